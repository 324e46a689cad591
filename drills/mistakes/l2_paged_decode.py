"""L2's mistakes: softmaxes that are none, tokens that are someone else's, heads that read another head's K and V.

All share one kernel, which is right, and in which a mistake replaces one line: `_with("…")` names the line as it is
written wrongly. What a wrong line finds is looked up within the cache (`inside`), for a page id of 2^30 would end the
process, and o has room after its last row. Where one mistake is a case of another, the special one stands first.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from drills.mistakes import mistake


@triton.jit
def paged_decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, lens_ptr, o_ptr, q_stride, table_stride, scale, first_head, slots,
    PAGE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, WRONG: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), first_head + tl.program_id(1)
    length = tl.load(lens_ptr + seq)
    if WRONG == "length = min(length, TILE)":
        length = tl.minimum(length, TILE)
    elif WRONG == "length = longest":
        length = tl.max(tl.load(lens_ptr + tl.arange(0, 16)), 0)
    start = 0
    if WRONG == "start = last page":
        start = tl.maximum(length - 1, 0) // PAGE * PAGE
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    heads = head * GROUP + row
    kv_head = head
    in_group, in_row = row < GROUP, dim < D
    if WRONG == "kv_head = heads % HKV":
        heads = head + row * HKV
    elif WRONG == "kv_head = 0":
        kv_head = 0 * head
    asked = heads
    if WRONG == "q of head * GROUP":
        asked = head * GROUP + 0 * row
    q_row = seq * q_stride
    if WRONG == "seq * HQ * D for q":
        q_row = seq * HKV * GROUP * D
    q_mask = in_group[:, None] & in_row[None, :]
    if WRONG == "q, k unmasked past D":
        q_mask = in_group[:, None] & (dim >= 0)[None, :]
    q = tl.load(q_ptr + q_row + asked[:, None] * D + dim[None, :], mask=q_mask, other=0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    if WRONG == "top = 0":
        top = tl.full([ROWS], 0, tl.float32)
    elif WRONG == "top = -10000":
        top = tl.full([ROWS], -10000, tl.float32)
    total = tl.full([ROWS], 0, tl.float32)
    acc = tl.full([ROWS, DIM], 0, tl.float32)
    if WRONG == "acc in float16":
        acc = acc.to(tl.float16)
    for first in range(start, length, TILE):
        position = first + tl.arange(0, TILE)
        live = position < length
        if WRONG == "position <= length":
            live = position <= length
        column, offset = position // PAGE, position % PAGE
        used = column < (length + PAGE - 1) // PAGE
        if WRONG == "column = position % PAGE":
            column, offset = position % PAGE, position // PAGE
        elif WRONG == "one page a tile":
            column = first // PAGE + 0 * position
        elif WRONG == "page 0 and on":
            column, offset = 0 * position, position
        table_row = seq * table_stride
        if WRONG == "tables[0]":
            table_row = 0 * seq
        page = tl.load(tables_ptr + table_row + column, mask=used, other=0).to(tl.int64)
        if WRONG == "page = column":
            page = column.to(tl.int64)
        slot = page * PAGE + offset
        if WRONG == "PAGE = 16":
            slot = tl.load(tables_ptr + table_row + position // 16).to(tl.int64) * 16 + position % 16
        slot = tl.minimum(tl.maximum(slot, 0), slots - 1)  # inside
        if WRONG == "slot in int32":
            slot = slot.to(tl.int32)
        at = (slot * HKV + kv_head)[:, None] * D + dim[None, :]
        if WRONG == "[NB, Hkv, BS, D]":
            at = ((slot // PAGE * HKV + kv_head) * PAGE + slot % PAGE)[:, None] * D + dim[None, :]
        there = live[:, None] & in_row[None, :]
        k_there, v_there = there, there
        if WRONG == "q, k unmasked past D":
            k_there = live[:, None] & (dim >= 0)[None, :]
        elif WRONG == "dead k loaded":
            k_there = (position >= 0)[:, None] & in_row[None, :]
        elif WRONG == "dead v loaded":
            v_there = (position >= 0)[:, None] & in_row[None, :]
        k = tl.load(k_cache_ptr + at, mask=k_there, other=0)
        v = tl.load(v_cache_ptr + at, mask=v_there, other=0)
        if WRONG == "k for v":
            v = k
        if WRONG == "input_precision of tf32":
            logits = tl.dot(q, tl.trans(k)) * scale
        else:
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if WRONG == "logits in float16":
            logits = logits.to(tl.float16).to(tl.float32)
        if WRONG == "dead k loaded":
            logits += tl.where(live, 0.0, float("-inf"))[None, :]
        elif WRONG != "dead logits of 0":
            logits = tl.where(live[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        if WRONG == "higher = 0":
            higher = 0 * total
        elif WRONG == "higher = this tile's":
            higher = tl.max(logits, 1)
        weights, shrink = tl.exp2(logits - higher[:, None]), tl.exp2(top - higher)
        if WRONG == "higher = 0":
            shrink = tl.exp2(higher)
        if WRONG == "total not shrunk" or WRONG == "nothing shrunk":
            total = total + tl.sum(weights, 1)
        else:
            total = total * shrink + tl.sum(weights, 1)
        if WRONG == "acc in float16":
            acc = (acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)).to(tl.float16)
        elif WRONG == "acc not shrunk" or WRONG == "nothing shrunk":
            acc = acc + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    if WRONG == "o = acc":
        o = acc
    elif WRONG == "o = acc / total":
        o = acc / total[:, None]
    else:
        o = acc / tl.where(total > 0, total, 1)[:, None]
    o_row = seq * HKV * GROUP * D
    if WRONG == "seq * q_stride for o":
        o_row = seq * q_stride
    o_mask = in_group[:, None] & in_row[None, :]
    if WRONG == "o unmasked past GROUP":
        o_mask = (row >= 0)[:, None] & in_row[None, :]
    elif WRONG == "o unmasked past D":
        o_mask = in_group[:, None] & (dim >= 0)[None, :]
    elif WRONG == "no o of an empty sequence":
        o_mask = o_mask & (length > 0)
    tl.store(o_ptr + o_row + heads[:, None] * D + dim[None, :], o.to(o_ptr.dtype.element_ty), mask=o_mask)


def _dense_row(x):
    return x.stride(-1) == 1 or x.shape[-1] <= 1


_CHECKS = {  # each of the arguments as a namespace
    "three_dimensions": lambda a: a.q.dim() == 3,
    "dense_rows": lambda a: a.q[:1].is_contiguous(),
    "one_cache_shape": lambda a: a.k_cache.shape == a.v_cache.shape,
    "one_head_dim": lambda a: a.q.shape[-1] == a.k_cache.shape[-1],
    "whole_groups": lambda a: a.q.shape[-2] % a.k_cache.shape[2] == 0,
    "one_dtype": lambda a: a.q.dtype == a.k_cache.dtype == a.v_cache.dtype,
    "dense_caches": lambda a: a.k_cache.is_contiguous() and a.v_cache.is_contiguous(),
    "int32_table": lambda a: a.block_tables.dtype == torch.int32,
    "int32_lengths": lambda a: a.context_lens.dtype == torch.int32,
    "a_row_a_sequence": lambda a: len(a.block_tables) == len(a.q),
    "a_length_a_sequence": lambda a: a.context_lens.shape[:1] == a.q.shape[:1],
    "flat_lengths": lambda a: a.context_lens.dim() == 1,
    "dense_table": lambda a: _dense_row(a.block_tables),
    "dense_lengths": lambda a: _dense_row(a.context_lens),
    "one_device": lambda a: all(x.device == a.q.device for x in vars(a).values()),
}


def _check(q, k_cache, v_cache, block_tables, context_lens, **other_checks):
    arguments = SimpleNamespace(
        q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, context_lens=context_lens
    )
    for name, passes in (_CHECKS | other_checks).items():
        assert passes(arguments), f"refused: {name.replace('_', ' ')}"


def _default(sm_scale, D):
    return 1 / math.sqrt(D) if sm_scale is None else sm_scale


def _launch(
    wrong, q, k_cache, v_cache, block_tables, context_lens, sm_scale=None,
    scale=None, dtype=None, table_stride=None, filled=0.0, one_by_one=False, kernel=paged_decode_kernel, o=None,
):  # fmt: skip
    """Launch the kernel with one line wrong ("": none). scale: what the logits are multiplied with, for exp2.

    filled: what stands in o before. one_by_one: a launch a KV head, from the last to the first.
    """
    (B, Hq, D), (NB, BS, Hkv, _) = q.shape, k_cache.shape
    scale = _default(sm_scale, D) * math.log2(math.e) if scale is None else scale
    rows, dim = (max(16, triton.next_power_of_2(n)) for n in (Hq // Hkv, D))
    if o is None:
        o = torch.full((B * Hq * D + 4096,), filled, dtype=dtype or q.dtype, device=q.device)
    table_stride = block_tables.stride(0) if table_stride is None else table_stride
    for head in reversed(range(Hkv)) if one_by_one else [0]:
        kernel[(B, 1 if one_by_one else Hkv)](
            q, k_cache, v_cache, block_tables, context_lens, o, q.stride(0), table_stride, scale, head, NB * BS,
            PAGE=BS, HKV=Hkv, GROUP=Hq // Hkv, D=D, ROWS=rows, DIM=dim, TILE=256 if D <= 16 else 32, WRONG=wrong,
            num_stages=1,
        )  # fmt: skip
    return o[: B * Hq * D].view(B, Hq, D)


def _with(wrong="", *, filled=0.0, one_by_one=False, **other_checks):
    """paged_decode with one line of the kernel wrong, or with other checks."""

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        args = q, k_cache, v_cache, block_tables, context_lens
        _check(*args, **other_checks)
        return _launch(wrong, *args, sm_scale, filled=filled, one_by_one=one_by_one)

    return paged_decode


def _without(*checks):
    return _with(**{check: lambda a: True for check in checks})


def _scaled(of):
    """paged_decode whose logits are multiplied with of(sm_scale, D), for exp2."""

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        args = q, k_cache, v_cache, block_tables, context_lens
        _check(*args)
        return _launch("", *args, scale=of(sm_scale, q.shape[-1]))

    return paged_decode


LOG2_E = math.log2(math.e)
LARGE = "test_large_logits"
TILES = "test_many_tiles"


# The softmax


@mistake("online-softmax", fails=["test_one_token", "test_worked_example"])
def zeros_for_attention():
    """o is all zeros: the shape and the dtype are right, now compute the attention and store it."""

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        _check(q, k_cache, v_cache, block_tables, context_lens)
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)

    return paged_decode


@mistake("online-softmax", fails=["test_one_token", "test_worked_example", "test_head_mapping"])
def k_summed_for_v():
    """The weights were summed over K's rows: K makes the weights, and V is what they are multiplied with."""
    return _with("k for v")


