"""DRILLS_IMPL -> the functions under test. The suite reaches an implementation through this module only.

impl = implementation.selected()                       # what DRILLS_IMPL names
outcome = impl.run("slot_mapping", table, seq, pos, 4) # called, observed, and its arguments watched
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _pytest.outcomes import Failed

from drills import catalog
from drills.lane import ON_GPU
from drills.observe import Observed, watching

HERE = Path(__file__).resolve().parent
OFF_LIMITS = ("drills.", "solutions.", "selftests.")  # an implementation imports nothing of ours
BUILT_IN = {"mine": HERE / "mine", "solutions": HERE / "solutions"}


class SelectionError(Exception):
    """DRILLS_IMPL names nothing that can be tested."""


class NotStarted(Exception):
    """A function or a kernel, `name`, still raises NotImplementedError."""

    def __init__(self, drill: str, name: str):
        super().__init__(f"{drill} {name} still raises NotImplementedError")
        self.name = name


class Unusable(Exception):
    """The function cannot be called at all: no file, an error while importing it, no such name."""


@dataclass
class Outcome:
    """One call: what it returned or raised, what it did meanwhile, which arguments it had no business changing."""

    returned: Any = None
    raised: BaseException | None = None
    where: list[str] = field(default_factory=list)  # the learner's own lines in the traceback, outermost first
    files: list[str] = field(default_factory=list)  # the files of the traceback, the one that raised last
    observed: Observed = field(default_factory=Observed)
    disturbed: list[str] = field(default_factory=list)


def select(name: str | None) -> Implementation:
    """The implementation called `name`: mine (also for None or ''), solutions, or a directory of drill modules.

    Raises SelectionError, which lists the choices, for anything else. Nothing is imported yet.
    """
    name = name or "mine"
    choices = "DRILLS_IMPL can be mine (the default), solutions, or a directory that holds the drill modules"
    try:
        directory = BUILT_IN.get(name) or Path(name).expanduser()
    except RuntimeError as error:  # ~nobody/attention
        raise SelectionError(f"DRILLS_IMPL={name}: {first_line(error)}.\n{choices}.") from None
    if not directory.exists():
        raise SelectionError(f"DRILLS_IMPL={name}: there is no such path ({directory.absolute()}).\n{choices}.")
    if not directory.is_dir():
        raise SelectionError(f"DRILLS_IMPL={name}: that is a file; name the directory it is in.\n{choices}.")
    files = [drill.file for drill in catalog.DRILLS]
    if not any((directory / file).is_file() for file in files):
        raise SelectionError(f"DRILLS_IMPL={name}: {directory} holds none of {', '.join(files)}.\n{choices}.")
    return Implementation(name, directory.resolve())


def selected() -> Implementation:
    """What the environment variable DRILLS_IMPL selects (or, inside `using`, what that was given)."""
    return _in_use[-1] if _in_use else select(os.environ.get("DRILLS_IMPL"))


_in_use: list[Implementation] = []


@contextmanager
def using(impl: Implementation) -> Iterator[None]:
    """Within the block `selected()` is `impl`: how the suite is run on functions that are in no directory."""
    _in_use.append(impl)
    try:
        yield
    finally:
        _in_use.pop()


def reference_with(function: Callable[..., Any], name: str) -> Implementation:
    """The solutions with one function replaced by another of its name."""
    drill, _ = catalog.owner(function.__name__)
    solutions = select("solutions")
    module = types.ModuleType(drill.module)
    vars(module).update({f.name: solutions.function(f.name) for f in drill.functions})
    setattr(module, function.__name__, function)
    return Implementation(name, Path(function.__code__.co_filename).parent, {drill.module: module})


class Implementation:
    """The drills of one directory. A module is imported when one of its functions is first called."""

    def __init__(self, name: str, directory: Path, modules: Mapping[str, types.ModuleType] | None = None):
        self.name, self.directory = name, directory
        self.lost: str | None = None  # how the GPU was lost, after which no call can be trusted
        self.late: BaseException | None = None  # the time-out of this test, if it has run out
        self._modules: dict[str, types.ModuleType | Unusable] = dict(modules or {})

    def run(
        self, function: str, *args: Any, forbid_sync: bool = False, capturing: bool = False, huge: bool = False
    ) -> Outcome:
        """Call `function` and observe it. Its declared `writes` change in place; others are checked to be unchanged.

        forbid_sync: on a GPU, any wait for the device raises inside the call (torch.cuda.set_sync_debug_mode).
        huge: the arguments are too large to be copied, so whether they were changed is not looked at.
        capturing: torch.cuda.is_current_stream_capturing() says yes, as if a CUDA graph were being captured.
        Raises NotStarted or Unusable, which are about the file and not about this call.
        """
        if self.late is not None:
            raise self.late  # Hypothesis would try the call that hangs again, and no alarm would end that
        drill, entry = catalog.owner(function)
        call = self.function(function)
        named = dict(zip(entry.arguments, args))
        kept = {name: _bits(value) for name, value in named.items() if name not in entry.writes and not huge}
        watched = {t.untyped_storage().data_ptr() for name in entry.writes for t in tensors(named.get(name))}
        outcome = Outcome()
        pretend = capturing or not torch.cuda.is_available()  # without a driver, asking raises
        asked = mock.patch("torch.cuda.is_current_stream_capturing", return_value=capturing)
        no_sync = _forbidden_sync() if forbid_sync and torch.cuda.is_available() else nullcontext()
        with _alone(), poisoned(), asked if pretend else nullcontext(), watching(watched) as outcome.observed:
            try:
                with no_sync:
                    outcome.returned = call(*args)
                if any(t.is_cuda for t in tensors(list(named.values()))):
                    torch.cuda.synchronize()  # a fault in a kernel belongs to this call
            except BaseException as error:
                if isinstance(error, Failed):
                    self.late = error
                if isinstance(error, (KeyboardInterrupt, Failed)):
                    raise  # the user's Ctrl-C, and the suite's time-out, which is a failed test
                outcome.raised = cause(error)
                outcome.where = self.own_lines(error)
                outcome.files = [frame.filename for frame in traceback.extract_tb(outcome.raised.__traceback__)]
                self.lost = self.lost or _gpu_lost(error)
        if isinstance(outcome.raised, NotImplementedError) and outcome.where:
            raise NotStarted(drill.id, traceback.extract_tb(outcome.raised.__traceback__)[-1].name) from None
        outcome.disturbed = [name for name, bits in kept.items() if _bits(named[name]) != bits]
        return outcome

    def capture(self, function: str, *args: Any) -> tuple[Callable[[], None], Any]:
        """`function(*args)` captured in a CUDA graph: what replays it on the same arguments, and what it returned.

        A replay writes its result into the tensors that were returned.
        """
        call = self.function(function)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call(*args)  # compiles outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = call(*args)
        return graph.replay, returned

    def function(self, name: str) -> Callable[..., Any]:
        """The learner's function. Raises Unusable when its module cannot be imported or does not define it."""
        drill, entry = catalog.owner(name)
        path = self.directory / drill.file
        try:
            with _alone():
                found = getattr(self._module(drill), name, None)
        except Exception as error:  # a module may have a __getattr__ of its own
            if isinstance(error, Unusable):
                raise
            raise Unusable(f"{shown(path)} has no {name}: asked for it, it raised {first_line(error)}") from None
        if not callable(found):
            raise Unusable(f"{shown(path)} defines no {name}. The drill needs\n    def {entry.signature}: ...")
        return found

    def _module(self, drill: catalog.Drill) -> types.ModuleType:
        known = self._modules.get(drill.module)
        if known is None:
            try:
                known = _import(self.directory, drill.module)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit and a test's timeout too: importing it did not work
                known = Unusable(self._import_failure(drill, error))
            self._modules[drill.module] = known
        if isinstance(known, Unusable):
            raise Unusable(str(known))
        return known

    def _import_failure(self, drill: catalog.Drill, error: BaseException) -> str:
        path = self.directory / drill.file
        if not path.is_file():
            return f"{path} does not exist. {drill.id} is graded from that file."
        if isinstance(error, SystemExit):
            said = f"called sys.exit({error.code if error.code is not None else ''})"
        elif isinstance(error, SyntaxError) and error.filename == str(path):
            line = (error.text or "").rstrip()
            said = f"has a syntax error: {error.msg}\n    {shown(path)}:{error.lineno}   {line.strip()}"
        else:
            said = f"raised {type(error).__name__}: {first_line(error)}"
        own = self.own_lines(error)
        return "\n".join([f"{shown(path)} cannot be imported: it {said}", *(f"    {line}" for line in own)])

    def own_lines(self, error: BaseException) -> list[str]:
        """The traceback's lines in this implementation's files, down to the exception's cause."""
        lines: list[str] = []
        for seen in causes(error):
            for frame in traceback.extract_tb(seen.__traceback__):
                if Path(frame.filename).parent == self.directory:
                    line = f"{shown(Path(frame.filename))}:{frame.lineno}   {frame.line or ''}"
                    if line not in lines:
                        lines.append(line)
        return lines


