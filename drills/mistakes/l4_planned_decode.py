"""L4's mistakes: plans that lose tokens or programs, and kernels that forget that the list is cut, padded and reused.

Each is right but for what its lesson says. What several of them share stands first, and is right.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from drills.mistakes import mistake


class WorkList(NamedTuple):
    seq: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    row_ptr: torch.Tensor


# A right planner in five steps. A mistake is one of them done wrong.


def _check_plan(lens, page_size, num_kv_heads, num_programs, skip=None):
    """plan_decode's refusals, but the one called `skip`."""
    assert skip == "shape" or lens.dim() == 1, "context_lens_cpu must be [B]"
    assert skip == "device" or lens.device.type == "cpu", "context_lens_cpu must be on the CPU"
    assert skip == "floats" or not lens.is_floating_point(), "context_lens_cpu must be integers"
    assert skip == "negative" or (lens >= 0).all(), "context_lens_cpu must not be negative"
    assert skip == "page_size" or page_size >= 1, "page_size must be at least 1"
    assert skip == "num_kv_heads" or num_kv_heads >= 1, "num_kv_heads must be at least 1"
    assert skip == "num_programs" or num_programs >= 1, "num_programs must be at least 1"


def _pages(length, page_size):
    return -(-length // page_size)


def _items(pages, chunk):
    return sum(-(-p // chunk) for p in pages)


def _smallest(pages, budget):
    """The smallest chunk, in pages, of which there are no more than `budget`; else one that holds any sequence."""
    low, high = 1, max([1, *pages])
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _items(pages, middle) <= budget else (middle + 1, high)
    return low


def _cut(length, step, page_size):
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _lists(rows, size):
    """The four lists, from each sequence's (start, end) pairs."""
    items = [(b, *item) for b, row in enumerate(rows) for item in row]
    items += [(0, 0, 0)] * (size - len(items))
    return *([item[i] for item in items] for i in range(3)), [0, *itertools.accumulate(map(len, rows))]


def _work(*lists, dtype=torch.int32):
    return WorkList(*(torch.tensor(x, dtype=dtype) for x in lists))


def _planner(pages=_pages, chunk=_smallest, cut=_cut, lists=_lists, budget=lambda programs, heads: programs // heads,
             size=lambda b, programs, heads: max(b, programs // heads), skip=None):  # fmt: skip
    """plan_decode with some of its steps replaced."""

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        _check_plan(context_lens_cpu, page_size, num_kv_heads, num_programs, skip)
        lens = context_lens_cpu.tolist()
        counts = [pages(n, page_size) for n in lens]
        step = chunk(counts, budget(num_programs, num_kv_heads)) * page_size
        rows = [cut(n, step, page_size) for n in lens]
        return _work(*lists(rows, size(len(lens), num_programs, num_kv_heads)))

    return plan_decode


# plan_decode: the list


@mistake("work-list", fails=["test_every_token_has_an_item", "test_page_sizes", "test_one_sequence"])
def last_chunk_left_out():
    """Only whole chunks became items, and the newest tokens are in the one that is not whole: round the number of
    chunks up.
    """

    def cut(length, step, page_size):
        return [(start, start + step) for start in range(0, length - step + 1, step)]

    return _planner(cut=cut)


@mistake("work-list", fails=["test_every_token_has_an_item", "test_page_sizes", "test_one_sequence"])
def newest_page_left_out():
    """length // page_size counts full pages only, and the newest tokens are in the one it leaves out: round up."""

    def cut(length, step, page_size):
        return _cut(length // page_size * page_size, step, page_size)

    return _planner(cut=cut)


@mistake("work-list", fails=["test_every_token_has_an_item", "test_page_sizes", "test_one_sequence"])
def chunk_past_the_length():
    """Every item is a whole chunk, past the sequence's last token too: end is the smaller of start + chunk and the
    length.
    """

    def cut(length, step, page_size):
        return [(start, start + step) for start in range(0, length, step)]

    return _planner(cut=cut)


@mistake("work-list", fails=["test_every_token_has_an_item", "test_one_sequence"])
def end_inclusive():
    """end names the item's last token, but the item is the tokens start..end-1: end is one past its last token."""

    def cut(length, step, page_size):
        return [(start, end - 1) for start, end in _cut(length, step, page_size)]

    return _planner(cut=cut)


@mistake("work-list", fails=["test_every_token_has_an_item", "test_one_sequence"])
def end_as_a_count():
    """end holds how many tokens the item has: it is a position in the sequence, start plus that number."""

    def cut(length, step, page_size):
        return [(start, end - start) for start, end in _cut(length, step, page_size)]

    return _planner(cut=cut)


@mistake("work-list", fails=["test_every_token_has_an_item", "test_page_sizes"])
def pages_for_tokens():
    """start and end count pages, but they are tokens: multiply the chunk by page_size before you step through a
    sequence.
    """

    def cut(length, step, page_size):
        return [(start // page_size, _pages(end, page_size)) for start, end in _cut(length, step, page_size)]

    return _planner(cut=cut)


@mistake("work-list", fails=["test_page_sizes", "test_one_sequence"])
def tail_by_remainder():
    """The last item got length % chunk tokens, which is 0 where the last chunk is whole: clip with the length
    instead.
    """

    def cut(length, step, page_size):
        row = _cut(length, step, page_size)
        return [*row[:-1], (row[-1][0], row[-1][0] + length % step)] if row else []

    return _planner(cut=cut)


@mistake("work-list", fails=["test_every_token_has_an_item", "test_page_sizes"])
def starts_run_on():
    """start counts on from the sequence before: every sequence begins at its own token 0."""

    def lists(rows, size):
        seq, start, end, row_ptr = _lists(rows, size)
        begin = list(itertools.accumulate((row[-1][1] if row else 0 for row in rows), initial=0))
        real = row_ptr[-1]
        shift = [begin[b] if i < real else 0 for i, b in enumerate(seq)]
        return seq, [s + by for s, by in zip(start, shift)], [e + by for e, by in zip(end, shift)], row_ptr

    return _planner(lists=lists)


@mistake("work-list", fails=["test_sequences_of_no_tokens", "test_no_tokens_at_all"])
def item_for_an_empty_sequence():
    """A sequence of length 0 got an item with no token in it, a program's work for nothing: it has none, and row_ptr
    repeats.
    """

    def cut(length, step, page_size):
        return _cut(length, step, page_size) or [(0, 0)]

    return _planner(cut=cut)


@mistake("work-list", fails=["test_sequences_of_no_tokens", "test_no_tokens_at_all"])
def empty_sequences_without_a_row():
    """Sequences of length 0 were left out and the others moved up, so seq names other rows of the batch: keep the
    numbers, with no items.
    """

    def lists(rows, size):
        return _lists([row for row in rows if row], size)

    return _planner(lists=lists)


@mistake("work-list", fails=["test_no_tokens_at_all", "test_one_size_for_all_lengths"])
def longest_of_nothing():
    """Where all lengths are 0 the longest has 0 pages, and a chunk of 0 divides by zero: begin with a chunk of at
    least 1.
    """

    def chunk(pages, budget):
        return _smallest(pages, budget) if not pages or max(pages) else 0

    return _planner(chunk=chunk)


@mistake("work-list", fails=["test_every_token_has_an_item", "test_page_sizes", "test_one_sequence"])
def row_ptr_without_its_0():
    """The running sum of the items alone says where sequences end: row_ptr has B + 1 entries, with a 0 before
    them.
    """

    def lists(rows, size):
        *items, row_ptr = _lists(rows, size)
        return *items, row_ptr[1:]

    return _planner(lists=lists)


@mistake("work-list", fails=["test_every_token_has_an_item", "test_page_sizes"])
def row_ptr_of_counts():
    """row_ptr holds how many items each sequence has, not where they begin: take the running sum of the counts."""

    def lists(rows, size):
        *items, _ = _lists(rows, size)
        return *items, [0, *map(len, rows)]

    return _planner(lists=lists)


@mistake("work-list", fails=["test_every_token_has_an_item", "test_page_sizes", "test_one_sequence"])
def row_ptr_of_pages():
    """row_ptr adds up pages, as the CSR of a block table does: here it adds up items, and an item has several
    pages.
    """

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        work = _planner()(context_lens_cpu, page_size, num_kv_heads, num_programs)
        pages = (_pages(n, page_size) for n in context_lens_cpu.tolist())
        return work._replace(row_ptr=torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32))

    return plan_decode


@mistake("work-list", fails=["test_every_token_has_an_item", "test_page_sizes"])
def items_in_rounds():
    """The list holds all first chunks, then all second ones, but row_ptr gives a sequence one stretch of it: keep
    its items together.
    """

    def lists(rows, size):
        seq, start, end, row_ptr = _lists(rows, size)
        order = sorted(range(row_ptr[-1]), key=lambda i: start[i])
        order += range(row_ptr[-1], len(seq))
        return *([x[i] for i in order] for x in (seq, start, end)), row_ptr

    return _planner(lists=lists)


@mistake("work-list", fails=["test_every_token_has_an_item", "test_page_sizes", "test_one_sequence"])
def chunk_of_any_tokens():
    """The tokens were shared out evenly, in the middle of pages too: count in pages, and make tokens of whole
    chunks.
    """

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        _check_plan(context_lens_cpu, page_size, num_kv_heads, num_programs)
        lens, budget = context_lens_cpu.tolist(), num_programs // num_kv_heads
        step = _smallest(lens, budget)
        return _work(*_lists([_cut(n, step, 1) for n in lens], max(len(lens), budget)))

    return plan_decode


# plan_decode: the search


@mistake("search", fails=["test_the_smallest_chunk", "test_kv_heads"])
def one_page_an_item():
    """Every page became an item, however many programs there are: the chunk grows until the items fit."""
    return _planner(chunk=lambda pages, budget: 1)


@mistake("search", fails=["test_the_smallest_chunk", "test_kv_heads"])
def one_item_a_sequence():
    """No sequence is cut, so a long one is a single program's work while others idle: take the smallest chunk that
    fits.
    """
    return _planner(chunk=lambda pages, budget: max([1, *pages]))


@mistake("search", fails=["test_the_smallest_chunk", "test_kv_heads"])
def full_pages_counted():
    """The search counted length // page_size pages, without the last one where it is not full: round up there as
    well.
    """
    return _planner(pages=lambda length, page_size: length // page_size)


@mistake("search", fails=["test_the_smallest_chunk", "test_one_long_among_short"])
def chunk_from_the_mean():
    """All pages over the number of items is too small a chunk, for every sequence rounds up by itself: count the items
    of the whole batch.
    """
    return _planner(chunk=lambda pages, budget: max(1, -(-sum(pages) // max(1, budget))))


@mistake("search", fails=["test_the_smallest_chunk", "test_one_long_among_short"])
def chunk_planned_for_the_longest():
    """The chunk gives the longest sequence its even share of items, which short ones leave unused: count the items of
    the whole batch.
    """

    def chunk(pages, budget):
        return max(1, -(-max([1, *pages]) // max(1, budget // max(1, len(pages)))))

    return _planner(chunk=chunk)


@mistake("search", fails=["test_the_smallest_chunk", "test_one_long_among_short"])
def as_many_items_for_each():
    """Every sequence got as many items, as with num_splits, and short ones are cut to crumbs: one chunk size for
    all.
    """

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        _check_plan(context_lens_cpu, page_size, num_kv_heads, num_programs)
        lens, budget = context_lens_cpu.tolist(), num_programs // num_kv_heads
        share = max(1, budget // max(1, len(lens)))
        steps = [max(1, -(-_pages(n, page_size) // share)) * page_size for n in lens]
        rows = [_cut(n, step, page_size) for n, step in zip(lens, steps)]
        return _work(*_lists(rows, max(len(lens), budget)))

    return plan_decode


@mistake("search", fails=["test_the_smallest_chunk", "test_kv_heads"])
def kv_heads_forgotten():
    """The items alone were held to num_programs, and each is a program for every KV head: compare items times
    num_kv_heads.
    """
    return _planner(budget=lambda programs, heads: programs)


@mistake("search", fails=["test_the_smallest_chunk", "test_kv_heads"])
def budget_rounded_up():
    """num_programs / num_kv_heads was rounded up, and the last item's programs are too many: round down, with //."""
    return _planner(budget=lambda programs, heads: -(-programs // heads))


@mistake("search", fails=["test_the_smallest_chunk", "test_every_budget"])
def fewer_than_fit():
    """The search stops at items < budget, but as many as there are programs fit: compare with <=."""
    return _planner(chunk=lambda pages, budget: _smallest(pages, budget - 1))


@mistake("search", fails=["test_the_smallest_chunk", "test_every_budget"])
def last_that_does_not_fit():
    """The search ended at the wrong side of its interval, one page below the smallest chunk that fits: return the
    upper end.
    """
    return _planner(chunk=lambda pages, budget: max(1, _smallest(pages, budget) - 1))


@mistake("search", fails=["test_the_smallest_chunk", "test_every_budget"])
def one_page_too_large():
    """The chunk is a page larger than it need be: where the middle fits it may be the answer, so keep it in the
    interval.
    """

    def chunk(pages, budget):
        best = _smallest(pages, budget)
        return best if best == 1 else min(best + 1, max(pages))

    return _planner(chunk=chunk)


@mistake("search", fails=["test_the_smallest_chunk", "test_every_budget"])
def chunk_doubled():
    """The chunk was doubled until it fitted, which leaves up to half of the programs idle: look between the last two
    sizes too.
    """

    def chunk(pages, budget):
        size = 1
        while size < max([1, *pages]) and _items(pages, size) > budget:
            size *= 2
        return size

    return _planner(chunk=chunk)


@mistake("search", fails=["test_the_smallest_chunk", "test_more_programs_than_pages"])
def at_least_128_tokens():
    """No chunk is below 128 tokens, which is FlashInfer's choice, not this planner's: a chunk of one page is fine if
    it fits.
    """

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        floor = max(128 // max(1, page_size), 1)
        return _planner(chunk=lambda pages, budget: max(floor, _smallest(pages, budget)))(
            context_lens_cpu, page_size, num_kv_heads, num_programs
        )

    return plan_decode


@mistake(
    "search",
    fails=[
        "test_page_sizes",
        "test_fewer_programs_than_sequences",
        "test_every_budget",
        "test_a_place_for_every_sequence",
    ],
)
def too_few_programs_refused():
    """Fewer programs than sequences were refused, but a batch must be decoded with whatever there is: then each has
    one item.
    """

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        assert num_programs >= len(context_lens_cpu) * num_kv_heads, "num_programs is too small for the batch"
        return _planner()(context_lens_cpu, page_size, num_kv_heads, num_programs)

    return plan_decode


@mistake("search", fails=["test_fewer_programs_than_sequences", "test_every_budget"])
def chunk_of_one_where_none_fits():
    """Where no chunk fits, the search left its first value, a page, and made the most items there can be: one item
    each is the fewest.
    """

    def chunk(pages, budget):
        return _smallest(pages, budget) if sum(p > 0 for p in pages) <= budget else 1

    return _planner(chunk=chunk)


@mistake("search", fails=["test_budget_below_the_batch"])
def budget_raised_to_the_batch():
    """The items were held to the length of the lists, which is B at least: where some sequences have no tokens, that
    is more than the programs allow.
    """

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        room = max(len(context_lens_cpu), num_programs // num_kv_heads)
        return _planner(budget=lambda programs, heads: room)(context_lens_cpu, page_size, num_kv_heads, num_programs)

    return plan_decode


@mistake("search", fails=["test_a_length_past_float32"])
def pages_counted_in_floats():
    """ceil(length / page_size) went through float32, which rounds lengths above 2^24: divide integers, (length +
    page_size - 1) // page_size.
    """

    def pages(length, page_size):
        return int(torch.ceil(torch.tensor(length, dtype=torch.int32) / page_size))

    return _planner(pages=pages)


@mistake("search", fails=["test_operations_for_more_sequences"], tells=False)
def a_tensor_for_each_sequence():
    """A loop takes each sequence's length out of its tensor and works on it there, microseconds each: use whole
    tensors or lists.
    """

    def pages(length, page_size):
        return ((torch.tensor(length) + page_size - 1) // page_size).item()

    return _planner(pages=pages)


@mistake("search", fails=["test_operations_for_longer_sequences"], tells=False)
def chunks_tried_one_by_one():
    """Every chunk size from 1 up was tried, thousands for a long context: larger chunks never make more items, so
    halve the interval.
    """

    def chunk(pages, budget):
        counts, size = torch.tensor(pages), 1
        while size < max([1, *pages]) and -(-counts // size).sum() > budget:
            size += 1
        return size

    return _planner(chunk=chunk)


# plan_decode: lists that a graph can keep


@mistake("fixed-size", fails=["test_worked_example", "test_one_size_for_all_lengths"])
def as_long_as_there_are_items():
    """The lists are as long as there are items, so the next plan does not fit into the tensors that a graph holds: pad
    them to one size.
    """
    return _planner(size=lambda b, programs, heads: 0)


@mistake("fixed-size", fails=["test_worked_example", "test_one_size_for_all_lengths"])
def as_long_as_there_are_programs():
    """The lists have num_programs entries, but an item is num_kv_heads programs: num_programs // num_kv_heads are
    enough.
    """
    return _planner(size=lambda b, programs, heads: max(b, programs))


@mistake("fixed-size", fails=["test_a_place_for_every_sequence"])
def no_place_for_every_sequence():
    """With fewer programs than sequences have KV heads, the lists are as long as the items of this step: make them at
    least B long.
    """

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        work = _planner()(context_lens_cpu, page_size, num_kv_heads, num_programs)
        size = max(int(work.row_ptr[-1]), num_programs // num_kv_heads) or 1
        return WorkList(work.seq[:size], work.start[:size], work.end[:size], work.row_ptr)

    return plan_decode


@mistake("fixed-size", fails=["test_worked_example", "test_one_size_for_all_lengths"])
def padding_of_minus_one():
    """The lists are padded with -1, and the kernel that loads seq before it looks at the rest reads row -1: pad with
    0.
    """

    def lists(rows, size):
        items = sum(map(len, rows))
        *columns, row_ptr = _lists(rows, size)
        return *(x[:items] + [-1] * (len(x) - items) for x in columns), row_ptr

    return _planner(lists=lists)


@mistake("fixed-size", fails=["test_worked_example", "test_one_size_for_all_lengths"])
def last_item_repeated():
    """The lists are filled up with copies of the last item, which is then computed many times over: padding is an item
    of no tokens, 0.
    """

    def lists(rows, size):
        items = sum(map(len, rows))
        *columns, row_ptr = _lists(rows, size)
        return *(x[:items] + x[items - 1 : items] * (len(x) - items) if items else x for x in columns), row_ptr

    return _planner(lists=lists)


@mistake("fixed-size", fails=["test_all_lists_are_int32", "test_worked_example"])
def lists_of_int64():
    """The lists are int64, as torch makes them unless told otherwise: the kernel and the graph's tensors take int32,
    so convert all four.
    """

    def plan_decode(*args):
        return WorkList(*(x.long() for x in _planner()(*args)))

    return plan_decode


@mistake("fixed-size", fails=["test_all_lists_are_int32", "test_worked_example"], seen=["pytorch#53360"])
def cumsum_left_int64():
    """cumsum of int32 is int64, and row_ptr stayed so: give it dtype=torch.int32, or convert the result."""

    def plan_decode(*args):
        work = _planner()(*args)
        return work._replace(row_ptr=work.row_ptr.long())

    return plan_decode


@mistake("fixed-size", fails=["test_all_lists_are_int32"])
def lists_in_the_lengths_dtype():
    """The lists have the dtype of the lengths, so int64 lengths make int64 lists: they are int32 whatever came in."""

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        work = _planner()(context_lens_cpu, page_size, num_kv_heads, num_programs)
        return WorkList(*(x.to(context_lens_cpu.dtype) for x in work))

    return plan_decode


@mistake("fixed-size", fails=["test_planned_again"], tells=False)
def one_buffer_for_all_plans():
    """Every plan is written into the same tensors, and the one before may still be on its way to the GPU: return new
    ones.
    """
    buffers: dict[tuple[int, int], WorkList] = {}

    def plan_decode(*args):
        work = _planner()(*args)
        kept = buffers.setdefault((len(work.seq), len(work.row_ptr)), work)
        for buffer, x in zip(kept, work):
            buffer.copy_(x)
        return kept

    return plan_decode


@mistake("fixed-size", fails=["test_worked_example", "test_every_budget"], tells=False)
def lengths_rounded_in_place():
    """The lengths were rounded up to pages in the caller's tensor, which still needs them: compute a new one."""

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        work = _planner()(context_lens_cpu, page_size, num_kv_heads, num_programs)
        context_lens_cpu.add_(page_size - 1).div_(page_size, rounding_mode="floor")
        return work

    return plan_decode


@mistake("fixed-size", fails=["test_lists_by_name"], tells=False)
def lists_without_names():
    """A plain tuple came back, and planned_decode asks for work.seq: return a WorkList, made of the four in their
    order.
    """

    def plan_decode(*args):
        return tuple(_planner()(*args))

    return plan_decode


@mistake("fixed-size", fails=["test_no_sequences"])
def longest_of_no_sequences():
    """max() of no lengths raises, and a step may have no sequences: give it a default, or a 1 to start from."""

    def chunk(pages, budget):
        return max(max(pages), 1) and _smallest(pages, budget)

    return _planner(chunk=chunk)


@mistake("fixed-size", fails=["test_plan_refuses"])
def sum_of_lengths_checked():
    """The lengths were checked as a sum, in which a negative one hides behind the others: check all of them."""

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        assert context_lens_cpu.sum() >= 0, "context_lens_cpu must not be negative"
        return _planner(skip="negative")(context_lens_cpu, page_size, num_kv_heads, num_programs)

    return plan_decode


@mistake("fixed-size", fails=["test_plan_refuses"])
def negative_lengths_as_empty():
    """A negative length became a sequence without items, and whoever made it never hears of it: refuse it."""
    return _planner(skip="negative")


@mistake("fixed-size", fails=["test_plan_refuses"])
def lengths_flattened():
    """Lengths of any shape were flattened into a batch that nobody meant: refuse all but [B]."""

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        return _planner()(context_lens_cpu.flatten(), page_size, num_kv_heads, num_programs)

    return plan_decode


@mistake("fixed-size", fails=["test_plan_refuses"])
def float_lengths_cut_off():
    """Lengths that are floats were cut to integers, which hides where they come from: refuse them."""

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        return _planner()(context_lens_cpu.long(), page_size, num_kv_heads, num_programs)

    return plan_decode


@mistake("fixed-size", fails=["test_plan_refuses_a_gpu_tensor"], lane="gpu")
def lengths_fetched_from_the_gpu():
    """Lengths on the GPU were fetched, and the step waited for it: keep a copy on the CPU, and refuse what is not
    there.
    """

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        return _planner()(context_lens_cpu.cpu(), page_size, num_kv_heads, num_programs)

    return plan_decode


@mistake("fixed-size", fails=["test_plan_refuses"])
def page_size_unchecked():
    """A page size below 1 was taken, and divided by: assert page_size >= 1 before anything else."""

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        return _planner()(context_lens_cpu, abs(page_size) or 1, num_kv_heads, num_programs)

    return plan_decode


@mistake("fixed-size", fails=["test_plan_refuses"])
def kv_heads_unchecked():
    """Numbers of KV heads below 1 were taken as 1, though only a mistake elsewhere makes them: refuse them."""

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        return _planner()(context_lens_cpu, page_size, max(1, num_kv_heads), num_programs)

    return plan_decode


@mistake("fixed-size", fails=["test_plan_refuses"])
def programs_unchecked():
    """No programs at all gave the plan of too few: num_programs below 1 is a mistake elsewhere, and refused."""
    return _planner(skip="num_programs")


# A right decode: a kernel that fills a partial result for each item, and one that merges every sequence's.
# WRONG names the one thing that a mistake does otherwise; "" is right.


@triton.jit
def planned_decode_kernel(
    q, k_cache, v_cache, tables, seqs, starts, ends, row_ptr, o_part, lse_part, q_stride, table_stride, scale,
    PAGE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, WRONG: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0), tl.program_id(1)
    if WRONG == "items on the short axis":
        item, head = head, item
    if WRONG != "item in int32":
        item = item.to(tl.int64)
    start, end = tl.load(starts + item), tl.load(ends + item)
    if WRONG != "padding computed":  # noqa: SIM102 (a constant, and a value of the kernel's)
        if start >= end:
            return
    seq = tl.load(seqs + item).to(tl.int64)
    if WRONG == "start ignored":
        start = start * 0
    if WRONG == "end ignored":
        end = tl.load(ends + tl.load(row_ptr + seq + 1) - 1)
    if WRONG == "first tile only":
        end = tl.minimum(end, start + TILE)
    if WRONG == "512 tokens":
        end = tl.minimum(end, start + 512)
    if WRONG == "start left out":
        start = start + 1
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    heads = head * GROUP + row
    if WRONG == "heads in turn":
        heads = row * HKV + head
    mine = (row < GROUP)[:, None] & (dim < D)[None, :]
    x = tl.load(q + seq * q_stride + heads[:, None] * D + dim[None, :], mask=mine, other=0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, DIM], 0.0, tl.float32)
    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        live = position < end
        here = position
        if WRONG == "position in the item":
            here = position - start
        column, offset = here // PAGE, here % PAGE
        if WRONG == "pages of 16":
            column, offset = here // 16, here % 16
        if WRONG == "page of a power of two":
            column, offset = here // (4 if PAGE == 3 else PAGE), here % (4 if PAGE == 3 else PAGE)
        known = live
        if WRONG == "v to the end of the page":
            known = position < tl.cdiv(end, PAGE) * PAGE
        page = tl.load(tables + seq * table_stride + column, mask=known, other=0)
        if WRONG != "page in int32":
            page = page.to(tl.int64)
        at = ((page * PAGE + offset) * HKV + head)[:, None] * D + dim[None, :]
        k = tl.load(k_cache + at, mask=live[:, None] & (dim < D)[None, :], other=0)
        v = tl.load(v_cache + at, mask=known[:, None] & (dim < D)[None, :], other=0)
        if WRONG == "tf32":
            logits = tl.dot(x, tl.trans(k)) * scale
        else:
            logits = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
        if WRONG != "tail counted":
            logits = tl.where(live[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weights, shrink = tl.exp2(logits - higher[:, None]), tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        if WRONG == "acc not shrunk":
            shrink = tl.full([ROWS], 1.0, tl.float32)
        if WRONG == "tf32":
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        else:
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    if WRONG == "parts not divided":
        part = acc
    elif WRONG == "single parts not divided":
        alone = tl.load(row_ptr + seq + 1) - tl.load(row_ptr + seq) == 1
        part = acc / tl.where(alone, 1.0, total)[:, None]
    else:
        part = acc / total[:, None]
    lse = (top + tl.log2(total)) * 0.6931471805599453
    if WRONG == "parts' lse in base 2":
        lse = top + tl.log2(total)
    out = (seq if WRONG == "written to the sequence" else item) * HKV * GROUP + heads
    if WRONG == "parts of the first group":
        out = item * HKV * GROUP + row
    tl.store(o_part + out[:, None] * D + dim[None, :], part.to(o_part.dtype.element_ty), mask=mine)
    tl.store(lse_part + out, lse.to(lse_part.dtype.element_ty), mask=row < GROUP)


@triton.jit
def merge_items_kernel(
    o_part, lse_part, seqs, row_ptr, o, lse, items,
    HQ: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, WRONG: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, DIM)
    out = seq * HQ + head
    begin, stop = tl.load(row_ptr + seq), tl.load(row_ptr + seq + 1)
    if WRONG == "empty rows skipped":  # noqa: SIM102
        if begin == stop:
            return
    if WRONG == "first item only":
        stop = tl.minimum(stop, begin + 1)
    if WRONG == "last item left out":
        stop = tl.where(stop > begin + 1, stop - 1, stop)
    if WRONG == "8 items":
        stop = tl.minimum(stop, begin + 8)
    if WRONG == "64 items":
        stop = tl.minimum(stop, begin + 64)
    if WRONG == "item as sequence":
        begin, stop = seq.to(tl.int32), seq.to(tl.int32) + 1
    if WRONG == "all of its items" or WRONG == "all items":
        begin, stop = begin * 0, begin * 0 + items
    top, total, acc = float("-inf"), 0.0, tl.full([DIM], 0.0, tl.float32)
    for item in range(begin, stop):
        at = tl.cast(item, tl.int64) * HQ + head
        if WRONG == "item in int32":
            at = item * HQ + head
        part_lse = tl.load(lse_part + at).to(tl.float32)
        part = tl.load(o_part + at * D + dim, mask=dim < D, other=0).to(tl.float32)
        counts = True
        if WRONG == "all of its items":
            counts = tl.load(seqs + item) == seq
        if counts:
            higher = tl.maximum(top, part_lse)
            if WRONG == "no maximum":
                higher = part_lse * 0
            weight, shrink = tl.exp(part_lse - higher), tl.exp(top - higher)
            if WRONG == "no maximum":
                shrink = weight * 0 + 1
            if WRONG == "parts weigh the same":
                weight, shrink = weight * 0 + 1, weight * 0 + 1
            total = total * shrink + weight
            acc = acc * (shrink * 0 + 1 if WRONG == "merged parts not shrunk" else shrink) + weight * part
            top = higher
    if WRONG == "sum not divided":
        value = acc
    elif WRONG == "nothing divided by nothing":
        value = acc / total
    else:
        value = acc / tl.where(total > 0, total, 1.0)
    whole = top + tl.log(total)
    if WRONG == "largest lse":
        whole = top + tl.log(total) * 0
    if WRONG == "lse in base 2":
        whole = whole * 1.4426950408889634
    if WRONG == "lse without its maximum":
        whole = tl.log(total)
    tl.store(o + out * D + dim, value.to(o.dtype.element_ty), mask=dim < D)
    tl.store(lse + out, whole.to(lse.dtype.element_ty))


def _check(q, k_cache, v_cache, block_tables, work, skip=()):
    """planned_decode's refusals, but those called in `skip`."""
    B, _, D = q.shape
    items = len(work.seq)
    checks = {
        "q rows": q[:1].is_contiguous(),
        "head dim": k_cache.shape[3] == D,
        "one cache shape": k_cache.shape == v_cache.shape,
        "heads": q.shape[1] % k_cache.shape[2] == 0,
        "q dtype": q.dtype == k_cache.dtype,
        "v dtype": k_cache.dtype == v_cache.dtype,
        "k dense": k_cache.is_contiguous(),
        "v dense": v_cache.is_contiguous(),
        "table rows": block_tables.dim() == 2 and len(block_tables) == B,
        "table dtype": block_tables.dtype == torch.int32,
        "table dense": block_tables.shape[1] <= 1 or block_tables.stride(1) == 1,
        "lists' dtype": all(x.dtype == torch.int32 for x in work[:3]),
        "row_ptr's dtype": work.row_ptr.dtype == torch.int32,
        "lists' length": len(work.start) == len(work.end) == items,
        "row_ptr's length": len(work.row_ptr) == B + 1,
        "lists dense": all(x.is_contiguous() for x in work),
        "device": all(x.device == q.device for x in (k_cache, v_cache, block_tables, *work)),
    }
    for name, holds in checks.items():
        assert name in skip or holds, f"refused: {name}"


def _parts(q, k_cache, v_cache, block_tables, work, scale, wrong="", into=None, **change):
    """(o_part [items, Hq, D], lse_part [items, Hq]), or what is in `into`. change: other values for the numbers."""
    (_, Hq, D), (_, BS, Hkv, _), items = q.shape, k_cache.shape, len(work.seq)
    given = {"q_stride": q.stride(0), "table_stride": block_tables.stride(0), "lse": torch.float32,
             "log2e": math.log2(math.e)} | change  # fmt: skip
    o_part, lse_part = into or (
        q.new_zeros(items, Hq, D, dtype=torch.float32),
        q.new_zeros(items, Hq, dtype=given["lse"]),
    )
    rows, dim = (max(16, triton.next_power_of_2(n)) for n in (Hq // Hkv, D))
    grid = (Hkv, items) if wrong == "items on the short axis" else (items, Hkv)
    planned_decode_kernel[grid](
        q, k_cache, v_cache, block_tables, *work, o_part, lse_part, given["q_stride"], given["table_stride"],
        scale * given["log2e"], PAGE=BS, HKV=Hkv, GROUP=Hq // Hkv, D=D, ROWS=rows, DIM=dim, TILE=32, WRONG=wrong,
    )  # fmt: skip
    return o_part, lse_part


def _merged(parts, work, dtype, wrong="", into=None, lse_dtype=torch.float32):
    """(o, lse) of the parts, in new tensors or in `into`."""
    (items, Hq, D), B = parts[0].shape, len(work.row_ptr) - 1
    o, lse = into or (parts[0].new_zeros(B, Hq, D, dtype=dtype), parts[0].new_zeros(B, Hq, dtype=lse_dtype))
    dim = triton.next_power_of_2(D)
    merge_items_kernel[(B, Hq)](*parts, work.seq, work.row_ptr, o, lse, items, HQ=Hq, D=D, DIM=dim, WRONG=wrong)
    return o, lse


def _scale(q, sm_scale):
    return 1 / math.sqrt(q.shape[2]) if sm_scale is None else sm_scale


def _decoder(wrong="", skip=(), scale=_scale, change=None, dtype=None, lse_dtype=torch.float32):
    """planned_decode with one thing done otherwise: in the kernels, in the checks, or in what the kernels are given."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        _check(q, k_cache, v_cache, block_tables, work, skip)
        by = scale(q, sm_scale)
        parts = _parts(q, k_cache, v_cache, block_tables, work, by, wrong, **(change or {}))
        o, lse = _merged(parts, work, dtype or q.dtype, wrong, lse_dtype=lse_dtype)
        return (o, lse) if return_lse else o

    return planned_decode


# planned_decode: the items


@mistake("decode", fails=["test_items_are_merged", "test_uneven_items", "test_cut_beside_nothing"])
def start_ignored():
    """Every item begins at token 0 of its sequence, and the first tokens count many times: begin at start[item]."""
    return _decoder("start ignored")


@mistake("decode", fails=["test_items_are_merged", "test_uneven_items", "test_cut_beside_nothing"])
def end_ignored():
    """Every item goes on to the end of its sequence, and the last tokens count many times: stop at end[item]."""
    return _decoder("end ignored")


@mistake("decode", fails=["test_one_item_each", "test_items_are_merged"])
def start_left_out():
    """The loop begins after the item's first token: the item is the tokens start..end-1, and start is one of them."""
    return _decoder("start left out")


@mistake("decode", fails=["test_items_are_merged", "test_uneven_items", "test_cut_beside_nothing"])
def columns_counted_from_the_item():
    """The table was read as if the item were the whole sequence: its column is that of the position in the sequence,
    start included.
    """
    return _decoder("position in the item")


@mistake("decode", fails=["test_a_long_item"])
def one_large_tile_an_item():
    """A single tile of 512 tokens holds a short item and loses the rest of a longer one: loop from start to end."""
    return _decoder("512 tokens")


@mistake("decode", fails=["test_a_cache_past_int32"], tells=False)
def page_of_an_item_in_int32():
    """The product of page id and page size was taken in int32 and wrapped: widen the id to int64 before any product."""
    return _decoder("page in int32")


@mistake("merging", fails=["test_groups_are_merged"])
def parts_of_all_heads_in_the_first_group():
    """Every KV head's program stored its parts as query heads 0 and on: they begin at head · GROUP of the item's Hq."""
    return _decoder("parts of the first group")


@mistake("merging", fails=["test_items_are_merged", "test_many_items"])
def merged_parts_not_shrunk():
    """When a part raises the largest lse, what was merged before belongs to the old: multiply it by exp(old - new)."""
    return _decoder("merged parts not shrunk")


@mistake("merging", fails=["test_parts_that_cancel"])
def parts_of_items_in_the_dtype_of_q():
    """The items' outputs were stored in q's 16 bits and rounded again after the merge: keep the parts in float32."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        _check(q, k_cache, v_cache, block_tables, work, ())
        part, part_lse = _parts(q, k_cache, v_cache, block_tables, work, _scale(q, sm_scale))
        o, lse = _merged((part.to(q.dtype).float(), part_lse), work, q.dtype)
        return (o, lse) if return_lse else o

    return planned_decode


@mistake("merging", fails=["test_many_items"])
def only_64_items_merged():
    """One tile of 64 items was merged, and a long sequence has more of them: loop over all that row_ptr gives it."""
    return _decoder("64 items")


@mistake("capture", fails=["test_as_many_launches"], tells=False)
def a_launch_a_kv_head():
    """A launch for each KV head waits for the one before: put the KV heads on the grid, beside the items."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        heads, group = k_cache.shape[2], q.shape[1] // k_cache.shape[2]
        parts = [
            _decoder()(
                q[:, h * group : (h + 1) * group].contiguous(),
                k_cache[:, :, h : h + 1].contiguous(), v_cache[:, :, h : h + 1].contiguous(),
                block_tables, work, sm_scale, True,
            )
            for h in range(heads)
        ]  # fmt: skip
        o, lse = (torch.cat(each, 1) for each in zip(*parts))
        return (o, lse) if return_lse else o

    return planned_decode


@mistake("decode", fails=["test_a_long_item", "test_decode_page_sizes"])
def one_tile_an_item():
    """Only the first tile of an item's tokens is read, and an item has as many as the plan gave it: loop from start to
    end.
    """
    return _decoder("first tile only")


@mistake("decode", fails=["test_a_long_item", "test_decode_page_sizes"])
def earlier_tiles_not_shrunk():
    """When a tile raises the maximum, what is summed so far belongs to the old one: multiply acc by exp2(old - new),
    like the total.
    """
    return _decoder("acc not shrunk")


@mistake("decode", fails=["test_one_item_each", "test_padding"], seen=["flashinfer#3716"])
def item_tail_counted():
    """Lanes past the item's end count as tokens with a logit of 0: set their logits to -inf before the maximum."""
    return _decoder("tail counted")


@mistake("decode", fails=["test_one_item_each", "test_padding"], seen=["vllm#47305"])
def values_read_past_the_item():
    """V was read to the end of the page, and a weight of 0 times the NaN that lies there is NaN: load zeros past the
    item's end.
    """
    return _decoder("v to the end of the page")


@mistake("decode", fails=["test_padding"])
def padding_merged():
    """Padding looks like an item of sequence 0, and its 0 / 0 went into that sequence's sum: skip it, and merge only
    what row_ptr names.
    """

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        _check(q, k_cache, v_cache, block_tables, work)
        parts = _parts(q, k_cache, v_cache, block_tables, work, _scale(q, sm_scale), "padding computed")
        o, lse = _merged(parts, work, q.dtype, "all of its items")
        return (o, lse) if return_lse else o

    return planned_decode


@mistake("decode", fails=["test_sequences_without_items", "test_cut_beside_nothing"])
def item_taken_for_the_sequence():
    """Sequence b was given item b, which is another's as soon as one is cut or has none: row_ptr says which are
    its.
    """
    return _decoder("item as sequence")


@mistake("decode", fails=["test_sequences_without_items", "test_cut_beside_nothing"], seen=["vllm#57094"])
def no_items_divided_by_0():
    """A sequence without items has a total of 0, and 0 / 0 is NaN: divide by 1 where the total is 0."""
    return _decoder("nothing divided by nothing")


@mistake("decode", fails=["test_heads_and_dims"], seen=["HipKittens#22", "ONNXim#33"])
def kv_head_by_remainder():
    """Query head h was given KV head h % Hkv: neighbours share one, so it is h // (Hq // Hkv)."""
    return _decoder("heads in turn")


@mistake("decode", fails=["test_heads_and_dims"], seen=["lmdeploy#3781"])
def head_dims_of_powers_of_two():
    """A head dim that is no power of two was refused, for tl.arange takes no other: round up, and mask what is too
    much.
    """

    def planned_decode(q, *args):
        assert q.shape[2] == triton.next_power_of_2(q.shape[2]), "q's head dim must be a power of two"
        return _decoder()(q, *args)

    return planned_decode


@mistake("decode", fails=["test_decode_page_sizes", "test_one_item_each"])
def positions_split_by_16():
    """Positions were split by 16, the usual page: k_cache.shape[1] is the page size."""
    return _decoder("pages of 16")


@mistake("decode", fails=["test_decode_page_sizes"], seen=["aiter#2190"])
def positions_split_by_a_power_of_two():
    """The page size was rounded up to a power of two, and a page of 3 is none: divide positions by the real page
    size.
    """
    return _decoder("page of a power of two")


@mistake("decode", fails=["test_views"])
def row_of_q_as_long_as_it_is_wide():
    """Row b of q was read at b · Hq · D, but a view of a larger tensor has its rows further apart: pass q.stride(0)."""

    def planned_decode(q, *args):
        return _decoder(change={"q_stride": q.shape[1] * q.shape[2]})(q, *args)

    return planned_decode


@mistake("decode", fails=["test_views"])
def row_of_the_table_as_long_as_it_is_wide():
    """Row b of the table was read at b times its width, but a view has its rows further apart: pass its stride(0)."""

    def planned_decode(q, k_cache, v_cache, block_tables, *args):
        change = {"table_stride": block_tables.shape[1]}
        return _decoder(change=change)(q, k_cache, v_cache, block_tables, *args)

    return planned_decode


@mistake("decode", fails=["test_one_item_each", "test_sm_scale"])
def items_not_scaled():
    """The logits were not multiplied by sm_scale, nor by 1 / sqrt(D) where none is given: scale q · k before the
    softmax.
    """
    return _decoder(scale=lambda q, sm_scale: 1.0)


@mistake("decode", fails=["test_sm_scale", "test_large_logits"])
def default_scale_always():
    """The default of 1 / sqrt(D) was used although a scale was given: use it only where sm_scale is None."""
    return _decoder(scale=lambda q, sm_scale: 1 / math.sqrt(q.shape[2]))


@mistake("decode", fails=["test_sm_scale"])
def scale_0_as_none():
    """`sm_scale or default` takes the default for 0.0 too: compare with None."""
    return _decoder(scale=lambda q, sm_scale: sm_scale or 1 / math.sqrt(q.shape[2]))


@mistake("decode", fails=["test_one_item_each", "test_sm_scale"])
def items_scaled_for_exp():
    """exp2 was given logits that were scaled for exp: 2^x is e^(x · ln 2), so put log2(e) into the scale."""
    return _decoder(change={"log2e": 1.0})


@mistake("decode", fails=["test_decode_dtypes"])
def merged_o_left_in_float32():
    """o stayed in float32, in which it was summed: it has q's dtype, so convert as you store."""
    return _decoder(dtype=torch.float32)


@mistake("decode", fails=["test_decode_dtypes"], lane="gpu")
def item_products_in_tf32():
    """tl.dot rounds float32 to TF32 unless told otherwise, and three digits are left: pass input_precision="ieee"."""
    return _decoder("tf32")


@mistake("decode", fails=["test_the_kernel_works"], tells=False)
def attention_in_torch():
    """A kernel was launched, and torch's matrix products did the attention over copies of the pages: the kernel is to
    do it.
    """

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        _check(q, k_cache, v_cache, block_tables, work)
        (B, Hq, D), (_, PAGE, Hkv, _) = q.shape, k_cache.shape
        by = _scale(q, sm_scale)
        _parts(q, k_cache, v_cache, block_tables, work, by)
        last = (work.row_ptr[1:] - 1).clamp(min=0).long()
        lens = torch.where(work.row_ptr[1:] > work.row_ptr[:-1], work.end[last], 0)
        position = torch.arange(block_tables.shape[1] * PAGE, device=q.device)
        live = position < lens[:, None]
        page = torch.where(live, block_tables[:, position // PAGE], 0).long()
        k, v = (torch.where(live[..., None, None], x[page, position % PAGE].float(), 0) for x in (k_cache, v_cache))
        logits = torch.einsum("bkgd,btkd->bkgt", q.float().view(B, Hkv, Hq // Hkv, D), k) * by
        logits = torch.where(live[:, None, None], logits, -math.inf)
        lse = logits.logsumexp(-1)
        weights = torch.where(live[:, None, None], (logits - lse[..., None]).exp(), 0)
        o = torch.einsum("bkgt,btkd->bkgd", weights, v).flatten(1, 2).to(q.dtype)
        return (o, lse.flatten(1)) if return_lse else o

    return planned_decode


@mistake("decode", fails=["test_the_kernel_works"], tells=False)
def items_merged_in_torch():
    """The items were computed in the kernel and merged by torch, in a dozen launches a layer: write a second kernel."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        _check(q, k_cache, v_cache, block_tables, work)
        o_part, lse_part = _parts(q, k_cache, v_cache, block_tables, work, _scale(q, sm_scale))
        item = torch.arange(len(o_part), device=q.device)
        mine = (item >= work.row_ptr[:-1, None]) & (item < work.row_ptr[1:, None])
        each = torch.where(mine[..., None], lse_part, -math.inf)  # [B, items, Hq]
        weights = (each - each.amax(1, keepdim=True).clamp(min=-1e30)).exp()
        total = weights.sum(1)
        o = (weights[..., None] * o_part).sum(1) / torch.where(total > 0, total, 1)[..., None]
        lse = each.amax(1) + total.log()
        return (o.to(q.dtype), lse) if return_lse else o.to(q.dtype)

    return planned_decode


@mistake("decode", fails=["test_as_many_launches"], tells=False)
def a_launch_for_each_item():
    """Each item is a launch of its own, some microseconds each: make one, whose grid runs over the items."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        _check(q, k_cache, v_cache, block_tables, work)
        items, (_, Hq, D) = len(work.seq), q.shape
        parts = q.new_zeros(items, Hq, D, dtype=torch.float32), q.new_zeros(items, Hq, dtype=torch.float32)
        for i in range(items):
            one = WorkList(work.seq[i : i + 1], work.start[i : i + 1], work.end[i : i + 1], work.row_ptr)
            _parts(q, k_cache, v_cache, block_tables, one, _scale(q, sm_scale), into=[x[i:] for x in parts])
        o, lse = _merged(parts, work, q.dtype)
        return (o, lse) if return_lse else o

    return planned_decode


@mistake("decode", fails=["test_as_many_launches"], tells=False)
def a_merge_launched_for_each_sequence():
    """Each sequence is merged by a launch of its own, some microseconds each: make one, whose grid runs over them."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        _check(q, k_cache, v_cache, block_tables, work)
        parts = _parts(q, k_cache, v_cache, block_tables, work, _scale(q, sm_scale))
        o, lse = (
            torch.zeros_like(q, memory_format=torch.contiguous_format),
            q.new_zeros(q.shape[:2], dtype=torch.float32),
        )
        for b in range(len(q)):
            one = work._replace(row_ptr=work.row_ptr[b : b + 2])
            _merged(parts, one, q.dtype, into=(o[b : b + 1], lse[b : b + 1]))
        return (o, lse) if return_lse else o

    return planned_decode


# planned_decode: the merge


@mistake("merging", fails=["test_items_are_merged", "test_uneven_items", "test_many_items"])
def first_item_only():
    """Only the first item of each sequence reached the output: merge all from row_ptr[b] to row_ptr[b + 1] - 1."""
    return _decoder("first item only")


@mistake("merging", fails=["test_items_are_merged", "test_uneven_items", "test_many_items"])
def last_item_left_out():
    """The merge stops one item early: row_ptr[b + 1] is already one past the last item of sequence b."""
    return _decoder("last item left out")


@mistake("merging", fails=["test_items_are_merged", "test_uneven_items", "test_cut_beside_nothing"])
def last_item_wins():
    """Every item wrote its own average to its sequence's output, and the last one stayed: keep a partial result an
    item, then merge.
    """

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        _check(q, k_cache, v_cache, block_tables, work)
        o = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:2], -math.inf, device=q.device)
        by = _scale(q, sm_scale)
        _parts(q, k_cache, v_cache, block_tables, work, by, "written to the sequence", into=(o, lse))
        return (o, lse) if return_lse else o

    return planned_decode


@mistake("merging", fails=["test_one_item_each", "test_items_are_merged"])
def items_of_all_sequences_merged():
    """Every sequence was merged from the items of all: those of sequence b are row_ptr[b]..row_ptr[b + 1] - 1."""
    return _decoder("all items")


@mistake("merging", fails=["test_items_are_merged", "test_uneven_items", "test_cut_beside_nothing"])
def items_weigh_the_same():
    """The parts' outputs were averaged as if each had the same share of the softmax: weigh each by exp(its lse)."""
    return _decoder("parts weigh the same")


@mistake("merging", fails=["test_one_item_each", "test_items_are_merged"])
def items_not_divided():
    """Partial outputs were stored undivided, and then weighted by lse, which holds the sum once more: divide each by
    its total first.
    """
    return _decoder("parts not divided")


@mistake("merging", fails=["test_one_item_each", "test_uneven_items"])
def single_items_not_divided():
    """A sequence of one item takes a short cut past the merge, and past its division: divide by the total there as
    well.
    """
    return _decoder("single parts not divided")


@mistake("merging", fails=["test_items_are_merged", "test_uneven_items", "test_cut_beside_nothing"])
def items_added_up():
    """The weighted parts were added up and not divided by the sum of the weights: a mean needs both."""
    return _decoder("sum not divided")


@mistake("merging", fails=["test_items_are_merged", "test_uneven_items"], seen=["vllm#28840", "sglang#40903"])
def item_lse_in_base_2():
    """The parts' lse are logarithms to base 2 and were merged with exp: multiply them by ln 2, or merge with exp2."""
    return _decoder("parts' lse in base 2")


@mistake("merging", fails=["test_large_logits"])
def items_merged_without_a_maximum():
    """exp(lse) overflows from 89 on, and inf / inf is NaN: subtract the largest lse of the sequence first."""
    return _decoder("no maximum")


@mistake("merging", fails=["test_many_items"])
def eight_items_at_most():
    """The merge takes one tile of items, and a long sequence has more: loop to row_ptr[b + 1]."""
    return _decoder("8 items")


@mistake("merging", fails=["test_lse", "test_lse_of_nothing"])
def lse_asked_for_in_vain():
    """return_lse was ignored: with it the result is (o, lse)."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        return _decoder()(q, k_cache, v_cache, block_tables, work, sm_scale)

    return planned_decode


@mistake("merging", fails=["test_one_item_each", "test_items_are_merged"])
def lse_unasked_for():
    """(o, lse) came back without being asked for: return o alone unless return_lse is set."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        return _decoder()(q, k_cache, v_cache, block_tables, work, sm_scale, True)

    return planned_decode


@mistake("merging", fails=["test_lse", "test_lse_of_nothing"])
def returned_lse_in_base_2():
    """The lse is to base 2, as exp2 and FlashInfer have it: here it is natural, so multiply by ln 2."""
    return _decoder("lse in base 2")


@mistake("merging", fails=["test_lse", "test_lse_in_half_precision"])
def lse_of_the_heaviest_item():
    """The lse is that of the heaviest part: the whole's is that plus the logarithm of the sum of the weights."""
    return _decoder("largest lse")


@mistake("merging", fails=["test_lse", "test_large_logits"])
def lse_without_the_items_maximum():
    """The maximum that was subtracted before exp was not added again after log: lse = maximum + log(sum)."""
    return _decoder("lse without its maximum")


@mistake("merging", fails=["test_lse_in_half_precision"])
def returned_lse_in_the_dtype_of_q():
    """The lse was returned in q's dtype, which leaves it three digits: it is float32 whatever q is."""

    def planned_decode(q, *args):
        return _decoder(lse_dtype=q.dtype)(q, *args)

    return planned_decode


@mistake("merging", fails=["test_items_are_merged", "test_uneven_items"])
def parts_lse_in_float16():
    """The parts' lse were kept in float16, which has three digits, and an error in an lse is one in a weight: keep them
    in float32.
    """
    return _decoder(change={"lse": torch.float16})


@mistake("merging", fails=["test_lse_of_nothing"], seen=["aiter#3641"])
def lse_of_nothing_0():
    """The merge skips sequences without items and leaves an lse of 0, the weight of one token: the lse of nothing is
    -inf.
    """
    return _decoder("empty rows skipped")


@mistake("merging", fails=["test_partial_results_past_int32"], seen=["sglang#28788"], lane="gpu", tells=False)
def offset_of_parts_in_int32():
    """tl.program_id is an int32, and item · Hq · D wraps at 2^31: program_id(0).to(tl.int64) first."""
    return _decoder("item in int32")


@mistake("merging", fails=["test_a_long_list", "test_partial_results_past_int32"], lane="gpu", tells=False)
def items_on_the_grids_short_axis():
    """A grid has room for 65,535 programs on its second axis and for 2^31 on its first: put the items on the first."""
    return _decoder("items on the short axis")


# planned_decode: one list, many calls


@mistake("capture", fails=["test_copied_into"], tells=False)
def list_kept_from_the_first_call():
    """A copy of the list was kept by the address of its tensors, and the next plan is copied to the same address: read
    the list every time.
    """
    kept: dict[int, tuple[WorkList, WorkList]] = {}

    def planned_decode(q, k_cache, v_cache, block_tables, work, *args):
        copy = WorkList(*(x.clone() for x in work))
        _, first = kept.setdefault(work.row_ptr.data_ptr(), (work, copy))
        return _decoder()(q, k_cache, v_cache, block_tables, first, *args)

    return planned_decode


@mistake("capture", fails=["test_copied_into"], tells=False)
def parts_of_the_step_before():
    """The partial results lie in one buffer, and past row_ptr[B] it still holds a longer plan's, which were merged for
    padding's sequence 0: end at row_ptr.
    """
    buffers: dict = {}

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        _check(q, k_cache, v_cache, block_tables, work)
        shape, like = (len(work.seq), *q.shape[1:]), {"device": q.device}
        key = work.row_ptr.data_ptr()
        fresh = work, torch.zeros(shape, **like), torch.full(shape[:2], -math.inf, **like)
        _, *parts = buffers.setdefault(key, fresh)
        _parts(q, k_cache, v_cache, block_tables, work, _scale(q, sm_scale), into=parts)
        o, lse = _merged(parts, work, q.dtype, "all of its items")
        return (o, lse) if return_lse else o

    return planned_decode


@mistake("capture", fails=["test_one_plan_for_all_layers"], tells=False)
def one_o_for_every_layer():
    """o is one buffer that every call writes, so the next layer overwrites what this one returned: allocate it in each
    call.
    """
    buffers: dict = {}

    def planned_decode(*args):
        result = _decoder()(*args)
        o = result[0] if isinstance(result, tuple) else result
        if (o.shape, o.dtype) not in buffers:
            buffers[o.shape, o.dtype] = o
        kept = buffers[o.shape, o.dtype].copy_(o)
        return (kept, result[1]) if isinstance(result, tuple) else kept

    return planned_decode


@mistake("capture", fails=["test_one_plan_for_all_layers"], tells=False)
def first_layers_answer_kept():
    """The answer was kept by the work list, which all layers share: each has its own q and caches, so compute it each
    time.
    """
    answers: dict = {}

    def planned_decode(q, k_cache, v_cache, block_tables, work, *args):
        key = work.row_ptr.data_ptr()
        if key not in answers:
            answers[key] = work, _decoder()(q, k_cache, v_cache, block_tables, work, *args)
        return answers[key][1]

    return planned_decode


@mistake("capture", fails=["test_nothing_is_read_on_the_host"], tells=False)
def items_counted_on_the_host():
    """row_ptr[-1].item() sizes the grid, but it waits for the GPU, in every layer, and cannot be captured: launch for
    padding too.
    """

    def planned_decode(q, k_cache, v_cache, block_tables, work, *args):
        n = max(1, int(work.row_ptr[-1].item()))
        items = WorkList(work.seq[:n], work.start[:n], work.end[:n], work.row_ptr)
        return _decoder()(q, k_cache, v_cache, block_tables, items, *args)

    return planned_decode


@mistake("capture", fails=["test_one_item_each", "test_one_plan_for_all_layers"], tells=False)
def q_multiplied_in_place():
    """q was multiplied by the scale where it lies, and the caller still has it: scale the logits in the kernel."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        _check(q, k_cache, v_cache, block_tables, work)
        q.mul_(_scale(q, sm_scale))
        return _decoder()(q, k_cache, v_cache, block_tables, work, 1.0, return_lse)

    return planned_decode


@mistake("capture", fails=["test_padding", "test_one_plan_for_all_layers"], tells=False)
def padding_marked_in_the_list():
    """Padding was marked with -1 in the caller's list, which every layer uses: compare start and end in the kernel."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, *args):
        result = _decoder()(q, k_cache, v_cache, block_tables, work, *args)
        work.seq.masked_fill_(work.start >= work.end, -1)
        return result

    return planned_decode


# planned_decode: what must be refused


@mistake("host-checks", fails=["test_refuses"])
def row_ptr_of_any_integer():
    """seq, start and end were checked to be int32, and row_ptr, which cumsum leaves in int64, was not: check all
    four.
    """
    return _decoder(skip=["row_ptr's dtype"])


@mistake("host-checks", fails=["test_refuses"])
def other_lists_converted():
    """int64 lists were converted, a copy in every layer, and a graph would go on reading the copy: refuse them."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, *args):
        work = WorkList(work.seq.int(), work.start.int(), work.end.int(), work.row_ptr)
        return _decoder()(q, k_cache, v_cache, block_tables, work, *args)

    return planned_decode


@mistake("host-checks", fails=["test_refuses"])
def lists_of_any_integer():
    """int64 lists were taken, but what is copied into a captured graph's tensors must have their dtype: refuse all but
    int32.
    """
    return _decoder(skip=["lists' dtype", "row_ptr's dtype"])


@mistake("host-checks", fails=["test_refuses"])
def row_ptr_long_enough():
    """row_ptr was only checked to be long enough, and one of more sequences than q has is of another batch: compare
    with ==.
    """

    def planned_decode(q, k_cache, v_cache, block_tables, work, *args):
        assert len(work.row_ptr) >= len(q) + 1, "work.row_ptr must have B + 1 entries"
        return _decoder(skip=["row_ptr's length"])(q, k_cache, v_cache, block_tables, work, *args)

    return planned_decode


@mistake("host-checks", fails=["test_refuses"])
def row_ptr_of_another_batch():
    """row_ptr was not held against q: with B + 1 entries it is of this batch, with more or fewer of another one."""
    return _decoder(skip=["row_ptr's length"])


@mistake("host-checks", fails=["test_refuses"])
def lists_of_several_lengths():
    """The grid has the length of seq, and a shorter start or end is read past its last entry: compare all three."""
    return _decoder(skip=["lists' length"])


@mistake("host-checks", fails=["test_refuses"])
def one_entry_of_each_list_asked():
    """x[:1].is_contiguous() asks a single entry of a list, which is always dense: ask the whole list."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, *args):
        assert all(x[:1].is_contiguous() for x in work), "work's lists must be dense"
        return _decoder(skip=["lists dense"])(q, k_cache, v_cache, block_tables, work, *args)

    return planned_decode


@mistake("host-checks", fails=["test_refuses"])
def table_of_one_dimension():
    """A flat table passed for one page a sequence, and longer sequences would read their neighbours' pages: refuse all
    but [B, W].
    """

    def planned_decode(q, k_cache, v_cache, block_tables, *args):
        table = block_tables if block_tables.dim() == 2 else block_tables[:, None]
        return _decoder()(q, k_cache, v_cache, table, *args)

    return planned_decode


@mistake("host-checks", fails=["test_refuses"])
def rows_of_q_taken_as_dense():
    """Only q's row stride reaches the kernel, so gaps within a row are read as values: refuse rows with gaps."""
    return _decoder(skip=["q rows"])


@mistake("host-checks", fails=["test_refuses"])
def batches_not_compared():
    """q has fewer rows than there are sequences, and what lies behind them was read: compare q, the table and
    row_ptr.
    """

    def planned_decode(q, k_cache, v_cache, block_tables, work, *args):
        assert len(block_tables) == len(work.row_ptr) - 1, "block_tables and work.row_ptr must be of one batch"
        return _decoder(skip=["table rows", "row_ptr's length"])(q, k_cache, v_cache, block_tables, work, *args)

    return planned_decode


@mistake("host-checks", fails=["test_refuses"])
def heads_not_divided():
    """Hq // Hkv of 3 and 2 is 1, and the third query head got no answer: refuse a remainder."""
    return _decoder(skip=["heads"])


@mistake("host-checks", fails=["test_refuses"])
def caches_of_another_width():
    """q's head dim was used for the caches too, whose rows are of another width: compare them."""
    return _decoder(skip=["head dim"])


@mistake("host-checks", fails=["test_refuses"])
def sizes_of_caches_compared():
    """v_cache was checked against k_cache in all but its number of pages, and is read past its end: compare the whole
    shapes.
    """

    def planned_decode(q, k_cache, v_cache, *args):
        assert v_cache.shape[1:] == k_cache.shape[1:], "v_cache must have k_cache's shape"
        return _decoder(skip=["one cache shape"])(q, k_cache, v_cache, *args)

    return planned_decode


@mistake("host-checks", fails=["test_refuses"])
def v_cache_of_its_own_dtype():
    """k_cache's dtype was compared with q's and v_cache's was not: compare both, for their bytes are read as one
    dtype.
    """

    def planned_decode(q, k_cache, v_cache, *args):
        return _decoder(skip=["v dtype"])(q, k_cache, v_cache, *args)

    return planned_decode


@mistake("host-checks", fails=["test_refuses"])
def q_of_the_caches_dtype():
    """q of another dtype than the caches was converted, a copy in every layer that nobody asked for: refuse it."""

    def planned_decode(q, k_cache, *args):
        return _decoder()(q.to(k_cache.dtype), k_cache, *args)

    return planned_decode


@mistake("host-checks", fails=["test_refuses"])
def only_v_cache_dense():
    """v_cache is checked to be contiguous and k_cache is not: kv[:, 0] is as strided as kv[:, 1], check both."""
    return _decoder(skip=["k dense"])


@mistake("host-checks", fails=["test_refuses"])
def only_k_cache_dense():
    """k_cache is checked to be contiguous and v_cache is not: kv[:, 1] is as strided as kv[:, 0], check both."""
    return _decoder(skip=["v dense"])


@mistake("host-checks", fails=["test_refuses"])
def caches_copied_in_every_layer():
    """A strided cache was made contiguous, a copy of the whole cache in every layer: refuse it."""

    def planned_decode(q, k_cache, v_cache, *args):
        return _decoder()(q, k_cache.contiguous(), v_cache.contiguous(), *args)

    return planned_decode


@mistake("host-checks", fails=["test_refuses"])
def block_table_of_any_integer():
    """An int64 table was taken, which is twice the reads and not what was asked for: refuse all but int32."""
    return _decoder(skip=["table dtype"])


@mistake("host-checks", fails=["test_refuses"])
def a_table_of_fewer_rows():
    """The table has fewer rows than q, and what lies behind them was read as page ids: compare the numbers of rows."""
    return _decoder(skip=["table rows"])


@mistake("host-checks", fails=["test_refuses"])
def block_table_with_gaps():
    """Only the table's row stride reaches the kernel, so gaps within a row are read as page ids: refuse such a
    table.
    """
    return _decoder(skip=["table dense"])


@mistake("host-checks", fails=["test_refuses_lists_on_the_cpu"], lane="gpu", tells=False)
def lists_copied_to_the_gpu():
    """A list on the CPU was copied to the GPU, in every layer: move it once a step, and refuse it here."""

    def planned_decode(q, k_cache, v_cache, block_tables, work, *args):
        work = WorkList(*(x.to(q.device) for x in work))
        return _decoder()(q, k_cache, v_cache, block_tables, work, *args)

    return planned_decode
