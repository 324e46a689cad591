"""The pages in two languages: their sections, and whether each was looked at since its other language changed.

    python -m drills.pages             # what has changed on one side since both were looked at
    python -m drills.pages looked      # both sides of everything are right as they are now

A section is a `## ` heading and what follows. Its id is the anchor that GitHub makes of an English heading; a Chinese
heading has the same id in an <a id="…"></a> of its own, on the line before it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from drills import catalog

CONTENT = catalog.PACKAGE / "content"
LOOKED_AT = CONTENT / "looked_at.json"
REFERENCE = "the-reference-line-by-line"  # the section that may hold the solution's lines
LANGUAGES = {"en": CONTENT, "zh": CONTENT / "zh"}


def page(drill: catalog.Drill, language: str = "en") -> Path:
    return LANGUAGES[language] / Path(drill.page).name


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def sections(path: Path) -> dict[str, str]:
    """A page's sections by id, in order; what stands before the first is called `top`."""
    found: dict[str, str] = {}
    current, anchor, fenced = "top", None, False
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        fenced ^= line.startswith("```")
        explicit = re.fullmatch(r'<a id="([\w-]+)"></a>\n?', line)
        if explicit and not fenced:
            anchor = explicit[1]
            continue
        if line.startswith("## ") and not fenced:
            current = anchor or slug(line[3:].strip())
            if current in found:
                raise ValueError(f"{path.name} has two sections called {current}")
        anchor = None if line.strip() else anchor
        found[current] = found.get(current, "") + line
    return found


def digests() -> dict[str, dict[str, list[str]]]:
    """For each page and section, a digest of the text in each language ("" where it is missing)."""
    found: dict[str, dict[str, list[str]]] = {}
    for drill in catalog.DRILLS:
        texts = [sections(page(drill, language)) if page(drill, language).exists() else {} for language in LANGUAGES]
        ids = dict.fromkeys(name for text in texts for name in text)
        found[drill.id] = {name: [_digest(text.get(name)) for text in texts] for name in ids}
    return found


def _digest(text: str | None) -> str:
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()[:12]


def changed() -> Iterator[str]:
    """What is to be looked at: sections of which a language has changed since both were right."""
    looked = json.loads(LOOKED_AT.read_text(encoding="utf-8")) if LOOKED_AT.exists() else {}
    for drill, parts in digests().items():
        for name, now in parts.items():
            then = looked.get(drill, {}).get(name, ["", ""])
            which = [language for language, x, y in zip(LANGUAGES, now, then) if x != y]
            if which:
                yield f"{drill} #{name} changed ({', '.join(which)}): look at both, then python -m drills.pages looked"


if __name__ == "__main__":
    if sys.argv[1:] == ["looked"]:
        LOOKED_AT.write_text(json.dumps(digests(), indent=1) + "\n", encoding="utf-8")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        found = list(changed())
        print("\n".join(found) or "both languages of every section were looked at")
        sys.exit(bool(found))
