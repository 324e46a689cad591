"""The catalogue of mistakes as a whole, and README's tables made from it and from the drills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drills import catalog, pages, readme
from drills.mistakes import catalogue


@pytest.mark.parametrize("drill", catalog.DRILLS, ids=lambda drill: drill.id)
def test_each_drill_has_its_files(drill):
    """What drills/ADDING_A_DRILL.md lists, all that is missing at once."""
    here, package = Path(__file__).parent, catalog.PACKAGE
    wanted = [package / folder / drill.file for folder in ("solutions", "mine", "mistakes", "hints")]
    wanted += [drill.tests, *(folder / f"{drill.id.lower()}.md" for folder in pages.LANGUAGES.values())]
    wanted += [here / "alternatives" / drill.file, here / f"test_mistakes_{drill.id.lower()}.py"]
    missing = [str(path.relative_to(package.parent)) for path in wanted if not path.exists()]
    assert not missing, f"{drill.id} lacks {', '.join(missing)}: see drills/ADDING_A_DRILL.md"


def test_there_are_enough():
    entries = catalogue()
    assert len(entries) >= 60
    covered = {entry.function for entry in entries}
    assert covered == {function.name for drill in catalog.DRILLS for function in drill.functions}


def test_each_is_worth_reading():
    for entry in catalogue():
        assert entry.fails, f"{entry.name} names no test that fails it"
        assert 40 <= len(entry.lesson) <= 240, f"{entry.name}: {len(entry.lesson)} characters"
        assert re.fullmatch(r"[a-z0-9-]{4,40}", entry.name)
        for report in entry.seen:
            assert re.fullmatch(r"[\w.-]+(/[\w.-]+)?#\d+", report), f"{entry.name}: {report}"


def test_the_tests_it_names_exist():
    for drill in catalog.DRILLS:
        there = set(re.findall(r"^def (test_\w+)", drill.tests.read_text(), re.MULTILINE))
        for entry in catalogue(drill):
            assert set(entry.fails) <= there, f"{entry.name}: {set(entry.fails) - there}"


def test_readme_has_the_tables():
    text = readme.README.read_text(encoding="utf-8")
    assert text == readme.made(text), "README's tables are old: python -m drills.readme writes them"
