"""`drills …`: thin over the catalogue, pytest, the stubs and the grader. What imports torch is imported when needed."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drills import catalog, stubs

if TYPE_CHECKING:
    from drills.grader.run import Report

BUILT_IN = ("mine", "solutions")

app = typer.Typer(
    help="Learn how an LLM inference engine's attention works by writing it. Start with [bold]drills list[/bold].",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
errors = Console(highlight=False, soft_wrap=True, stderr=True)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # where · cannot be printed it is a ?
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        app(arguments[:at], prog_name="drills", obj=arguments[at + 1 :])
    except OSError as error:
        fail(str(error))


def fail(message: str, status: int = 2) -> NoReturn:
    errors.print(escape(message), style="red")
    raise SystemExit(status)


def absolute(impl: str) -> str:
    """The tests run in another directory than the one that a path was typed in."""
    if not impl or impl in BUILT_IN:
        return impl or "mine"
    try:
        return str(Path(impl).expanduser().absolute())
    except RuntimeError as error:  # ~nobody/attention
        fail(f"--impl {impl}: {error}")


def version(wanted: bool) -> None:
    if wanted:
        console.print(f"attention-drills {importlib.metadata.version('attention-drills')}")
        raise typer.Exit


A_DRILL = "An id (l1), a module or a file name"
Drills = Annotated[list[str] | None, typer.Argument(metavar="DRILL", help=f"{A_DRILL}. Left out: all of them.")]
Impl = Annotated[
    str,
    typer.Option(
        envvar="DRILLS_IMPL", callback=absolute, help="mine, solutions, or a directory that holds the drill modules."
    ),
]


@app.callback()
def options(
    ctx: typer.Context,
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")] = False,
) -> None:
    if ctx.obj and ctx.invoked_subcommand != "test":
        fail(f"drills {ctx.invoked_subcommand} takes nothing after --: only drills test hands it on, to pytest")


@app.command("list", epilog="Example: [bold]drills list[/bold]")
def list_drills(impl: Impl = "mine") -> None:
    """The drills, and where your files are."""
    table = Table("", "title", "file", "functions", "stages", "page", show_lines=True)
    for column in table.columns:
        column.overflow = "fold"
    for drill in catalog.DRILLS:
        functions = "\n".join(function.name for function in drill.functions)
        table.add_row(drill.id, drill.title, drill.file, functions, str(len(drill.stages)), f"drills/{drill.page}")
    console.print(table)
    console.print(f"Your files are in {escape(str(directory(impl)))}")


@app.command("test", epilog="Example: [bold]drills test l1 -- -x -k padding[/bold]")
def run_tests(ctx: typer.Context, drills: Drills = None, impl: Impl = "mine") -> None:
    """Run the tests with pytest, which gets what stands after -- and whose exit status is passed on."""
    os.environ["DRILLS_IMPL"] = impl
    files = [str(drill.tests) for drill in chosen(drills)]
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *files, *ctx.obj])


@app.command(epilog="Example: [bold]drills grade l1 --impl ~/attention[/bold]")
def grade(drills: Drills = None, impl: Impl = "mine") -> None:
    """Grade an implementation. The exit status is 0 if all that this machine can check passed, 1 if not, 2 for a
    wrong argument."""
    report = graded(chosen(drills), impl)
    from drills.grader import show

    show.show(report, console)
    raise typer.Exit(0 if report.ok else 1)


@app.command(epilog="Example: [bold]drills hint l1[/bold]")
def hint(
    drill: Annotated[str, typer.Argument(metavar="DRILL", help=f"{A_DRILL}.")],
    impl: Impl = "mine",
    again: Annotated[bool, typer.Option("--again", help="Repeat the hints you have had for this stage.")] = False,
) -> None:
    """The next hint for your first stage that does not pass: a question, then an idea, then the shape of the line."""
    (wanted,) = chosen([drill])
    from drills import hints

    report = graded([wanted], impl).drills[0]
    stage = report.next_stage()
    if stage is None and not report.ok:
        fail(report.problem or f"{wanted.id} could not be graded", 1)
    if stage is None:
        console.print(f"{wanted.id} passes, as far as this machine can check: there is nothing to hint at.")
        return
    console.print(f"{wanted.id} · stage {stage} of {len(wanted.stages)}, {wanted.stages[stage - 1].title}")
    store = directory(impl) / ".hints.json"
    for level, text in hints.had(wanted, stage, store) if again else [hints.give(wanted, stage, store)]:
        console.print(f"  {level} of 3: {escape(text)}")
    console.print(f"  Read {wanted.section(stage)}")


@app.command(epilog="Example: [bold]drills mistakes f1 --prove[/bold]")
def mistakes(
    drills: Drills = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the matrix as README has it.")] = False,
    prove: Annotated[bool, typer.Option("--prove", help="Run the suite against each: some minutes.")] = False,
) -> None:
    """The known mistakes: which stage and which tests fail each, and on which lane it shows."""
    from drills.grader import show
    from drills.mistakes import matrix

    wanted = chosen(drills)
    if markdown:
        sys.stdout.write(matrix.markdown(wanted))
    elif prove:
        raise typer.Exit(0 if show.prove(wanted, console) else 1)
    else:
        show.matrix(wanted, console)


@app.command(epilog="Example: [bold]drills reset l1[/bold]")
def reset(
    drills: Annotated[list[str], typer.Argument(metavar="DRILL", help=f"{A_DRILL}.")],
    impl: Impl = "mine",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Start a drill afresh from its empty stub. What you had written is kept in .backup beside it."""
    where = directory(impl)
    if where.resolve() == stubs.SOLUTIONS:
        fail("the solutions are what the stubs are made from: choose another directory")
    for drill in chosen(drills):
        path = where / drill.file
        if stubs.differs(drill, where) and not yes:
            typer.confirm(f"{path} is not the empty stub. Replace it, and keep it in .backup?", abort=True)
        try:
            kept = stubs.reset(drill, where)
        except ValueError as error:
            fail(str(error))
        console.print(escape(f"{path} is the empty stub" + (f"; yours is kept as {kept}" if kept else "")))


def graded(drills: list[catalog.Drill], impl: str) -> Report:
    """Grade with a progress display."""
    from drills.grader import run, show
    from drills.implementation import SelectionError

    for ending in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # however this is ended, the tests end with it
        signal.signal(ending, signal.default_int_handler)
    try:
        with show.Watch(console) as watch:
            return run.grade(drills, impl, watch)
    except SelectionError as error:
        fail(str(error).replace("DRILLS_IMPL", "--impl"))
    except KeyboardInterrupt:
        fail("stopped: nothing was graded", 130)


def chosen(names: list[str] | None) -> list[catalog.Drill]:
    try:
        return list(dict.fromkeys(catalog.find(Path(name).name) for name in names or [])) or list(catalog.DRILLS)
    except KeyError as error:
        fail(error.args[0])


def directory(impl: str) -> Path:
    return catalog.PACKAGE / impl if impl in BUILT_IN else Path(impl)


if __name__ == "__main__":
    main()
