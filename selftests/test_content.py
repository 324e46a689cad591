"""The pages and the hints: every place that a message points to exists, every excerpt is the solution's, every example
runs, every sum and command is right, both languages have the same sections, and nothing gives a solution away early."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from drills import catalog, cli, hints, mistakes, no_triton, pages

no_triton.install_if_missing()

ROOT = catalog.PACKAGE.parent
PAGES = [pages.page(drill, language) for language in pages.LANGUAGES for drill in catalog.DRILLS]
UPSTREAM = pages.CONTENT / "upstream.md"  # every place in other projects' code that a page leads to, with its symbol
SHORT = 25  # a line of a solution that is no longer than this, without its spaces, may occur anywhere

a_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(pages.CONTENT)))
a_drill = pytest.mark.parametrize("drill", catalog.DRILLS, ids=lambda drill: drill.id)
a_stage = pytest.mark.parametrize(
    ("drill", "number"),
    [pytest.param(d, i + 1, id=f"{d.id} stage {i + 1}") for d in catalog.DRILLS for i in range(len(d.stages))],
)


def blocks(page: Path) -> tuple[str, list[tuple[str, str]]]:
    """A page's text without its fenced blocks, and these with their languages."""
    prose, fenced, inside = [], [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = not inside
            if inside:
                fenced.append((line[3:].strip(), ""))
        elif inside:
            fenced[-1] = (fenced[-1][0], f"{fenced[-1][1]}{line}\n")
        else:
            prose.append(line)
    assert not inside, f"{page.name} ends within a fenced block"
    return "\n".join(prose), fenced


def anchors(page: Path) -> list[str]:
    """The anchors that GitHub makes of the headings, and those that are written out."""
    prose = blocks(page)[0]
    found: list[str] = []
    for title in re.findall(r"^#{1,6} +(.+?) *#*$", prose, re.MULTILINE):
        slug = pages.slug(title)
        taken = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{taken}" if slug in found else slug)
    return found + re.findall(r'<a id="([\w-]+)"></a>', prose)


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", blocks(page)[0])


@a_page
def test_each_page_says_how_to_run(page):
    assert f"drills test {page.stem}" in page.read_text(encoding="utf-8")


@a_stage
def test_each_stage_has_its_section(drill, number):
    section = drill.stages[number - 1].section
    assert section in pages.sections(pages.page(drill)), f"{drill.page} has no section #{section}"


@a_drill
def test_both_languages_have_the_same_sections(drill):
    english, chinese = (list(pages.sections(pages.page(drill, language))) for language in pages.LANGUAGES)
    assert len(english) > len(drill.stages)
    assert chinese == english


def test_both_languages_were_looked_at():
    """A section whose other language has changed may be wrong: look, then record it."""
    assert not list(pages.changed())


def test_each_mistake_names_a_section():
    lost = [m.name for m in mistakes.catalogue() if m.section not in anchors(pages.page(m.drill))]
    assert not lost, f"these name a section that their drill's page has not: {', '.join(lost)}"


@a_page
def test_links_within_the_repository(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        if link.startswith(("https://", "http://")):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        assert target.exists(), f"{link}: there is no {target}"
        assert not anchor or anchor in anchors(target), f"{link}: {target.name} has no such section"


@a_page
def test_links_to_code_elsewhere_are_pinned(page):
    for link in links(page):
        assert not link.startswith("http://")
        if re.match(r"https://github\.com/[^/]+/[^/]+/(blob|tree)/", link):
            pinned = re.search(r"/(blob|tree)/(v\d+\.\d+\.\d+|[0-9a-f]{40})/", link)
            assert pinned, f"{link} is not pinned to a release or a commit: its lines will move"


@a_page
def test_issues_are_named_as_they_are_linked(page):
    """[vllm#1486] leads to issue or pull request 1486 of a repository called vllm."""
    prose = blocks(page)[0].replace("\n", " ")
    named = re.findall(r"\[([\w.\-]+)#(\d+)\]\(([^)\s]+)\)", prose)
    assert named
    for project, number, link in named:
        pattern = rf"https://github\.com/[\w.\-]+/{re.escape(project)}/(issues|pull)/{number}"
        assert re.fullmatch(pattern, link), f"{project}#{number} leads to {link}"
    linked = re.findall(r"/(?:issues|pull)/\d+\)", prose)
    assert len(linked) == len(named), "an issue is linked under another name than project#number"


@a_page
def test_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    spans = [code for _, code in blocks(page)[1]] + re.findall(r"`([^`\n]+)`", blocks(page)[0])
    commands = {c.name or c.callback.__name__ for c in cli.app.registered_commands if c.callback}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = 0
    for span in spans:
        for word in re.findall(r"(?:^|[;&|] *|  )drills (\w+)", span, re.MULTILINE):
            assert word in commands, f"there is no command drills {word}"
            found += 1
        for module in re.findall(r"python -m ([\w.]+)", span):
            assert importlib.util.find_spec(module), f"there is no module {module}"
        for path in re.findall(r"pytest (drills/\S+)", span):
            assert (ROOT / path.partition("::")[0]).exists(), f"pytest {path}: there is no such file"
        for target in re.findall(r"^make ([a-z]+)", span, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"there is no target {target}"
    assert found, f"{page.name} names no command of ours"
    assert "drills/mine" in text


@a_page
def test_drawings_have_words(page):
    """Who cannot see a drawing, or whose reader does not render it, reads the next paragraph."""
    text = page.read_text(encoding="utf-8")
    after = re.findall(r"^```mermaid\n(?:(?!```).*\n)*```\n\n?(.*)$", text, re.MULTILINE)
    assert len(after) == text.count("```mermaid") > 0, f"{page.name} has no drawing, or one that does not end"
    for paragraph in after:
        assert paragraph.startswith(("In words: ", "文字说明：")), f"no words after a drawing: {paragraph[:60]}"


def test_places_upstream_are_listed():
    """upstream.md lists each place in another project's code that a page leads to, and no other."""
    listed = re.findall(r"\]\((https://github\.com/[^)\s]+/blob/[^)\s]+)\)", UPSTREAM.read_text(encoding="utf-8"))
    used = {link for page in PAGES for link in links(page) if "/blob/" in link}
    assert used
    assert set(listed) == used, f"not listed: {sorted(used - {*listed})}; not used: {sorted({*listed} - used)}"
    assert len(listed) == len(set(listed)), "a place is listed twice"


def symbols(drill: catalog.Drill) -> dict[str, list[str]]:
    """The functions and classes of a solution: the lines of each, dedented, without blank ones and docstrings."""
    source = (catalog.PACKAGE / "solutions" / drill.file).read_text(encoding="utf-8")
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            own = range(first, (node.end_lineno or first) + 1)
            said = node.body[0] if ast.get_docstring(node) is not None else None
            silent = range(said.lineno, (said.end_lineno or 0) + 1) if said else range(0)
            found[node.name] = [lines[n - 1] for n in own if n not in silent and lines[n - 1].strip()]
    return found


@a_page
def test_excerpts_are_the_solution(page):
    """Each is consecutive lines of the symbol that it names, and together they are all of the solution's code."""
    drill = catalog.find(page.stem)
    code, left = symbols(drill), {(name, line) for name, body in symbols(drill).items() for line in body}
    excerpts = [(tag.split()[1], text) for tag, text in blocks(page)[1] if tag.startswith("python ")]
    assert excerpts, f"{page.name} has no excerpt"
    for place, text in excerpts:
        file, _, name = place.partition("#")
        assert file == f"solutions/{drill.file}", f"{place} is not of this drill's solution"
        assert name in code, f"{place}: the solution has no {name}"
        wanted = [line for line in text.splitlines() if line.strip()]
        starts = range(len(code[name]) - len(wanted) + 1)
        windows = [code[name][n : n + len(wanted)] for n in starts]
        same = [w for w in windows if textwrap.dedent("\n".join(w)) == textwrap.dedent("\n".join(wanted))]
        assert same, f"{place}: these are not consecutive lines of it:\n{text}"
        left -= {(name, line) for line in same[0]}
    assert not left, f"{page.name} explains all but {sorted(left)}"


@a_page
def test_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"drills/[\w/.]+\.(?:py|md)", text):
        assert (ROOT / path).exists(), f"{path} is named, and does not exist"


def examples() -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(pages.CONTENT)} {i + 1}", code)
        for page in PAGES
        if page.exists()
        for i, code in enumerate(c for language, c in blocks(page)[1] if language == "python")
    ]


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in examples()])
def test_examples_run(code):
    """Each by itself, for a reader comes from anywhere."""
    assert set(re.findall(r"import (\w+)", code)) <= {"torch"}, "an example needs torch alone"
    if ">>>" not in code:
        exec(compile(code, "example", "exec"), {"__name__": "example"})
        return
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(code, {}, "example", None, 0)
    assert any(example.want for example in test.examples)
    result = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not result.failed, "".join(said)


