"""Run the suite against an implementation, one process a drill, and say what came of it.

Nothing that the code under test does to its process makes a pass: every test that was collected needs its result,
and the process has to end as pytest said that it would.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from drills import catalog
from drills.implementation import BUILT_IN, Implementation, select, shown

ROOT = catalog.PACKAGE.parent
STARTUP = 180  # seconds until the first test starts: importing torch can take a minute on a cold disk
MARGIN = 30  # seconds past a test's own time-out, which code that swallows exceptions or never returns can defeat
PATIENCE = float(os.environ.get("DRILLS_PATIENCE", 0))  # seconds of silence after that, instead of the two together
TAIL = 64 << 10  # bytes of a dead process's output that are looked at for a traceback,
OWN_LINES = 4  # how many of its lines are shown,
OUTPUT_LINES = 8  # and how many of the output where there is none


@dataclass
class Test:
    id: str
    stage: int
    title: str
    seconds: float  # the time-out that the suite gives it
    needs: str | None  # what this lane lacks for it, as the suite said before any of the learner's code ran
    state: str = "missing"
    text: str = ""  # why it failed or was skipped
    held: bool = False  # its message repeats another's, or is of a later stage

    @property
    def verdict(self) -> str:
        """The state, but a skip that the suite did not announce was the learner's, and is a failure."""
        return "failed" if self.state == "skipped" and self.needs is None else self.state

    @property
    def fine(self) -> bool:
        return self.verdict in ("passed", "skipped")


@dataclass
class DrillReport:
    """What became of one drill. `problem`: how its process went wrong, which is a failure whatever the tests say."""

    drill: catalog.Drill
    tests: dict[str, Test] = field(default_factory=dict)
    lane: str = ""
    problem: str | None = None
    current: Test | None = None  # the test it is in
    status: int | None = None  # the exit status that pytest announced
    garbled: str | None = None  # a line of the record that the recorder did not write

    @property
    def ok(self) -> bool:
        tests = self.tests.values()
        return self.problem is None and all(t.fine for t in tests) and any(t.state == "passed" for t in tests)

    @property
    def done(self) -> int:
        return sum(test.state != "missing" for test in self.tests.values())

    def stage(self, number: int) -> list[Test]:
        return [test for test in self.tests.values() if test.stage == number]

    def counts(self, number: int) -> Counter[str]:
        return Counter(test.verdict for test in self.stage(number))

    def skips(self) -> Counter[str]:
        return Counter(test.text for test in self.tests.values() if test.verdict == "skipped")

    def first(self, *verdicts: str) -> int | None:
        """The first stage with a test of one of these verdicts."""
        return min((test.stage for test in self.tests.values() if test.verdict in verdicts), default=None)

    def next_stage(self) -> int | None:
        """The stage to work on: the first that fails, else the first that is not started."""
        return self.first("failed", "missing") or self.first("not started")

    def failures(self) -> list[Test]:
        """Those of the first stage that fails, each that has a message of its own before those that repeat one."""
        failed = [test for test in self.stage(self.first("failed") or 0) if test.verdict == "failed"]
        return sorted(failed, key=lambda test: test.held)

    def take(self, event: dict[str, Any]) -> None:
        """Note one line of the record."""
        match event["event"]:
            case "collected":
                self.tests = {facts["id"]: Test(**facts) for facts in event["tests"]}
            case "started":
                self.current = self.tests[event["test"]]
            case "ended":
                test = self.tests[event["test"]]
                test.state, test.text, test.held = event["state"], event["text"], event["held"]
                if test.state != test.verdict:
                    test.text = f"{self.where(test)}\n  skipped itself ({test.text}): only the suite may skip a test"
                self.current = None
            case "finished":
                self.status = event["status"]
        self.lane = event.get("lane", self.lane)

    def where(self, test: Test) -> str:
        stage = self.drill.stages[test.stage - 1].title
        return f"{self.drill.id} · stage {test.stage} of {len(self.drill.stages)}, {stage} · {test.title}"

    def patience(self) -> float:
        """How many seconds of silence are too many now."""
        if self.current is None and not self.done:
            return STARTUP
        return PATIENCE or (self.current.seconds if self.current else 0) + MARGIN


@dataclass
class Report:
    drills: list[DrillReport]

    @property
    def ok(self) -> bool:
        return bool(self.drills) and all(report.ok for report in self.drills)

    @property
    def lane(self) -> str:
        return " / ".join(sorted({report.lane for report in self.drills} - {""})) or "unknown"


Progress = Callable[[DrillReport], None]


def grade(drills: Iterable[catalog.Drill], impl: str | None, progress: Progress = lambda report: None) -> Report:
    """Grade drills of an implementation; `progress` is called at every event. Raises implementation.SelectionError."""
    chosen = select(impl)
    return Report([_grade(drill, chosen, progress) for drill in drills])