@mistake("online-softmax", fails=["test_worked_example", "test_one_page"])
def not_divided():
    """The weighted sum of V was stored as it is: divide it by the sum of the weights, once, after the last tile."""
    return _with("o = acc")


@mistake("online-softmax", fails=[LARGE, TILES])
def nothing_subtracted():
    """exp of a logit above 88 is inf in float32, and inf / inf is NaN: subtract the largest logit before exp."""
    return _with("higher = 0")


@mistake("online-softmax", fails=[LARGE])
def largest_from_zero():
    """The largest logit began at 0, and if all are far below, every weight is exp(-120), which is 0: begin at -inf."""
    return _with("top = 0")


@mistake("online-softmax", fails=[LARGE], seen=["flashinfer#4267"])
def a_low_number_for_infinity():
    """-10000, as the largest logit to begin with or as a dead one, is above lower ones: only -inf is below them all."""
    return _with("top = -10000")


@mistake("online-softmax", fails=[TILES])
def acc_not_shrunk():
    """The sum of V still counts from the old largest logit: when that rises, multiply acc by exp(old - new) as well."""
    return _with("acc not shrunk")


@mistake("online-softmax", fails=[TILES])
def total_not_shrunk():
    """The sum of weights still counts from the old largest logit: multiply total by exp(old - new), as acc is."""
    return _with("total not shrunk")


