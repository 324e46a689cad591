"""L2 · Decode attention over a paged cache: one new query token a sequence, keys and values found through the table.

The softmax is taken online, a tile of tokens at a time (Milakov and Gimelshein, arXiv 1805.02867); the pages are
PagedAttention's (arXiv 2309.06180). vLLM's kernel of this form is kernel_unified_attention.
"""

import math

import torch
import triton
import triton.language as tl


@triton.jit
def paged_decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, lens_ptr, o_ptr, q_stride, table_stride, scale,
    PAGE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, KV head): K and V are read once for all GROUP query heads that share them."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lens_ptr + seq)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)  # powers of two, and at least the 16 of tl.dot: the rest is masked
    heads = head * GROUP + row
    mine = (row < GROUP)[:, None] & (dim < D)[None, :]
    q = tl.load(q_ptr + seq * q_stride + heads[:, None] * D + dim[None, :], mask=mine, other=0)
    top = tl.full([ROWS], float("-inf"), tl.float32)  # the largest logit so far
    total = tl.zeros([ROWS], tl.float32)  # the sum of exp2(logit - top)
    acc = tl.zeros([ROWS, DIM], tl.float32)  # the sum of exp2(logit - top) · v
    for first in range(0, length, TILE):
        position = first + tl.arange(0, TILE)
        live = position < length
        page = tl.load(tables_ptr + seq * table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
        at = ((page * PAGE + position % PAGE) * HKV + head)[:, None] * D + dim[None, :]
        there = live[:, None] & (dim < D)[None, :]
        k = tl.load(k_cache_ptr + at, mask=there, other=0)
        v = tl.load(v_cache_ptr + at, mask=there, other=0)  # zero, not what is there: 0 · NaN is NaN
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(live[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weights, shrink = tl.exp2(logits - higher[:, None]), tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    o = acc / tl.where(total > 0, total, 1)[:, None]  # no tokens: zeros, not 0 / 0
    tl.store(o_ptr + (seq * HKV * GROUP + heads)[:, None] * D + dim[None, :], o.to(o_ptr.dtype.element_ty), mask=mine)


def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
    """softmax(q · K^T · sm_scale) · V for each sequence and query head, accumulated in float32.

    q [B, Hq, D] fp32, fp16 or bf16: rows dense, any row stride. k_cache, v_cache [NB, BS, Hkv, D], contiguous, q's
    dtype; Hq a multiple of Hkv, and query head h reads KV head h // (Hq // Hkv). Any D, any BS >= 1.
    block_tables [B, W] int32, rows dense; context_lens [B] int32. What lies past a length, in the last page, in the
    table's row or in pages nobody owns, is never used, whatever it holds. A length of 0 gives zeros.
    sm_scale: a float, 1 / sqrt(D) by default. Returns [B, Hq, D], contiguous, in q's dtype.
    The values of lengths and page ids are not looked at: that would wait for the GPU. Refused (AssertionError naming
    the argument): shapes, dtypes or devices that disagree, heads that do not divide, layouts other than these.

    >>> paged_decode(q, k_cache, v_cache, block_tables=[[2, 0]], context_lens=[5])  # BS = 4
    # tokens 0..3 are k_cache[2, 0..3], token 4 is k_cache[0, 0]
    """
    assert q.dim() == 3 and q[:1].is_contiguous(), "q must be [B, Hq, D] with dense rows"
    (B, Hq, D), (_, BS, Hkv, _) = q.shape, k_cache.shape
    assert k_cache.shape == v_cache.shape and k_cache.shape[3] == D, "k_cache and v_cache must be [NB, BS, Hkv, q's D]"
    assert Hq % Hkv == 0, f"q has {Hq} heads, not a multiple of k_cache's {Hkv}"
    for name, x in {"k_cache": k_cache, "v_cache": v_cache}.items():
        assert x.dtype == q.dtype and x.device == q.device, f"{name} is {x.dtype} on {x.device}, q {q.dtype}"
        assert x.is_contiguous(), f"{name} must be contiguous: pass the cache itself, not a strided view of it"
    for name, x, dims in ("block_tables", block_tables, 2), ("context_lens", context_lens, 1):
        assert x.dim() == dims and len(x) == B, f"{name} must have a row for each of q's {B} sequences, got {x.shape}"
        assert x.dtype == torch.int32 and x.device == q.device, f"{name} must be int32 on {q.device}"
        assert x.stride(-1) == 1 or x.shape[-1] <= 1, f"{name} must be dense: call .contiguous() on it"
    o = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    scale = (1 / math.sqrt(D) if sm_scale is None else sm_scale) * math.log2(math.e)  # exp2 is the GPU's own
    rows, dim = (max(16, triton.next_power_of_2(n)) for n in (Hq // Hkv, D))
    tile, warps = max(16, 16384 // (dim * q.element_size())), 4 if Hq > Hkv else 2  # 16 KiB of K, tuned on an H200
    paged_decode_kernel[(B, Hkv)](
        q, k_cache, v_cache, block_tables, context_lens, o, q.stride(0), block_tables.stride(0), scale,
        PAGE=BS, HKV=Hkv, GROUP=Hq // Hkv, D=D, ROWS=rows, DIM=dim, TILE=tile, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return o