def _grade(drill: catalog.Drill, impl: Implementation, progress: Progress) -> DrillReport:
    report = DrillReport(drill)
    with tempfile.TemporaryDirectory(prefix="drills-grade-") as scratch:
        record, output = Path(scratch, "record.jsonl"), Path(scratch, "output")
        with record.open("w+", encoding="utf-8", errors="replace") as events, output.open("w+b") as said:
            child = _start(drill, impl, record, said)
            try:
                silent = _follow(child, events, report, progress)
            finally:
                _kill(child)
            said.seek(max(0, said.seek(0, os.SEEK_END) - TAIL))
            tail = said.read().decode(errors="replace")
    report.problem = _problem(report, child.returncode, silent, tail, impl)
    progress(report)
    return report


def _start(drill: catalog.Drill, impl: Implementation, record: Path, said: Any) -> subprocess.Popen[bytes]:
    # The caller's PYTEST_ADDOPTS and the like must not choose what is graded.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env.pop("PYTHONOPTIMIZE", None)
    env |= {"DRILLS_IMPL": impl.name if impl.name in BUILT_IN else str(impl.directory), "DRILLS_RECORD": str(record)}
    command = [sys.executable, "-m", "pytest", str(drill.tests), "-q", "-rN", "--tb=short", "--show-capture=no"]
    plugins = ["-p", "drills.grader.record", "-p", "no:cacheprovider"]
    return subprocess.Popen(
        [*command, *plugins],
        cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def _follow(child: subprocess.Popen[bytes], events: TextIO, report: DrillReport, progress: Progress) -> float | None:
    """Read the record while it grows, until the process ends. Returns for how long it was silent if it was stopped."""
    heard, rest = time.monotonic(), ""
    while True:
        ended = child.poll() is not None  # asked before reading, so that the last lines are read
        *lines, rest = (rest + events.read()).split("\n")
        for line in lines:
            try:
                report.take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                report.garbled = line
                return None
            progress(report)
            heard = time.monotonic()
        if ended:
            return None
        if time.monotonic() - heard > report.patience():
            child.send_signal(signal.SIGABRT)  # faulthandler answers it with a traceback, wherever the process is
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=3)
            return time.monotonic() - heard
        time.sleep(0.05)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # they are gone, as macOS says it
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _problem(report: DrillReport, code: int, silent: float | None, output: str, impl: Implementation) -> str | None:
    """How the process went wrong, or None: it ran every test it collected and ended as their results demand."""
    if report.garbled is not None:
        return (
            f"{report.drill.id} · something other than the suite wrote into the record of the results\n"
            f"    {report.garbled[:80]!r}\n"
            "  Code under test must leave files alone that it has not opened: no result of this run counts."
        )
    missing = sum(test.state == "missing" for test in report.tests.values())
    demanded = 0 if all(test.state in ("passed", "skipped") for test in report.tests.values()) else 1
    if report.tests and not missing and silent is None and code == report.status == demanded:
        return None
    how, why = _ended(code, silent)
    if report.current:
        lines = [report.where(report.current), f"  {how}, in the middle of this test"]
        missing -= 1
    else:
        lines = [f"{report.drill.id} · {how}, {_moment(report)}"]
    lines += _own_lines(output, impl) or _last_lines(output)
    lines.append(
        f"  {why if report.tests else 'None of your code had run: the fault is in the suite or its installation.'}"
    )
    if missing:
        lines.append(f"  {missing} tests after it have no result, and count as failed.")
    if report.current:
        lines.append(f"  Read {report.drill.section(report.current.stage)}")
    return "\n".join(lines)


def _ended(code: int, silent: float | None) -> tuple[str, str]:
    """How the process ended, and what that is most likely a sign of."""
    if silent is not None:
        how = f"the process was stopped, as nothing was heard from it for {silent:.0f} s"
        return how, "That is a loop that does not end, or a wait for something that never comes."
    if code >= 0:
        return f"the process ended with status {code}", "Look for os._exit, quit() or a KeyboardInterrupt."
    name = (signal.strsignal(-code) or "unknown").lower()
    why = {
        -signal.SIGSEGV: "A kernel read or wrote far outside of its tensors, most likely: see its offsets and masks.",
        -signal.SIGKILL: "The system stopped it, most likely for want of memory.",
    }
    return f"the process was killed by signal {-code} ({name})", why.get(code, "Look at what it said last.")


def _moment(report: DrillReport) -> str:
    if not report.tests:
        return "and no tests were collected"
    if report.status is None:
        return f"after {report.done} of {len(report.tests)} tests"
    return f"after its last test, though pytest had announced status {report.status}"


def _own_lines(output: str, impl: Implementation) -> list[str]:
    """The learner's lines in the traceback that faulthandler left, innermost first."""
    frames = re.findall(r'File "(.+?)", line (\d+) in', output)
    own = [(Path(file), int(line)) for file, line in frames if Path(file).parent == impl.directory]
    return [
        f"    {shown(path)}:{line}   {linecache.getline(str(path), line).strip()}" for path, line in own[:OWN_LINES]
    ]


def _last_lines(output: str) -> list[str]:
    """What the process said last, but for pytest's letter a test."""
    lines = [
        line for line in output.splitlines() if line.strip() and not re.fullmatch(r"[.fFnsE]+( +\[ *\d+%\])?", line)
    ]
    return [f"    {line}" for line in lines[-OUTPUT_LINES:]]