@mistake("online-softmax", fails=[TILES])
def nothing_shrunk():
    """Each tile counted from a largest logit of its own: multiply acc and total by exp(old - new) before adding."""
    return _with("nothing shrunk")


@mistake("online-softmax", fails=[TILES])
def largest_of_this_tile():
    """The largest logit of the tile replaced that of all so far, and exp(old - new) overflows: keep the larger one."""
    return _with("higher = this tile's")


@mistake("online-softmax", fails=[TILES])
def first_tile_alone():
    """Only one tile of tokens was looked at: loop over the sequence, tile by tile, until its length."""
    return _with("length = min(length, TILE)")


# The scale


@mistake("shapes", fails=["test_worked_example", "test_one_page", "test_scales"])
def not_scaled():
    """The logits are q · K as they come: multiply them by sm_scale, which is 1 / sqrt(D) if none is given."""
    return _scaled(lambda sm_scale, D: LOG2_E)


@mistake("shapes", fails=["test_worked_example", "test_scales"])
def scale_squared():
    """q was scaled and the logits were scaled again: the factor belongs to one of the two."""
    return _scaled(lambda sm_scale, D: _default(sm_scale, D) ** 2 * LOG2_E)


@mistake("shapes", fails=["test_worked_example", "test_scales"])
def exp2_of_natural_logits():
    """exp2(x) is not exp(x): multiply the scale by log2(e) first, or take exp."""
    return _scaled(lambda sm_scale, D: _default(sm_scale, D))


