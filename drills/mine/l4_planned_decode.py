"""L4 · The planner: cut the batch into equal pieces of work on the CPU, run one kernel over the list, merge.

What FlashInfer's plan() decides (its scheduler.cuh, PartitionPagedKVCacheBinarySearchMinNumPagePerBatch), in the open.
A list is made once a step, used in every layer, and has a fixed size, so that a CUDA graph can hold the launches.
"""

# Run: pytest drills/tests/test_l4_planned_decode.py   or: drills test l4

import math
from typing import NamedTuple
import torch
import triton
import triton.language as tl


class WorkList(NamedTuple):
    """Work items, int32: item i is the tokens start[i]..end[i]-1 of sequence seq[i], and start[i] begins a page.

    Sequence b has the items row_ptr[b]..row_ptr[b+1]-1, in the order of its tokens. Those past row_ptr[B] are padding:
    seq, start and end are 0.
    """

    seq: torch.Tensor  # [items]
    start: torch.Tensor  # [items]
    end: torch.Tensor  # [items]
    row_ptr: torch.Tensor  # [B + 1]


def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
    """Cut every sequence into chunks of as few pages as keep items · num_kv_heads <= num_programs.

    context_lens_cpu [B] int32 or int64, on the CPU. One chunk size for all, a whole number of pages, the smallest that
    fits; a sequence's last chunk may be shorter, and a sequence of length 0 has none. Where not even one item a
    sequence fits, each has one. The lists are max(B, num_programs // num_kv_heads) long, whatever the lengths are:
    a captured graph keeps its tensors, and the next plan is copied into them. Returns a WorkList on the CPU.
    Refused (AssertionError naming the argument): lengths that are not [B] integers on the CPU or are negative; any of
    the three numbers below 1.
    num_programs: how much to cut. On an H200 this does well: one for each (sequence, KV head), and where lengths differ
    much one more for each 1,024 tokens of a head; but never fewer than 4 a multiprocessor.

    >>> plan_decode([9, 2, 5], page_size=4, num_kv_heads=2, num_programs=10)  # 5 items at most; chunks of 2 pages
    seq [0, 0, 1, 2, 0], start [0, 8, 0, 0, 0], end [8, 9, 2, 5, 0], row_ptr [0, 2, 3, 4]
    """
    raise NotImplementedError("L4 plan_decode is yours to write")


@triton.jit
def planned_decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, seq_ptr, start_ptr, end_ptr, row_ptr, o_part_ptr, lse_part_ptr,
    o_ptr, lse_ptr, q_stride, table_stride, scale,
    PAGE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program an (item, KV head): L3's, but for where its piece of work comes from."""
    raise NotImplementedError("L4 planned_decode_kernel is yours to write")


def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
    """Decode over a work list of plan_decode, moved to q's device: one launch over the items, one of a merge kernel.

    q [B, Hq, D]; k_cache, v_cache [NB, BS, Hkv, D]; block_tables [B, W] int32: as in paged_decode (L2), and the same is
    refused, and a work list that is not int32, contiguous and on q's device. The lengths are the list's: no value is
    read on the host, so a CUDA graph can hold the call, and be replayed when another plan of the same sizes has been
    copied into work's tensors. Returns o [B, Hq, D] in q's dtype, or (o, lse [B, Hq] fp32, natural) with return_lse.

    >>> work = plan_decode(context_lens_cpu, page_size, Hkv, num_programs)
    >>> work = WorkList(*(x.to(q.device) for x in work))       # once a step
    >>> planned_decode(q, k_cache, v_cache, block_tables, work)  # once a layer
    """
    raise NotImplementedError("L4 planned_decode is yours to write")
