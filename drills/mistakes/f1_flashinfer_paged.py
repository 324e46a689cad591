"""F1's mistakes: pages that are not the sequence's, plans of another step, and kernels that wait or overrun.

Each is right but for what its lesson says. What several of them share stands first, and is right.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from drills.mistakes import mistake


def live_pages(block_tables, context_lens, page_size, skip=None):
    """(pages of each row, mask of the table's live part), after every check but the one called `skip`."""
    B, W = block_tables.shape
    assert skip == "page size" or page_size >= 1, "page_size must be at least 1"
    assert skip == "rows" or context_lens.shape == (B,), "context_lens must have one entry a row"
    assert skip == "lengths" or (context_lens >= 1).all(), "context_lens must be at least 1"
    pages = (context_lens - 1) // page_size + 1
    assert skip == "width" or (pages <= W).all(), "block_tables has too few columns"
    live = torch.arange(W, device=pages.device) < pages[:, None]
    assert skip == "ids" or not (live & (block_tables < 0)).any(), "block_tables has a negative page id in use"
    return pages, live


def starts(pages):
    return torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()


def in_last_page(context_lens, pages, page_size):
    return (context_lens - (pages - 1) * page_size).int()


# block_table_to_csr


@mistake("csr", fails=["test_last_page"], seen=["flashinfer#2896"])
def last_page_by_remainder():
    """ctx % page_size is 0 where the last page is full: use ctx - (pages - 1) · page_size, or (ctx - 1) %
    page_size + 1.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        return starts(pages), block_tables[live].int(), (context_lens % page_size).int()

    return block_table_to_csr


@mistake("csr", fails=["test_worked_example", "test_last_page"], seen=["flashinfer#2079"])
def last_page_from_the_page_count():
    """The number of pages went into the formula meant for the number of tokens: (ctx - 1) % page_size + 1 is
    about tokens.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        return starts(pages), block_tables[live].int(), ((pages - 1) % page_size + 1).int()

    return block_table_to_csr


@mistake("csr", fails=["test_last_page", "test_permuted_pages"])
def one_page_too_many():
    """ctx // page_size + 1 adds a page where the last one is exactly full: round up, (ctx - 1) // page_size + 1."""

    def block_table_to_csr(block_tables, context_lens, page_size):
        live_pages(block_tables, context_lens, page_size)
        pages = context_lens // page_size + 1
        live = torch.arange(block_tables.shape[1], device=pages.device) < pages[:, None]
        return starts(pages), block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr", fails=["test_worked_example", "test_last_page", "test_permuted_pages"])
def last_page_left_out():
    """ctx // page_size counts only the full pages, and the newest tokens are in the one it leaves out: round up."""

    def block_table_to_csr(block_tables, context_lens, page_size):
        live_pages(block_tables, context_lens, page_size)
        pages = context_lens // page_size
        live = torch.arange(block_tables.shape[1], device=pages.device) < pages[:, None]
        return starts(pages), block_tables[live].int(), ((context_lens - 1) % page_size + 1).int()

    return block_table_to_csr


@mistake("csr", fails=["test_worked_example", "test_permuted_pages", "test_ragged_batch"], seen=["sglang#24587"])
def indptr_of_tokens():
    """indptr adds up tokens, as the ragged layout of prefill does, but indices holds pages: add up the pages of
    each row.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        return starts(context_lens), block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr", fails=["test_worked_example", "test_last_page"])
def indptr_without_its_0():
    """cumsum alone gives where each sequence ends: indptr has B + 1 entries, and the first is 0."""

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        return pages.cumsum(0).int(), block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr", fails=["test_worked_example", "test_permuted_pages", "test_ragged_batch"])
def pages_column_by_column():
    """The live entries are taken down the columns, first pages first: CSR goes row by row, and so does
    table[mask].
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        return starts(pages), block_tables.T[live.T].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr", fails=["test_worked_example", "test_a_wider_table"])
def padding_kept():
    """The whole rectangle goes into indices, padding included: what lies past a row's live part is in no
    sequence, mask it out.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, _ = live_pages(block_tables, context_lens, page_size)
        return starts(pages), block_tables.flatten().int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr", fails=["test_ragged_batch", "test_a_wider_table"])
def minus_one_taken_for_the_end():
    """A row is taken to end at its first -1, but stale ids or any number may stand there: only context_lens
    says where it ends.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        live_pages(block_tables, context_lens, page_size)
        live = (block_tables >= 0).cumprod(1).bool()
        return starts(live.sum(1)), block_tables[live].int(), ((context_lens - 1) % page_size + 1).int()

    return block_table_to_csr


@mistake("csr", fails=["test_worked_example", "test_permuted_pages"])
def pages_taken_as_consecutive():
    """Page ids are counted up from each row's first, which holds in a fresh cache or a test with pages 0, 1, 2:
    read every entry.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        ids = block_tables[:, :1] + torch.arange(block_tables.shape[1], device=pages.device)
        return starts(pages), ids[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_worked_example", "test_always_int32"], seen=["pytorch#53360"])
def indptr_of_int64():
    """cumsum of int32 is int64 in PyTorch, and plan() refuses an indptr that is not int32: bring it back with
    .int().
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0))
        return indptr, block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_always_int32"], seen=["flashinfer#725"])
def the_callers_dtypes_kept():
    """indices and last_page_len come out as int64 where the table or the lengths were, which plan() does not
    notice: convert all three to int32.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        return starts(pages), block_tables[live], context_lens - (pages - 1) * page_size

    return block_table_to_csr


@mistake("csr-edges", fails=["test_worked_example", "test_permuted_pages", "test_always_int32"])
def a_strided_last_page_len():
    """A column of a stacked tensor has gaps between its entries, and FlashInfer takes a bare pointer: return
    contiguous tensors.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        both = torch.stack([pages, context_lens - (pages - 1) * page_size], dim=1).int()
        return starts(both[:, 0]), block_tables[live].int(), both[:, 1]

    return block_table_to_csr


@mistake("csr-edges", fails=["test_a_table_that_is_a_view"])
def a_table_taken_as_dense():
    """Entry (b, c) is looked for at b · W + c, but the rows of a table cut out of a larger one lie further
    apart: index by row and column.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        dense = block_tables.as_strided(block_tables.shape, (block_tables.shape[1], 1))
        return starts(pages), dense[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_an_empty_batch"])
def the_longest_of_none():
    """pages.max() has no answer for a batch of no sequences: compare all of them, (pages <= W).all() is true of
    none.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        assert pages.max() <= block_tables.shape[1], "block_tables has too few columns"
        return starts(pages), block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_vectorised"], tells=False)
