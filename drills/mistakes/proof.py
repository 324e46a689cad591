"""The proof that the suite sees each mistake: the graded suite run on the reference with one function replaced.

One process runs many mistakes, for torch is imported once; `prove` shares them out over several processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from drills import catalog, mistakes
from drills.mistakes import Mistake, catalogue


@dataclass
class Proof:
    """What the suite said of one implementation."""

    name: str
    failed: dict[str, str] = field(default_factory=dict)  # test, with its parameters -> the message
    stages: dict[str, int] = field(default_factory=dict)  # test -> its stage
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def killers(self) -> set[str]:
        """The tests that failed, by function name."""
        return {test.partition("[")[0] for test in self.failed}

    @property
    def first_diagnosis(self) -> str | None:
        """The mistake named by the first message that names one."""
        for message in self.failed.values():
            for line in message.splitlines():
                named = re.match(r" *This (?:is|may be) ([\w-]+): ", line)
                if named:
                    return named[1]
        return None


def run(name: str, function: Callable[..., Any], keep: Callable[[str, int], bool]) -> Proof:
    """Run the tests that `keep(test name, stage)` wants, in this process, with `function` in the reference's place."""
    import pytest

    from drills import implementation

    drill, _ = catalog.owner(function.__name__)
    proof = Proof(name)

    class Watch:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items):
            items[:] = [i for i in items if keep(i.originalname, dict(i.user_properties)["stage"])]

        def pytest_runtest_logreport(self, report):
            test = report.nodeid.rpartition("::")[2]
            if report.failed:
                proof.failed[test] = report.longreprtext
                proof.stages[test] = dict(report.user_properties)["stage"]
            elif report.skipped:
                proof.skipped.append(test)
            elif report.when == "call":
                proof.passed.append(test)

    idle = ["cacheprovider", "xdist", "unraisableexception", "logging"]  # of no use here; two of them cost a third
    options = ["-q", "--everything", f"--rootdir={catalog.PACKAGE.parent}", *(f"-pno:{plugin}" for plugin in idle)]
    with (
        implementation.using(implementation.reference_with(function, name)),
        mock.patch.object(mistakes, "diagnose", _until_it_finds(mistakes.diagnose)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        status = pytest.main([str(drill.tests), *options], plugins=[Watch()])
    if status not in (0, 1, 5):
        raise RuntimeError(f"pytest could not run {drill.tests.name} on {name}: status {status}")
    return proof


def _until_it_finds(diagnose: Callable[..., Mistake | None]) -> Callable[..., Mistake | None]:
    """The first diagnosis is the one that counts here, and each costs a run of many mistakes."""
    found: list[Mistake] = []

    def first(*args: Any) -> Mistake | None:
        answer = None if found else diagnose(*args)
        found.extend([answer] if answer else [])
        return answer

    return first


def prove(names: Iterable[str], workers: int = 2) -> Iterator[Proof]:
    """The proofs of the mistakes called `names`, as they come in, from `workers` processes."""
    names = list(names)
    shares = [names[first::workers] for first in range(min(workers, len(names)))]
    results: queue.Queue[Proof | Exception | None] = queue.Queue()
    for share in shares:
        threading.Thread(target=_prove_share, args=(share, results), daemon=True).start()
    running = len(shares)
    while running:
        result = results.get()
        if isinstance(result, Exception):
            raise result
        if result is None:
            running -= 1
        else:
            yield result


def _prove_share(share: list[str], results: queue.Queue[Proof | Exception | None]) -> None:
    """Read a child's lines as they come: a pipe that nobody reads would stop it."""
    command = [sys.executable, "-m", "drills.mistakes.proof", *share]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DRILLS_EXAMPLES": "8"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=catalog.PACKAGE.parent, env=env) as child:
        assert child.stdout is not None
        for line in child.stdout:
            results.put(Proof(**json.loads(line)))
    if child.returncode:
        results.put(RuntimeError(f"the process that ran {' '.join(share)} ended with status {child.returncode}"))
    results.put(None)


def prove_one(entry: Mistake, everything: bool = True) -> Proof:
    """The proof of one mistake, in this process: by the tests it names, and by all others of its function's stages.

    everything: False for the tests it names alone, in a tenth of the time.
    """
    function = entry.make()
    stages = {n for n, stage in enumerate(entry.drill.stages, 1) if everything and stage.function == function.__name__}
    return run(entry.name, function, lambda test, stage: stage in stages or test in entry.fails)


def main(names: list[str]) -> None:
    """In a child: a line of JSON for each mistake."""
    entries = {entry.name: entry for entry in catalogue()}
    for name in names:
        print(json.dumps(vars(prove_one(entries[name]))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
