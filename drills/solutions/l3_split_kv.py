"""L3 · Split-KV decode: a sequence's tokens are shared out over programs, and their partial answers merged.

Flash-Decoding (pytorch.org/blog/flash-decoding) in Triton. An answer with its lse is an attention state, and merging
states is associative (FlashInfer, arXiv 2501.01005, section 2.2), so any cut of the tokens gives the same.
"""

import math

import torch
import triton
import triton.language as tl


@triton.jit
def split_kv_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, lens_ptr, o_ptr, lse_ptr, q_stride, table_stride, scale, S,
    PAGE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, KV head, split): L2's loop over the split's tokens, and its lse beside its output."""
    seq, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + seq)
    chunk = tl.cdiv(length, S)
    start = split * chunk
    end = tl.minimum(start + chunk, length)  # start >= end: nothing was left for this split
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    heads = head * GROUP + row
    mine = (row < GROUP)[:, None] & (dim < D)[None, :]
    q = tl.load(q_ptr + seq * q_stride + heads[:, None] * D + dim[None, :], mask=mine, other=0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        live = position < end
        page = tl.load(tables_ptr + seq * table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
        at = ((page * PAGE + position % PAGE) * HKV + head)[:, None] * D + dim[None, :]
        there = live[:, None] & (dim < D)[None, :]
        k = tl.load(k_cache_ptr + at, mask=there, other=0)
        v = tl.load(v_cache_ptr + at, mask=there, other=0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(live[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weights, shrink = tl.exp2(logits - higher[:, None]), tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    out = (seq * HKV * GROUP + heads) * S + split  # int64: seq was widened
    tl.store(o_ptr + out[:, None] * D + dim[None, :], acc / tl.where(total > 0, total, 1)[:, None], mask=mine)
    lse = (top + tl.log2(total)) * 0.6931471805599453  # times ln 2: the logits were scaled for exp2. Empty: -inf
    tl.store(lse_ptr + out, lse, mask=row < GROUP)


@triton.jit
def merge_splits_kernel(
    o_part_ptr, lse_part_ptr, o_ptr, lse_ptr, S,
    D: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, query head): the mean of the parts, weighted by what each has of the whole softmax."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIM)
    top, total, acc = float("-inf"), 0.0, tl.zeros([DIM], tl.float32)
    for first in range(0, S, TILE):
        split = first + tl.arange(0, TILE)
        lse = tl.load(lse_part_ptr + row * S + split, mask=split < S, other=float("-inf"))
        there = (split < S)[:, None] & (dim < D)[None, :]
        part = tl.load(o_part_ptr + (row * S + split)[:, None] * D + dim[None, :], mask=there, other=0)
        higher = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # all empty so far: -inf - -inf would be NaN
        weights, shrink = tl.exp(lse - base), tl.exp(top - base)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * part, 0)
        top = higher
    tl.store(o_ptr + row * D + dim, acc / tl.where(total > 0, total, 1.0), mask=dim < D)
    tl.store(lse_ptr + row, top + tl.log(total))


def merge_splits(o_part, lse):
    """Merge the outputs of S disjoint sets of tokens into the output over all of them.

    o_part [B, Hq, S, D] fp32: each split's own softmax average, normalised. lse [B, Hq, S] fp32: the natural log of
    its sum of exponentials; an empty split is (0, -inf). Both contiguous. Returns (o [B, Hq, D] fp32, lse [B, Hq]
    fp32); where all splits are empty, (0, -inf). Refused (AssertionError): shapes, dtypes or layouts other than these.

    >>> merge_splits([[[[1.], [0.]]]], lse=[[[math.log(8), math.log(2)]]])
    ([[[0.8]]], [[2.302585]])    # (8 · 1 + 2 · 0) / (8 + 2), ln 10
    """
    for name, x, dims in ("o_part", o_part, 4), ("lse", lse, 3):
        assert x.dim() == dims and x.dtype == torch.float32 and x.is_contiguous(), f"{name} must be dense fp32"
    assert lse.shape == o_part.shape[:3] and lse.device == o_part.device, "lse must be [B, Hq, S], as o_part begins"
    B, Hq, S, D = o_part.shape
    o, merged = o_part.new_empty(B, Hq, D), lse.new_empty(B, Hq)
    tile = min(64, max(8, triton.next_power_of_2(S)))  # all of the splits, if they are few
    shape = {"D": D, "DIM": triton.next_power_of_2(D), "TILE": tile, "num_warps": max(1, tile // 16)}
    merge_splits_kernel[(B * Hq,)](o_part, lse, o, merged, S, **shape)
    return o, merged


def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale=None, return_lse=False):
    """L2's paged_decode with every sequence cut into num_splits >= 1 parts that run at the same time, then merged.

    All arguments but the last three as in paged_decode: q [B, Hq, D]; k_cache, v_cache [NB, BS, Hkv, D];
    block_tables [B, W] int32; context_lens [B] int32; and the same is refused, and num_splits below 1. More splits
    than tokens are fine. Returns o [B, Hq, D] in q's dtype, or (o, lse [B, Hq] fp32) with return_lse: the natural log
    of the sum of exp(q · k · sm_scale) over the tokens, -inf where there are none.

    >>> split_kv_decode(q, k_cache, v_cache, block_tables=[[2, 0]], context_lens=[5], num_splits=2)  # BS = 4
    # here: tokens 0..2 and tokens 3..4; any cut gives the same
    """
    assert q.dim() == 3 and q[:1].is_contiguous(), "q must be [B, Hq, D] with dense rows"
    (B, Hq, D), (_, BS, Hkv, _), S = q.shape, k_cache.shape, num_splits
    assert S >= 1, f"num_splits must be at least 1, got {S}"
    assert k_cache.shape == v_cache.shape and k_cache.shape[3] == D, "k_cache and v_cache must be [NB, BS, Hkv, q's D]"
    assert Hq % Hkv == 0, f"q has {Hq} heads, not a multiple of k_cache's {Hkv}"
    for name, x in {"k_cache": k_cache, "v_cache": v_cache}.items():
        assert x.dtype == q.dtype and x.device == q.device, f"{name} is {x.dtype} on {x.device}, q {q.dtype}"
        assert x.is_contiguous(), f"{name} must be contiguous: pass the cache itself, not a strided view of it"
    for name, x, dims in ("block_tables", block_tables, 2), ("context_lens", context_lens, 1):
        assert x.dim() == dims and len(x) == B, f"{name} must have a row for each of q's {B} sequences, got {x.shape}"
        assert x.dtype == torch.int32 and x.device == q.device, f"{name} must be int32 on {q.device}"
        assert x.stride(-1) == 1 or x.shape[-1] <= 1, f"{name} must be dense: call .contiguous() on it"
    o_part, lse_part = (q.new_empty(shape, dtype=torch.float32) for shape in ((B, Hq, S, D), (B, Hq, S)))
    scale = (1 / math.sqrt(D) if sm_scale is None else sm_scale) * math.log2(math.e)
    rows, dim = (max(16, triton.next_power_of_2(n)) for n in (Hq // Hkv, D))
    tile, warps = max(16, 16384 // (dim * q.element_size())), 4 if Hq > Hkv else 2
    split_kv_kernel[(B, Hkv, S)](
        q, k_cache, v_cache, block_tables, context_lens, o_part, lse_part,
        q.stride(0), block_tables.stride(0), scale, S,
        PAGE=BS, HKV=Hkv, GROUP=Hq // Hkv, D=D, ROWS=rows, DIM=dim, TILE=tile, num_warps=warps, num_stages=3,
    )  # fmt: skip
    o, lse = merge_splits(o_part, lse_part)
    return (o.to(q.dtype), lse) if return_lse else o.to(q.dtype)