def tables(page: Path) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, the header first."""
    found = re.findall(r"(?:^\|.*\n?)+", blocks(page)[0], re.MULTILINE)
    return [[[c.strip() for c in row.strip("|").split("|")] for row in t.splitlines()] for t in found]


@a_page
def test_tables_are_whole(page):
    for table in tables(page):
        assert {len(row) for row in table} == {len(table[0])}, f"rows of different lengths: {table[0]}"
        assert set("".join(table[1])) <= set("-:"), f"no line below the header: {table[0]}"


@a_page
def test_sums_are_right(page):
    """What is written as a calculation with its result, in the order Python takes: 3 · 4 + 1 = 13."""
    number = r"−?\d[\d,]*(?:\.\d+)?"
    term = rf"(?:{number}|\({number} [·+−] {number}\))"
    prose = blocks(page)[0].replace("\n", " ")
    found = re.findall(rf"(?<![\w\].])({term}(?: (?:·|\+|−|//|%) {term})+) (?:=|is) ({number})", prose)
    assert found
    for sum_, result in found:
        python = [x.replace("·", "*").replace("−", "-").replace(",", "") for x in (sum_, result.rstrip(","))]
        assert eval(python[0]) == float(python[1]), f"{sum_} is not {result}"


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def solution_lines(path: Path) -> Iterator[str]:
    """The code in a solution's functions: its lines, and the values they assign or return, without spaces."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        body = function.body[ast.get_docstring(function) is not None :]
        for statement in body:
            yield from (line.partition("  #")[0] for line in lines[statement.lineno - 1 : statement.end_lineno])
            for node in ast.walk(statement):
                if isinstance(node, (ast.Assign, ast.Return)) and node.value is not None:
                    yield ast.get_source_segment(source, node.value) or ""


