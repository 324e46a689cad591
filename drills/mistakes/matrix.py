"""The matrix of mistakes: which stage and which tests fail each, and on which lane it was seen."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from drills import catalog
from drills.mistakes import LANES, Mistake, catalogue


def stages_of_tests(drill: catalog.Drill) -> dict[str, int]:
    """The stage of each test of a drill, read from its file."""
    found = {}
    for node in ast.parse(drill.tests.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.stage":
                    found[node.name] = ast.literal_eval(mark.args[0])
    return found


def rows(drill: catalog.Drill) -> Iterator[tuple[Mistake, list[int]]]:
    """Each mistake of a drill with the stages whose tests are to fail it."""
    stages = stages_of_tests(drill)
    for entry in catalogue(drill):
        yield entry, sorted({stages[test] for test in entry.fails})


def markdown(drills: Iterable[catalog.Drill] = catalog.DRILLS) -> str:
    """The matrix as README has it."""
    lines = []
    for drill in drills:
        entries = list(rows(drill))
        lines += ["<details>", f"<summary>{drill.id}: {len(entries)} mistakes, each failed by the suite</summary>", ""]
        lines += ["| mistake | stage | failed by | lane | it has happened |", "|---|---|---|---|---|"]
        for entry, stages in entries:
            tests = " ".join(f"`{test.removeprefix('test_')}`" for test in entry.fails)
            numbers = ", ".join(map(str, stages))
            lines.append(f"| {entry.name} | {numbers} | {tests} | {LANES[entry.lane]} | {', '.join(entry.seen)} |")
        lines += ["", "</details>", ""]
    return "\n".join(lines)
