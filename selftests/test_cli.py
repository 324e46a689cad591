"""The command line, as a user runs it: in a process of its own, from another directory, on files of theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drills import catalog, cli, hints, stubs
from drills.mistakes import catalogue

L1, F1 = catalog.L1, catalog.F1
SOLUTION = (stubs.SOLUTIONS / L1.file).read_text(encoding="utf-8")
COMMAND = [sys.executable, "-m", "drills.cli"]
ENV = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "DRILLS_"))}
ENV |= {"PYTHONPATH": str(catalog.PACKAGE.parent), "COLUMNS": "200", "TRITON_INTERPRET": "1"}  # one lane everywhere


def drills(*args: str, cwd: Path, answer: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *args], cwd=cwd, env=ENV | env, input=answer, capture_output=True, encoding="utf-8"
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done


def test_help_has_an_example_of_every_command(tmp_path):
    top = drills("-h", cwd=tmp_path)
    assert top.returncode == 0
    assert drills(cwd=tmp_path).stdout.split() == top.stdout.split()
    for command in ("list", "test", "grade", "hint", "mistakes", "reset"):
        assert command in top.stdout
        assert f"Example: drills {command}" in drills(command, "--help", cwd=tmp_path).stdout


def test_list(tmp_path):
    done = drills("list", cwd=tmp_path)
    for drill in catalog.DRILLS:
        for text in (drill.id, drill.title, drill.file, f"drills/{drill.page}", *(f.name for f in drill.functions)):
            assert text in done.stdout
    assert str(stubs.MINE) in done.stdout
    assert str(tmp_path / "here") in drills("list", "--impl", "here", cwd=tmp_path).stdout
    assert str(tmp_path / "there") in drills("list", cwd=tmp_path, DRILLS_IMPL="there").stdout


def test_the_command_line_starts_without_torch(tmp_path):
    code = "import sys, drills.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENV).returncode == 0


@pytest.mark.parametrize("command", ["test", "grade", "hint", "mistakes", "reset"])
def test_an_unknown_drill(command, tmp_path):
    done = drills(command, "l99", cwd=tmp_path)
    assert done.returncode == 2
    assert "no drill is called 'l99'; there are L1, " in done.stderr
    assert done.stdout == ""


def test_only_pytest_gets_what_follows_the_dashes(tmp_path):
    done = drills("grade", "l1", "--", "-x", cwd=tmp_path)
    assert done.returncode == 2
    assert "takes nothing after --" in done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [("absent", "there is no such path"), ("file.py", "that is a file"), ("empty", f"holds none of {L1.file}")],
)
def test_an_implementation_that_cannot_be_found(name, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "file.py").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["drills", "grade", "l1", "--impl", name])
    with pytest.raises(SystemExit) as leaving:  # in this process: a new one would only import torch again
        cli.main()
    assert leaving.value.code == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "--impl can be mine (the default), solutions, or a directory" in printed.err
    assert printed.out == ""


def test_a_home_that_nobody_has(tmp_path):
    done = drills("reset", "l1", "--impl", "~nobody-of-this-name/drills", cwd=tmp_path)
    assert done.returncode == 2
    assert "--impl ~nobody-of-this-name/drills: " in done.stderr
    assert "Traceback" not in done.stderr


def test_grade_passes_a_solution_however_noisy(tmp_path):
    noise = "\nimport sys\nprint('noise ' * 1_000_000)\nprint('noise', file=sys.stderr)\n"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / L1.file).write_text(SOLUTION + noise, encoding="utf-8")
    options = {"PYTEST_ADDOPTS": "-k none_of_them", "PYTHONOPTIMIZE": "2", "TRITON_INTERPRET": "0"}
    done = drills("grade", "L1", "l1", "--impl", "theirs", cwd=tmp_path, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED: L1" in done.stdout
    assert "\nlane: " in done.stdout
    assert "L1: test 1 of " in done.stdout  # plain lines where there is no terminal
    assert "noise" not in done.stdout + done.stderr


def test_grade_passes_the_solutions(tmp_path):
    done = drills("grade", "f1", "--impl", "solutions", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED: F1, but for 1 test that this lane cannot run" in done.stdout
    assert "F1: 1 skipped: needs a GPU: a CUDA graph is captured and replayed" in done.stdout


def test_grade_fails_a_file_that_is_absent(tmp_path):
    stubs.reset(F1, tmp_path)
    done = drills("grade", L1.file, cwd=tmp_path, DRILLS_IMPL=".")
    assert done.returncode == 1
    assert done.stdout.count(f"{tmp_path / L1.file} does not exist. L1 is graded from that file.") == 1
    assert "FAILED: L1" in done.stdout


def test_test_is_pytest(tmp_path):
    (tmp_path / L1.file).write_text(SOLUTION.replace("% block_size", "% block_size * 0"), encoding="utf-8")
    options = ["--", "-q", "-p", "no:cacheprovider", "-k", "worked_example"]
    done = drills("test", L1.module, "--impl", ".", *options, cwd=tmp_path)
    assert done.returncode == 1
    assert "1 failed" in done.stdout
    assert "deselected" in done.stdout


def test_what_stops_the_grading_stops_the_tests(tmp_path):
    """SIGTERM, which takes the way of Ctrl-C: neither reaches the tests, which have a session of their own."""
    source = "import os, pathlib, time\npathlib.Path(__file__).with_name('pid').write_text(f'{os.getpid()} ')\n"
    (tmp_path / L1.file).write_text(source + "time.sleep(3600)\n")
    command = [*COMMAND, "grade", "l1", "--impl", "."]
    with subprocess.Popen(command, cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as grading:
        pid, patience = tmp_path / "pid", time.monotonic() + 100
        while not (pid.exists() and pid.read_text().endswith(" ")):
            assert time.monotonic() < patience
            time.sleep(0.1)
        grading.send_signal(signal.SIGTERM)
        _, said = grading.communicate(timeout=20)
    assert grading.returncode == 130
    assert said.decode().strip() == "stopped: nothing was graded"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_hints_come_one_at_a_time(tmp_path):
    stubs.reset(L1, tmp_path)
    given = hints.of(L1)[0]
    for level, text in [(1, given[0]), (2, given[1])]:
        done = drills("hint", "l1", "--impl", ".", cwd=tmp_path)
        assert done.returncode == 0
        assert f"{level} of 3: {text}" in done.stdout
        assert "L1 · stage 1 of 6, the slot of a token" in done.stdout
        assert L1.section(1) in done.stdout
    both = drills("hint", "l1", "--impl", ".", "--again", cwd=tmp_path).stdout
    assert given[0] in both
    assert given[1] in both
    assert given[2] not in both


def test_mistakes(tmp_path):
    done = drills("mistakes", "l1", cwd=tmp_path)
    assert done.returncode == 0
    for entry in catalogue(L1):
        assert entry.name in done.stdout
    assert drills("mistakes", "l1", "--markdown", cwd=tmp_path).stdout.startswith("<details>")


def test_reset(tmp_path):
    path = tmp_path / "new" / L1.file
    assert drills("reset", "l1", "--impl", "new", cwd=tmp_path).returncode == 0
    assert path.read_text(encoding="utf-8") == stubs.stub(L1)
    path.write_text("my work\n")
    declined = drills("reset", "l1", "--impl", "new", cwd=tmp_path, answer="n\n")
    assert declined.returncode == 1
    assert "is not the empty stub" in declined.stdout
    assert path.read_text() == "my work\n"
    assert drills("reset", "l1", "--impl", "new", cwd=tmp_path).returncode == 1, "no answer is not a yes"
    done = drills("reset", "l1", "--impl", "new", "--yes", cwd=tmp_path)
    assert done.returncode == 0
    (kept,) = (tmp_path / "new" / ".backup").iterdir()
    assert str(kept) in done.stdout
    assert kept.read_text() == "my work\n"
    assert path.read_text(encoding="utf-8") == stubs.stub(L1)


def test_reset_leaves_the_solutions_alone(tmp_path):
    before = (stubs.SOLUTIONS / L1.file).stat().st_mtime_ns
    done = drills("reset", "l1", "--yes", cwd=tmp_path, DRILLS_IMPL="solutions")
    assert done.returncode == 2
    assert "choose another directory" in done.stderr
    assert (stubs.SOLUTIONS / L1.file).stat().st_mtime_ns == before
