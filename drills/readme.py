"""README's tables, made from the drills and their mistakes. `python -m drills.readme` writes them into README.md."""

from __future__ import annotations

import re

from drills import catalog
from drills.mistakes import matrix

README = catalog.PACKAGE.parent / "README.md"


def drills() -> str:
    rows = ["| drill | what you write | functions | page |", "|---|---|---|---|"]
    for drill in catalog.DRILLS:
        functions = ", ".join(f"`{function.name}`" for function in drill.functions)
        pages = ", ".join(
            f"[{name}](drills/{path})"
            for name, path in (("English", drill.page), ("中文", drill.page.replace("/", "/zh/")))
        )
        rows.append(f"| {drill.id} | {drill.title} | {functions} | {pages} |")
    return "\n".join(rows)


TABLES = {"drills": drills, "matrix": matrix.markdown}


def made(text: str) -> str:
    """README's text with its tables, each between <!-- name --> and <!-- /name -->, as they should be."""
    for name, table in TABLES.items():
        block = re.compile(rf"(<!-- {name} -->\n).*(<!-- /{name} -->)", re.DOTALL)
        if not block.search(text):
            raise ValueError(f"README.md has no <!-- {name} --> block")
        text = block.sub(lambda found: f"{found[1]}{table().strip()}\n{found[2]}", text)  # noqa: B023
    return text


if __name__ == "__main__":
    README.write_text(made(README.read_text(encoding="utf-8")), encoding="utf-8")
