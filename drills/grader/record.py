"""A pytest plugin that writes what happens to a file while it happens, one JSON object a line.

    DRILLS_RECORD=record.jsonl pytest -p drills.grader.record drills/tests/test_l1_paged_kv_write.py

`collected` lists the tests to expect, `started` and `ended` are about one test, `finished` has pytest's exit status.
Whoever follows the file knows how far the process came, however it ends.
"""

from __future__ import annotations

import json
import os
import resource
from typing import Any

import pytest

from drills import lane

LONGEST_TEXT = 20_000  # a message longer than this helps nobody


def pytest_configure(config: pytest.Config) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is told by faulthandler: no core files
    path = os.environ.pop("DRILLS_RECORD", None)  # the code under test has no business with it
    if path is None:
        raise pytest.UsageError("-p drills.grader.record: set DRILLS_RECORD to the file to write")
    config.pluginmanager.register(Recorder(path), "drills-recorder")


class Recorder:
    def __init__(self, path: str):
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - it lives as long as the process
        self.process = os.getpid()
        self.outcome: dict[str, Any] | None = None

    def write(self, event: str, **facts: Any) -> None:
        if os.getpid() == self.process:  # a fork in the code under test would tell everything twice
            self.file.write(json.dumps({"event": event, **facts}) + "\n")
            self.file.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write("collected", tests=[_test(item) for item in session.items], lane=lane.describe())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome = None
        self.write("started", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:  # a teardown that fails replaces a call that passed
            about = dict(report.user_properties)
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.outcome = {
                "state": "not started" if about.get("state") == "not started" else report.outcome,
                "text": text.removeprefix("Skipped: ")[:LONGEST_TEXT],
                "held": bool(about.get("held back")),
            }

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.outcome is not None:
            self.write("ended", test=nodeid, **self.outcome)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write("finished", status=int(exitstatus), lane=lane.describe())


def _test(item: pytest.Item) -> dict[str, Any]:
    about, timeout = dict(item.user_properties), item.get_closest_marker("timeout")
    skips = [*item.iter_markers("skip"), *(mark for mark in item.iter_markers("skipif") if mark.args[0])]
    reasons = [str(mark.kwargs.get("reason", "")) for mark in skips]
    return {
        "id": item.nodeid,
        "stage": about["stage"],
        "title": about["title"],
        "seconds": timeout.args[0] if timeout else 0,
        "needs": next((reason for reason in reasons if reason.startswith("needs ")), None),
    }
