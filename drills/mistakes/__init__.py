"""The catalogue of mistakes: wrong implementations, each the shortest that a learner would write by that mistake.

They are used twice. The suite is proved by them: each must fail it, in the tests that it names. And they feed the
suite's messages: when a learner's output is exactly what a mistake gives on the same input, the message says so.

    @mistake("masks", fails=["test_odd_widths"], seen=["mojo_opset#266"])
    def unmasked_tail():
        '''The program stores its whole power-of-two tile, so a row of another width runs on into the next slot.'''
        ...                     # kernels and helpers of its own
        def reshape_and_cache(key, value, k_cache, v_cache, slots): ...
        return reshape_and_cache
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drills import catalog, lane

LANES = {"any": "CPU, GPU", "cpu": "CPU", "gpu": "GPU"}


@dataclass(frozen=True)
class Mistake:
    name: str  # the factory's, with dashes
    lesson: str  # one sentence that a learner can act on
    drill: catalog.Drill
    section: str  # the anchor of the page that explains it
    fails: tuple[str, ...]  # the tests that must fail it, by function name
    seen: tuple[str, ...]  # public reports in which it shipped
    lane: str  # of LANES: "gpu" shows only there, "cpu" only where FlashInfer's stand-in is stricter than the real one
    tells: bool  # whether its output shows it (not so for what is only slow, or not a kernel)
    make: Callable[[], Callable[..., Any]]

    @property
    def function(self) -> str:
        return self.make().__name__

    @property
    def read(self) -> str:
        return f"drills/{self.drill.page}#{self.section}"


_entries: list[Mistake] = []


def mistake(
    section: str, *, fails: Sequence[str], seen: Sequence[str] = (), lane: str = "any", tells: bool = True
) -> Callable[[Callable[[], Callable[..., Any]]], Callable[[], Callable[..., Any]]]:
    """Enter a factory of a wrong function into the catalogue; its docstring is the lesson."""

    def enter(factory: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
        drill = next(d for d in catalog.DRILLS if d.module == factory.__module__.rpartition(".")[2])
        lesson = " ".join((factory.__doc__ or "").split())
        name = factory.__name__.replace("_", "-")
        assert lesson.endswith("."), f"{name} has no lesson"
        assert lane in LANES, f"{name}: no lane is called {lane!r}"
        taken = next((entry.drill.id for entry in _entries if entry.name == name), None)
        assert taken is None, f"{taken} has a mistake called {name} already: names are unique over all drills"
        _entries.append(Mistake(name, lesson, drill, section, tuple(fails), tuple(seen), lane, tells, factory))
        return factory

    return enter


def catalogue(drill: catalog.Drill | None = None) -> list[Mistake]:
    """Every entry, or a drill's, in the order of the drills and of their modules."""
    wanted = catalog.DRILLS if drill is None else (drill,)
    for each in wanted:
        try:
            importlib.import_module(f"drills.mistakes.{each.module}")
        except BaseException:
            # Those entered before it failed would be there twice when it is imported again.
            _entries[:] = [entry for entry in _entries if entry.drill != each]
            raise
    return [entry for each in wanted for entry in _entries if entry.drill == each]


def shows_here(entry: Mistake) -> bool:
    """Whether the lane of this process can show the mistake."""
    return entry.lane in ("any", "gpu" if lane.ON_GPU else "cpu")


def diagnose(
    function: str, test: str, gives: Callable[[Callable[..., Any]], bool], vague: bool = False
) -> Mistake | None:
    """The mistake that a wrong result is a sign of, or None.

    test: the name of the test that failed. gives: whether a function has exactly the learner's result on the same
    input. Of several that do, the most specific: one that is known to fail this test, then the one that fails fewest.
    vague: many mistakes would give this result (NaN is one like the other): only those known to fail this test count.
    """
    drill, _ = catalog.owner(function)
    order = sorted(
        (e for e in catalogue(drill) if e.tells and shows_here(e) and (test in e.fails or not vague)),
        key=lambda entry: (test not in entry.fails, len(entry.fails) if entry.fails else math.inf),
    )
    for entry in order:
        made = entry.make()
        if made.__name__ == function and gives(made):
            return entry
    return None
