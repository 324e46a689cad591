"""Stubs: a solution's text with the bodies taken out. `python -m drills.stubs` writes those of drills/mine again."""

from __future__ import annotations

import ast
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from drills import catalog

SOLUTIONS = catalog.PACKAGE / "solutions"
MINE = catalog.PACKAGE / "mine"


def stub(drill: catalog.Drill) -> str:
    """The file a learner starts from: the solution's docstrings, imports and signatures, word for word."""
    source = (SOLUTIONS / drill.file).read_text(encoding="utf-8")
    module, lines = ast.parse(source), source.splitlines()
    wanted = {name for function in drill.functions for name in (function.name, function.kernel)}
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]  # what functions hand on: given whole
    missing = wanted - {node.name for node in functions} - {None}
    if missing:
        raise ValueError(f"solutions/{drill.file} defines no {', '.join(sorted(map(str, missing)))}: see catalog.py")
    used = {node.id for given in [*functions, *classes] for node in ast.walk(given) if isinstance(node, ast.Name)}
    run = f"# Run: pytest drills/tests/{drill.tests.name}   or: drills test {drill.id.lower()}"
    head = lines[: module.body[0].end_lineno] + ["", run, ""]
    imports = [text for node in module.body for text in _imported(node, used, lines)]
    bodies = [lines[node.lineno - 1 : node.end_lineno] for node in classes]
    bodies += [_emptied(node, lines, drill) for node in functions]
    return "\n".join([*head, *imports, *(line for body in bodies for line in ["", "", *body])]) + "\n"


def _imported(node: ast.stmt, used: set[str], lines: list[str]) -> Iterator[str]:
    """An import's lines. One of the standard library that only the solution's helpers need is left out."""
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return
    names = {alias.asname or alias.name.split(".")[0] for alias in node.names}
    origin = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
    # Torch, Triton and FlashInfer stay even so: a learner without those helpers calls them directly.
    if names & used or (origin or "").split(".")[0] not in sys.stdlib_module_names:
        yield from lines[node.lineno - 1 : node.end_lineno]


def _emptied(node: ast.FunctionDef, lines: list[str], drill: catalog.Drill) -> list[str]:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    body = node.body[0]
    documented = ast.get_docstring(node) is not None
    last = body.end_lineno if documented else body.lineno - 1
    return [*lines[first - 1 : last], f'    raise NotImplementedError("{drill.id} {node.name} is yours to write")']


def reset(drill: catalog.Drill, directory: Path) -> Path | None:
    """Put the drill's stub into the directory. Returns where a file that was there, and not the stub, is kept."""
    if directory.resolve() == SOLUTIONS:
        raise ValueError("the solutions are what the stubs are made from: choose another directory")
    path = directory / drill.file
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a link to nothing: remove it, or make what it leads to")
    kept = keep(path) if differs(drill, directory) else None
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(stub(drill), encoding="utf-8", newline="\n")
    return kept


def differs(drill: catalog.Drill, directory: Path) -> bool:
    """Whether the directory has a file of this drill that is anything else than its stub."""
    path = directory / drill.file
    return path.exists() and path.read_bytes().replace(b"\r\n", b"\n") != stub(drill).encode()


def keep(path: Path) -> Path:
    """Copy a file to .backup beside it, under a name that no other backup has."""
    folder = path.parent / ".backup"
    folder.mkdir(exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in count(1):
        kept = folder / f"{path.stem}.{stamp}{f'-{number}' if number > 1 else ''}.py"
        try:
            with kept.open("xb") as backup, path.open("rb") as original:
                shutil.copyfileobj(original, backup)
        except FileExistsError:
            continue
        return kept
    raise AssertionError("unreachable")


if __name__ == "__main__":
    for each in catalog.DRILLS:
        backup = reset(each, MINE)
        print(f"{MINE / each.file}" + (f" (what was there is kept as {backup})" if backup else ""))
