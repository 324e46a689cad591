"""A grading on the terminal: how far it is, what there is to mend, and the table."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from drills.catalog import Drill
from drills.grader.run import DrillReport, Report

MOST_MESSAGES = 5  # of one drill
COLUMNS = ("passed", "failed", "not started", "skipped", "missing")


class Watch:
    """How far it is: a bar on a terminal, elsewhere a line a stage."""

    def __init__(self, console: Console):
        columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
        self.console, self.bar = console, Progress(*columns, console=console, disable=not console.is_terminal)
        self.tasks: dict[str, TaskID] = {}
        self.last: tuple[str, int] | None = None

    def __enter__(self) -> Watch:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def __call__(self, report: DrillReport) -> None:
        drill, test = report.drill, report.current
        if drill.id not in self.tasks:
            self.tasks[drill.id] = self.bar.add_task(drill.id, total=None)
        what = f"{drill.id} · {drill.stages[test.stage - 1].title} · {test.title}" if test else drill.id
        of = len(report.tests) or None
        self.bar.update(self.tasks[drill.id], description=escape(f"{what:<60.60}"), completed=report.done, total=of)
        if test and not self.console.is_terminal and self.last != (drill.id, test.stage):
            self.last = drill.id, test.stage
            stage = drill.stages[test.stage - 1].title
            self.console.print(f"{drill.id}: test {report.done + 1} of {of}, stage {test.stage}, {stage}")


def show(report: Report, console: Console) -> None:
    for each in report.drills:
        _explain(each, console)
    console.print()
    console.print(_table(report))
    for each in report.drills:
        for reason, number in each.skips().items():
            console.print(f"{each.drill.id}: {number} skipped: {escape(reason)}", style="yellow")
    console.print(f"lane: {escape(report.lane)}")
    failed = [each.drill.id for each in report.drills if not each.ok]
    skipped = sum(each.skips().total() for each in report.drills)
    if failed:
        console.print(f"FAILED: {', '.join(failed)}", style="bold red")
    else:
        tests = "1 test" if skipped == 1 else f"{skipped} tests"
        but = f", but for {tests} that this lane cannot run" if skipped else ""
        console.print(f"PASSED: {', '.join(each.drill.id for each in report.drills)}{but}", style="bold green")


def _explain(report: DrillReport, console: Console) -> None:
    """What there is to mend, or to write, in one drill."""
    drill, failures = report.drill, report.failures()
    said = [test.text for test in failures if not test.held][:MOST_MESSAGES]
    for text in said:
        console.print(f"\n{escape(text)}")
    if len(failures) > len(said):
        console.print(f"\n{drill.id} · stage {failures[0].stage}: and {len(failures) - len(said)} more")
    if report.problem:
        console.print(f"\n{escape(report.problem)}")
    stage = report.first("not started")
    if stage and not failures and not report.problem:
        console.print(f"\n{drill.id} · stage {stage} is not started: write {drill.stages[stage - 1].function}")
        console.print(f"  Read {drill.section(stage)}")


def _table(report: Report) -> Table:
    table = Table("drill", "stage", *COLUMNS)
    for each in report.drills:
        for number, stage in enumerate(each.drill.stages, 1):
            count = each.counts(number)
            bad = count["failed"] or count["missing"]
            style = "red" if bad else "yellow" if count["not started"] or not count["passed"] else "green"
            numbers = (str(count[verdict] or "") for verdict in COLUMNS)
            table.add_row(each.drill.id, f"{number} {stage.title}", *numbers, style=style)
        table.add_section()
    return table


def matrix(drills: list[Drill], console: Console) -> None:
    """The catalogue of mistakes, a row each."""
    from drills.mistakes import LANES, matrix

    table = Table("mistake", "stage", "failed by", "lane", "it has happened", show_lines=True)
    for drill in drills:
        for entry, stages in matrix.rows(drill):
            tests = ", ".join(test.removeprefix("test_").replace("_", " ") for test in entry.fails)
            seen = ", ".join(entry.seen)
            table.add_row(
                f"{entry.name}\n[dim]{escape(entry.lesson)}[/dim]",
                _stages(drill, stages),
                tests,
                LANES[entry.lane],
                seen,
            )
    console.print(table)


def _stages(drill: Drill, stages: list[int]) -> str:
    return "\n".join(f"{drill.id} {number} {drill.stages[number - 1].title}" for number in stages)


def prove(drills: list[Drill], console: Console) -> bool:
    """Run the suite against each mistake that this lane can show. Whether it failed all of them, where it should."""
    from drills import lane
    from drills.mistakes import catalogue, proof, shows_here

    entries = {e.name: e for drill in drills for e in catalogue(drill) if shows_here(e)}
    survivors = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("mistakes", total=len(entries))
        for result in proof.prove(entries):
            survived = set(entries[result.name].fails) - result.killers
            if survived or not result.failed:
                survivors.append(result.name)
                console.print(f"{result.name} SURVIVES {', '.join(survived) or 'every test'}", style="bold red")
            else:
                named = f"; called {result.first_diagnosis}" if result.first_diagnosis else ""
                console.print(f"{result.name}: failed by {len(result.failed)} tests{named}", style="green")
            bar.advance(task)
    console.print(f"{len(entries)} mistakes, {len(survivors)} survive. Lane: {lane.describe()}")
    return not survivors
