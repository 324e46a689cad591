"""What the code under test does while it runs: torch operations, host reads, kernel launches, FlashInfer calls.

On the CPU nothing waits for a GPU, so a host read is recognised by the call that would wait: `.item()`, `bool(t)`,
`.tolist()`, `.cpu()`, a boolean mask whose size must be known, and the like. What happens inside a Triton launch or
inside FlashInfer's wrapper is theirs, and is not counted.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result has a size, or a value, that only the device knows.
WAITING_OPS = {
    "aten::_local_scalar_dense": "reads one value (.item(), int(), bool(), an if)",
    "aten::is_nonzero": "reads one value (an if on a tensor)",
    "aten::equal": "torch.equal reads its verdict",
    "aten::nonzero": "nonzero, or a boolean mask: the size of its result must be read",
    "aten::masked_select": "masked_select: the size of its result must be read",
    "aten::_unique2": "unique: the size of its result must be read",
    "aten::unique_consecutive": "unique: the size of its result must be read",
    "aten::unique_dim": "unique: the size of its result must be read",
    "aten::bincount": "bincount: the size of its result must be read",
    "aten::repeat_interleave": "repeat_interleave without output_size: the size of its result must be read",
}
TRITON = f"{os.sep}triton{os.sep}"
# Python calls that read a tensor on the host, whatever torch dispatches for them.
WAITING_CALLS = ("tolist", "numpy", "__array__", "__dlpack__", "cpu")
# The wrapper's methods, older names included, and what a call of each counts as.
WRAPPER_CALLS = {
    "__init__": "constructed",
    "plan": "planned",
    "begin_forward": "planned",
    "run": "run",
    "run_return_lse": "run",
    "forward": "run",
    "forward_return_lse": "run",
}


@dataclass
class Observed:
    """What was seen during one call."""

    ops: list[str] = field(default_factory=list)  # torch operations dispatched, in order
    float_ops: list[str] = field(default_factory=list)  # those of them whose result is a float tensor
    host_reads: list[str] = field(default_factory=list)  # each as a phrase a learner can act on
    values_read: int = 0  # how many values the host reads brought over
    torch_writes: list[str] = field(default_factory=list)  # torch operations that wrote into a watched argument
    torch_in_kernels: list[str] = field(default_factory=list)  # torch operations called by a kernel's own lines
    launches: Counter[str] = field(default_factory=Counter)  # Triton kernels by name
    wrapper: Counter[str] = field(default_factory=Counter)  # FlashInfer: constructed, planned, run


class _Ops(TorchDispatchMode):
    def __init__(self, seen: Observed, watched: set[int]):
        super().__init__()
        self.seen, self.watched = seen, watched
        self.paused: str | None = None  # within a launch or a wrapper's method: the directory of the kernel's file

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile never sees this mode, and hiding it would import the compiler: two seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if self.paused:
            if _called_from(self.paused):
                self.seen.torch_in_kernels.append(name)
            return func(*args, **kwargs)
        self.seen.ops.append(name)
        if name in WAITING_OPS and not (name == "aten::repeat_interleave" and kwargs.get("output_size") is not None):
            self.read(WAITING_OPS[name], 1)
        elif name in ("aten::index", "aten::index_put_") and _by_mask(name, args):
            self.read("a boolean mask as an index: the size of its result must be read", 1)
        for place, spec in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(spec.name)
            written = spec.alias_info is not None and spec.alias_info.is_write and isinstance(value, torch.Tensor)
            if written and value.untyped_storage().data_ptr() in self.watched:
                self.seen.torch_writes.append(name)
        result = func(*args, **kwargs)
        if any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in _flat(result)):
            self.seen.float_ops.append(name)
        source: Any = args[1] if name == "aten::copy_" else args[0] if args else None
        both = isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)
        if both and source.is_cuda and not result.is_cuda and not kwargs.get("non_blocking"):
            self.read("a copy from the GPU to the host", source.numel())
        return result

    def read(self, how: str, values: int) -> None:
        self.seen.host_reads.append(how)
        self.seen.values_read += values


def _called_from(directory: str) -> bool:
    """Whether a line in this directory called torch, and not Triton for it: to the interpreter a kernel is Python."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if os.path.dirname(file) == directory:
            return True
        if TRITON in file or (file == __file__ and frame.f_code.co_name == "run"):
            return False
        frame = frame.f_back
    return False


def _flat(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an indexing operation must first count a mask. Assigning one value is a masked fill, and need not."""
    masks = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return masks and (name == "aten::index" or args[2].numel() != 1)


class _Calls(TorchFunctionMode):
    def __init__(self, ops: _Ops):
        super().__init__()
        self.ops = ops

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None and not self.ops.paused:
            if name in WAITING_CALLS:
                self.ops.read(f"Tensor.{name} brings the values to the host", tensor.numel())
            elif name == "to" and not tensor.is_cuda and "cpu" in map(str, (*args[1:], *(kwargs or {}).values())):
                # On the CPU lane there is no GPU to copy from, but the same line would wait for one.
                self.ops.read("Tensor.to('cpu') brings the values to the host", tensor.numel())
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watching(watched: set[int]) -> Iterator[Observed]:
    """Observe the code in the block. `watched`: storage addresses that no torch operation should write."""
    seen = Observed()
    ops = _Ops(seen, watched)

    @contextlib.contextmanager
    def paused(directory: str = "nobody's") -> Iterator[None]:
        before, ops.paused = ops.paused, directory
        try:
            yield
        finally:
            ops.paused = before

    with contextlib.ExitStack() as stack:
        _watch_triton(stack, seen, paused)
        _watch_flashinfer(stack, seen, paused)
        stack.enter_context(ops)
        stack.enter_context(_Calls(ops))
        yield seen


def _watch_triton(stack: contextlib.ExitStack, seen: Observed, paused: Any) -> None:
    """Every launch goes through `run` of one of these classes, however the kernel was named or stored."""
    if "triton" not in sys.modules or not hasattr(sys.modules["triton"], "runtime"):
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def counted(original):
        def run(self, *args, grid, warmup, **kwargs):
            if not warmup:
                seen.launches[self.fn.__name__] += 1
            with paused(os.path.dirname(self.fn.__code__.co_filename)):
                return original(self, *args, grid=grid, warmup=warmup, **kwargs)

        return run

    for cls in (JITFunction, InterpretedFunction):
        stack.enter_context(mock.patch.object(cls, "run", counted(cls.run)))


def _watch_flashinfer(stack: contextlib.ExitStack, seen: Observed, paused: Any) -> None:
    """The wrapper as the code under test gets it: the real one on a GPU, the suite's stand-in without."""
    wrapper = getattr(sys.modules.get("flashinfer"), "BatchDecodeWithPagedKVCacheWrapper", None)
    if wrapper is None:
        return
    inside = False  # `forward` may call `run`: one call of the learner's is counted once

    def counted(original, what):
        def call(self, *args, **kwargs):
            nonlocal inside
            bound = original.__get__(self, type(self))
            if inside:
                return bound(*args, **kwargs)
            seen.wrapper[what] += 1
            inside = True
            try:
                with paused():
                    return bound(*args, **kwargs)
            finally:
                inside = False

        return call

    for method, what in WRAPPER_CALLS.items():
        if method in vars(wrapper):
            stack.enter_context(mock.patch.object(wrapper, method, counted(vars(wrapper)[method], what)))