@a_drill
def test_nothing_gives_a_solution_away(drill):
    path = catalog.PACKAGE / "solutions" / drill.file
    code = {line for line in map(squeezed, solution_lines(path)) if len(line) > SHORT}
    assert len(code) >= len(drill.functions), "the solution was not read"
    parts = {(page, name): text for page in PAGES for name, text in pages.sections(page).items()}
    texts = {f"{page.name}#{name}": text for (page, name), text in parts.items() if name != pages.REFERENCE}
    texts |= {f"hint {n} of {d.id}, stage {i + 1}": hint for d in catalog.DRILLS
              for i, three in enumerate(hints.of(d)) for n, hint in enumerate(three, 1)}  # fmt: skip
    for name, text in texts.items():
        given = [line for line in code if line in squeezed(text)]
        assert not given, f"{name} holds code of solutions/{drill.file}: {given}"


@a_stage
def test_each_stage_has_three_hints(drill, number):
    assert len(hints.of(drill)) == len(drill.stages)
    question, idea, shape = three = hints.of(drill)[number - 1]
    assert question.endswith("?"), "the first hint is a question"
    assert "<" in shape and ">" in shape, "the third has places to fill in"
    assert len({*three}) == 3
    for hint in three:
        assert hint.endswith(("?", ".")) and "\n" not in hint and "  " not in hint
        assert 30 < len(hint) < 260, f"{len(hint)} characters: {hint}"


def test_hints_are_given_one_by_one():
    three = hints.of(catalog.L1)[0]
    assert [hints.next_hint(catalog.L1, 1, given) for given in range(3)] == [*enumerate(three, 1)]
    assert hints.next_hint(catalog.L1, 1, 3) is None