def a_loop_over_sequences():
    """Slicing and concatenating row by row costs a few operations a sequence in every step: one mask takes all
    the rows.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, _ = live_pages(block_tables, context_lens, page_size)
        rows = [row[:count] for row, count in zip(block_tables, pages)]
        indices = torch.cat(rows) if rows else block_tables.flatten()
        return starts(pages), indices.int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_vectorised"], tells=False, seen=["sglang#8340"])
def csr_built_from_lists():
    """.tolist() brings the whole table to the host, which waits for the GPU, and then back: stay in tensors."""

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, _ = live_pages(block_tables, context_lens, page_size)
        indices = [page for row, count in zip(block_tables.tolist(), pages.tolist()) for page in row[:count]]
        indices = torch.tensor(indices, dtype=torch.int32, device=pages.device)
        return starts(pages), indices, in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_worked_example", "test_a_wider_table"], tells=False)
def the_callers_table_cleaned():
    """The padding is zeroed in the caller's own table: it is the scheduler's, and the next step reads it too,
    so mask what you read.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size)
        block_tables[~live] = 0
        return starts(pages), block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_csr_refuses"], seen=["sglang#1779"])
def length_0_let_through():
    """A row of length 0 comes out with no pages and a full last page, and attention over nothing has no answer:
    refuse it and name the row.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        assert (context_lens >= 0).all(), "context_lens must not be negative"
        pages, live = live_pages(block_tables, context_lens, page_size, skip="lengths")
        return starts(pages), block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_csr_refuses"])
def negative_length_let_through():
    """A length below 0 comes out as less than no pages, and context_lens.all() does not find it: compare,
    (context_lens >= 1).all().
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        assert context_lens.all(), "context_lens must not be 0"
        pages, live = live_pages(block_tables, context_lens, page_size, skip="lengths")
        return starts(pages), block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_csr_refuses"])
def lengths_raised_to_1():
    """clamp(min=1) invents a token for a row that has none, and what lies in the padding becomes its page:
    refuse such a row.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        context_lens = context_lens.clamp(min=1)
        pages, live = live_pages(block_tables, context_lens, page_size)
        return starts(pages), block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_csr_refuses"], seen=["flashinfer#4365"])
def narrow_table_cut_short():
    """A mask as wide as the table silently drops the pages that it has no column for, while indptr counts them:
    compare with W first.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size, skip="width")
        return starts(pages), block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_csr_refuses"])
def negative_page_let_through():
    """A page id below 0 in the live part is a page that was never allocated, and the kernel reads before the
    pool: refuse it.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size, skip="ids")
        return starts(pages), block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_csr_refuses"])
def live_minus_one_dropped():
    """Dropping every -1 also drops one in the live part, and all later pages move up a place: there it is an
    error, not padding.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size, skip="ids")
        indices = block_tables[live & (block_tables != -1)].int()
        assert (indices >= 0).all(), "block_tables has a negative page id in use"
        return starts(pages), indices, in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_csr_refuses"])
def lengths_broadcast_over_rows():
    """One length for two rows, or two for one, broadcast without an error and come out as another batch:
    compare the shapes.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size, skip="rows")
        return starts(pages), block_tables.masked_select(live).int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_csr_refuses"])
def any_page_size():
    """page_size goes unchecked: 0 ends in a ZeroDivisionError from inside of PyTorch, a negative one in a
    negative number of pages.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables, context_lens, page_size, skip="page size")
        return starts(pages), block_tables[live].int(), in_last_page(context_lens, pages, page_size)

    return block_table_to_csr


@mistake("csr-edges", fails=["test_vectorised"], tells=False)
def results_on_the_host():
    """The arithmetic is done on the CPU and its results stay there: the kernels need them on the device of the
    inputs.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages, live = live_pages(block_tables.cpu(), context_lens.cpu(), page_size)
        return starts(pages), block_tables.cpu()[live].int(), in_last_page(context_lens.cpu(), pages, page_size)

    return block_table_to_csr


@mistake("csr", fails=["test_worked_example", "test_last_page", "test_always_int32", "test_csr_refuses"])
def zeros_for_csr():
    """Three tensors of zeros in the right shapes are no conversion: fill indptr first, the other two follow
    from it.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        B, pages = len(block_tables), int(((context_lens - 1) // page_size + 1).sum())
        return tuple(torch.zeros(n, dtype=torch.int32, device=block_tables.device) for n in (B + 1, pages, B))

    return block_table_to_csr


@mistake("csr", fails=["test_worked_example", "test_last_page", "test_an_empty_batch", "test_csr_refuses"])
def the_arguments_returned():
    """The block table and the lengths come back as they went in: compute indptr, indices and last_page_len from
    them.
    """

    def block_table_to_csr(block_tables, context_lens, page_size):
        return block_tables, context_lens, page_size

    return block_table_to_csr


@mistake("csr", fails=["test_worked_example", "test_last_page", "test_vectorised"], tells=False)
def the_reference_called():
    """The answer is imported from the solutions, which the suite does not let an implementation reach: write it."""

    def block_table_to_csr(block_tables, context_lens, page_size):
        from drills.solutions import f1_flashinfer_paged

        return f1_flashinfer_paged.block_table_to_csr(block_tables, context_lens, page_size)

    return block_table_to_csr


# csr_to_block_table


def row_pages(indptr, indices, last_page_len, page_size, max_blocks, skip=None):
    """(pages of each row, columns of the table), after every check but the one called `skip`."""
    B = len(last_page_len)
    assert page_size >= 1, "page_size must be at least 1"
    assert skip == "length" or len(indptr) == B + 1, "indptr must be one longer than last_page_len"
    assert skip == "start" or indptr[0] == 0, "indptr must start at 0"
    assert skip == "end" or indptr[-1] == len(indices), "indptr must end at len(indices)"
    pages = indptr.diff()
    assert skip == "pages" or (pages >= 1).all(), "indptr must increase"
    assert skip == "last" or ((last_page_len >= 1) & (last_page_len <= page_size)).all(), "last_page_len out of range"
    widest = int(pages.max()) if B else 0
    W = widest if max_blocks is None else max_blocks
    assert skip == "max_blocks" or widest <= W, "max_blocks is too small"
    return pages, W


def table_of(indptr, indices, pages, W, padding=0):
    column = torch.arange(W, device=indptr.device)
    at = (indptr[:-1, None] + column).clamp(max=len(indices) - 1)
    return torch.where(column < pages[:, None], indices[at.long()], padding).int()


def tokens(pages, last_page_len, page_size):
    return ((pages - 1) * page_size + last_page_len).int()


@mistake("way-back", fails=["test_way_back", "test_max_blocks"])
def last_page_counted_full():
    """pages · page_size takes the last page as full: it holds last_page_len tokens, (pages - 1) · page_size +
    last_page_len.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks)
        return table_of(indptr, indices, pages, W), (pages * page_size).int()

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back", "test_one_page"])
def last_page_counted_twice():
    """pages · page_size + last_page_len counts the last page as full and once more as it is: only the pages
    before it are full.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks)
        return table_of(indptr, indices, pages, W), (pages * page_size + last_page_len).int()

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back", "test_max_blocks"], seen=["Megatron-LM#5950"])
def padded_with_minus_one():
    """Padding of -1 is an address before the pool for a kernel that loads a page too many: pad with 0, a page
    that exists.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks)
        return table_of(indptr, indices, pages, W, padding=-1), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back", "test_max_blocks"])
def padding_from_the_next_row():
    """Every row is cut W wide from indices, so a short one runs on into the next sequence's pages: mask the
    columns past its own.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks)
        return table_of(indptr, indices, pages.new_full(pages.shape, W), W), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_max_blocks", "test_round_trips"])