@mistake("shapes", fails=["test_head_dims"])
def scaled_for_the_padded_width():
    """The default scale came from the tile's width, a power of two: it is that of D itself."""
    padded = triton.next_power_of_2
    return _scaled(lambda sm_scale, D: (1 / math.sqrt(padded(D)) if sm_scale is None else sm_scale) * LOG2_E)


@mistake("shapes", fails=["test_scales"])
def a_scale_of_0_replaced():
    """`sm_scale or default` takes 0.0 for no scale at all: ask whether it is None."""
    return _scaled(lambda sm_scale, D: (sm_scale or 1 / math.sqrt(D)) * LOG2_E)


@mistake("shapes", fails=["test_scales"])
def the_given_scale_ignored():
    """sm_scale was never looked at: the default is only for None."""
    return _scaled(lambda sm_scale, D: LOG2_E / math.sqrt(D))


# The pages


@mistake("pages", fails=["test_docstring_example", "test_page_sizes", "test_a_ragged_batch"])
def page_by_position():
    """The table was not asked, and page 0 held token 0: a sequence's pages are anywhere, in the order of its row."""
    return _with("page = column")


@mistake("pages", fails=["test_docstring_example", "test_page_sizes"])
def pages_in_a_row():
    """Only the first page was looked up, and the next tokens were read behind it: look up every position's own page."""
    return _with("page 0 and on")


@mistake("pages", fails=["test_page_sizes", "test_docstring_example"])
def column_and_offset_swapped():
    """position % page size chose the column and position // page size the place in the page: it is the other way."""
    return _with("column = position % PAGE")


@mistake("pages", fails=["test_page_sizes", "test_many_pages"])
def one_page_a_tile():
    """The tile's first position chose the page for all of them: a tile may cross pages, so look up each position's."""
    return _with("one page a tile")


@mistake("pages", fails=["test_page_sizes", "test_docstring_example"])
def pages_of_16():
    """Pages were taken to hold 16 tokens, as they often do: the page size is k_cache.shape[1]."""
    return _with("PAGE = 16")


@mistake("pages", fails=["test_a_ragged_batch", "test_groups_in_a_batch"])
def row_0_of_the_table_for_all():
    """Every sequence read row 0 of the table: row b begins b · block_tables.stride(0) further on."""
    return _with("tables[0]")


