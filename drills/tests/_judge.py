"""Compares what an implementation did with what it should have done, and says what went wrong in the drill's terms.

A verdict reads, from the outside in: where the learner is, the call, what is wrong (what was raised, then shapes and
dtypes, then the first value that differs and where that is), what it is a sign of, and where to read.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from _pytest.outcomes import Failed

from drills import catalog, mistakes
from drills.implementation import Implementation, Outcome, cause, first_line, poisoned, tensors
from drills.mistakes import Mistake
from drills.tests import _oracle
from drills.tests._flashinfer_contract import SilentlyWrong
from drills.tests._paged import allocation, copy_of, far_page

REFUSALS = (AssertionError, ValueError, TypeError, IndexError)
ROOM = 1 << 16  # bytes on either side of an allocation when a mistake is tried on it
# How far attention may be off, of a row's norm: a few roundings of the output's type.
CLOSE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
SHOWN_VALUES = 12  # a tensor with more is named by its shape
# Torch operations that need no kernel: memory, views, casts, a scaling. Whatever else makes floats does the work.
NO_WORK = re.compile(
    r"aten::(empty\w*|new_\w+|zeros\w*|ones\w*|full\w*|fill_|zero_|arange|detach|alias|clone|copy_|_to_copy|to|contiguous"
    r"|view\w*|_unsafe_view|reshape|_reshape_alias|as_strided|permute|transpose|t|expand|slice|select|narrow|split\w*"
    r"|unsqueeze|squeeze|unbind|mul|div|lift_fresh|set_|resize_)"
)


class Verdict(Failed):
    """A failed check. Its text is all that the learner is shown."""

    def __init__(
        self,
        lines: list[str],
        hint: str | None,
        read: str,
        look_up: Callable[[], Mistake | None] | None,
        vague: bool = False,
    ):
        self.lines, self.hint, self.read, self.look_up = lines, hint, read, look_up
        self.vague = vague  # the result is NaN, which looks the same however it came about
        super().__init__(self.text(), pytrace=False)

    def text(self, found: Mistake | None = None) -> str:
        """What to show, with the mistake that `look_up` has found, if it was asked and has."""
        if found is None:
            return "\n".join([*self.lines, *([f"  {self.hint}"] if self.hint else []), f"  Read {self.read}"])
        happened = [f"  It has happened: {', '.join(found.seen)}."] if found.seen else []
        this = f"  This {'may be' if self.vague else 'is'} {found.name}: {found.lesson}"
        hint = [f"  {self.hint}"] if self.vague and self.hint else []
        return "\n".join([*self.lines, *hint, this, *happened, f"  Read {found.read}"])


class Judge:
    """Runs one test's calls through an implementation. Each method returns only when all is well."""

    def __init__(self, impl: Implementation, drill: catalog.Drill, stage: int, test: str, title: str):
        self.impl, self.drill, self.stage, self.test, self.title = impl, drill, stage, test, title

    def agrees(
        self,
        function: str,
        *args: Any,
        oracle: Callable[..., Any],
        close: float | None = None,
        hint: str | None = None,
        or_refuses: tuple[type[Exception], ...] = (),
    ) -> Outcome:
        """The call must return, and leave in the arguments it writes, what the oracle does on a copy of them.

        close: the largest error a row of the last dimension may have, relative to its norm; without it, to the bit.
        hint: what a difference here is a sign of. or_refuses: errors that are as good, where the contract is silent.
        """
        before = copy_of(list(args))
        wanted = copy_of(list(args), device="cpu")
        expected = oracle(*wanted)
        outcome = self.call(function, *args, or_refuses=or_refuses)
        if outcome.raised is not None:
            return outcome
        writes = catalog.owner(function)[1].writes
        problem = _differs(function, outcome.returned, expected, close, before)
        for name, x, want in zip(catalog.owner(function)[1].arguments, args, wanted):
            if problem is None and name in writes:
                problem = _overwritten(function, name, x, want, before)
        if problem is not None:
            self.fail(function, before, problem, hint, outcome, list(args))
        return outcome

    def refuses(
        self, function: str, *args: Any, because: str, also: tuple[type[Exception], ...] = (), **options: Any
    ) -> None:
        """The call must raise, and must have written nothing. also: errors that count beside the usual four."""
        before = copy_of(list(args))
        outcome = self.impl.run(function, *args, **options)
        if outcome.raised is None:
            self.fail(
                function, before, ["returned as if all were well", f"but {because}: refuse it"], None, outcome, [*args]
            )
        problem = None
        if isinstance(outcome.raised, SilentlyWrong):
            problem = "only the stand-in for FlashInfer saw it, the real one would not: check it before you plan or run"
        elif not isinstance(outcome.raised, REFUSALS + also):
            problem = "refuse it with an AssertionError that names the argument"
        elif any("/triton/" in file for file in outcome.files) or outcome.files[-1].endswith("/drills/observe.py"):
            problem = (
                "that is an accident, not a refusal: check the argument before you launch or call anything with it"
            )
        if problem:
            self.fail(function, before, [*_raised(outcome), f"{because}: {problem}"], None, outcome, [*args])
        self._untouched(function, before, args)

    def _untouched(self, function: str, before: list[Any], args: tuple[Any, ...]) -> None:
        for name, old, new in zip(catalog.owner(function)[1].arguments, before, args):
            if not all(_same_bits(allocation(x), allocation(y)) for x, y in zip(tensors(old), tensors(new))):
                self.fail(function, before, [f"refused, but {name} had been written by then: check before any write"])

    def call(
        self,
        function: str,
        *args: Any,
        huge: bool = False,
        or_refuses: tuple[type[Exception], ...] = (),
        **options: Any,
    ) -> Outcome:
        """The call must return, and change nothing but what it is declared to write. huge: too large to be copied."""
        before = list(args) if huge else copy_of(list(args))
        outcome = self.impl.run(function, *args, huge=huge, **options)
        if isinstance(outcome.raised, or_refuses) and not isinstance(outcome.raised, SilentlyWrong):
            self._untouched(function, before, args)
        elif outcome.raised is not None:
            self.fail(function, before, _raised(outcome), None, outcome, [*args])
        for op in outcome.observed.torch_in_kernels:
            self.fail(function, before, [f"a kernel called torch ({op}): only the interpreter lets it, no GPU can"])
        for name in outcome.disturbed:
            self.fail(function, before, [f"changed its argument {name}, which it should only read"])
        return outcome

    def no_growth(
        self, function: str, arguments: Callable[[int], Iterable[Any]], few: int, many: int, what: str, advice: str
    ) -> None:
        """The call must not need more operations, launches or values on the host for `many` (tokens, say) than for few.

        arguments: makes the arguments of a call with a number of them; what: what they are called.
        """
        one = self.call(function, *arguments(few)).observed
        args = list(arguments(many))
        other = self.call(function, *args).observed
        for kind, now, then, slack in (
            ("torch operations", len(other.ops), len(one.ops), 8),
            ("kernel launches", other.launches.total(), one.launches.total(), 0),
            ("values read on the host", other.values_read, one.values_read, 16),
        ):
            if now > then + slack:
                read = [f"stay in tensors: {other.host_reads[-1]}"] if kind == "values read on the host" else [advice]
                self.fail(
                    function, args, [f"{now} {kind} for {many} {what}, {then} for {few}: a loop over them", *read]
                )

    def works_in_its_kernel(self, function: str, *args: Any) -> None:
        """The function's kernel must be launched, and no operation of torch's may do the work."""
        seen = self.call(function, *args).observed
        kernel = catalog.owner(function)[1].kernel or ""
        if seen.torch_writes:
            self.fail(function, [*args], [f"torch's {seen.torch_writes[0]} wrote the result: {kernel} is to do it"])
        done = [op for op in seen.float_ops if not NO_WORK.fullmatch(op)]
        if done:
            self.fail(
                function, [*args], [f"torch's {done[0]} did part of the work: Triton kernels are to do all of it"]
            )
        if seen.wrapper:
            self.fail(function, [*args], ["FlashInfer was called: this drill is to write what it does"])
        if not seen.launches[kernel]:
            others = ", ".join(seen.launches) or "no kernel"
            self.fail(function, [*args], [f"{kernel} was not launched ({others} was)"])

    def reads_far_pages(self, function: str, *last: Any) -> None:
        """A decode must find a page past 2^31 values of the cache. last: its arguments after block_tables."""
        args, held, wrapped = far_page()
        args = [*args[:4], *(last or args[4:])]
        got = self.call(function, *args, huge=True).returned
        table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3])
        q = args[0].cpu()
        want, other = (_oracle.attention(q, page.cpu(), page.cpu(), table, lens)[0] for page in (held, wrapped))
        shown = [q, *("[131074,256,1,64 float16]" for _ in "kv"), *args[3:]]
        if not isinstance(got, torch.Tensor) or got.shape != want.shape:
            self.fail(function, shown, [f"o is {_kind(got)}, expected a tensor {_list(want.shape)}"])
        if not torch.allclose(got.cpu().double(), want, atol=1e-2):
            early = torch.allclose(got.cpu().double(), other, atol=1e-2)
            self.fail(function, shown, [
                "o is not the attention over page 131073" + (", but over what is 2^32 values before" if early else ""),
                "the offset page · BS · Hkv · D passes 2^31: widen the page id to int64 before any product",
            ])  # fmt: skip

    def waits_for_nothing(self, function: str, *args: Any) -> None:
        """No value of a tensor may be looked at on the host: that waits for the GPU, and a captured graph cannot."""
        reads = self.call(function, *args).observed.host_reads
        if reads:
            self.fail(function, [*args], [
                f"waited for the GPU: {reads[0]}",
                "a captured step cannot wait, and every layer would: leave the tensors' values to the kernel",
            ])  # fmt: skip

    def fail(
        self,
        function: str,
        args: list[Any],
        problem: Iterable[str],
        hint: str | None = None,
        outcome: Outcome | None = None,
        after: list[Any] | None = None,
    ) -> NoReturn:
        """Raise the verdict. args: the arguments before the call. With the outcome, and the arguments after it, the
        catalogue of mistakes can be asked for one that does the same."""
        lines = [self.heading, f"  {_call_line(function, args)}", *(f"  {line}" for line in problem)]
        vague = outcome is not None and any(
            x.is_floating_point() and x.isnan().any() for x in tensors(outcome.returned)
        )
        look_up = None
        if outcome is not None:

            def look_up() -> Mistake | None:
                same = functools.partial(_does_the_same, function=function, before=args, outcome=outcome, after=after)
                return mistakes.diagnose(function, self.test, same, vague)

        raise Verdict(lines, hint, self.drill.section(self.stage), look_up, vague)

    @property
    def heading(self) -> str:
        stage = self.drill.stages[self.stage - 1].title
        return f"{self.drill.id} · stage {self.stage} of {len(self.drill.stages)}, {stage} · {self.title}"