def max_blocks_ignored():
    """The table is as wide as its longest row whatever was asked for: a captured graph needs the width it was
    captured with.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, _ = row_pages(indptr, indices, last_page_len, page_size, max_blocks)
        widest = int(pages.max()) if len(pages) else 0
        return table_of(indptr, indices, pages, widest), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back"])
def as_wide_as_all_pages():
    """len(indices) columns hold every page of the batch in each row: the longest row's, indptr.diff().max(), is
    all it takes.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks)
        W = len(indices) if max_blocks is None else W
        return table_of(indptr, indices, pages, W), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back", "test_round_trips"])
def filled_column_by_column():
    """The pages are laid down the columns, but CSR lists them row by row: table[mask] = indices fills in that
    order.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks)
        table = torch.zeros(W, len(pages), dtype=torch.int32, device=indptr.device)
        table[torch.arange(W, device=indptr.device)[:, None] < pages] = indices.int()
        return table.T.contiguous(), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back"])
def int64_goes_through():
    """The table and the lengths keep the int64 of the CSR: both are int32 here whatever came in."""

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks)
        table = table_of(indptr, indices, pages, W)
        return table.to(indices.dtype), (pages - 1) * page_size + last_page_len

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back_of_nothing"])
def the_widest_of_none():
    """indptr.diff().max() has no answer for a batch of no sequences: their table has no columns either."""

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        max_blocks = int(indptr.diff().max()) if max_blocks is None else max_blocks
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks)
        return table_of(indptr, indices, pages, W), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back_vectorised"], tells=False)
def a_row_at_a_time():
    """Copying one row after another costs a few operations and two host reads a sequence: one gather or one
    mask does all.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks)
        table = torch.zeros(len(pages), W, dtype=torch.int32, device=indptr.device)
        for row, start, end in zip(table, indptr, indptr[1:]):
            row[: end - start] = indices[start:end]
        return table, tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back_refuses"])
def any_start():
    """An indptr that starts at 1 leaves a page to no sequence: it is the slice of another batch's, so refuse it."""

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks, skip="start")
        return table_of(indptr, indices, pages, W), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back_refuses"])
def any_end():
    """indptr need not end at len(indices): short of it pages belong to nobody, past it they are read from other
    memory.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks, skip="end")
        return table_of(indptr, indices, pages, W), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back_refuses"], seen=["flashinfer#362"])
def indptr_of_any_length():
    """An indptr of another batch's length fails deep in the arithmetic, or broadcasts: compare it with B + 1
    first.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks, skip="length")
        return table_of(indptr, indices, pages, W), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back_refuses"])
def a_sequence_of_negative_length():
    """(pages - 1) · page_size + last_page_len is below 0 for a row without pages: every sequence has at least
    one, refuse it.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        assert (indptr.diff() >= 0).all(), "indptr must not decrease"
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks, skip="pages")
        return table_of(indptr, indices, pages, W), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back_refuses"])
def a_falling_indptr():
    """Where indptr falls a row has fewer than no pages, and its neighbour some that are not its own: check
    indptr.diff() >= 1.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks, skip="pages")
        return table_of(indptr, indices, pages, W), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back_refuses"], seen=["flashinfer#320"])
def more_tokens_than_a_page_holds():
    """A last_page_len above page_size is a length that the pages cannot hold, and the kernel reads on past the
    page: refuse it.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        assert (last_page_len >= 1).all(), "last_page_len must be at least 1"
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks, skip="last")
        return table_of(indptr, indices, pages, W), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back_refuses"], seen=["flashinfer#2896"])
def an_empty_last_page():
    """A last_page_len of 0 is the trace of ctx % page_size, and a token is lost for each: it is in
    1..page_size, refuse others.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        assert (last_page_len <= page_size).all(), "last_page_len must be at most page_size"
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks, skip="last")
        return table_of(indptr, indices, pages, W), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back_refuses"])
def long_rows_cut_off():
    """With fewer columns than a row has pages its last pages vanish while its length still counts them: refuse
    the max_blocks.
    """

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages, W = row_pages(indptr, indices, last_page_len, page_size, max_blocks, skip="max_blocks")
        return table_of(indptr, indices, pages, W), tokens(pages, last_page_len, page_size)

    return csr_to_block_table


@mistake("way-back", fails=["test_way_back", "test_one_page", "test_way_back_refuses"])
def zeros_for_a_table():
    """A table of zeros says that every sequence lies in page 0: the page ids are in indices, from indptr[b] on."""

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        pages = indptr.diff()
        W = (int(pages.max()) if len(pages) else 0) if max_blocks is None else max_blocks
        return indices.new_zeros(len(pages), W).int(), pages.int() * 0

    return csr_to_block_table


# flashinfer_decode


def decode_csr(q, k_cache, v_cache, block_tables, context_lens, skip=None):
    """The CSR of one decode step, after every check but the one called `skip`."""
    (B, Hq, D), (NB, page_size, Hkv, _) = q.shape, k_cache.shape
    assert skip == "gaps" or q.stride(-1) == 1, "q must be dense in its last dimension"
    assert k_cache.shape == v_cache.shape, "k_cache and v_cache must agree"
    assert skip == "v dtype" or k_cache.dtype == v_cache.dtype, "k_cache and v_cache must agree"
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "the caches must be contiguous"
    assert len(block_tables) == B, "q must have a row a sequence"
    assert q.dtype == k_cache.dtype, "q and k_cache must agree"
    assert k_cache.shape[3] == D and Hq % Hkv == 0, "q's heads do not fit the cache"
    pages, live = live_pages(block_tables, context_lens, page_size)
    indices = block_tables[live].int()
    assert (indices < NB).all(), "block_tables names a page past the pool"
    return starts(pages), indices, in_last_page(context_lens, pages, page_size)


@functools.cache
def workspace(device, size):
    return torch.zeros(size, dtype=torch.uint8, device=device)


def wrapper_for(q, k_cache, layout="NHD", room=128 << 20):
    import flashinfer

    tensor_cores = q.shape[1] // k_cache.shape[2] not in (1, 2, 3, 4, 6, 8, 16)
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(q.device, room), layout, use_tensor_cores=tensor_cores
    )


def sizes(q, k_cache):
    """Query heads, KV heads, head dimension, page size: what plan() takes after the CSR."""
    return q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1]