def _import(directory: Path, module: str) -> types.ModuleType:
    """Import a drill's file under a name that only this directory has, from its source as it is now.

    No bytecode is cached: two edits in one second, of one size, would otherwise run the first one's.
    """
    path = directory / f"{module}.py"
    package = f"drills_under_test_{hashlib.sha256(str(directory).encode()).hexdigest()[:12]}"
    if package not in sys.modules:
        parent = types.ModuleType(package)
        parent.__path__ = [str(directory)]  # `from .other import x` finds this directory's file, and no other's
        sys.modules[package] = parent
    loader = _SourceLoader(f"{package}.{module}", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    linecache.checkcache(str(path))
    sys.modules[loader.name] = loaded
    try:
        with _alone():
            loader.exec_module(loaded)
    except BaseException:
        del sys.modules[loader.name]
        raise
    return loaded


class _SourceLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)  # type: ignore[return-value]


@contextmanager
def _alone() -> Iterator[None]:
    """While learner code runs, the reference and the suite's own answers cannot be imported."""
    hidden = {name: module for name, module in sys.modules.items() if name.startswith(OFF_LIMITS)}
    attached = []
    for full, module in hidden.items():
        package, _, name = full.rpartition(".")
        parent = sys.modules.get(package)
        if parent is not None and vars(parent).get(name) is module:
            attached.append((parent, name, module))
    for parent, name, _ in attached:
        delattr(parent, name)  # `drills.tests` is found without an import, too
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, _Refuse)
    try:
        yield
    finally:
        with suppress(ValueError):  # the code under test may have emptied the list
            sys.meta_path.remove(_Refuse)
        sys.modules.update(hidden)
        for parent, name, module in attached:
            setattr(parent, name, module)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within the block new memory holds NaN, on the CPU lane: what nobody wrote is seen, the same in each run."""
    if ON_GPU:
        yield  # there the same switch would refuse or warn of operations that are all right
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def _forbidden_sync() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _Refuse(importlib.abc.MetaPathFinder):
    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if f"{fullname}.".startswith(OFF_LIMITS) and fullname != "drills":
            raise ImportError(f"{fullname} is not for an implementation to import: the drill is to write it")
        return


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in an argument: itself, or those in lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def _bits(value: Any) -> list[Any]:
    """An argument's content to the bit, NaN included, to see whether a call changed it."""
    found: list[Any] = [
        (tuple(t.shape), t.stride(), t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for t in tensors(value)
    ]
    return found or [repr(value)]


def cause(error: BaseException) -> BaseException:
    """Triton's interpreter wraps what a kernel raised: the learner needs the inner one."""
    return next((e for e in causes(error) if type(e).__name__ != "InterpreterError"), error)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it was raised from, and so on. A chain that bites its tail ends there."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__


def _gpu_lost(error: BaseException) -> str | None:
    """After an illegal access every later CUDA call of this process fails: the first error, if that happened."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return first_line(error)
    return None


def shown(path: Path) -> str:
    """A path as a learner would type it: from the working directory when it is below, else whole."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # the working directory may be gone
        return str(path)


def first_line(error: BaseException) -> str:
    """An exception's message, its first line, cut to a readable length, without what a terminal would obey."""
    try:
        text = str(error)
    except Exception as wrong:
        return f"(its message cannot be had: __str__ raised {type(wrong).__name__})"
    line = next(iter(text.strip().splitlines()), "")
    line = "".join(c if c.isprintable() else "\ufffd" for c in line)
    return line if len(line) <= 300 else line[:297] + "..."
