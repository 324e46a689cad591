"""The stubs: what is left of a solution, that the shipped ones are these, that a reset loses nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drills import catalog, stubs

ROOT = catalog.PACKAGE.parent
each_drill = pytest.mark.parametrize("drill", catalog.DRILLS, ids=lambda drill: drill.id)


def functions(source: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


@each_drill
def test_a_stub_is_its_solution_without_the_bodies(drill):
    solution = (stubs.SOLUTIONS / drill.file).read_text(encoding="utf-8")
    stub = stubs.stub(drill)
    assert ast.get_docstring(ast.parse(stub)) == ast.get_docstring(ast.parse(solution))
    wanted = {name for function in drill.functions for name in (function.name, function.kernel)} - {None}
    assert set(functions(stub)) == wanted, "a stub holds the catalogue's functions and their kernels, and nothing else"
    for name, node in functions(stub).items():
        original = functions(solution)[name]
        assert ast.unparse(node.args) == ast.unparse(original.args)
        assert [ast.unparse(d) for d in node.decorator_list] == [ast.unparse(d) for d in original.decorator_list]
        assert ast.get_docstring(node, clean=False) == ast.get_docstring(original, clean=False)
        *rest, last = node.body
        assert len(rest) == (ast.get_docstring(node) is not None)
        assert ast.unparse(last) == f"raise NotImplementedError('{drill.id} {name} is yours to write')"
    lines = solution.splitlines()
    added = [line for line in stub.splitlines() if line not in lines]
    assert all(line.startswith(("# Run: pytest", "    raise NotImplementedError(")) for line in added)


@each_drill
def test_a_stub_names_the_catalogue_s_arguments(drill):
    defined = functions(stubs.stub(drill))
    for function in drill.functions:
        assert tuple(argument.arg for argument in defined[function.name].args.args) == function.arguments


def test_importing_a_stub_compiles_nothing(tmp_path):
    """Through Triton's interpreter the grader's tests import them; here without it, and without a GPU."""
    for drill in catalog.DRILLS:
        stubs.reset(drill, tmp_path)
    (tmp_path / "flashinfer.py").write_text("")  # the real one takes seconds
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    modules = ", ".join(drill.module for drill in catalog.DRILLS)
    subprocess.run([sys.executable, "-c", f"import {modules}"], cwd=tmp_path, env=env, check=True)


def shipped(drill: catalog.Drill) -> Iterator[str]:
    """The stub as it was committed with what it is made from or since, and the one on disk.

    One of them has to be right. That on disk, and later commits of it, may be a learner's: their work fails no test.
    """

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, encoding="utf-8")

    yield (stubs.MINE / drill.file).read_text(encoding="utf-8")
    mine, sources = f"drills/mine/{drill.file}", [f"drills/solutions/{drill.file}", "drills/stubs.py"]
    try:
        edited = git("status", "--porcelain", "--", *sources)
    except FileNotFoundError:
        pytest.skip("needs git")
    if edited.returncode:
        pytest.skip(f"needs a git checkout: {edited.stderr.strip()}")
    if edited.stdout:
        return
    made = git("log", "-1", "--format=%H", "--", *sources).stdout.strip()
    for commit in (made, *git("log", "--format=%H", f"{made}..HEAD", "--", mine).stdout.split()):
        yield git("show", f"{commit}:{mine}").stdout


@each_drill
def test_the_shipped_stub_is_the_generated_one(drill):
    fix = f"run `python -m drills.stubs` and commit drills/mine/{drill.file} together with what it is made from"
    assert any(text == stubs.stub(drill) for text in shipped(drill)), fix


def test_a_reset_keeps_what_was_there(tmp_path):
    path = tmp_path / catalog.L1.file
    assert stubs.reset(catalog.L1, tmp_path) is None
    assert path.read_text(encoding="utf-8") == stubs.stub(catalog.L1)
    assert stubs.reset(catalog.L1, tmp_path) is None, "an untouched stub needs no backup"
    works = [b"first", b"second", b"third \xff"]  # in one second, and not even text
    kept = []
    for work in works:
        path.write_bytes(work)
        kept.append(stubs.reset(catalog.L1, tmp_path))
    assert [backup.read_bytes() for backup in kept if backup] == works
    assert path.read_text(encoding="utf-8") == stubs.stub(catalog.L1)
    assert {backup.parent for backup in kept if backup} == {tmp_path / ".backup"}


def test_a_reset_leaves_the_solutions_alone():
    before = (stubs.SOLUTIONS / catalog.L1.file).read_bytes()
    with pytest.raises(ValueError, match="choose another directory"):
        stubs.reset(catalog.L1, Path(stubs.SOLUTIONS))
    assert (stubs.SOLUTIONS / catalog.L1.file).read_bytes() == before