def _does_the_same(
    made: Callable[..., Any], *, function: str, before: list[Any], outcome: Outcome, after: list[Any] | None
) -> bool:
    """Whether `made` does on the same arguments exactly what the outcome shows: result, error, and damage in memory."""
    trial = copy_of(before, pad=ROOM)  # what it writes out of bounds must not end this process
    try:
        with poisoned():
            result = made(*trial)
    except Exception as error:
        raised = cause(error)
        return type(raised) is type(outcome.raised) and first_line(raised) == first_line(outcome.raised)
    if outcome.raised is not None or not _same_result(result, outcome.returned):
        return False
    for x, y in zip(tensors(after), tensors(trial)):
        edge = ROOM // x.element_size()
        damage, found = allocation(y)[edge:-edge], allocation(x)
        if not _same_bits(damage, found):
            return False
    return True


def _same_result(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device or x.stride() != y.stride():
            return False
        if x.is_floating_point() and x.dtype.itemsize > 1:  # attention: another order of additions is the same mistake
            rtol, atol = (1e-4, 1e-5) if x.dtype == torch.float32 else (2e-2, 2e-3)
            return torch.allclose(x.double(), y.double(), rtol=rtol, atol=atol, equal_nan=True)
        return _same_bits(x.cpu(), y.cpu())
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return len(x) == len(y) and all(map(_same_result, x, y))
    return type(x) is type(y) and x == y


def _call_line(function: str, args: list[Any]) -> str:
    names = catalog.owner(function)[1].arguments
    return f"{function}({', '.join(_argument(name, value) for name, value in zip(names, args))})"


def _argument(name: str, value: Any) -> str:
    label = f"{name}=" if name else ""
    if isinstance(value, torch.Tensor):
        if value.numel() <= SHOWN_VALUES and not value.is_floating_point() and value.dim() <= 2 and value.numel():
            return f"{label}{value.tolist()}"
        kind = "" if value.dtype in (torch.float32, torch.int32) else f" {_dtype(value.dtype)}"
        layout = "" if value.is_contiguous() else f" strides {_list(value.stride())}"
        return f"{name}[{','.join(map(str, value.shape))}{kind}{layout}]"
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", [""] * len(value))
        return f"{label}[{', '.join(map(_argument, names, value))}]"
    return f"{label}{value}"


def _raised(outcome: Outcome) -> list[str]:
    error = outcome.raised
    assert error is not None
    if isinstance(error, SystemExit):
        return [f"called sys.exit({'' if error.code is None else error.code}) in the middle of the call", *_at(outcome)]
    return [f"raised {type(error).__name__}: {first_line(error)}", *_at(outcome)]


def _at(outcome: Outcome) -> list[str]:
    return [f"    {line}" for line in outcome.where]


def _differs(function: str, got: Any, want: Any, close: float | None, args: list[Any]) -> list[str] | None:
    """What is wrong with a returned value, or None. Types, shapes and dtypes come before values."""
    names = catalog.owner(function)[1].returns
    if want is None:
        return None if got is None else [f"returned {_kind(got)}, but it works in place and returns None"]
    if isinstance(want, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(want):
            many = f"{len(want)} tensors ({', '.join(names)})" if len(names) > 1 else f"a list of {len(want)} tensors"
            return [f"returned {_kind(got)}", f"expected {many}"]
        labels = names if len(names) > 1 else [f"layer {i}'s {names[0]}" for i in range(len(want))]
        pairs = list(zip(labels, got, want))
    else:
        pairs = [(names[0], got, want)]
    for name, x, y in pairs:
        if type(x) is not torch.Tensor:  # a subclass can answer a comparison as it likes
            return [f"{name} is {_kind(x)}, expected a tensor"]
        if x.shape != y.shape:
            return [f"{name} has shape {_list(x.shape)}, expected {_list(y.shape)}", *_side_by_side(x, y)]
        if x.dtype != y.dtype:
            return [f"{name} is {_dtype(x.dtype)}, expected {_dtype(y.dtype)}"]
        if x.device.type != next(tensors(args)).device.type:
            return [f"{name} is on {x.device}, expected it on the device of the inputs, {next(tensors(args)).device}"]
        if not x.is_contiguous():
            return [f"{name} has strides {_list(x.stride())}, expected it contiguous"]
    for name, x, y in pairs:
        wrong = (x.cpu() != y) if close is None else _far(x.cpu(), y, close)
        if wrong.any():
            return _first_difference(function, name, x.cpu(), y, wrong, args)
    return None


def _far(x: torch.Tensor, y: torch.Tensor, close: float) -> torch.Tensor:
    """Which elements stand in a row that is further from y than its norm allows. NaN is always too far.

    An infinity, the lse of nothing, must be met exactly, and does not count in a norm.
    """
    x, y = x.double(), y.double()
    gap = torch.where(x == y, 0, x - y)
    y = torch.where(y.isfinite(), y, 0)
    if y.dim() < 2 or y.shape[-1] == 1:
        return ~(gap.abs() <= close * y.abs().clamp(min=1))
    floor = y.norm() / math.sqrt(max(1, y.numel() // y.shape[-1]))  # a row of almost nothing is held to the others
    error, norm = gap.norm(dim=-1), y.norm(dim=-1)
    far = ~(error <= close * torch.maximum(norm, floor * 0.1))
    return far[..., None] & ~(gap.abs() <= close * norm[..., None] / math.sqrt(y.shape[-1]))


def _first_difference(
    function: str, name: str, x: torch.Tensor, y: torch.Tensor, wrong: torch.Tensor, args: list[Any]
) -> list[str]:
    count, first = int(wrong.sum()), tuple(wrong.nonzero()[0].tolist())
    if y.numel() <= SHOWN_VALUES and not y.is_floating_point():
        place = [f"{name} differs first at {_place(function, name, first, args)}"]
        return place + _side_by_side(x, y)
    head = f"{name}: {count} of {y.numel()} values {_differ(count)}, first at {_place(function, name, first, args)}"
    return [head, f"    expected {_value(y[first])}    got {_value(x[first])}"]


def _side_by_side(x: torch.Tensor, y: torch.Tensor) -> list[str]:
    if max(x.numel(), y.numel()) > SHOWN_VALUES or y.is_floating_point():
        return []
    return [f"    expected {y.tolist()}", f"    got      {x.tolist()}"]


def _overwritten(function: str, name: str, x: torch.Tensor, want: torch.Tensor, before: list[Any]) -> list[str] | None:
    """What is wrong with an argument that is written in place: looked for in the whole of its allocation."""
    got, expected = allocation(x), allocation(want)
    wrong = _bit_view(got) != _bit_view(expected)
    if not wrong.any():
        return None
    base, size = int(x.storage_offset()), x.numel()
    places = [int(i) - base for i in wrong.nonzero().flatten()]
    inside = [i for i in places if 0 <= i < size]
    outside = len(places) - len(inside)
    lines = []
    if inside:
        at = _element(function, name, inside[0], x, before)
        lines.append(f"{name}: {len(inside)} of {size} values {_differ(len(inside))}, first at {at}")
    first = (inside or places)[0] + base
    if outside:
        damage = "1 value outside of it was" if outside == 1 else f"{outside} values outside of it were"
        lines.append(f"{name}: {damage} overwritten, {_outside(places, size, x)}")
    lines.append(f"    expected {_value(expected[first])}    got {_value(got[first])}")
    return lines


def _outside(places: list[int], size: int, x: torch.Tensor) -> str:
    row = x.shape[-1] * x.shape[-2] if x.dim() == 4 else 1
    unit = "slot" if x.dim() == 4 else "entry"
    first = next(i for i in places if not 0 <= i < size)
    number = first // row
    where = "before its first" if first < 0 else "past its last"
    return f"first at {unit} {number}, {where}"


def _element(function: str, name: str, index: int, x: torch.Tensor, before: list[Any]) -> str:
    """An element of a written argument, by its place in the argument's own order."""
    if x.dim() != 4:
        return _place(function, name, (index,), before)
    _, block_size, heads, dim = x.shape
    slot, rest = divmod(index, heads * dim)
    text = f"slot {slot}"
    slots = dict(zip(catalog.owner(function)[1].arguments, before)).get("slots")
    if slots is not None:
        tokens = (slots == slot).nonzero().flatten().tolist()
        text += f" (token {tokens[0]})" if tokens else " (no token goes there)"
    return f"{text} -> block {slot // block_size}, offset {slot % block_size}, head {rest // dim}, dim {rest % dim}"


def _place(function: str, name: str, index: tuple[int, ...], args: list[Any]) -> str:
    """Where an element of a result is, in the terms of the drill."""
    entry = catalog.owner(function)[1]
    given = dict(zip(entry.arguments, args))
    i = index[0] if index else 0
    if name == "indptr":
        return f"indptr[{i}]" + (f", where sequence {i} begins" if i < len(given["context_lens"]) else ", the end")
    if name == "indices":
        counts = (-(-given["context_lens"] // given["page_size"])).cpu()
        ends = counts.cumsum(0)
        sequence = int((ends <= i).sum())
        if sequence == len(ends):
            return f"indices[{i}], past the last page in use"
        return f"indices[{i}]: sequence {sequence}, its page {i - int(ends[sequence] - counts[sequence])}"
    each = {arg: int(x[i]) for arg, x in given.items() if isinstance(x, torch.Tensor) and x.dim() == 1 and i < len(x)}
    template = entry.places.get(name.split()[-1])
    return template.format(*index, **each) if template else f"{name}[{', '.join(map(str, index))}]"


def _differ(count: int) -> str:
    return "differs" if count == 1 else "differ"


def _bit_view(x: torch.Tensor) -> torch.Tensor:
    """As integers of the same size: NaN equals itself, -0.0 does not equal 0.0."""
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(_bit_view(x), _bit_view(y))


def _kind(x: Any) -> str:
    if type(x) is torch.Tensor:
        return f"a tensor {_list(x.shape)} of {_dtype(x.dtype)}"
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} of {len(x)}"
    return "None" if x is None else f"a {type(x).__name__}"


def _value(x: torch.Tensor) -> str:
    number = x.double().item() if x.is_floating_point() else x.item()
    return f"{number:.6g}"


def _list(values: Iterable[int]) -> str:
    return str(list(values))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