@mistake("tails", fails=["test_a_ragged_batch", "test_empty_sequence"])
def longest_length_for_all():
    """Every sequence went on to the longest one's end, into tokens that are not its own: stop at its own length."""
    return _with("length = longest")


@mistake("pages", fails=["test_docstring_example", "test_page_sizes"])
def last_page_alone():
    """Only the tokens of the last page were looked at: attention is over all that the sequence has."""
    return _with("start = last page")


@mistake("pages", fails=["test_head_mapping", "test_odd_groups"])
def pages_read_heads_first():
    """The cache was read as [NB, Hkv, BS, D]: a page holds its tokens one after another, each with all its heads."""
    return _with("[NB, Hkv, BS, D]")


# The heads


@mistake("groups", fails=["test_head_mapping", "test_groups_in_a_batch"])
def heads_dealt_out_in_turn():
    """Query head h read KV head h % Hkv: heads that share K and V are neighbours, so it is h // (Hq // Hkv)."""
    return _with("kv_head = heads % HKV")


@mistake("groups", fails=["test_head_mapping", "test_groups_in_a_batch"], seen=["HipKittens#22", "ONNXim#33"])
def heads_divided_by_kv_heads():
    """Query head h read KV head h // Hkv, right only where a group is as large as Hkv: it is h // (Hq // Hkv)."""

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        _check(q, k_cache, v_cache, block_tables, context_lens)
        NB, BS, HKV, D = k_cache.shape
        heads = torch.arange(q.shape[1], device=q.device) // HKV
        rows = torch.arange(NB * BS, device=q.device)[:, None] * HKV + heads  # past the last head: the next slot's
        rows = rows.clamp(max=NB * BS * HKV - 1)
        k_cache, v_cache = (x.view(-1, D)[rows].view(NB, BS, -1, D) for x in (k_cache, v_cache))
        return _launch("", q, k_cache, v_cache, block_tables, context_lens, sm_scale)

    return paged_decode


@mistake("groups", fails=["test_head_mapping", "test_groups_in_a_batch"])
def first_kv_head_for_all():
    """All query heads read KV head 0: head h // (Hq // Hkv) begins D values further on for each."""
    return _with("kv_head = 0")


@mistake("groups", fails=["test_groups", "test_odd_groups"])
def one_q_for_the_group():
    """The first query head of the group asked for all of them: they share K and V, and each has a q of its own."""
    return _with("q of head * GROUP")


@mistake("groups", fails=["test_head_mapping", "test_groups_in_a_batch"])
def padding_rows_stored():
    """The rows that fill a tile up were stored too, over the next KV head's: mask the store with row < group."""
    return _with("o unmasked past GROUP", one_by_one=True)


# What must not be read


@mistake("tails", fails=["test_one_page", "test_nan_past_the_length"], seen=["flashinfer#3716"])
def dead_logits_of_0():
    """What is past the length got a logit of 0, and exp(0) is a weight of 1: give it -inf after the dot product."""
    return _with("dead logits of 0")


@mistake("tails", fails=["test_one_page", "test_docstring_example", "test_nan_past_the_length"])
def one_token_too_many():
    """position <= length takes the place after the last token for one: the positions are 0 to length - 1."""
    return _with("position <= length")


@mistake("tails", fails=["test_nan_past_the_length"], seen=["vllm#47305", "vllm#641"])
def dead_v_multiplied():
    """A weight of 0 times a NaN past the length is NaN: load V only where a token is, with other=0 for the rest."""
    return _with("dead v loaded")


@mistake("tails", fails=["test_nan_past_the_length"])
def minus_infinity_added():
    """NaN + -inf is still NaN, so a mask that is added does not hide a dead K: choose, with tl.where."""
    return _with("dead k loaded")


@mistake("tails", fails=["test_empty_sequence"], seen=["vllm#57094"])
def nothing_by_nothing():
    """Without tokens both sums are 0, and 0 / 0 is NaN: divide by 1 where the sum of the weights is 0."""
    return _with("o = acc / total")


