"""L2 · Decode attention over a paged cache: one new query token a sequence, keys and values found through the table.

The softmax is taken online, a tile of tokens at a time (Milakov and Gimelshein, arXiv 1805.02867); the pages are
PagedAttention's (arXiv 2309.06180). vLLM's kernel of this form is kernel_unified_attention.
"""

# Run: pytest drills/tests/test_l2_paged_decode.py   or: drills test l2

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
    raise NotImplementedError("L2 paged_decode_kernel is yours to write")


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
    raise NotImplementedError("L2 paged_decode is yours to write")
