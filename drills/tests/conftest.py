"""How the graded suite runs: which implementation, on which lane, in the order a learner writes things."""

from __future__ import annotations

import pytest

from drills import catalog, implementation, lane, no_triton
from drills.tests import _flashinfer_contract, _scoreboard
from drills.tests._judge import Judge, Verdict

no_triton.install_if_missing()
if not lane.ON_GPU:
    _flashinfer_contract.install()

SECONDS_A_TEST = 300 if lane.ON_GPU else 30  # FlashInfer compiles at its first use on a GPU
TIMEOUTS_A_DRILL = 2  # after as many hanging tests the drill's others are not waited for

impl_key = pytest.StashKey[implementation.Implementation]()
board_key = pytest.StashKey[_scoreboard.Scoreboard]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everything", action="store_true", help="show the failures of later stages in full too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stage(number): the drill's stage, as drills/catalog.py numbers them")
    config.addinivalue_line("markers", "gpu(reason): runs on a GPU only, and why")
    config.addinivalue_line("markers", "kernel: needs Triton")
    if not __debug__:
        raise pytest.UsageError("Python runs without its asserts (-O, PYTHONOPTIMIZE): the drills' checks are such")
    try:
        config.stash[impl_key] = implementation.selected()
    except implementation.SelectionError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[board_key] = _scoreboard.Scoreboard(everything=config.getoption("--everything"))


def pytest_report_header(config: pytest.Config) -> list[str]:
    impl = config.stash[impl_key]
    return [f"drills: {impl.name} ({impl.directory})", f"lane: {lane.describe()}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        drill, stage = drill_of(item), stage_of(item)
        item.user_properties += [("drill", drill.id), ("stage", stage), ("title", title_of(item))]
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS_A_TEST))
        gpu = item.get_closest_marker("gpu")
        if gpu and not lane.ON_GPU:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {gpu.args[0]}"))
        if item.get_closest_marker("kernel") and no_triton.MISSING:
            item.add_marker(pytest.mark.skip(reason=f"needs Triton: {no_triton.WHY}"))
    items.sort(key=lambda item: (catalog.DRILLS.index(drill_of(item)), stage_of(item)))


def drill_of(item: pytest.Item) -> catalog.Drill:
    return catalog.find(item.path.stem.removeprefix("test_"))


def stage_of(item: pytest.Item) -> int:
    marker = item.get_closest_marker("stage")
    if marker is None:
        raise pytest.UsageError(f"{item.nodeid} has no @pytest.mark.stage(...)")
    return marker.args[0]


def title_of(item: pytest.Item) -> str:
    """What the test shows: the first line of its docstring, with its parameters."""
    function = getattr(item, "function", None)
    text = (function.__doc__ or item.name).strip().splitlines()[0].rstrip(".")
    spec = getattr(item, "callspec", None)
    return f"{text} [{spec.id}]" if spec else text


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Judge:
    return judge_of(request.node)


def judge_of(item: pytest.Item) -> Judge:
    test = getattr(item, "originalname", item.name)
    return Judge(item.config.stash[impl_key], drill_of(item), stage_of(item), test, title_of(item))


def pytest_runtest_setup(item: pytest.Item) -> None:
    board, impl = item.config.stash[board_key], item.config.stash[impl_key]
    impl.late = None
    if impl.lost:
        pytest.fail(f"not run: the GPU was lost in an earlier test ({impl.lost}). Mend that one first.", pytrace=False)
    if board.timeouts[drill_of(item).id] >= TIMEOUTS_A_DRILL:
        pytest.fail(f"not run: {TIMEOUTS_A_DRILL} tests of this drill ran out of time before it.", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    error = call.excinfo.value if call.excinfo else None
    late = "Timeout (>" in str(error)
    if call.excinfo and (late or isinstance(error, (implementation.NotStarted, implementation.Unusable, Verdict))):
        # Its lines are not shown, and formatting them takes 0.2 s, or fails: a loop without a body has no line number.
        call.excinfo.traceback = call.excinfo.traceback[:0]
    report = yield
    state, text = None, None
    if isinstance(error, implementation.NotStarted):
        state, text = "not started", str(error)
        report.user_properties.append(("unwritten", error.name))
    elif isinstance(error, implementation.Unusable):
        state, text = "unusable", f"{judge_of(item).heading}\n  " + str(error).replace("\n", "\n  ")
    elif isinstance(error, Verdict):
        text = item.config.stash[board_key].diagnosed(error, drill_of(item).id, stage_of(item))
    elif report.failed and late:
        own = item.config.stash[impl_key].own_lines(error) if error else []
        state = "timeout"
        text = "\n".join([judge_of(item).heading, f"  did not end within {SECONDS_A_TEST} s, and was stopped in",
                          *(f"      {line}" for line in own or ["(none of your lines)"])])  # fmt: skip
    elif report.failed and report.when == "setup" and "not run: " in str(error):
        state = "not run"
    if text is not None:
        report.longrepr = text
    if state is not None:
        report.user_properties.append(("state", state))
    if report.when == "call" or not report.passed:
        item.config.stash[board_key].add(report)
    return report


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        items[0].config.stash[board_key].partial = True


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config):
    return config.stash[board_key].status(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line, markup in config.stash[board_key].lines():
        terminalreporter.write_line(line, **markup)