@mistake("tails", fails=["test_empty_sequence"], tells=False)
def empty_rows_left_as_they_were():
    """The program of an empty sequence stored nothing, and torch.empty's rows hold anything: store zeros."""
    return _with("no o of an empty sequence", filled=-101.0)


@mistake("tails", fails=["test_a_wider_table", "test_nothing_is_read_on_the_host"])
def dead_ids_refused():
    """Ids past a row's live part may be anything, -1 too, and looking at them waits for the GPU: leave them unread."""

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        _check(q, k_cache, v_cache, block_tables, context_lens)
        assert ((block_tables >= 0) & (block_tables < len(k_cache))).all(), "block_tables are past the cache"
        return _launch("", q, k_cache, v_cache, block_tables, context_lens, sm_scale)

    return paged_decode


# Widths, dtypes and strides


@mistake("shapes", fails=["test_head_dims"])
def logits_over_the_padding():
    """The dot product ran on past D, into the next head's values: mask q and K with dim < D."""
    return _with("q, k unmasked past D")


@mistake("shapes", fails=["test_head_dims"])
def padding_columns_stored():
    """The tile's columns past D were stored too, over the next head's first values: mask the store with dim < D."""
    return _with("o unmasked past D", one_by_one=True)


@mistake("shapes", fails=["test_dtypes", "test_sums_in_float32"])
def float32_returned():
    """The sums are in float32 and so was o: return it in q's dtype."""

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        _check(q, k_cache, v_cache, block_tables, context_lens)
        return _launch("", q, k_cache, v_cache, block_tables, context_lens, sm_scale, dtype=torch.float32)

    return paged_decode


@mistake("shapes", fails=["test_sums_in_float32", "test_float32_is_kept"])
def summed_in_float16():
    """The sum of V was kept in float16, which has 3 digits and ends at 65,504: add up in float32, convert o alone."""
    return _with("acc in float16")


@mistake("shapes", fails=["test_logits_in_float32", "test_float32_is_kept"])
def logits_in_float16():
    """Logits of 40 in float16 are off by up to 1/64, and so are the weights by 1.5 %: keep them in float32."""
    return _with("logits in float16")


@mistake("shapes", fails=["test_float32_is_kept"], lane="gpu")
def products_in_tf32():
    """On a GPU tl.dot rounds float32 to TF32, 3 digits, unless told otherwise: pass input_precision="ieee"."""
    return _with("input_precision of tf32")


@mistake("shapes", fails=["test_rows_of_q"])
def stride_of_q_ignored():
    """Row b of q was read at b · Hq · D, but rows of a fused QKV tensor are further apart: use q.stride(0)."""
    return _with("seq * HQ * D for q")


@mistake("shapes", fails=["test_rows_of_q"])
def strides_of_q_for_o():
    """o was written with q's row stride, and it is a dense tensor of its own: its rows are Hq · D apart."""
    return _with("seq * q_stride for o")


@mistake("shapes", fails=["test_rows_of_q"])
def strided_q_refused():
    """q.is_contiguous() refuses views of a fused QKV tensor, the usual input: ask it of a single row, q[:1]."""
    return _with(dense_rows=lambda a: a.q.is_contiguous())


@mistake("shapes", fails=["test_one_head_of_any_stride"])
def strides_compared_by_hand():
    """q.stride(1) == D refuses a q of one head, whose stride means nothing: ask a row, q[:1], if it is contiguous."""
    return _with(dense_rows=lambda a: a.q.stride(1) == a.q.shape[2])


@mistake("shapes", fails=["test_a_table_that_is_a_view"])
def stride_of_the_table_ignored():
    """Row b of the table was read at b · W, but a table cut out of a larger one has a stride of its own: use it."""

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        args = q, k_cache, v_cache, block_tables, context_lens
        _check(*args)
        return _launch("", *args, sm_scale, table_stride=block_tables.shape[1])

    return paged_decode


