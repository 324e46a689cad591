"""L4: the plan that cuts a batch into work items, and the decode that runs over such a list."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drills.lane import DEVICE, ON_GPU
from drills.tests import _oracle
from drills.tests._judge import CLOSE, Judge
from drills.tests._paged import copy_of, decode_args, few, filled_caches, generator, guarded, has_room, ints

LISTS = ("seq", "start", "end")
BF16 = pytest.mark.gpu("bf16 arithmetic is wrong in Triton's interpreter")


class Work(NamedTuple):
    """A work list of our own: planned_decode is tested with lists that no learner's plan_decode has made."""

    seq: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    row_ptr: torch.Tensor


# What the functions mean


def chunk_that_fits(lens, page_size, budget):
    """The smallest number of pages a chunk, tried one after another, with no more than `budget` items."""
    pages = [-(-n // page_size) for n in lens]
    chunk = 1
    while chunk < max(pages, default=0) and sum(-(-p // chunk) for p in pages) > budget:
        chunk += 1
    return chunk


def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
    lens, budget = context_lens_cpu.tolist(), num_programs // num_kv_heads
    step = chunk_that_fits(lens, page_size, budget) * page_size
    items = [(b, start, min(start + step, n)) for b, n in enumerate(lens) for start in range(0, n, step)]
    row_ptr = [0, *itertools.accumulate(-(-n // step) for n in lens)]
    items += [(0, 0, 0)] * (max(len(lens), budget) - len(items))
    columns = [[item[i] for item in items] for i in range(3)]
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (*columns, row_ptr))


def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
    """The list says how long a sequence is: its last item ends there. How it is cut makes no difference."""
    rows = work.row_ptr.tolist()
    lens = torch.tensor([int(work.end[last - 1]) if last > first else 0 for first, last in itertools.pairwise(rows)])
    o, lse = _oracle.attention(q, k_cache, v_cache, block_tables, lens, sm_scale)
    return (o.to(q.dtype), lse.float()) if return_lse else o.to(q.dtype)


# Stages 1 to 3: what must hold of a plan, the most basic first. Each function says what does not, or None.


def unreadable(plan, lens):
    """What keeps the lists from being read at all."""
    if not isinstance(plan, (tuple, list)) or len(plan) != 4 or not all(isinstance(x, torch.Tensor) for x in plan):
        kind = f"a {type(plan).__name__} of {len(plan)}" if isinstance(plan, (tuple, list)) else type(plan).__name__
        return f"returned {kind}, expected a WorkList of four tensors: seq, start, end, row_ptr"
    if any(x.dim() != 1 or x.is_floating_point() or x.device.type != "cpu" for x in plan):
        return "returned lists that are not 1-D tensors of integers on the CPU"
    seq, start, end, row_ptr = plan
    if not len(seq) == len(start) == len(end):
        return f"seq, start and end have {len(seq)}, {len(start)} and {len(end)} entries: one each for every item"
    if len(row_ptr) != len(lens) + 1:
        return f"row_ptr has {len(row_ptr)} entries, expected {len(lens) + 1}: where each of the {len(lens)} " + (
            "sequences begins, and the end"
        )
    return None


def not_covered(plan, lens, page_size):
    """A token that belongs to no item, or to two; an item where none should be."""
    seq, start, end, row_ptr = (x.tolist() for x in plan)
    if row_ptr[0] != 0:
        return f"row_ptr begins with {row_ptr[0]}, expected 0: the items of sequence 0 are the first"
    for b, length in enumerate(lens):
        first, last = row_ptr[b : b + 2]
        if not first <= last <= len(seq):
            return f"row_ptr gives sequence {b} the items {first}..{last - 1}, of {len(seq)}"
        if not length and first < last:
            return f"sequence {b} has no tokens, and row_ptr gives it {amount(last - first, 'item')}: it needs none"
        done = 0  # tokens that have an item
        for i in range(first, last):
            if seq[i] != b:
                return f"item {i} is of sequence {seq[i]}, but row_ptr gives it to sequence {b}"
            if start[i] > done:
                return f"sequence {b}: {tokens(done, min(start[i], length))} to no item"
            if start[i] < done:
                return f"sequence {b}: {tokens(start[i], done)} to two items"
            if start[i] % page_size:
                return f"item {i} begins at token {start[i]} of sequence {b}, in the middle of a page of {page_size}"
            if end[i] > length:
                return f"item {i} ends at {end[i]}, but sequence {b} has {amount(length, 'token')}"
            if end[i] <= start[i]:
                return f"item {i}, of sequence {b}, goes from {start[i]} to {end[i]}: there is no token in it"
            done = end[i]
        if done < length:
            return f"sequence {b}: {tokens(done, length)} to no item"
    return None


def not_smallest(plan, lens, page_size, num_kv_heads, num_programs):
    """More items than programs, chunks of several sizes, or chunks that could be smaller."""
    _, start, end, row_ptr = (x.tolist() for x in plan)
    counts = [last - first for first, last in itertools.pairwise(row_ptr)]
    items, budget = sum(counts), num_programs // num_kv_heads
    least = sum(n > 0 for n in lens)
    if least > budget and items > least:
        many = next(b for b, count in enumerate(counts) if count > 1)
        return (
            f"one item a sequence is already {programs(least, num_kv_heads)}, more than num_programs={num_programs}: "
            f"then each has one, but sequence {many} has {counts[many]}"
        )
    if items > budget and items > least:
        return f"{programs(items, num_kv_heads)}, more than num_programs={num_programs}"
    pages = [-(-(end[i] - start[i]) // page_size) for i in range(items)]
    whole = [i for first, last in itertools.pairwise(row_ptr) for i in range(first, last - 1)]
    chunk = pages[whole[0]] if whole else max(pages, default=0)
    for i in range(items):
        if pages[i] > chunk or (i in whole and pages[i] != chunk):
            return f"item {i} has {amount(pages[i], 'page')} and another {chunk}: one chunk size for all sequences"
    best = chunk_that_fits(lens, page_size, budget)
    if chunk > best:
        fewer = sum(-(-n // (best * page_size)) for n in lens)
        return f"chunks of {amount(chunk, 'page')}, but those of {best} fit too: " + (
            f"{programs(fewer, num_kv_heads)}, and num_programs={num_programs}"
        )
    return None


def not_fixed(plan, lens, num_kv_heads, num_programs):
    """Lists of another length than every plan of these sizes has, or padding that is not 0."""
    seq, start, end, row_ptr = (x.tolist() for x in plan)
    size = max(len(lens), num_programs // num_kv_heads)
    if len(seq) != size:
        return f"the lists have {amount(len(seq), 'entry')}, expected {size}, whatever the lengths are: " + (
            f"the larger of B={len(lens)} and {num_programs} // {num_kv_heads}"
        )
    for i in range(row_ptr[-1], size):
        if seq[i] or start[i] or end[i]:
            return f"item {i} is padding, for row_ptr ends at {row_ptr[-1]}, and holds " + (
                f"seq {seq[i]}, start {start[i]}, end {end[i]}: all must be 0"
            )
    return None


def amount(n, what):
    return f"{n} {what}" if n == 1 else f"{n} {what.removesuffix('y')}{'ies' if what.endswith('y') else 's'}"


def tokens(first, stop):
    return f"token {first} belongs" if stop == first + 1 else f"tokens {first}..{stop - 1} belong"


def programs(items, num_kv_heads):
    return f"{amount(items, 'item')} · {amount(num_kv_heads, 'KV head')} = {items * num_kv_heads} programs"


def shown(plan):
    """The lists, each in a line, if they are few numbers."""
    if not isinstance(plan, (tuple, list)) or not all(isinstance(x, torch.Tensor) and x.numel() <= 12 for x in plan):
        return []
    return [f"    {name:8}{x.tolist()}" for name, x in zip((*LISTS, "row_ptr"), plan)]


def lengths(lens, dtype=torch.int32):
    return torch.tensor(lens, dtype=dtype)  # on the CPU, whatever the lane


def plan(judge: Judge, lens, page_size=4, num_kv_heads=2, num_programs=10, dtype=torch.int32, upto=3):
    """One call of plan_decode: what must hold by stage `upto`, in this order, and for the third stage to the bit."""
    args = lengths(lens, dtype), page_size, num_kv_heads, num_programs
    outcome = judge.call("plan_decode", *args)
    made = outcome.returned
    checks = (
        functools.partial(unreadable, made, lens),
        functools.partial(not_covered, made, lens, page_size),
        *[functools.partial(not_smallest, made, lens, page_size, num_kv_heads, num_programs)] * (upto > 1),
        *[functools.partial(not_fixed, made, lens, num_kv_heads, num_programs)] * (upto > 2),
    )
    for check in checks:
        problem = check()
        if problem:
            judge.fail("plan_decode", [*args], [problem, *shown(made)], None, outcome, [*args])
    if upto > 2:
        judge.agrees("plan_decode", *args, oracle=plan_decode)
    return made


covers = functools.partial(plan, upto=1)
fits = functools.partial(plan, upto=2)


# Stage 1: a list that covers the batch


@pytest.mark.stage(1)
@pytest.mark.parametrize("num_programs", [10, 6, 100], ids=lambda n: f"{n} programs")
def test_every_token_has_an_item(judge, num_programs):
    """the docstring's batch: every token in exactly one item"""
    covers(judge, [9, 2, 5], num_programs=num_programs)


@pytest.mark.stage(1)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_page_sizes(judge, page_size):
    """lengths at and around multiples of the page"""
    lens = [m * page_size + d for m in (1, 3, 4) for d in (-1, 0, 1) if m * page_size + d > 0]
    for num_programs in (1, 30, 100):
        covers(judge, lens, page_size, num_programs=num_programs)


@pytest.mark.stage(1)
@pytest.mark.parametrize("lens", [[9, 0, 5], [0, 9], [9, 0], [0, 0, 17, 0, 0, 3]], ids=str)
def test_sequences_of_no_tokens(judge, lens):
    """a sequence of length 0 has no items, and row_ptr stays where it is"""
    covers(judge, lens, num_programs=40)


@pytest.mark.stage(1)
@pytest.mark.parametrize("lens", [[0], [0, 0, 0]], ids=str)
def test_no_tokens_at_all(judge, lens):
    """all lengths 0"""
    covers(judge, lens)


@pytest.mark.stage(1)
@pytest.mark.parametrize("lens", [[1], [4], [1000]], ids=str)
def test_one_sequence(judge, lens):
    """one sequence, B = 1"""
    covers(judge, lens, num_programs=16)


# Stage 2: the smallest chunk that fits


@pytest.mark.stage(2)
def test_the_smallest_chunk(judge):
    """page counts of 56, 3, 1 and 20, 3 KV heads, 25 programs: chunks of 14 pages"""
    fits(judge, [223, 9, 1, 78], num_kv_heads=3, num_programs=25)


@pytest.mark.stage(2)
def test_every_budget(judge):
    """page counts of 10, 2, 3 and 1, and every number of programs from 1 to 20"""
    for num_programs in range(1, 21):
        fits(judge, [40, 7, 12, 1], num_kv_heads=1, num_programs=num_programs)


@pytest.mark.stage(2)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8])
def test_kv_heads(judge, num_kv_heads):
    """an item is a program for each KV head, and the heads need not divide the programs"""
    for num_programs in (25, 31, 32):
        fits(judge, [33, 14, 21], num_kv_heads=num_kv_heads, num_programs=num_programs)


@pytest.mark.stage(2)
@pytest.mark.parametrize(("num_programs", "num_kv_heads"), [(1, 1), (2, 1), (5, 2), (7, 8)])
def test_fewer_programs_than_sequences(judge, num_programs, num_kv_heads):
    """not even one item a sequence fits: each has one"""
    fits(judge, [40, 7, 12], num_kv_heads=num_kv_heads, num_programs=num_programs)


@pytest.mark.stage(2)
@pytest.mark.parametrize("num_programs", [1, 2, 3, 5])
def test_budget_below_the_batch(judge, num_programs):
    """sequences without tokens need no program: the others have those that there are"""
    fits(judge, [40, 0, 7, 0, 0, 0], num_kv_heads=1, num_programs=num_programs)


@pytest.mark.stage(2)
@pytest.mark.parametrize("num_programs", [127, 128, 132, 256])
def test_one_long_among_short(judge, num_programs):
    """one long sequence among short ones"""
    fits(judge, [4000, *[37] * 30], page_size=16, num_kv_heads=4, num_programs=num_programs)


@pytest.mark.stage(2)
def test_more_programs_than_pages(judge):
    """programs to spare: chunks of one page"""
    fits(judge, [9, 2, 5], num_programs=1000)


@pytest.mark.stage(2)
def test_a_length_past_float32(judge):
    """a length that float32 cannot hold, in a million pages"""
    fits(judge, [2**24 + 1], page_size=16, num_kv_heads=1, num_programs=1024)


@pytest.mark.stage(2)
@few
@given(
    lens=st.lists(st.integers(1, 60), min_size=1, max_size=6), page_size=st.integers(1, 9),
    num_kv_heads=st.integers(1, 4), num_programs=st.integers(1, 60),
)  # fmt: skip
def test_random_batches(judge, lens, page_size, num_kv_heads, num_programs):
    """random batches and budgets"""
    fits(judge, lens, page_size, num_kv_heads, num_programs)


def operations(judge, *args):
    return len(judge.call("plan_decode", *args).observed.ops)


@pytest.mark.stage(2)
def test_operations_for_more_sequences(judge):
    """2,048 sequences: no torch operation a sequence"""
    few_, many = ((lengths([33, 14] * n), 4, 2, 16 * n) for n in (2, 1024))
    then, now = operations(judge, *few_), operations(judge, *many)
    if now > then + 300:  # far more than a search needs in another number of steps
        judge.fail("plan_decode", [*many], [
            f"{now} torch operations for 2048 sequences, {then} for 4: a loop over them",
            "each takes some microseconds, in every step: use whole tensors, or Python's numbers and lists",
        ])  # fmt: skip


@pytest.mark.stage(2)
def test_operations_for_longer_sequences(judge):
    """a sequence of 8,192 pages: no torch operation a page, nor for each size of chunk"""
    few_, many = ((lengths([n]), 1, 1, 2) for n in (4, 8192))
    then, now = operations(judge, *few_), operations(judge, *many)
    if now > then + 600:  # halving an interval of 8,192 takes 13 steps
        judge.fail("plan_decode", [*many], [
            f"{now} torch operations for 8192 pages, {then} for 4: a loop over pages, or over sizes of chunks",
            "a larger chunk never makes more items: halve the interval in which the answer lies",
        ])  # fmt: skip


# Stage 3: lists of a fixed size


@pytest.mark.stage(3)
def test_worked_example(judge):
    """the worked example of the docstring"""
    plan(judge, [9, 2, 5])


@pytest.mark.stage(3)
@pytest.mark.parametrize("lens", [[9, 2, 5], [40, 40, 40], [1, 1, 1], [0, 0, 0], [0, 31, 0]], ids=str)
def test_one_size_for_all_lengths(judge, lens):
    """the lists are as long whatever the lengths are, and 0 where there is no item"""
    plan(judge, lens, num_programs=23)


@pytest.mark.stage(3)
@pytest.mark.parametrize("num_programs", [1, 5, 7, 9])
@pytest.mark.parametrize("lens", [[9, 2, 5, 8], [3, 0, 2, 0]], ids=str)
def test_a_place_for_every_sequence(judge, lens, num_programs):
    """the lists have B entries at least, however few programs there are"""
    plan(judge, lens, num_programs=num_programs)


@pytest.mark.stage(3)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_all_lists_are_int32(judge, dtype):
    """lengths of int32 or int64, lists of int32"""
    plan(judge, [9, 2, 5], dtype=dtype)


@pytest.mark.stage(3)
@pytest.mark.parametrize("num_programs", [1, 12])
def test_no_sequences(judge, num_programs):
    """a step with no sequences, B = 0"""
    plan(judge, [], num_programs=num_programs)


@pytest.mark.stage(3)
def test_lists_by_name(judge):
    """a WorkList: planned_decode reads work.seq, work.start, work.end and work.row_ptr"""
    args = lengths([9, 2, 5]), 4, 2, 10
    outcome = judge.call("plan_decode", *args)
    for i, name in enumerate((*LISTS, "row_ptr")):
        if getattr(outcome.returned, name, None) is not outcome.returned[i]:
            problem = f"what was returned has no .{name}, or it is not number {i} of the four: return a WorkList"
            judge.fail("plan_decode", [*args], [problem])


@pytest.mark.stage(3)
def test_planned_again(judge):
    """a plan stays as it was when the next is made"""
    kept = [(list_, list_.clone()) for list_ in plan(judge, [9, 2, 5])]
    plan(judge, [3, 30, 1])
    for name, (list_, before) in zip((*LISTS, "row_ptr"), kept):
        if not torch.equal(list_, before):
            judge.fail("plan_decode", [lengths([3, 30, 1]), 4, 2, 10], [
                f"overwrote {name} of the plan before: {before.tolist()} became {list_.tolist()}",
                "return new tensors: the step before may still be copying them to the GPU",
            ])  # fmt: skip


@pytest.mark.stage(3)
@pytest.mark.parametrize(
    ("lens", "numbers", "because"),
    [
        ([-1], (4, 2, 10), "a sequence cannot have -1 tokens"),
        ([9, -2, 5], (4, 2, 10), "sequence 1 cannot have -2 tokens"),
        ([[9, 2, 5]], (4, 2, 10), "the lengths are [1, 3], and should be [B]"),
        (9, (4, 2, 10), "one number is no batch: the lengths should be [B]"),
        ([9.0, 2.0, 5.5], (4, 2, 10), "no sequence has 5.5 tokens: lengths are integers"),
        ([9, 2, 5], (0, 2, 10), "a page of 0 tokens holds nothing"),
        ([9, 2, 5], (-4, 2, 10), "a page cannot have -4 tokens"),
        ([9, 2, 5], (4, 0, 10), "there is no item without a KV head"),
        ([9, 2, 5], (4, -2, 10), "there cannot be -2 KV heads"),
        ([9, 2, 5], (4, 2, 0), "0 programs do no work"),
        ([9, 2, 5], (4, 2, -10), "there cannot be -10 programs"),
    ],
    ids=[
        "a negative length", "a negative length among others", "lengths of two dimensions", "lengths of no dimension",
        "lengths of floats", "page size 0", "negative page size", "no KV heads", "negative KV heads", "no programs",
        "negative programs",
    ],
)  # fmt: skip
def test_plan_refuses(judge, lens, numbers, because):
    """what plan_decode must refuse"""
    judge.refuses("plan_decode", torch.tensor(lens), *numbers, because=because)


@pytest.mark.gpu("lengths on a GPU are to be refused")
@pytest.mark.stage(3)
def test_plan_refuses_a_gpu_tensor(judge):
    """lengths on the GPU must be refused: to read them would wait for it"""
    judge.refuses("plan_decode", ints([9, 2, 5]), 4, 2, 10, because="the lengths are on the GPU, and planning is not")


@pytest.mark.stage(3)
@few
@given(
    lens=st.lists(st.integers(0, 60), max_size=6), page_size=st.integers(1, 9), num_kv_heads=st.integers(1, 4),
    num_programs=st.integers(1, 60),
)  # fmt: skip
def test_random_plans(judge, lens, page_size, num_kv_heads, num_programs):
    """random batches, with sequences of no tokens"""
    plan(judge, lens, page_size, num_kv_heads, num_programs)


# Stages 4 to 7: lists of our own, each sequence's items as (start, end)


def whole(lens):
    """One item a sequence, none for a length of 0."""
    return [[(0, n)] * (n > 0) for n in lens]


def cut(lens, step):
    """Every sequence in chunks of `step` tokens."""
    return [[(start, min(start + step, n)) for start in range(0, n, step)] for n in lens]


def work_of(rows, padding=0) -> Work:
    items = [(b, *item) for b, row in enumerate(rows) for item in row]
    items += [(0, 0, 0)] * max(padding, len(rows) - len(items))  # as in a plan: B entries at least
    seq, start, end = (ints([item[i] for item in items]) for i in range(3))
    return Work(seq, start, end, ints([0, *itertools.accumulate(map(len, rows))]))


def work_args(seed, rows, padding=0, **options):
    """A batch of just these items, and [q, k_cache, v_cache, block_tables, work]."""
    options = dict[str, Any](dim=16, dtype=torch.float32, heads=(1, 1)) | options
    of, args = decode_args(seed, [row[-1][1] if row else 0 for row in rows], **options)
    return of, [*args[:4], work_of(rows, padding)]


def decodes(judge: Judge, rows, padding=0, *, seed=40, sm_scale=None, return_lse=False, hint=None, **options):
    """One call of planned_decode, compared with attention over all tokens that the list names."""
    _, args = work_args(seed, rows, padding, **options)
    close = CLOSE[args[0].dtype]
    more = [sm_scale, return_lse] if return_lse else [] if sm_scale is None else [sm_scale]
    return judge.agrees("planned_decode", *args, *more, oracle=planned_decode, close=close, hint=hint)


LENS = [9, 2, 5]


# Stage 4: decode over a list


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("lens", [[4], [9, 2]], ids=str)
def test_one_item_each(judge, lens):
    """one item a sequence: nothing to merge"""
    decodes(judge, whole(lens), heads=(2, 1))


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("padding", [1, 8], ids=["1 item", "8 items"])
def test_padding(judge, padding):
    """padding at the end of the list, also more of it than items: nothing is done for it"""
    decodes(judge, whole([9, 2]), padding)


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("lens", [[9, 0, 5], [0, 0]], ids=str)
def test_sequences_without_items(judge, lens):
    """a sequence without items: zeros"""
    decodes(judge, whole(lens), padding=2)


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize(("heads", "dim"), [((6, 2), 16), ((3, 1), 24), ((2, 2), 8), ((1, 1), 80)], ids=str)
def test_heads_and_dims(judge, heads, dim):
    """query heads that share a KV head, widths of every kind"""
    decodes(judge, whole([6]), padding=1, heads=heads, dim=dim)


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_decode_page_sizes(judge, page_size):
    """page sizes of every kind"""
    decodes(judge, whole([2 * page_size + 2]), page_size=page_size)


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("tokens", [300, 1100])
def test_a_long_item(judge, tokens):
    """an item of hundreds of tokens"""
    decodes(judge, whole([tokens]), page_size=16, dim=64 if tokens == 300 else 16)


@pytest.mark.skipif(not has_room(9), reason="needs 9 GiB of memory in one piece, little of it touched")
@pytest.mark.kernel
@pytest.mark.stage(4)
def test_a_cache_past_int32(judge):
    """a page whose offset in the cache does not fit in int32"""
    judge.reads_far_pages("planned_decode", work_of(whole([3])))


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("sm_scale", [0.5, 0.0, -1.0])
def test_sm_scale(judge, sm_scale):
    """another scale; with 0.0 all tokens weigh the same"""
    decodes(judge, whole([9]), sm_scale=sm_scale)


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=BF16)],
    ids=lambda d: str(d).removeprefix("torch."),
)
def test_decode_dtypes(judge, dtype):
    """o in q's dtype, accumulated in float32"""
    decodes(judge, whole([37]), dtype=dtype)


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("strided", ["q", "block_tables"])
def test_views(judge, strided):
    """q and the block table cut out of larger tensors: a row is not as long as the stride"""
    _, (q, k_cache, v_cache, table, work) = work_args(41, whole([6, 3]), padding=1)
    if strided == "q":
        wide = guarded((len(q), 3, *q.shape[1:]), q.dtype)
        wide[:, 1] = q
        q = wide[:, 1]
    else:
        wide = ints([[0] * (table.shape[1] + 3)] * len(table))  # pages that exist: a wrong row must not end the process
        wide[:, 1:-2] = torch.where((table >= 0) & (table < len(k_cache)), table, 0)
        table = wide[:, 1:-2]
    args = q, k_cache, v_cache, table, work
    judge.agrees("planned_decode", *args, oracle=planned_decode, close=CLOSE[q.dtype])


@pytest.mark.kernel
@pytest.mark.stage(4)
def test_the_kernel_works(judge):
    """the attention is planned_decode_kernel's work"""
    _, args = work_args(42, cut([6], 4), padding=1)
    judge.works_in_its_kernel("planned_decode", *args)


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("more", ["items", "sequences", "KV heads"])
def test_as_many_launches(judge, more):
    """as many kernel launches for more items, sequences and KV heads"""

    def arguments(n):
        if more == "KV heads":
            return work_args(43, whole([2]), heads=(n, n))[1]
        return work_args(43, cut([4 * n], 4) if more == "items" else whole([2] * n))[1]

    judge.no_growth("planned_decode", arguments, 1, 4, more, "launch once: the grid runs over the work items")


# Stage 5: merging what was cut


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("lens", [[9], [9, 2]], ids=str)
def test_items_are_merged(judge, lens):
    """sequences in chunks of one page"""
    decodes(judge, cut(lens, 4), heads=(2, 1))


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("heads", [(6, 3), (17, 1)], ids=str)
def test_groups_are_merged(judge, heads):
    """several KV heads, and groups of every size, whole and cut"""
    hint = "A part is stored for an item and a query head, and there are Hq of them: head · GROUP + row."
    decodes(judge, [*cut([6], 4), *whole([3])], heads=heads, return_lse=True, hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("dim", [24, 80])
def test_odd_dims_are_merged(judge, dim):
    """head dims that are no power of two, cut"""
    hint = "Parts are D apart, however wide the tile is that reads them, and o ends after D."
    decodes(judge, cut([6, 5], 4), heads=(2, 1), dim=dim, hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_parts_that_cancel(judge):
    """float16, and items whose answers are 1000.25 and -1000: half of 0.25 is left"""
    of, args = work_args(44, cut([4], 2), page_size=2, dtype=torch.float16)
    args[0].zero_()
    values = torch.tensor([[1000, 1000.5], [-1000, -1000]], dtype=torch.float16, device=DEVICE)
    args[2][of.rows[0]] = values[:, :, None, None]
    hint = (
        "Near 1000 float16 has steps of 1/2: the parts are float32, whatever q is, and o is rounded once, at the end."
    )
    judge.agrees("planned_decode", *args, oracle=planned_decode, close=CLOSE[torch.float16], hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_uneven_items(judge):
    """items of different lengths: each counts by what its tokens weigh"""
    decodes(judge, [[(0, 4), (4, 16), (16, 17)], [(0, 3)]], padding=1)


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_cut_beside_nothing(judge):
    """cut sequences beside those without items, and padding"""
    decodes(judge, cut([0, 9, 0, 0, 5], 8), padding=4)


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("rows", [whole([9]), cut([9], 8)], ids=["whole", "cut"])
def test_lse(judge, rows):
    """return_lse: the natural logarithm of the whole sequence's sum of exponentials, in float32"""
    decodes(judge, rows, padding=1, return_lse=True, heads=(2, 1))


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_lse_in_half_precision(judge):
    """float16 comes in, o goes out in float16 and lse in float32"""
    decodes(judge, cut([9], 8), padding=1, dtype=torch.float16, return_lse=True)


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_lse_of_nothing(judge):
    """a sequence without items: zeros, and an lse of -inf"""
    decodes(judge, whole([0, 5]), padding=1, return_lse=True)


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_large_logits(judge):
    """logits in the hundreds, whose exponentials float32 cannot hold"""
    decodes(judge, cut([13], 8), sm_scale=40.0, return_lse=True, dtype=torch.float16)


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_many_items(judge):
    """a sequence in many items"""
    decodes(judge, cut([1000 if ON_GPU else 70], 1), page_size=1)


@pytest.mark.kernel
@pytest.mark.stage(5)
@settings(few, max_examples=max(3, few.max_examples // 4))  # each is a dozen programs, and the interpreter is slow
@given(data=st.data(), page_size=st.integers(1, 5), group=st.integers(1, 2), padding=st.integers(0, 3))
def test_random_lists(judge, data, page_size, group, padding):
    """random lists"""
    rows = []
    for _ in range(data.draw(st.integers(1, 2), label="sequences")):
        pages = data.draw(st.lists(st.integers(1, 3), max_size=3), label="pages of each item")
        ends = [page_size * sum(pages[: i + 1]) for i in range(len(pages))]
        ends[-1:] = [end - data.draw(st.integers(0, page_size - 1), label="free") for end in ends[-1:]]
        rows.append(list(zip([0, *ends], ends)))
    decodes(judge, rows, padding, page_size=page_size, heads=(group, 1), return_lse=True)


@pytest.mark.gpu("70,000 programs, which the interpreter runs one after another")
@pytest.mark.kernel
@pytest.mark.stage(5)
def test_a_long_list(judge):
    """a list of 70,000 entries"""
    decodes(judge, cut([9, 2], 4), padding=70_000)


@pytest.mark.gpu("8 GiB of partial results")
@pytest.mark.kernel
@pytest.mark.stage(5)
def test_partial_results_past_int32(judge):
    """131,080 items of 64 heads of 256: a partial result's offset does not fit in int32"""
    items = 2**31 // (64 * 256) + 8
    q = torch.zeros(2, 64, 256, dtype=torch.float16, device=DEVICE)
    k_cache = torch.zeros(items, 1, 1, 256, dtype=torch.float16, device=DEVICE)
    v_cache = torch.ones_like(k_cache)
    table = torch.arange(items, dtype=torch.int32, device=DEVICE).expand(2, -1).contiguous()
    # Sequence 0 has all items but the last two, and all tokens weigh the same: the last sequence's are 1 and 3.
    v_cache[1] = 3
    work = work_of([[(i, i + 1) for i in range(items - 2)], [(0, 1), (1, 2)]])
    args = q, k_cache, v_cache, table, work
    o = judge.call("planned_decode", *args, huge=True).returned
    if not (torch.is_tensor(o) and o.shape == q.shape and (o[1] == 2).all() and ((o[0] - 1).abs() < 1e-2).all()):
        problem = ["two items past number 131,072 were not merged into their mean",
                   "the offset item · Hq · D passes 2^31: compute it in int64"]  # fmt: skip
        named = ["[2,64,256 float16]", *["[131080,1,1,256 float16]"] * 2, "[2,131080]", "[131080 items]"]
        judge.fail("planned_decode", named, problem)


# Stage 6: one plan, many layers, one graph


@pytest.mark.kernel
@pytest.mark.stage(6)
def test_a_plan_of_your_own(judge):
    """the lists that plan_decode makes, moved to the device"""
    of, (q, k_cache, v_cache, table, _) = work_args(44, whole([13, 0, 5]))
    made = judge.call("plan_decode", lengths(of.lens), 4, 2, 8).returned
    work = Work(*(x.to(DEVICE) for x in made))
    args = q, k_cache, v_cache, table, work
    judge.agrees("planned_decode", *args, oracle=planned_decode, close=CLOSE[q.dtype])


@pytest.mark.kernel
@pytest.mark.stage(6)
def test_one_plan_for_all_layers(judge):
    """three layers with one work list: each has its own q and caches, and its output stays"""
    rng, (of, first) = generator(45), work_args(46, cut([9], 8), padding=1)
    outputs = []
    for layer in range(3):
        args = first
        if layer:
            pair = filled_caches(rng, of, first[1].shape[2], first[1].shape[3], first[1].dtype)
            args = [torch.randn(first[0].shape, generator=rng).to(DEVICE), *pair, *first[3:]]
        outcome = judge.agrees("planned_decode", *args, oracle=planned_decode, close=CLOSE[args[0].dtype])
        outputs.append((outcome.returned, outcome.returned.clone()))
    for layer, (o, before) in enumerate(outputs):
        if not torch.equal(o, before):
            problem = [f"a later layer overwrote the output of layer {layer}", "return a new tensor each time"]
            judge.fail("planned_decode", args, problem)


STEPS = ([17, 5], [1, 0], [0, 11])  # in chunks of 8: up to 4 items


def steps(padded=5):
    """(args, copy): `copy(lens)` copies the work list for these lengths into the tensors of args."""
    _, args = decode_args(47, [17, 17], dim=16, heads=(1, 1), dtype=torch.float32)
    work = work_of([], padding=padded)._replace(row_ptr=ints([0] * 3))
    args = [*args[:4], work]

    def copy(lens):
        rows = cut(lens, 8)
        new = work_of(rows, padding=padded - sum(map(len, rows)))
        for old, values in zip(work, new):
            old.copy_(values)
        return args

    return args, copy


@pytest.mark.kernel
@pytest.mark.stage(6)
def test_copied_into(judge):
    """the next plan is copied into the same tensors: nothing is left of the one before"""
    _, copy = steps()
    for lens in STEPS:
        judge.agrees(
            "planned_decode", *copy(lens), None, True, oracle=planned_decode, close=2e-5,
            hint="The work list's tensors are those of the step before, and hold another plan now.",
        )  # fmt: skip


@pytest.mark.kernel
@pytest.mark.stage(6)
def test_nothing_is_read_on_the_host(judge):
    """no length, item or page is looked at on the host"""
    _, args = work_args(48, cut([6], 4), padding=1)
    judge.waits_for_nothing("planned_decode", *args)


@pytest.mark.gpu("a CUDA graph is captured and replayed")
@pytest.mark.kernel
@pytest.mark.stage(6)
def test_replayed(judge):
    """captured once in a CUDA graph, replayed for other lengths after another plan has been copied into the list"""
    args, copy = steps()
    copy(STEPS[0])
    replay, results = judge.impl.capture("planned_decode", *args, None, True)
    for lens in STEPS:
        copy(lens)
        q, k_cache, v_cache, table, work = copy_of(args, device="cpu")
        wanted = planned_decode(q, k_cache, v_cache, table, work, None, True)
        replay()
        torch.cuda.synchronize()
        for name, got, want in zip(("o", "lse"), results, wanted):
            got = got.cpu().double()
            if not torch.allclose(got, want.double(), rtol=1e-4, atol=1e-4):
                b = int((~torch.isclose(got, want.double(), rtol=1e-4, atol=1e-4)).flatten(1).any(1).nonzero()[0])
                judge.fail("planned_decode", args, [f"replayed for lengths {lens}: {name} differs at sequence {b}",
                           "all that changes from step to step must come from work's tensors"])  # fmt: skip


# Stage 7: refusing what would be wrong


def good():
    """Arguments that are fine: each refusal spoils one of them."""
    _, (q, k_cache, v_cache, table, work) = work_args(49, cut(LENS, 4), padding=2, heads=(4, 2))
    return dict(q=q, k_cache=k_cache, v_cache=v_cache, block_tables=table, work=work)


def spaced(x):
    """The same values, every other element of a tensor twice as wide, with zeros between them."""
    return torch.stack([x, torch.zeros_like(x)], dim=-1).flatten(-2)[..., ::2]


def longer(x):
    """One more entry."""
    return torch.cat([x, x[-1:]])


SPOILED = {
    "all lists of int64": (lambda g: dict(work=Work(*(x.long() for x in g["work"]))), "the work list is int64"),
    "a list of int64": (lambda g: dict(work=g["work"]._replace(end=g["work"].end.long())), "work.end is int64"),
    "row_ptr of int64": (
        lambda g: dict(work=g["work"]._replace(row_ptr=g["work"].row_ptr.long())), "work.row_ptr is int64"
    ),
    "a short row_ptr": (
        lambda g: dict(work=g["work"]._replace(row_ptr=g["work"].row_ptr[:-1])), "row_ptr has 3 entries for 3 sequences"
    ),
    "a long row_ptr": (
        lambda g: dict(work=g["work"]._replace(row_ptr=longer(g["work"].row_ptr))),
        "row_ptr is of 4 sequences, and q of 3",
    ),
    "a short list of ends": (
        lambda g: dict(work=g["work"]._replace(end=g["work"].end[:-1])), "work.end has an entry less than work.seq"
    ),
    "a long list of starts": (
        lambda g: dict(work=g["work"]._replace(start=longer(g["work"].start))),
        "work.start has an entry more than work.seq",
    ),
    "strided starts": (
        lambda g: dict(work=g["work"]._replace(start=spaced(g["work"].start))),
        "work.start is every other entry of a tensor",
    ),
    "a strided row_ptr": (
        lambda g: dict(work=g["work"]._replace(row_ptr=spaced(g["work"].row_ptr))),
        "work.row_ptr is every other entry of a tensor",
    ),
    "q of two dimensions": (lambda g: dict(q=g["q"].flatten(1)), "q must be [B, Hq, D]"),
    "q with gaps": (lambda g: dict(q=spaced(g["q"])), "q's rows are not dense"),
    "fewer queries": (lambda g: dict(q=g["q"][:2]), "q has 2 rows, the table and the work list 3 sequences"),
    "heads that do not divide": (
        lambda g: dict(q=g["q"][:, :3].contiguous()), "3 query heads cannot share 2 KV heads evenly"
    ),
    "another head dim": (
        lambda g: dict(q=g["q"][..., :8].contiguous()), "q has a head dim of 8, the caches 16"
    ),
    "q of another dtype": (lambda g: dict(q=g["q"].half()), "q is float16, the caches float32"),
    "v_cache of another dtype": (lambda g: dict(v_cache=g["v_cache"].half()), "v_cache is float16, the rest float32"),
    "caches of different shapes": (lambda g: dict(v_cache=g["v_cache"][:-1]), "v_cache has a page less than k_cache"),
    "a strided k_cache": (
        lambda g: dict(k_cache=torch.stack([g["k_cache"]] * 2, 1)[:, 0]), "k_cache is kv[:, 0], every other page"
    ),
    "a strided v_cache": (
        lambda g: dict(v_cache=torch.stack([g["v_cache"]] * 2, 1)[:, 1]), "v_cache is kv[:, 1], every other page"
    ),
    "a table of int64": (lambda g: dict(block_tables=g["block_tables"].long()), "block_tables is int64"),
    "a table of fewer rows": (
        lambda g: dict(block_tables=g["block_tables"][:2]), "block_tables has 2 rows, for 3 sequences"
    ),
    "a flat table": (lambda g: dict(block_tables=ints([0] * 8)[:3]), "block_tables is [3], not [B, W]"),
    "a table with gaps": (lambda g: dict(block_tables=spaced(g["block_tables"])), "block_tables' rows are not dense"),
}  # fmt: skip


@pytest.mark.kernel
@pytest.mark.stage(7)
@pytest.mark.parametrize("spoiled", SPOILED)
def test_refuses(judge, spoiled):
    """must be refused"""
    spoil, because = SPOILED[spoiled]
    args = good()
    args |= spoil(args)
    judge.refuses("planned_decode", *args.values(), because=because)


@pytest.mark.gpu("a work list left on the CPU")
@pytest.mark.kernel
@pytest.mark.stage(7)
@pytest.mark.parametrize("left", ["all lists", "row_ptr"])
def test_refuses_lists_on_the_cpu(judge, left):
    """a work list that was not moved to the GPU"""
    args = good()
    there = args["work"]
    here = Work(*(x.cpu() for x in there))
    args["work"] = here if left == "all lists" else there._replace(row_ptr=here.row_ptr)
    judge.refuses("planned_decode", *args.values(), because="the list is on the CPU: the kernel cannot read it there")
