"""The hints: for each stage of a drill a question, an idea, and the shape of the line. A shape is never the code.

of(catalog.L1)[0]               # the three hints of L1's first stage, from hints/l1_paged_kv_write.py
next_hint(catalog.L1, 1, given=0)  # (1, "A token is at position 9 of its sequence …"), and None after the third
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from drills import catalog


def of(drill: catalog.Drill) -> tuple[tuple[str, str, str], ...]:
    """A drill's hints, three for each stage."""
    return importlib.import_module(f"drills.hints.{drill.module}").HINTS


def next_hint(drill: catalog.Drill, stage: int, given: int) -> tuple[int, str] | None:
    """The hint after the first `given` ones, with its level (1 to 3). Stages count from 1. None: all were given."""
    hints = of(drill)[stage - 1]
    return (given + 1, hints[given]) if given < len(hints) else None


def give(drill: catalog.Drill, stage: int, store: Path) -> tuple[int, str]:
    """The next hint for a stage, after those that `store` (a JSON file) remembers; after the third, the third again."""
    given = _given(store)
    key = f"{drill.id} stage {stage}"
    answer = next_hint(drill, stage, given.get(key, 0)) or (3, of(drill)[stage - 1][2])
    store.write_text(json.dumps(given | {key: answer[0]}, indent=1), encoding="utf-8")
    return answer


def had(drill: catalog.Drill, stage: int, store: Path) -> list[tuple[int, str]]:
    """The hints of a stage that were given so far, by level."""
    return list(enumerate(of(drill)[stage - 1][: _given(store).get(f"{drill.id} stage {stage}", 0)], 1))


def _given(store: Path) -> dict[str, int]:
    try:
        given = json.loads(store.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    items = given.items() if isinstance(given, dict) else ()
    return {key: level for key, level in items if level in (1, 2, 3)}
