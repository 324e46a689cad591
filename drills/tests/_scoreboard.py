"""Where a learner is: results by drill and stage, what to show now and what to hold back, the next thing to do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from drills import catalog, lane
from drills.mistakes import Mistake
from drills.tests._judge import Verdict

MOST_SHOWN = 6  # failures of a drill that are printed in full
MOST_FOUND, MOST_IN_VAIN = 8, 3  # look-ups among the mistakes in one run of a drill: each runs dozens of functions
ORDER = ("passed", "failed", "not started", "skipped")


@dataclass
class Scoreboard:
    everything: bool = False  # show the failures of later stages too
    counts: dict[tuple[str, int], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    skips: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    timeouts: Counter[str] = field(default_factory=Counter)
    asked: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    shown: set[str] = field(default_factory=set)
    blocks: Counter[str] = field(default_factory=Counter)
    unwritten: dict[tuple[str, int], str] = field(default_factory=dict)
    unusable: set[str] = field(default_factory=set)
    known: dict[str, Mistake | None] = field(default_factory=dict)
    partial: bool = False  # not all tests were chosen
    held: Counter[str] = field(default_factory=Counter)

    def diagnosed(self, verdict: Verdict, drill: str, stage: int) -> str:
        """A verdict's text, looked up among the mistakes if it will be shown and is not one of many."""
        asked = self.asked[drill]
        found = None
        if (
            verdict.look_up
            and (self.everything or not self._fails_before(drill, stage))
            and asked["found"] < MOST_FOUND
            and asked["nothing"] < MOST_IN_VAIN
        ):
            said = verdict.lines[2]  # the same error again is the same mistake again
            again = said.startswith("  raised ") and said in self.known
            found = self.known[said] if again else verdict.look_up()
            self.known[said] = found
            asked["again" if again else "found" if found else "nothing"] += 1
        return verdict.text(found)

    def add(self, report: pytest.TestReport) -> None:
        """Count one finished test, and decide whether its failure is shown or held back."""
        about = _about(report)
        drill, state = about["drill"], _state(report)
        self.timeouts[drill] += about.get("state") == "timeout"
        self.counts[drill, about["stage"]][state] += 1
        if "unwritten" in about:
            self.unwritten.setdefault((drill, about["stage"]), about["unwritten"])
        if about.get("state") == "unusable":
            self.unusable.add(drill)
        if state == "skipped":
            self.skips[drill][_reason(report)] += 1
        if state == "failed" and not self.everything and self._is_repeat(report, drill, about["stage"]):
            report.user_properties.append(("held back", True))
            self.held[drill] += 1

    def _fails_before(self, drill: str, stage: int) -> bool:
        return any(self.counts[drill, before]["failed"] for before in range(1, stage))

    def _is_repeat(self, report: pytest.TestReport, drill: str, stage: int) -> bool:
        """A failure of a stage after the first that fails, one of many, or one that says again what was said."""
        state = _about(report).get("state")
        if state != "unusable":
            self.blocks[drill] += 1
            return self._fails_before(drill, stage) or state == "not run" or self.blocks[drill] > MOST_SHOWN
        reason = report.longreprtext.split("\n", 1)[1]
        again = reason in self.shown
        self.shown.add(reason)
        return again

    def status(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """pytest's (category, letter, word). What is not in the category `failed` is not printed in full."""
        about = _about(report)
        if about.get("state") == "not started":
            return "not started", "n", "NOT STARTED"
        if about.get("held back"):
            return "held back", "f", "FAILED (held back)"
        return None

    def lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The terminal summary, as (text, markup)."""
        for drill in catalog.DRILLS:
            ran = sorted(stage for name, stage in self.counts if name == drill.id)
            if not ran:
                continue
            yield "", {}
            yield f"{drill.id} · {drill.title}", {"bold": True}
            for stage in ran:
                count = self.counts[drill.id, stage]
                parts = " · ".join(f"{count[state]} {state}" for state in ORDER if count[state])
                yield f"  {stage} {drill.stages[stage - 1].title:<36} {parts}", _colour(count)
            for reason, number in self.skips[drill.id].items():
                yield f"  {number} skipped: {reason}", {"yellow": True}
            if self.held[drill.id]:
                yield (
                    f"  {self.held[drill.id]} failures held back until the first are mended (--everything shows them)",
                    {},
                )
            yield from ((f"  {line}", {"bold": True}) for line in self.next_step(drill))

    def next_step(self, drill: catalog.Drill) -> Iterator[str]:
        """What to do now, and what to read for it."""
        if drill.id in self.unusable:
            yield f"next: mend what keeps {drill.file} from being used, shown above, and run again"
            return
        begun = {n for n in range(1, len(drill.stages) + 1) if self.counts[drill.id, n]["passed"]}
        for state, do, among in (
            ("failed", "mend", None),
            ("not started", "write", begun),
            ("not started", "write", None),
        ):
            for number, stage in enumerate(drill.stages, 1):
                if self.counts[drill.id, number][state] and (among is None or number in among):
                    name = stage.function
                    if state == "not started":
                        name = self.unwritten.get((drill.id, number), name)
                    yield f"next: stage {number}, {stage.title}: {do} {name}"
                    yield f"      read {drill.section(number)}"
                    return
        if self.partial:
            yield "the tests that were chosen pass; there are others"
        elif self.skips[drill.id] or not lane.ON_GPU:
            yield "done, as far as this lane can check"
        else:
            yield "done"


def _about(report: pytest.TestReport) -> dict[str, Any]:
    return dict(getattr(report, "user_properties", ()))  # a file that cannot be collected has none


def _state(report: pytest.TestReport) -> str:
    return "not started" if _about(report).get("state") == "not started" else str(report.outcome)


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _colour(count: Counter[str]) -> dict[str, bool]:
    if count["failed"]:
        return {"red": True}
    return {"green": True} if count["passed"] and not count["not started"] else {"yellow": True}