@mistake("shapes", fails=["test_a_table_that_is_a_view"])
def strided_table_refused():
    """is_contiguous() refuses the first columns of a wider table, the usual input: only its last stride must be 1."""
    return _with(dense_table=lambda a: a.block_tables.is_contiguous())


# The tensors that show an int32 offset are too large to try a mistake on: the tests' own words tell.


@mistake("shapes", fails=["test_a_cache_past_int32"], seen=["vllm#47671"], tells=False)
def page_offset_in_int32():
    """page · BS · Hkv · D wraps at 2^31, which a float16 cache of 4 GiB reaches: widen the page id to int64 first."""
    return _with("slot in int32")


# What must be refused


@mistake("host-checks", fails=["test_refuses"])
def heads_cut_to_fit():
    """Hq // Hkv rounds down, so query heads were left over or had no K and V: refuse Hq % Hkv != 0."""
    return _without("whole_groups")


@mistake("host-checks", fails=["test_refuses"])
def head_dims_uncompared():
    """q and the caches may have another D, and then rows begin elsewhere: compare q.shape[2] with k_cache.shape[3]."""
    return _without("one_head_dim")


@mistake("host-checks", fails=["test_refuses"])
def numbers_of_values_compared():
    """Caches of one size may be cut into other pages, and V is read elsewhere than K: compare the shapes."""
    return _with(one_cache_shape=lambda a: a.k_cache.numel() == a.v_cache.numel())


@mistake("host-checks", fails=["test_refuses"])
def parts_of_the_shapes_compared():
    """A v_cache with fewer pages than k_cache, or another D, is read past its end: compare all of their shapes."""
    return _with(one_cache_shape=lambda a: a.k_cache.shape[1:3] == a.v_cache.shape[1:3])


@mistake("host-checks", fails=["test_refuses"])
def dtypes_uncompared():
    """q, k_cache and v_cache must have one dtype, and whoever mixed them up should hear of it: compare all three."""
    return _without("one_dtype")


@mistake("host-checks", fails=["test_refuses"])
def v_cache_unchecked():
    """k_cache is checked to be contiguous and v_cache is not: kv[:, 1] is as strided as kv[:, 0], check both."""
    return _with(dense_caches=lambda a: a.k_cache.is_contiguous())


@mistake("host-checks", fails=["test_refuses"])
def dense_pages_taken_for_a_dense_cache():
    """Dense pages are not enough: kv[:, 0] is every other page, and K is read from V, so check all of it, not [:1]."""
    return _with(dense_caches=lambda a: a.k_cache[:1].is_contiguous() and a.v_cache[:1].is_contiguous())


@mistake("host-checks", fails=["test_refuses"])
def tables_of_any_integer():
    """int64 ids cost twice the traffic, and a kernel made for int32 reads each as two: refuse all but int32."""
    return _without("int32_table")


@mistake("host-checks", fails=["test_refuses"])
def lengths_of_any_integer():
    """The table must be int32 and so must the lengths: refuse context_lens of another dtype."""
    return _without("int32_lengths")


@mistake("host-checks", fails=["test_refuses"])
def rows_of_the_table_uncounted():
    """With fewer rows than sequences the kernel reads on past the table: check len(block_tables) == len(q)."""
    return _without("a_row_a_sequence")


@mistake("host-checks", fails=["test_refuses"])
def lengths_uncounted():
    """With fewer lengths than sequences the kernel reads on past the last: check that there are as many."""
    return _without("a_length_a_sequence")


@mistake("host-checks", fails=["test_refuses"])
def lengths_of_any_shape():
    """A [B, 1] tensor has B lengths, though it is not what was asked for: check context_lens.dim() == 1."""
    return _without("flat_lengths")


@mistake("host-checks", fails=["test_refuses"], lane="gpu")
def devices_uncompared():
    """Lengths on the host reach the launch, and Triton stumbles over them: compare the devices yourself, and refuse."""
    return _without("one_device")


@mistake("host-checks", fails=["test_gaps"])
def gaps_of_q_read_as_numbers():
    """Only q's row stride reaches the kernel, so it read the gaps of q[..., ::2] as numbers: refuse rows with gaps."""
    return _without("dense_rows")


