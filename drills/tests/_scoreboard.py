"""Where a learner is: results by drill and stage, what to show now and what to hold back, the next thing to do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from drills import catalog
from drills.tests._judge import Verdict

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
    held: Counter[str] = field(default_factory=Counter)

    def diagnosed(self, verdict: Verdict, drill: str, stage: int) -> str:
        """A verdict's text, looked up among the mistakes if it will be shown and is not one of many."""
        earlier = any(self.counts[drill, before]["failed"] for before in range(1, stage))
        asked = self.asked[drill]
        found = None
        if (
            verdict.look_up
            and (self.everything or not earlier)
            and asked["found"] < MOST_FOUND
            and asked["nothing"] < MOST_IN_VAIN
        ):
            found = verdict.look_up()
            asked["found" if found else "nothing"] += 1
        return verdict.text(found)

    def add(self, report: pytest.TestReport) -> None:
        """Count one finished test, and decide whether its failure is shown or held back."""
        about = _about(report)
        drill, state = about["drill"], _state(report)
        self.timeouts[drill] += about.get("state") == "timeout"
        self.counts[drill, about["stage"]][state] += 1
        if state == "skipped":
            self.skips[drill][_reason(report)] += 1
        if state == "failed" and not self.everything and self._is_repeat(report, drill, about["stage"]):
            report.user_properties.append(("held back", True))
            self.held[drill] += 1

    def _is_repeat(self, report: pytest.TestReport, drill: str, stage: int) -> bool:
        """A failure of a stage after the first that fails, or one that says again why the file cannot be used."""
        earlier = any(self.counts[drill, before]["failed"] for before in range(1, stage))
        if _about(report).get("state") != "unusable":
            return earlier
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
        for state, do in (("failed", "mend"), ("not started", "write")):
            for number, stage in enumerate(drill.stages, 1):
                if self.counts[drill.id, number][state]:
                    yield f"next: stage {number}, {stage.title}: {do} {stage.function}"
                    yield f"      read {drill.section(number)}"
                    return
        if self.skips[drill.id]:
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