def plan_it(wrapper, csr, q, k_cache, **keywords):
    wrapper.plan(*csr, *sizes(q, k_cache), q_data_type=q.dtype, kv_data_type=k_cache.dtype, **keywords)
    return wrapper


def planned(q, k_cache, v_cache, block_tables, context_lens):
    """A wrapper planned right."""
    csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
    return plan_it(wrapper_for(q, k_cache), csr, q, k_cache)


def softmax_by_hand(q, k_cache, v_cache, csr):
    """(o, lse to base 2) in PyTorch, a sequence at a time."""
    indptr, indices, last_page_len = csr
    outs, lses = [], []
    for b, last in enumerate(last_page_len.tolist()):
        pages = indices[indptr[b] : indptr[b + 1]].long()
        length = (len(pages) - 1) * k_cache.shape[1] + last
        group = q.shape[1] // k_cache.shape[2]
        k, v = (c[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for c in (k_cache, v_cache))
        logits = torch.einsum("hd,nhd->hn", q[b].float(), k) / math.sqrt(q.shape[2])
        outs.append(torch.einsum("hn,nhd->hd", logits.softmax(1), v))
        lses.append(logits.logsumexp(1) / math.log(2))
    return torch.stack(outs).to(q.dtype), torch.stack(lses)


@mistake("plan-run", fails=["test_decode_dtypes"], seen=["flashinfer#638"])
def planned_as_float16():
    """plan() takes q as float16 unless it is told otherwise, whatever run() gets: pass it q_data_type and
    kv_data_type.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        wrapper = wrapper_for(q, k_cache)
        wrapper.plan(*csr, *sizes(q, k_cache))
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", lane="cpu", fails=["test_decode", "test_decode_dtypes", "test_one_sequence"], seen=["vllm#34687"])
def planned_by_position():
    """What plan() takes after page_size has moved between releases, so a position may mean another argument in
    the next: name them.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        wrapper = wrapper_for(q, k_cache)
        wrapper.plan(*csr, *sizes(q, k_cache), "NONE", -1, None, q.dtype, k_cache.dtype)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_decode", "test_as_many_heads_as_page_slots"], seen=["vllm#38895"])
def a_layout_of_hnd():
    """The wrapper is made for HND, [pages, heads, page_size, D], and the cache is NHD: with as many heads as
    tokens a page nothing notices.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        wrapper = plan_it(wrapper_for(q, k_cache, "HND"), csr, q, k_cache)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_one_sequence", "test_decode_groups", "test_a_skewed_batch"])
def a_shape_read_as_hnd():
    """k_cache.shape is taken apart as [NB, Hkv, page_size, D], so plan() gets heads for tokens: here it is [NB,
    page_size, Hkv, D].
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        Hkv, page_size = k_cache.shape[1:3]
        wrapper, dtypes = wrapper_for(q, k_cache), {"q_data_type": q.dtype, "kv_data_type": k_cache.dtype}
        wrapper.plan(*csr, q.shape[1], Hkv, q.shape[2], page_size, **dtypes)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_decode", "test_decode_groups", "test_as_many_heads_as_page_slots"])
def query_and_kv_heads_swapped():
    """plan() takes the query heads first and the KV heads second; the other way round works only where there
    are as many of both.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        wrapper, dtypes = wrapper_for(q, k_cache), {"q_data_type": q.dtype, "kv_data_type": k_cache.dtype}
        wrapper.plan(*csr, k_cache.shape[2], q.shape[1], q.shape[2], k_cache.shape[1], **dtypes)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_decode_groups"], seen=["flashinfer#996"])
def no_tensor_cores():
    """Without tensor cores decode is compiled for some group sizes only, and 5 or 7 query heads a KV head are
    not among them: use_tensor_cores.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        import flashinfer

        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(q.device, 128 << 20), "NHD")
        plan_it(wrapper, csr, q, k_cache)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_many_pages"], seen=["vllm#25342"])
def a_workspace_of_a_kilobyte():
    """The workspace holds the partial outputs of sequences that are split, so a small one is enough until one
    is long: 128 MiB is usual.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        wrapper = plan_it(wrapper_for(q, k_cache, room=1024), csr, q, k_cache)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_lengths_of_int64"], seen=["flashinfer#725"])
def a_plan_of_int64():
    """int64 lengths go on to plan() as last_page_len, and the real one notices in run() or not at all: make all
    of the CSR int32.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        indptr, indices, last = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        csr = indptr, indices.to(block_tables.dtype), last.to(context_lens.dtype)
        return plan_it(wrapper_for(q, k_cache), csr, q, k_cache).run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_decode", "test_lse_to_base_2", "test_lse"])
def scaled_twice():
    """q is divided by sqrt(D) beforehand, and FlashInfer does it again: leave q as it is, its sm_scale is
    1/sqrt(D) by default.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        return wrapper.run(q / math.sqrt(q.shape[2]), (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_one_sequence"])
def scaled_for_another_head_dim():
    """The scale is that of one model's heads, written down as a number: take it from q.shape[-1], or leave it
    to FlashInfer.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        wrapper = plan_it(wrapper_for(q, k_cache), csr, q, k_cache, sm_scale=0.125)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_decode", "test_decode_groups"])
def k_and_v_swapped():
    """run() takes the caches as (k, v): the other way round it attends to the values and returns a mixture of
    keys.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        return wrapper.run(q, (v_cache, k_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_lse_to_base_2", "test_lse"], seen=["flashinfer#2113", "sglang#35045"])
def lse_made_natural():
    """The lse is multiplied by ln 2, and FlashInfer's merge, which is to base 2, then weighs the parts wrongly:
    return it as it comes.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        o, lse = wrapper.run(q, (k_cache, v_cache), return_lse=True)
        return (o, lse * math.log(2)) if return_lse else o

    return flashinfer_decode


@mistake("plan-run", fails=["test_lse_to_base_2", "test_lse"])
def lse_of_the_outputs_dtype():
    """In bfloat16 an lse of 10 is off by up to 0.03, and the weights of a merge by 2 %: it stays float32,
    whatever o is.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        o, lse = wrapper.run(q, (k_cache, v_cache), return_lse=True)
        return (o, lse.to(q.dtype)) if return_lse else o

    return flashinfer_decode


@mistake("plan-run", fails=["test_lse_to_base_2", "test_lse"])
def lse_first():
    """The pair comes back as (lse, o), but FlashInfer returns (o, lse), and that is how callers unpack it."""

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        o, lse = wrapper.run(q, (k_cache, v_cache), return_lse=True)
        return (lse, o) if return_lse else o

    return flashinfer_decode


@mistake("plan-run", fails=["test_lse_to_base_2", "test_lse"])
def lse_not_returned():
    """return_lse is not passed on, so run() returns o alone: without the lse nobody can merge this with another
    part.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        return planned(q, k_cache, v_cache, block_tables, context_lens).run(q, (k_cache, v_cache))

    return flashinfer_decode


