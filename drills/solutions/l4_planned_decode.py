"""L4 · The planner: cut the batch into equal pieces of work on the CPU, run one kernel over the list, merge.

What FlashInfer's plan() decides (its scheduler.cuh, PartitionPagedKVCacheBinarySearchMinNumPagePerBatch), in the open.
A list is made once a step, used in every layer, and has a fixed size, so that a CUDA graph can hold the launches.
"""

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
    lens = context_lens_cpu
    assert lens.dim() == 1 and lens.device.type == "cpu", "context_lens_cpu must be [B] on the CPU: plan reads it"
    assert not lens.is_floating_point() and (lens >= 0).all(), "context_lens_cpu must be integers, none negative"
    for name, x in ("page_size", page_size), ("num_kv_heads", num_kv_heads), ("num_programs", num_programs):
        assert x >= 1, f"{name} must be at least 1, got {x}"
    pages = (lens.long() + page_size - 1) // page_size
    budget = num_programs // num_kv_heads
    chunk, enough = 1, max([1, *pages.tolist()])
    while chunk < enough:  # a larger chunk never makes more items, so halve the interval
        middle = (chunk + enough) // 2
        fits = ((pages + middle - 1) // middle).sum() <= budget
        chunk, enough = (chunk, middle) if fits else (middle + 1, enough)
    counts = (pages + chunk - 1) // chunk
    row_ptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    seq = torch.repeat_interleave(counts)
    start = (torch.arange(len(seq)) - row_ptr[seq]) * chunk * page_size
    end = torch.minimum(start + chunk * page_size, lens[seq])
    padding = max(len(lens), budget) - len(seq)
    items = (torch.nn.functional.pad(x, (0, padding)) for x in (seq, start, end))
    return WorkList(*(x.int() for x in (*items, row_ptr)))


@triton.jit
def planned_decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, seq_ptr, start_ptr, end_ptr, row_ptr, o_part_ptr, lse_part_ptr,
    o_ptr, lse_ptr, q_stride, table_stride, scale,
    PAGE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program an (item, KV head): L3's, but for where its piece of work comes from."""
    item, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(start_ptr + item), tl.load(end_ptr + item)
    if start >= end:
        return  # padding
    seq = tl.load(seq_ptr + item).to(tl.int64)
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
    o, lse = acc / total[:, None], (top + tl.log2(total)) * 0.6931471805599453  # times ln 2: to base e
    if tl.load(row_ptr + seq + 1) - tl.load(row_ptr + seq) == 1:  # all of the sequence: there is nothing to merge
        out = seq * HKV * GROUP + heads
        tl.store(o_ptr + out[:, None] * D + dim[None, :], o.to(o_ptr.dtype.element_ty), mask=mine)
        tl.store(lse_ptr + out, lse, mask=row < GROUP)
    else:
        out = item * HKV * GROUP + heads
        tl.store(o_part_ptr + out[:, None] * D + dim[None, :], o, mask=mine)
        tl.store(lse_part_ptr + out, lse, mask=row < GROUP)


@triton.jit
def merge_items_kernel(
    o_part_ptr, lse_part_ptr, row_ptr, o_ptr, lse_ptr,
    HQ: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, query head): L3's merge over the items that row_ptr gives the sequence."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, stop = tl.load(row_ptr + seq), tl.load(row_ptr + seq + 1)
    if stop - begin == 1:
        return
    dim = tl.arange(0, DIM)
    top, total, acc = float("-inf"), 0.0, tl.zeros([DIM], tl.float32)
    for first in range(begin, stop, TILE):
        item = (first + tl.arange(0, TILE)).to(tl.int64)
        lse = tl.load(lse_part_ptr + item * HQ + head, mask=item < stop, other=float("-inf"))
        there = (item < stop)[:, None] & (dim < D)[None, :]
        part = tl.load(o_part_ptr + (item * HQ + head)[:, None] * D + dim[None, :], mask=there, other=0)
        higher = tl.maximum(top, tl.max(lse, 0))
        weights, shrink = tl.exp(lse - higher), tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * part, 0)
        top = higher
    o = acc / tl.where(total > 0, total, 1.0)  # a sequence of length 0 has no items: zeros, and an lse of -inf
    tl.store(o_ptr + (seq * HQ + head) * D + dim, o.to(o_ptr.dtype.element_ty), mask=dim < D)
    tl.store(lse_ptr + seq * HQ + head, top + tl.log(total))


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
    assert q.dim() == 3 and q[:1].is_contiguous(), "q must be [B, Hq, D] with dense rows"
    (B, Hq, D), (_, BS, Hkv, _), items = q.shape, k_cache.shape, len(work.seq)
    assert k_cache.shape == v_cache.shape and k_cache.shape[3] == D, "k_cache and v_cache must be [NB, BS, Hkv, q's D]"
    assert Hq % Hkv == 0, f"q has {Hq} heads, not a multiple of k_cache's {Hkv}"
    for name, x in {"k_cache": k_cache, "v_cache": v_cache}.items():
        assert x.dtype == q.dtype and x.device == q.device, f"{name} is {x.dtype} on {x.device}, q {q.dtype}"
        assert x.is_contiguous(), f"{name} must be contiguous: pass the cache itself, not a strided view of it"
    assert block_tables.dim() == 2, f"block_tables must be [B, W], got {block_tables.shape}"
    sizes = {"block_tables": B, "work.seq": items, "work.start": items, "work.end": items, "work.row_ptr": B + 1}
    for (name, size), x in zip(sizes.items(), (block_tables, *work)):
        assert len(x) == size, f"{name} has {len(x)} rows, expected {size}"
        assert x.dtype == torch.int32 and x.device == q.device, f"{name} must be int32 on {q.device}"
        assert x.stride(-1) == 1 or x.shape[-1] <= 1, f"{name} must be dense: call .contiguous() on it"
    o, o_part = q.new_empty(B, Hq, D), q.new_empty(items, Hq, D, dtype=torch.float32)
    lse, lse_part = (q.new_empty(n, Hq, dtype=torch.float32) for n in (B, items))
    scale = (1 / math.sqrt(D) if sm_scale is None else sm_scale) * math.log2(math.e)
    rows, dim = (max(16, triton.next_power_of_2(n)) for n in (Hq // Hkv, D))
    tile, warps = max(16, 16384 // (dim * q.element_size())), 4 if Hq > Hkv else 2
    planned_decode_kernel[(items, Hkv)](
        q, k_cache, v_cache, block_tables, *work, o_part, lse_part, o, lse, q.stride(0), block_tables.stride(0), scale,
        PAGE=BS, HKV=Hkv, GROUP=Hq // Hkv, D=D, ROWS=rows, DIM=dim, TILE=tile, num_warps=warps, num_stages=3,
    )  # fmt: skip
    tile = min(64, max(8, triton.next_power_of_2(items // max(B, 1))))  # all the items of a usual sequence
    shape = {"HQ": Hq, "D": D, "DIM": dim, "TILE": tile, "num_warps": max(1, tile // 16)}
    merge_items_kernel[(B, Hq)](o_part, lse_part, work.row_ptr, o, lse, **shape)
    return (o, lse) if return_lse else o