@mistake("host-checks", fails=["test_gaps"])
def columns_taken_as_dense():
    """The kernel steps one id a column, through a view of every other column as well: check the table's last stride."""
    return _without("dense_table")


@mistake("host-checks", fails=["test_gaps"])
def strided_lengths_taken_as_dense():
    """The kernel steps one length a sequence, through a view of every other one as well: check their stride."""
    return _without("dense_lengths")


@mistake("host-checks", fails=["test_nothing_is_read_on_the_host"], tells=False)
def longest_read_on_the_host():
    """context_lens.max().item() waits for the GPU in every layer and cannot be captured: let the kernel read them."""

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        _check(q, k_cache, v_cache, block_tables, context_lens)
        assert context_lens.max().item() <= block_tables.shape[1] * k_cache.shape[1], "context_lens"
        return _launch("", q, k_cache, v_cache, block_tables, context_lens, sm_scale)

    return paged_decode


# The manner


@mistake("pages", fails=["test_as_many_launches_for_more_sequences"], tells=False)
def a_launch_for_each_sequence():
    """Each sequence is a launch of its own, some 5 us each, one after another: make one, whose grid runs over them."""

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        _check(q, k_cache, v_cache, block_tables, context_lens)
        o = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for b in range(len(q)):
            one = slice(b, b + 1)
            _launch("", q[one], k_cache, v_cache, block_tables[one], context_lens[one], sm_scale, o=o[one].view(-1))
        return o

    return paged_decode


@mistake("online-softmax", fails=["test_the_kernel_decodes"], tells=False)
def torch_beside_a_kernel_of_nothing():
    """A kernel was launched and torch computed the attention: move the work into the kernel."""

    @triton.jit
    def paged_decode_kernel():
        pass

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        _check(q, k_cache, v_cache, block_tables, context_lens)
        paged_decode_kernel[(1,)]()
        (B, Hq, D), (_, BS, Hkv, _) = q.shape, k_cache.shape
        positions = torch.arange(block_tables.shape[1] * BS, device=q.device)
        live = positions < context_lens[:, None]
        pages = torch.where(live, block_tables[:, positions // BS], 0).long()
        k, v = (torch.where(live[..., None, None], c[pages, positions % BS], 0).float() for c in (k_cache, v_cache))
        logits = torch.einsum("bhgd,bnhd->bhgn", q.float().view(B, Hkv, -1, D), k) * _default(sm_scale, D)
        weights = logits.masked_fill(~live[:, None, None], -math.inf).softmax(-1).nan_to_num()
        return torch.einsum("bhgn,bnhd->bhgd", weights, v).reshape(B, Hq, D).to(q.dtype)

    return paged_decode


@mistake("online-softmax", fails=["test_the_kernel_decodes"], tells=False)
def decode_under_another_name():
    """The kernel is right and is called something else: the suite, and a profile, look for paged_decode_kernel."""

    @triton.jit
    def kernel(
        q, k, v, tables, lens, o, q_stride, table_stride, scale, first_head, slots,
        PAGE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
        ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, WRONG: tl.constexpr,
    ):  # fmt: skip
        paged_decode_kernel(
            q, k, v, tables, lens, o, q_stride, table_stride, scale, first_head, slots,
            PAGE, HKV, GROUP, D, ROWS, DIM, TILE, WRONG,
        )  # fmt: skip

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        _check(q, k_cache, v_cache, block_tables, context_lens)
        return _launch("", q, k_cache, v_cache, block_tables, context_lens, sm_scale, kernel=kernel)

    return paged_decode


@mistake("shapes", fails=["test_one_page", "test_scales"], tells=False)
def q_scaled_in_place():
    """q *= scale changes the caller's q, and a second call scales it again: scale the logits, or a copy of q."""

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        _check(q, k_cache, v_cache, block_tables, context_lens)
        q *= _default(sm_scale, q.shape[-1])
        return _launch("", q, k_cache, v_cache, block_tables, context_lens, scale=LOG2_E)

    return paged_decode