@mistake("plan-run", fails=["test_decode", "test_decode_dtypes", "test_decode_groups"])
def lse_always_returned():
    """A pair comes back whether or not the lse was asked for, and the caller takes it for o: pass return_lse on."""

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        return planned(q, k_cache, v_cache, block_tables, context_lens).run(q, (k_cache, v_cache), return_lse=True)

    return flashinfer_decode


@mistake("plan-run", fails=["test_the_wrapper_runs"], tells=False)
def run_again_for_the_lse():
    """run() is called once for o and once more for the lse, which reads the whole cache twice: one run returns
    both.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        o = wrapper.run(q, (k_cache, v_cache))
        return (o, wrapper.run(q, (k_cache, v_cache), return_lse=True)[1]) if return_lse else o

    return flashinfer_decode


@mistake("plan-run", fails=["test_the_wrapper_runs"], tells=False)
def a_plan_for_each_sequence():
    """Every sequence is planned and run on its own, each alone on the card: the CSR is there so that one plan
    balances them all.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        parts = [
            planned(q[b : b + 1], k_cache, v_cache, block_tables[b : b + 1], context_lens[b : b + 1]).run(
                q[b : b + 1], (k_cache, v_cache), return_lse=True
            )
            for b in range(len(q))
        ]
        o, lse = (torch.cat(part) for part in zip(*parts))
        return (o, lse) if return_lse else o

    return flashinfer_decode


@mistake("plan-run", fails=["test_the_wrapper_runs"], tells=False)
def attention_in_pytorch():
    """The numbers are right but FlashInfer never ran: gathering the pages copies the whole cache that is in
    use, in every step.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        o, lse = softmax_by_hand(q, k_cache, v_cache, csr)
        return (o, lse) if return_lse else o

    return flashinfer_decode


@mistake("silent", lane="cpu", fails=["test_in_a_capture"], tells=False, seen=["flashinfer#3904"])
def errors_answered_with_pytorch():
    """An error of FlashInfer's is caught and the step done in PyTorch, so that nobody hears of a plan inside a
    capture: let it out.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        try:
            wrapper = plan_it(wrapper_for(q, k_cache), csr, q, k_cache)
            return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)
        except RuntimeError:
            o, lse = softmax_by_hand(q, k_cache, v_cache, csr)
            return (o, lse) if return_lse else o

    return flashinfer_decode


@mistake("plan-run", fails=["test_planned_again"], tells=False, seen=["TensorRT-LLM#18769"])
def a_plan_for_the_same_tensors():
    """The plan is kept as long as the tensors are the same ones, but a step changes what is in them: plan again
    in every step.
    """

    plan_once = functools.cache(planned)

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        wrapper = plan_once(q, k_cache, v_cache, block_tables, context_lens)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_planned_again", "test_the_wrapper_runs"], tells=False)
def a_plan_for_the_same_shapes():
    """The plan is kept for batches of the same shape, but it holds the lengths and pages that it was made with:
    plan again in every step.
    """

    plans = {}

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
        key = q.shape, q.dtype, k_cache.shape, block_tables.shape
        if key not in plans:
            plans[key] = plan_it(wrapper_for(q, k_cache), csr, q, k_cache)
        return plans[key].run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("silent", fails=["test_silent"], seen=["vllm#25196"])
def sequences_counted_by_queries():
    """The batch is taken to be as large as q, so sequences without a query are left out in silence: refuse q
    unless len(q) == B.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        block_tables, context_lens = block_tables[: len(q)], context_lens[: len(q)]
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("silent", fails=["test_silent"])
def queries_cut_to_the_batch():
    """q[:B] drops the queries that belong to no sequence, and their callers get fewer outputs than they asked
    for: refuse q.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        q = q[: len(block_tables)]
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("silent", fails=["test_silent"], seen=["InfiniCore#1149"])
def caches_made_contiguous():
    """.contiguous() on a cache copies the whole pool in every layer and step, which costs far more than the
    attention: refuse it.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("silent", fails=["test_silent"])
def dtypes_made_to_agree():
    """Casting the caches to q's dtype copies the whole pool in every step and hides a cache that was allocated
    wrong: refuse it.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        k_cache, v_cache = k_cache.to(q.dtype), v_cache.to(q.dtype)
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("silent", fails=["test_silent"])
def pages_clamped_into_the_pool():
    """A page id outside of the pool is clamped into it, so a sequence attends to somebody else's tokens: refuse
    it.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        block_tables = block_tables.clamp(0, len(k_cache) - 1)
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("silent", fails=["test_silent"])
def lengths_cut_to_the_table():
    """A length that the table has no columns for is cut to what it has, and the newest tokens are not attended
    to: refuse it.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        context_lens = context_lens.clamp(max=block_tables.shape[1] * k_cache.shape[1])
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("silent", fails=["test_silent"])
def empty_sequences_given_a_token():
    """A length of 0 is raised to 1, so an empty row attends to whatever page stands in its padding: refuse it."""

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        context_lens = context_lens.clamp(min=1)
        wrapper = planned(q, k_cache, v_cache, block_tables, context_lens)
        return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("silent", fails=["test_silent"], lane="gpu")
def v_of_any_dtype():
    """Only k_cache's dtype is compared, and FlashInfer then reads v's bits as that type without an error:
    compare both.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens, skip="v dtype")
        return plan_it(wrapper_for(q, k_cache), csr, q, k_cache).run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("silent", fails=["test_a_strided_last_dimension"], lane="gpu")
def gaps_read_as_numbers():
    """FlashInfer takes a row of q for D numbers side by side, whatever stride(-1) says: refuse another stride,
    or call .contiguous().
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens, skip="gaps")
        return plan_it(wrapper_for(q, k_cache), csr, q, k_cache).run(q, (k_cache, v_cache), return_lse=return_lse)

    return flashinfer_decode


@mistake("plan-run", fails=["test_decode", "test_one_sequence", "test_silent"])
def q_returned():
    """q comes back as it went in, with the right shape and dtype: attention is what FlashInfer makes of it and
    the cache.
    """

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        return (q, q[:, :, 0].float()) if return_lse else q

    return flashinfer_decode


@mistake("plan-run", fails=["test_decode", "test_one_sequence", "test_silent"])
def ones_for_attention():
    """The right shape is filled with ones and nothing is computed: run() returns o."""

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        o = torch.ones_like(q, memory_format=torch.contiguous_format)
        return (o, o[:, :, 0].float()) if return_lse else o

    return flashinfer_decode


# flashinfer_decode_layers


def all_alike(qs, kv_caches, block_tables, context_lens):
    """The CSR of a step through all layers, after every check."""
    assert len(qs) == len(kv_caches), "qs and kv_caches must be of one length"
    for q, (k_cache, v_cache) in zip(qs, kv_caches):
        assert q.shape == qs[0].shape and q.dtype == qs[0].dtype, "every layer's q must be like the first's"
        assert k_cache.shape == kv_caches[0][0].shape, "every layer's cache must be like the first's"
        csr = decode_csr(q, k_cache, v_cache, block_tables, context_lens)
    return csr


