"""L3 · Split-KV decode: a sequence's tokens are shared out over programs, and their partial answers merged.

Flash-Decoding (pytorch.org/blog/flash-decoding) in Triton. An answer with its lse is an attention state, and merging
states is associative (FlashInfer, arXiv 2501.01005, section 2.2), so any cut of the tokens gives the same.
"""

# Run: pytest drills/tests/test_l3_split_kv.py   or: drills test l3

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
    raise NotImplementedError("L3 split_kv_kernel is yours to write")


@triton.jit
def merge_splits_kernel(
    o_part_ptr, lse_part_ptr, o_ptr, lse_ptr, S,
    D: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, query head): the mean of the parts, weighted by what each has of the whole softmax."""
    raise NotImplementedError("L3 merge_splits_kernel is yours to write")


def merge_splits(o_part, lse):
    """Merge the outputs of S disjoint sets of tokens into the output over all of them.

    o_part [B, Hq, S, D] fp32: each split's own softmax average, normalised. lse [B, Hq, S] fp32: the natural log of
    its sum of exponentials; an empty split is (0, -inf). Both contiguous. Returns (o [B, Hq, D] fp32, lse [B, Hq]
    fp32); where all splits are empty, (0, -inf). Refused (AssertionError): shapes, dtypes or layouts other than these.

    >>> merge_splits([[[[1.], [0.]]]], lse=[[[math.log(8), math.log(2)]]])
    ([[[0.8]]], [[2.302585]])    # (8 · 1 + 2 · 0) / (8 + 2), ln 10
    """
    raise NotImplementedError("L3 merge_splits is yours to write")


def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale=None, return_lse=False):
    """L2's paged_decode with every sequence cut into num_splits >= 1 parts that run at the same time, then merged.

    All arguments but the last three as in paged_decode: q [B, Hq, D]; k_cache, v_cache [NB, BS, Hkv, D];
    block_tables [B, W] int32; context_lens [B] int32; and the same is refused, and num_splits below 1. More splits
    than tokens are fine. Returns o [B, Hq, D] in q's dtype, or (o, lse [B, Hq] fp32) with return_lse: the natural log
    of the sum of exp(q · k · sm_scale) over the tokens, -inf where there are none.

    >>> split_kv_decode(q, k_cache, v_cache, block_tables=[[2, 0]], context_lens=[5], num_splits=2)  # BS = 4
    # here: tokens 0..2 and tokens 3..4; any cut gives the same
    """
    raise NotImplementedError("L3 split_kv_decode is yours to write")
