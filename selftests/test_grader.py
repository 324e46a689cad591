"""The grader against submissions that fail in every way: a failure that says what happened, never a pass or a hang.

Each test grades one small L1 submission. What a learner would see is compared, as text.
"""

from __future__ import annotations

import io
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from drills import catalog, stubs
from drills.grader import run, show

L1 = catalog.L1
SOLUTION = (stubs.SOLUTIONS / L1.file).read_text(encoding="utf-8")
SLOT_MAPPING = SOLUTION[: SOLUTION.index("@triton.jit")]  # the solution's half that needs no kernel


@pytest.fixture(autouse=True)
def cpu_lane(monkeypatch):
    """What a crash or a hang looks like depends on the lane: these tests see it on the interpreter, on any machine."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def submission(directory: Path, source: str, drill: catalog.Drill = L1) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / drill.file).write_text(source, encoding="utf-8")
    return directory


def graded(directory: Path, drill: catalog.Drill = L1) -> tuple[run.DrillReport, str]:
    """The report, and what `drills grade` prints of it."""
    report = run.grade([drill], str(directory))
    console = Console(file=io.StringIO(), width=200, highlight=False, soft_wrap=True)
    show.show(report, console)
    (only,) = report.drills
    assert report.ok == only.ok
    return only, console.file.getvalue()  # type: ignore[attr-defined]


def total(report: run.DrillReport, verdict: str, stages: range | None = None) -> int:
    return sum(report.counts(stage)[verdict] for stage in stages or range(1, len(report.drill.stages) + 1))


@pytest.mark.parametrize("drill", catalog.DRILLS, ids=lambda drill: drill.id)
def test_untouched_stubs_pass_no_test(drill, tmp_path):
    report, text = graded(submission(tmp_path, stubs.stub(drill), drill), drill)
    passing = [test.title for test in report.tests.values() if test.verdict == "passed"]
    assert passing == [], "these pass without a line written"
    for stage in range(1, len(drill.stages) + 1):
        assert report.counts(stage)["not started"], f"stage {stage} has no test that notices an empty stub"
    assert total(report, "failed") == total(report, "missing") == 0
    assert not report.ok
    assert report.problem is None
    assert f"stage 1 is not started: write {drill.stages[0].function}" in text
    assert f"Read drills/{drill.page}#{drill.stages[0].section}" in text


def test_a_wrong_answer_then_a_silent_end(tmp_path):
    source = """
        import os

        right = slot_mapping

        def slot_mapping(*args):
            return right(*args) + (args[-1] == 3)  # few failures, which are quicker than many

        def reshape_and_cache(*args):
            os._exit(0)
    """
    report, text = graded(submission(tmp_path, SLOT_MAPPING + textwrap.dedent(source)))
    assert not report.ok
    assert "the process ended with status 0, in the middle of this test" in text
    assert report.current is not None
    assert f"{report.current.title}\n" in text
    assert report.current.stage == 3
    assert report.counts(1)["failed"]
    assert "stage 1 of 6" in text
    assert "expected" in text
    assert text.count("\n  slot_mapping(") == report.counts(1)["failed"] <= show.MOST_MESSAGES
    assert total(report, "missing") == len([test for test in report.tests.values() if test.stage >= 3])


def test_a_missing_function_then_a_forged_status(tmp_path):
    source = f"{SLOT_MAPPING}\nimport atexit, os\natexit.register(os._exit, 0)\n"
    report, text = graded(submission(tmp_path, source))
    assert not report.ok
    assert total(report, "failed", range(1, 3)) == 0
    assert total(report, "passed", range(1, 3)) > 10
    assert total(report, "passed", range(3, 7)) == 0
    assert text.count("defines no reshape_and_cache") == 1
    assert "the process ended with status 0, after its last test, though pytest had announced status 1" in text


def test_a_syntax_error_is_shown_once(tmp_path):
    report, text = graded(submission(tmp_path, "import torch\n\ndef slot_mapping(block_table:\n    return 1\n"))
    assert not report.ok
    assert total(report, "failed") == len(report.tests)
    assert text.count("syntax error") == 1
    assert f"L1 · stage 1: and {report.counts(1)['failed'] - 1} more" in text
    assert f"{tmp_path / L1.file}:3   def slot_mapping(block_table:" in text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys\nsys.exit(0)\n", "called sys.exit(0)"),
        ("import os\nos._exit(0)\n", "the process ended with status 0, in the middle of this test"),
    ],
    ids=["sys.exit", "os._exit"],
)
def test_leaving_at_import(source, said, tmp_path):
    report, text = graded(submission(tmp_path, source))
    assert not report.ok
    assert total(report, "passed") == 0
    assert text.count(said) == 1


def test_leaving_inside_a_function(tmp_path):
    source = """
        import sys
        import pytest

        right, calls = slot_mapping, []

        def slot_mapping(*args):
            return sys.exit(0) if args[-1] == 3 else right(*args)

        def reshape_and_cache(*args):
            calls.append(args)
            if len(calls) == 1:
                pytest.skip("needs a GPU: it says")
            raise KeyboardInterrupt
    """
    report, text = graded(submission(tmp_path, SLOT_MAPPING + textwrap.dedent(source)))
    assert not report.ok
    assert total(report, "skipped") == 0
    assert text.count("called sys.exit(0)") == 1
    assert report.counts(3)["failed"] == 1, "only the suite may skip a test"
    assert "the process ended with status 2, in the middle of this test" in text
    assert ": KeyboardInterrupt" in text


def test_a_crash_names_the_line(tmp_path):
    source = SOLUTION.replace("tl.store(k_cache_ptr + slot * HD", "tl.store(k_cache_ptr + 2**40 + slot * HD")
    assert source != SOLUTION
    report, text = graded(submission(tmp_path, source + "\nprint('noise ' * 1_000_000)\n"))
    assert not report.ok
    assert report.current is not None
    assert report.current.stage == 3
    assert "the process was killed by signal 11 (segmentation fault), in the middle of this test" in text
    assert f"{tmp_path / L1.file}:" in text
    assert "tl.store(k_cache_ptr + 2**40" in text
    assert "noise" not in text


def test_nothing_hangs(tmp_path, monkeypatch):
    """A hang at import, one that swallows the time-out, and a thread that outlives the tests. Graded side by side."""
    monkeypatch.setattr(run, "PATIENCE", 10)
    swallows = """
        import time

        def slot_mapping(*args):
            while True:
                try:
                    time.sleep(1)
                except BaseException:
                    pass
    """
    thread = f"{stubs.stub(L1)}\nimport threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    sources = {"import": "import time\ntime.sleep(3600)\n", "swallows": textwrap.dedent(swallows), "thread": thread}
    places = [submission(tmp_path / name, source) for name, source in sources.items()]
    with ThreadPoolExecutor() as pool:
        at_import, swallowed, outlived = pool.map(graded, places)
    for (report, text), line in ((at_import, "time.sleep(3600)"), (swallowed, "time.sleep(1)")):
        assert not report.ok
        assert total(report, "passed") == 0
        assert report.current is not None
        assert report.where(report.current) in text
        assert "nothing was heard from it for 10 s, in the middle of this test" in text
        assert line in text
    report, text = outlived
    assert not report.ok
    assert total(report, "missing") == 0
    assert "nothing was heard from it for 10 s, after its last test" in text


def test_a_record_that_is_written_to(tmp_path):
    """What the code under test writes into every open file is no result, and no traceback of ours either."""
    source = """
        import os

        def slot_mapping(*args):
            for file in range(3, 64):
                try:
                    os.write(file, b"junk \\xff\\n[1]\\n")
                except OSError:
                    pass
            return None
    """
    report, text = graded(submission(tmp_path, textwrap.dedent(source)))
    assert not report.ok
    assert "something other than the suite wrote into the record of the results" in text


def test_a_tensor_that_lies(tmp_path):
    """A subclass that calls itself equal to everything."""
    source = """
        import torch

        class Equal(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                if getattr(func, "__name__", "") in ("ne", "__ne__"):
                    return torch.zeros(args[1].shape, dtype=torch.bool)
                return super().__torch_function__(func, types, args, kwargs or {})

        def slot_mapping(block_table, seq_idx, positions, block_size):
            return torch.zeros(positions.shape, dtype=torch.int64).as_subclass(Equal)
    """
    report, text = graded(submission(tmp_path, textwrap.dedent(source)))
    assert report.counts(1)["passed"] == 0
    assert "slots is a Equal, expected a tensor" in text


def test_a_collection_without_tests_is_a_failure():
    report = run.DrillReport(L1, status=5)
    assert not report.ok
    said = run._problem(report, 5, None, "no tests ran", run.select("solutions"))
    assert said is not None
    assert "no tests were collected" in said
    assert "None of your code had run" in said


ACCIDENTS = {
    "a kernel launched without its last argument": (
        "slots, *strides, HD, tile, num_warps=warps)",
        "num_warps=warps)",
        "that is an accident, not a refusal",
    ),
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_an_accident_is_no_refusal(name, tmp_path):
    """An error of Triton's on the way to the launch is not the check that the drill asks for."""
    old, new, said = ACCIDENTS[name]
    assert old in SOLUTION
    unchecked = SOLUTION.replace(old, new)
    start = unchecked.index("    assert slots.dtype")
    end = unchecked.index("    bits = {")
    unchecked = unchecked[:start] + "    T, HD = len(slots), k_cache[0, 0].numel()\n" + unchecked[end:]
    report, _ = graded(submission(tmp_path, unchecked))
    stage = report.stage(len(L1.stages))
    assert any(said in test.text for test in stage)
    assert sum(test.verdict == "passed" for test in stage) < len(stage) / 2