def planned_for_all(qs, kv_caches, block_tables, context_lens):
    csr = all_alike(qs, kv_caches, block_tables, context_lens)
    return plan_it(wrapper_for(qs[0], kv_caches[0][0]), csr, qs[0], kv_caches[0][0])


@mistake("layers", fails=["test_planned_once"], tells=False, seen=["xllm#534"])
def a_plan_in_every_layer():
    """plan() is called before each run(), and takes longer than the attention it plans: the pages are the same
    in all layers.
    """

    def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
        csr = all_alike(qs, kv_caches, block_tables, context_lens)
        wrapper = wrapper_for(qs[0], kv_caches[0][0])
        return [plan_it(wrapper, csr, q, k).run(q, (k, v)) for q, (k, v) in zip(qs, kv_caches)]

    return flashinfer_decode_layers


@mistake("layers", fails=["test_planned_once"], tells=False)
def a_wrapper_for_every_layer():
    """Each layer constructs a wrapper, with 8 MiB of workspace and 8 MiB of pinned memory of its own: construct
    it once, plan once, run often.
    """

    def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
        all_alike(qs, kv_caches, block_tables, context_lens)
        return [planned(q, k, v, block_tables, context_lens).run(q, (k, v)) for q, (k, v) in zip(qs, kv_caches)]

    return flashinfer_decode_layers


@mistake("layers", fails=["test_layers", "test_layers_planned_right"])
def the_first_layers_cache_in_all():
    """The plan is for the pages and not for the cache: every layer runs on its own (k_cache, v_cache), not on
    that of the first.
    """

    def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
        wrapper = planned_for_all(qs, kv_caches, block_tables, context_lens)
        return [wrapper.run(q, kv_caches[0]) for q in qs]

    return flashinfer_decode_layers


@mistake("layers", fails=["test_layers", "test_layers_planned_right"])
def one_output_for_all_layers():
    """All layers write into the same out, so that the list holds the last layer's numbers as often as there are
    layers: one out each.
    """

    def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
        wrapper = planned_for_all(qs, kv_caches, block_tables, context_lens)
        out = torch.empty_like(qs[0], memory_format=torch.contiguous_format)
        return [wrapper.run(q, kv, out=out) for q, kv in zip(qs, kv_caches)]

    return flashinfer_decode_layers


@mistake("layers", fails=["test_layers"])
def only_the_last_layer_returned():
    """Only the last layer's o comes back, as if the layers had been chained here: return the list, one o a layer."""

    def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
        wrapper = planned_for_all(qs, kv_caches, block_tables, context_lens)
        return [wrapper.run(q, kv) for q, kv in zip(qs, kv_caches)][-1]

    return flashinfer_decode_layers


@mistake("layers", fails=["test_layers_planned_right"], seen=["flashinfer#638"])
def layers_planned_as_float16():
    """The one plan that all layers share is made without dtypes, so for float16: pass it q_data_type and
    kv_data_type.
    """

    def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
        csr = all_alike(qs, kv_caches, block_tables, context_lens)
        wrapper = wrapper_for(qs[0], kv_caches[0][0])
        wrapper.plan(*csr, *sizes(qs[0], kv_caches[0][0]))
        return [wrapper.run(q, kv) for q, kv in zip(qs, kv_caches)]

    return flashinfer_decode_layers


@mistake("layers", fails=["test_layers_planned_again"], tells=False, seen=["TensorRT-LLM#18769"])
def one_plan_for_ever():
    """The plan outlives its step: the tensors are the same in the next one but the lengths in them are not, so
    plan once in every step.
    """

    plans = {}

    def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
        if id(context_lens) not in plans:
            plans[id(context_lens)] = planned_for_all(qs, kv_caches, block_tables, context_lens), context_lens
        wrapper, _ = plans[id(context_lens)]
        return [wrapper.run(q, kv) for q, kv in zip(qs, kv_caches)]

    return flashinfer_decode_layers


@mistake("layers", fails=["test_layers_refuse"])
def lists_zipped():
    """zip() ends with the shorter list, so layers without a cache get no output and no error: compare the
    lengths first.
    """

    def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
        qs, kv_caches = zip(*zip(qs, kv_caches))
        wrapper = planned_for_all(qs, kv_caches, block_tables, context_lens)
        return [wrapper.run(q, kv) for q, kv in zip(qs, kv_caches)]

    return flashinfer_decode_layers


@mistake("layers", fails=["test_layers_refuse"])
def planned_again_for_an_odd_layer():
    """A layer of another shape or dtype gets a plan of its own without a word: one plan is the contract, so
    refuse that layer.
    """

    def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
        assert len(qs) == len(kv_caches), "qs and kv_caches must be of one length"
        wrappers, outs = {}, []
        for q, (k, v) in zip(qs, kv_caches):
            key = q.shape, q.dtype, k.shape
            wrappers[key] = wrappers.get(key) or planned(q, k.to(q.dtype), v.to(q.dtype), block_tables, context_lens)
            outs.append(wrappers[key].run(q, (k.to(q.dtype), v.to(q.dtype))))
        return outs

    return flashinfer_decode_layers


@mistake("layers", fails=["test_layers_refuse"], lane="gpu", seen=["sglang#32625"])
def later_layers_unchecked():
    """Only the first layer is compared with the plan, and a later one with more heads runs all the same, on the
    wrong ones: compare each.
    """

    def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
        assert len(qs) == len(kv_caches), "qs and kv_caches must be of one length"
        wrapper = planned(qs[0], *kv_caches[0], block_tables, context_lens)
        return [wrapper.run(q, kv) for q, kv in zip(qs, kv_caches)]

    return flashinfer_decode_layers


# block_table_to_csr_into


def check_buffers(block_tables, context_lens, page_size, indptr, indices, last_page_len, skip=None):
    B, W = block_tables.shape
    assert page_size >= 1, "page_size must be at least 1"
    assert block_tables.stride(1) == 1 or W == 1, "block_tables must have dense rows"
    shapes = [(context_lens, (B,)), (indptr, (B + 1,)), (last_page_len, (B,))]
    assert skip == "shapes" or all(x.shape == shape for x, shape in shapes), "a buffer has the wrong shape"
    for x in (indptr, indices, last_page_len):
        assert skip == "dtypes" or x.dtype == torch.int32, "the buffers must be int32"
        assert x.is_contiguous(), "the buffers must be contiguous"


def launching(kernel, skip=None, **constants):
    """The function that checks its arguments and launches `kernel` once, a program a row."""

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        check_buffers(block_tables, context_lens, page_size, indptr, indices, last_page_len, skip)
        B, W = block_tables.shape
        usual = {"B": B, "ROWS": triton.next_power_of_2(B), "W": W, "TILE": min(1024, triton.next_power_of_2(W))}
        kernel[(B,)](
            block_tables, context_lens, indptr, indices, last_page_len, block_tables.stride(0), len(indices), page_size,
            **(usual | constants),
        )  # fmt: skip

    return block_table_to_csr_into


@triton.jit
def span(lens_ptr, row, page_size, B: tl.constexpr, ROWS: tl.constexpr):
    """Where the pages of a row begin in indices, and how many it has."""
    rows = tl.arange(0, ROWS)
    pages = tl.cdiv(tl.load(lens_ptr + rows, mask=rows < B, other=0), page_size).to(tl.int32)
    return tl.sum(tl.where(rows < row, pages, 0)), tl.sum(tl.where(rows == row, pages, 0))


@triton.jit
def put_indptr(indptr_ptr, row, start, count, B: tl.constexpr):
    tl.store(indptr_ptr + row, start)
    tl.store(indptr_ptr + B, start + count, mask=row == B - 1)


@triton.jit
def put_last(last_ptr, lens_ptr, row, count, page_size):
    last = tl.load(lens_ptr + row) - (count - 1) * page_size
    tl.store(last_ptr + row, tl.where(count > 0, last, 0).to(tl.int32))


@triton.jit
def put_ids(tables_ptr, indices_ptr, row, start, count, row_stride, room, W: tl.constexpr, TILE: tl.constexpr):
    for first in range(0, W, TILE):
        column = first + tl.arange(0, TILE)
        live = (column < count) & (column < W)
        ids = tl.load(tables_ptr + row.to(tl.int64) * row_stride + column, mask=live, other=0)
        tl.store(indices_ptr + start + column, ids.to(tl.int32), mask=live & (start + column < room))


@triton.jit
def block_table_to_csr_kernel(
    tables, lens, indptr, indices, last, row_stride, room, page_size,
    B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start, count = span(lens, row, page_size, B, ROWS)
    put_indptr(indptr, row, start, count, B)
    put_last(last, lens, row, count, page_size)
    put_ids(tables, indices, row, start, count, row_stride, room, W, TILE)


@mistake("sync-free", fails=["test_into", "test_into_larger_buffers"])
def ends_for_starts():
    """The program of a row adds up the pages of the rows up to and including its own, which is where it ends:
    it begins after those before it.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        put_indptr(indptr, row, start + count, 0, B)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start + count, count, row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into", "test_into_larger_buffers"])
def the_end_left_out():
    """B programs write B entries of indptr, and the one after them keeps what was there: the last row's program
    writes indptr[B] too.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        tl.store(indptr + row, start)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, count, row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into", "test_into_larger_buffers"])
def the_0_left_out():
    """Each program writes where its row ends, indptr[row + 1], and nobody writes indptr[0]: a fixed buffer is
    not zero by itself.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        tl.store(indptr + row + 1, start + count)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, count, row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into", "test_into_a_view"])
def rows_kept_apart():
    """Each row's pages go to row · W, as in the table, and leave gaps between the rows: they go to where its
    pages begin, indptr[row].
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        put_indptr(indptr, row, start, count, B)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, row * W, count, row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into_larger_buffers", "test_into_empty_rows"])
def whole_rows_copied():
    """The whole row of the table is stored, padding too, and only another program's pages hide it, by luck of
    the order: mask by the page count.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        put_indptr(indptr, row, start, count, B)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, W, row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into_exact_multiples"], seen=["flashinfer#2896"])
def remainder_in_the_kernel():
    """length % page_size is 0 where the last page is full, in a kernel as in Python: use length - (pages - 1) ·
    page_size.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        put_indptr(indptr, row, start, count, B)
        tl.store(last + row, (tl.load(lens + row) % page_size).to(tl.int32))
        put_ids(tables, indices, row, start, count, row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into_empty_rows"], seen=["triton#619"])
def a_page_for_an_empty_row():
    """Triton divides as C does, so (0 - 1) // page_size is 0 there and not -1, and + 1 gives an empty row a
    page: use tl.cdiv.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        rows = tl.arange(0, ROWS)
        pages = ((tl.load(lens + rows, mask=rows < B, other=1) - 1) // page_size + 1).to(tl.int32)
        start = tl.sum(tl.where(rows < row, pages, 0))
        count = tl.sum(tl.where(rows == row, pages, 0))
        put_indptr(indptr, row, start, count, B)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, count, row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into_empty_rows"])
def a_full_page_for_an_empty_row():
    """length - (pages - 1) · page_size is a full page where a row has none: with tl.where such a row gets a
    last_page_len of 0.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        put_indptr(indptr, row, start, count, B)
        tl.store(last + row, (tl.load(lens + row) - (count - 1) * page_size).to(tl.int32))
        put_ids(tables, indices, row, start, count, row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into_too_little_room"], seen=["sglang#24587", "sglang#27338"])
def past_the_end_of_indices():
    """Nothing stops the stores at the end of indices, and what lies behind it in memory is another tensor's:
    mask them by its length.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        put_indptr(indptr, row, start, count, B)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, count, row_stride, start + count, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into_too_little_room"])
def indptr_cut_to_the_room():
    """indptr stops at the room that indices has, so a caller cannot see that pages are missing: let it tell how
    many were needed.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        begin = tl.minimum(start, room)
        put_indptr(indptr, row, begin, tl.minimum(start + count, room) - begin, B)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, count, row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into_a_view"])
def width_taken_for_the_stride():
    """The row is looked for at row · W, but a table cut out of a larger one has its rows further apart: pass
    block_tables.stride(0).
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        put_indptr(indptr, row, start, count, B)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, count, W, room, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into_large"])
def one_tile_of_pages():
    """A program copies one tile of 128 page ids and is done, so a longer sequence loses the rest: loop over the
    row, or size the tile by W.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        put_indptr(indptr, row, start, count, B)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, tl.minimum(count, TILE), row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel, TILE=128)


@mistake("sync-free", fails=["test_into_large"])
def one_tile_of_rows():
    """Only the first 64 rows are added up, so all after them begin at the same place: the tile of rows is
    next_power_of_2(B).
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start, _ = span(lens, row, page_size, B, ROWS)
        count = tl.cdiv(tl.load(lens + row), page_size).to(tl.int32)
        put_indptr(indptr, row, start, count, B)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, count, row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel, ROWS=64)


@mistake("sync-free", fails=["test_into_large"], lane="gpu")
def sum_handed_from_program_to_program():
    """A program reads where the row before it ended, but programs run in no order and the other may not have
    written it yet: each adds up for itself.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        tl.store(indptr, 0, mask=row == 0)
        start = tl.where(row > 0, tl.load(indptr + row), 0)
        count = tl.cdiv(tl.load(lens + row), page_size).to(tl.int32)
        tl.store(indptr + row + 1, start + count)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, tl.where(start < 0, 0, count), row_stride, room, W, TILE)

    return launching(block_table_to_csr_kernel)


@mistake("sync-free", fails=["test_into_dtypes"])
def int32_inputs_only():
    """int64 tables and lengths are refused, and a scheduler often has them: a Triton pointer knows its type,
    load, then .to(tl.int32).
    """

    launch = launching(block_table_to_csr_kernel)

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        assert block_tables.dtype == context_lens.dtype == torch.int32, "block_tables and context_lens must be int32"
        launch(block_tables, context_lens, page_size, indptr, indices, last_page_len)

    return block_table_to_csr_into


@mistake("sync-free", fails=["test_into_refuses"])
def buffers_of_any_dtype():
    """An int64 buffer is filled as well as an int32 one, and FlashInfer then reads its halves as two entries:
    refuse other dtypes.
    """

    return launching(block_table_to_csr_kernel, skip="dtypes")


@mistake("sync-free", fails=["test_into_refuses"], seen=["sglang#25124"])
def buffers_of_any_length():
    """A buffer that is too short is written past its end, which no error tells: shapes are known without
    reading a value, compare them.
    """

    return launching(block_table_to_csr_kernel, skip="shapes")


@mistake("sync-free", fails=["test_into_empty_rows", "test_no_host_read"])
def lengths_refused_on_the_host():
    """An assert on context_lens waits for the GPU and refuses the empty rows that a captured batch is padded
    with: check shapes and dtypes only.
    """

    launch = launching(block_table_to_csr_kernel)

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        assert (context_lens >= 1).all(), "no sequence may be empty"
        launch(block_tables, context_lens, page_size, indptr, indices, last_page_len)

    return block_table_to_csr_into


@mistake("sync-free", fails=["test_no_host_read"], tells=False, seen=["sglang#32218", "sglang#9409"])
def a_loop_sized_by_a_host_read():
    """.item() asks the GPU for the longest row and waits, and a graph replays the answer of its capture: size
    by W, which is static, and mask.
    """

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        check_buffers(block_tables, context_lens, page_size, indptr, indices, last_page_len)
        most = int(context_lens.max())
        tile = min(1024, triton.next_power_of_2(max(1, -(-most // page_size))))
        launch = launching(block_table_to_csr_kernel, TILE=tile)
        launch(block_tables, context_lens, page_size, indptr, indices, last_page_len)

    return block_table_to_csr_into


@mistake("sync-free", fails=["test_no_host_read"], tells=False)
def a_launch_for_each_row():
    """A Python loop launches the kernel row by row, and a launch costs as much as the whole conversion: one
    grid has a program for each row.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        row, tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row += tl.program_id(0)
        start, count = span(lens, row, page_size, B, ROWS)
        put_indptr(indptr, row, start, count, B)
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, count, row_stride, room, W, TILE)

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        check_buffers(block_tables, context_lens, page_size, indptr, indices, last_page_len)
        B, W = block_tables.shape
        for row in range(B):
            block_table_to_csr_kernel[(1,)](
                row, block_tables, context_lens, indptr, indices, last_page_len, block_tables.stride(0), len(indices),
                page_size, B=B, ROWS=triton.next_power_of_2(B), W=W, TILE=min(1024, triton.next_power_of_2(W)),
            )  # fmt: skip

    return block_table_to_csr_into


@mistake("sync-free", fails=["test_no_host_read"], tells=False)
def pytorch_in_place_of_the_kernel():
    """It waits for nothing, but a dozen PyTorch operations are as many launches in every step: one kernel does
    all three buffers.
    """

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        check_buffers(block_tables, context_lens, page_size, indptr, indices, last_page_len)
        pages, room = (context_lens + page_size - 1) // page_size, len(indices)
        columns = torch.arange(block_tables.shape[1], device=pages.device)
        ends = pages.cumsum(0)
        at = (ends - pages)[:, None] + columns
        at = torch.where((columns < pages[:, None]) & (at < room), at, room)  # what has no place goes to a spare entry
        spare = torch.cat([indices, indices[:1]])
        indices.copy_(spare.scatter(0, at.flatten(), block_tables.flatten().int())[:room])
        indptr[0] = 0
        indptr[1:] = ends
        last_page_len.copy_(torch.where(pages > 0, context_lens - (pages - 1) * page_size, 0))

    return block_table_to_csr_into


@mistake("sync-free", fails=["test_no_host_read"], tells=False)
def cumsum_beside_the_kernel():
    """PyTorch adds up indptr and the kernel only copies, which takes several launches where one would do: each
    program adds up the rows before it.
    """

    @triton.jit
    def block_table_to_csr_kernel(
        tables, lens, indptr, indices, last, row_stride, room, page_size,
        B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        start = tl.load(indptr + row)
        count = tl.load(indptr + row + 1) - start
        put_last(last, lens, row, count, page_size)
        put_ids(tables, indices, row, start, count, row_stride, room, W, TILE)

    launch = launching(block_table_to_csr_kernel)

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        check_buffers(block_tables, context_lens, page_size, indptr, indices, last_page_len)
        pages = (context_lens + page_size - 1) // page_size
        indptr.zero_()
        torch.cumsum(pages, 0, dtype=torch.int32, out=indptr[1:])
        launch(block_tables, context_lens, page_size, indptr, indices, last_page_len)

    return block_table_to_csr_into


@mistake("sync-free", fails=["test_into_larger_buffers", "test_no_host_read"])
def the_rest_zeroed():
    """indices is zeroed before the kernel fills it, a second launch for entries that nobody reads: what is past
    indptr[B] stays as it was.
    """

    launch = launching(block_table_to_csr_kernel)

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        check_buffers(block_tables, context_lens, page_size, indptr, indices, last_page_len)
        indices.zero_()
        launch(block_tables, context_lens, page_size, indptr, indices, last_page_len)

    return block_table_to_csr_into


@mistake("sync-free", fails=["test_into_empty_rows", "test_into_too_little_room", "test_no_host_read"])
def converted_and_copied():
    """block_table_to_csr is called and its results copied over: it reads on the host, refuses empty rows and
    knows no room, so launch a kernel.
    """

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        check_buffers(block_tables, context_lens, page_size, indptr, indices, last_page_len)
        pages, live = live_pages(block_tables, context_lens, page_size)
        indptr.copy_(starts(pages))
        indices[: int(pages.sum())] = block_tables[live].int()
        last_page_len.copy_(in_last_page(context_lens, pages, page_size))

    return block_table_to_csr_into


@mistake("sync-free", fails=["test_into", "test_into_large", "test_into_refuses"])
def nothing_written():
    """The buffers keep what was in them: launch block_table_to_csr_kernel[(B,)] to fill them."""

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        pass

    return block_table_to_csr_into


@mistake("sync-free", fails=["test_into", "test_into_large"])
def new_tensors_returned():
    """New tensors come back and the caller's buffers stay as they were: a graph replays into the addresses it
    was captured with, so write those.
    """

    launch = launching(block_table_to_csr_kernel)

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        made = indptr.clone(), indices.clone(), last_page_len.clone()
        launch(block_tables, context_lens, page_size, *made)
        return made

    return block_table_to_csr_into
