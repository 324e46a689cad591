"""L4 written in other ways, all of them right."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import namedtuple
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from selftests.alternatives import alternative

Lists = namedtuple("Lists", "seq start end row_ptr")


def check_numbers(lens, page_size, num_kv_heads, num_programs):
    if lens.device.type != "cpu" or lens.dim() != 1:
        raise ValueError("context_lens_cpu")
    if lens.dtype not in (torch.int32, torch.int64):
        raise TypeError("context_lens_cpu")
    if len(lens) and int(lens.min()) < 0:
        raise ValueError("context_lens_cpu")
    if min(page_size, num_kv_heads, num_programs) <= 0:
        raise ValueError("numbers must be positive")


@alternative
def planned_in_python_lists():
    """Everything in Python's numbers; the chunk by bisecting a range of sizes."""

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        check_numbers(context_lens_cpu, page_size, num_kv_heads, num_programs)
        lens = context_lens_cpu.tolist()
        pages = [math.ceil(n / page_size) for n in lens]
        sizes = range(1, max(pages, default=0) + 1)
        fits = lambda size: sum((p - 1) // size + 1 for p in pages) * num_kv_heads <= num_programs  # noqa: E731
        at = bisect.bisect_left(sizes, True, key=fits)
        step = page_size * (sizes[at] if at < len(sizes) else max(len(sizes), 1))
        seq, start, end, row_ptr = [], [], [], [0]
        for b, n in enumerate(lens):
            done = 0
            while done < n:
                seq.append(b)
                start.append(done)
                done = min(n, done + step)
                end.append(done)
            row_ptr.append(len(seq))
        size = max(len(lens), num_programs // num_kv_heads)
        for column in (seq, start, end):
            column.extend([0] * (size - len(column)))
        return Lists(*(torch.tensor(x, dtype=torch.int32) for x in (seq, start, end, row_ptr)))

    return plan_decode


@alternative
def planned_in_numpy_arrays():
    """NumPy, the lists filled in place; the search bounded below by the mean."""

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        check_numbers(context_lens_cpu, page_size, num_kv_heads, num_programs)
        lens = context_lens_cpu.numpy().astype(np.int64)
        pages, budget = -(-lens // page_size), num_programs // num_kv_heads
        longest = max(1, int(pages.max(initial=0)))
        chunk = min(longest, max(1, -(-int(pages.sum()) // max(1, budget))))
        high = longest
        while chunk < high:
            middle = chunk + (high - chunk) // 2
            if int((-(-pages // middle)).sum()) > budget:
                chunk = middle + 1
            else:
                high = middle
        counts = -(-pages // chunk)
        work = np.zeros((3, max(len(lens), budget)), dtype=np.int32)
        row_ptr = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(counts, out=row_ptr[1:])
        items = int(row_ptr[-1])
        seq = np.repeat(np.arange(len(lens)), counts)
        start = (np.arange(items) - row_ptr[seq]) * (chunk * page_size)
        work[:, :items] = seq, start, np.minimum(start + chunk * page_size, lens[seq])
        return Lists(*(torch.from_numpy(x) for x in (*work, row_ptr)))

    return plan_decode


@alternative
def only_sizes_that_save_an_item():
    """Only the sizes at which some sequence gets an item less are tried: ceil(pages / n)."""

    def plan_decode(context_lens_cpu, page_size, num_kv_heads, num_programs):
        check_numbers(context_lens_cpu, page_size, num_kv_heads, num_programs)
        lens, budget = context_lens_cpu.tolist(), num_programs // num_kv_heads
        pages = [(n + page_size - 1) // page_size for n in lens if n]
        chunk = max(pages, default=1)
        sizes = sorted({-(-p // n) for p in pages for n in range(1, budget + 1)})
        for size in sizes:
            if sum(-(-p // size) for p in pages) <= budget:
                chunk = size
                break
        step = chunk * page_size
        items = [(b, s, min(n, s + step)) for b, n in enumerate(lens) for s in range(0, n, step)]
        row_ptr = torch.tensor([0, *itertools.accumulate(-(-n // step) for n in lens)], dtype=torch.int32)
        lists = torch.zeros(3, max(len(lens), budget), dtype=torch.int32)
        if items:
            lists[:, : len(items)] = torch.tensor(items, dtype=torch.int32).T
        return Lists(lists[0], lists[1], lists[2], row_ptr)

    return plan_decode


def check_tensors(q, k_cache, v_cache, block_tables, work):
    """The same refusals as other exceptions, in another order."""
    row = lambda x: x.dim() == 1 and (len(x) <= 1 or x.stride(0) == 1)  # noqa: E731
    if any(x.dtype is not torch.int32 for x in (*work, block_tables)):
        raise TypeError("work and block_tables must be int32")
    if not all(map(row, work)) or len({len(x) for x in work[:3]}) != 1:
        raise ValueError("work's lists")
    if q.dim() != 3 or k_cache.dim() != 4 or block_tables.dim() != 2:
        raise ValueError("dimensions")
    if not q.shape[0] == block_tables.shape[0] == work.row_ptr.shape[0] - 1:
        raise IndexError("not one batch")
    if q.shape[1] % k_cache.shape[2] or q.shape[2] != k_cache.shape[3] or k_cache.shape != v_cache.shape:
        raise ValueError("heads or shapes")
    if len({q.dtype, k_cache.dtype, v_cache.dtype}) != 1:
        raise TypeError("dtypes")
    if len({x.device for x in (q, k_cache, v_cache, block_tables, *work)}) != 1:
        raise ValueError("devices")
    (_, H, D), table = q.stride(), block_tables.stride(1)
    if (
        (q.shape[2] > 1 and D != 1)
        or (q.shape[1] > 1 and q.shape[2] != H)
        or (block_tables.shape[1] > 1 and table != 1)
    ):
        raise ValueError("rows must be dense")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("caches must be contiguous")


def power(n):
    return 1 << (n - 1).bit_length()


@triton.jit
def merge_kernel(parts, lses, row_ptr, o, lse, HQ: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr):
    """One program a (sequence, query head): the largest lse first, then the weights, an item at a time."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, DIM)
    first, last = tl.load(row_ptr + b), tl.load(row_ptr + b + 1)
    top = tl.full([], float("-inf"), tl.float32)
    for i in range(first, last):
        top = tl.maximum(top, tl.load(lses + tl.cast(i, tl.int64) * HQ + h))
    total = tl.full([], 0.0, tl.float32)
    acc = tl.full([DIM], 0.0, tl.float32)
    for i in range(first, last):
        at = tl.cast(i, tl.int64) * HQ + h
        weight = tl.exp(tl.load(lses + at) - top)
        total += weight
        acc += weight * tl.load(parts + at * D + dim, mask=dim < D, other=0.0)
    if last > first:
        acc = acc / total
    tl.store(o + (b * HQ + h) * D + dim, acc.to(o.dtype.element_ty), mask=dim < D)
    tl.store(lse + b * HQ + h, top + tl.log(total))


@alternative
def items_by_query_head():
    """A program for every query head, no tl.dot, natural exponentials, the whole item in two passes."""

    @triton.jit
    def planned_decode_kernel(
        q, k, v, tables, seqs, starts, ends, parts, lses, qs, ts, scale, HQ: tl.constexpr, HKV: tl.constexpr,
        D: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr, T: tl.constexpr,
    ):  # fmt: skip
        i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
        b, start, end = tl.load(seqs + i).to(tl.int64), tl.load(starts + i), tl.load(ends + i)
        dim = tl.arange(0, DIM)
        kv = h // (HQ // HKV)
        x = tl.load(q + b * qs + h * D + dim, mask=dim < D, other=0.0).to(tl.float32) * scale
        top = tl.full([], float("-inf"), tl.float32)
        for t0 in range(start, end, T):
            t = t0 + tl.arange(0, T)
            page = tl.load(tables + b * ts + t // BS, mask=t < end, other=0).to(tl.int64)
            at = ((page * BS + t % BS) * HKV + kv)[:, None] * D + dim[None, :]
            keys = tl.load(k + at, mask=(t < end)[:, None] & (dim < D)[None, :], other=0.0).to(tl.float32)
            logits = tl.where(t < end, tl.sum(keys * x[None, :], 1), float("-inf"))
            top = tl.maximum(top, tl.max(logits, 0))
        total = tl.full([], 0.0, tl.float32)
        acc = tl.full([DIM], 0.0, tl.float32)
        for t0 in range(start, end, T):
            t = t0 + tl.arange(0, T)
            page = tl.load(tables + b * ts + t // BS, mask=t < end, other=0).to(tl.int64)
            at = ((page * BS + t % BS) * HKV + kv)[:, None] * D + dim[None, :]
            there = (t < end)[:, None] & (dim < D)[None, :]
            keys = tl.load(k + at, mask=there, other=0.0).to(tl.float32)
            values = tl.load(v + at, mask=there, other=0.0).to(tl.float32)
            w = tl.where(t < end, tl.exp(tl.sum(keys * x[None, :], 1) - top), 0.0)
            total += tl.sum(w, 0)
            acc += tl.sum(w[:, None] * values, 0)
        acc = acc / tl.where(total > 0, total, 1.0)  # padding: 0, with an lse of -inf, that no row has
        tl.store(parts + (i * HQ + h) * D + dim, acc, mask=dim < D)
        tl.store(lses + i * HQ + h, top + tl.log(total))

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        check_tensors(q, k_cache, v_cache, block_tables, work)
        (B, Hq, D), (_, BS, Hkv, _), n = q.shape, k_cache.shape, work.seq.numel()
        scale = D**-0.5 if sm_scale is None else float(sm_scale)
        new: dict[str, Any] = dict(dtype=torch.float32, device=q.device)
        parts, lses, lse = torch.empty(n, Hq, D, **new), torch.empty(n, Hq, **new), torch.empty(B, Hq, **new)
        o = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
        planned_decode_kernel[(n, Hq)](
            q, k_cache, v_cache, block_tables, work.seq, work.start, work.end, parts, lses, q.stride(0),
            block_tables.stride(0), scale, HQ=Hq, HKV=Hkv, D=D, DIM=power(D), BS=BS, T=64,
        )  # fmt: skip
        merge_kernel[(B, Hq)](parts, lses, work.row_ptr, o, lse, HQ=Hq, D=D, DIM=power(D))
        return (o, lse) if return_lse else o

    return planned_decode


@alternative
def items_page_by_page():
    """A program for each (item, KV head) that walks over pages, and knows padding by row_ptr[B]; fp32 throughout."""

    @triton.jit
    def planned_decode_kernel(
        q, k, v, tables, seqs, starts, ends, row_ptr, parts, lses, qs, ts, scale, B, HKV: tl.constexpr, G: tl.constexpr,
        GP: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr, BSP: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0).to(tl.int64)
        kv = tl.program_id(1)
        if i < tl.load(row_ptr + B):
            b, start, end = tl.load(seqs + i).to(tl.int64), tl.load(starts + i), tl.load(ends + i)
            g, dim, slot = tl.arange(0, GP), tl.arange(0, DIM), tl.arange(0, BSP)
            mine = (g < G)[:, None] & (dim < D)[None, :]
            rows = (kv * G + g)[:, None] * D + dim[None, :]
            x = tl.load(q + b * qs + rows, mask=mine, other=0.0).to(tl.float32)
            top = tl.full([GP], float("-inf"), tl.float32)
            total = tl.full([GP], 0.0, tl.float32)
            acc = tl.full([GP, DIM], 0.0, tl.float32)
            for column in range(start // BS, (end + BS - 1) // BS):
                page = tl.load(tables + b * ts + column).to(tl.int64)
                live = (slot < BS) & (column * BS + slot < end)
                at = ((page * BS + slot) * HKV + kv)[:, None] * D + dim[None, :]
                there = live[:, None] & (dim < D)[None, :]
                keys = tl.load(k + at, mask=there, other=0.0).to(tl.float32)
                values = tl.load(v + at, mask=there, other=0.0).to(tl.float32)
                logits = tl.sum(x[:, None, :] * keys[None, :, :], 2) * scale
                logits = tl.where(live[None, :], logits, float("-inf"))
                now = tl.maximum(top, tl.max(logits, 1))
                w = tl.exp(logits - now[:, None])
                total = total * tl.exp(top - now) + tl.sum(w, 1)
                acc = acc * tl.exp(top - now)[:, None] + tl.sum(w[:, :, None] * values[None, :, :], 1)
                top = now
            out = i * (HKV * G) * D
            tl.store(parts + out + rows, acc / total[:, None], mask=mine)
            tl.store(lses + i * (HKV * G) + kv * G + g, top + tl.log(total), mask=g < G)

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        check_tensors(q, k_cache, v_cache, block_tables, work)
        (B, Hq, D), (_, BS, Hkv, _), n = q.shape, k_cache.shape, work.end.shape[0]
        scale = 1.0 / D**0.5 if sm_scale is None else sm_scale
        whole = torch.empty(n * Hq * (D + 1), dtype=torch.float32, device=q.device)
        parts, lses = whole[: n * Hq * D], whole[n * Hq * D :]
        lse = torch.empty(B, Hq, dtype=torch.float32, device=q.device)
        o = torch.empty_like(q, memory_format=torch.contiguous_format)
        planned_decode_kernel[(n, Hkv)](
            q, k_cache, v_cache, block_tables, *work, parts, lses, q.stride(0), block_tables.stride(0), scale, B,
            HKV=Hkv, G=Hq // Hkv, GP=power(Hq // Hkv), D=D, DIM=power(D), BS=BS, BSP=power(BS), num_warps=4,
        )  # fmt: skip
        merge_kernel[(B, Hq)](parts, lses, work.row_ptr, o, lse, HQ=Hq, D=D, DIM=power(D))
        return (o, lse) if return_lse else o

    return planned_decode


@alternative
def items_with_sums_and_maxima_apart():
    """Parts kept undivided beside their maximum and their sum; merged over all heads of a sequence in one program."""

    @triton.jit
    def planned_decode_kernel(
        q, k, v, tables, seqs, starts, ends, accs, tops, sums, qs, ts, scale, HQ: tl.constexpr, HKV: tl.constexpr,
        D: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    ):  # fmt: skip
        kv, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
        start, end = tl.load(starts + i), tl.load(ends + i)
        if end == 0:
            return
        b = tl.load(seqs + i).to(tl.int64)
        m, dim = tl.arange(0, M), tl.arange(0, DIM)
        G: tl.constexpr = HQ // HKV
        h = kv * G + m
        mine = (m < G)[:, None] & (dim < D)[None, :]
        x = tl.load(q + b * qs + h[:, None] * D + dim[None, :], mask=mine, other=0.0)
        top = tl.full([M], -1.0e30, tl.float32)
        total = tl.full([M], 0.0, tl.float32)
        acc = tl.full([M, DIM], 0.0, tl.float32)
        for t0 in range(start, end, T):
            t = t0 + tl.arange(0, T)
            page = tl.load(tables + b * ts + t // BS, mask=t < end, other=0).to(tl.int64)
            at = (page * (BS * HKV * D) + (t % BS) * (HKV * D) + kv * D)[:, None] + dim[None, :]
            there = (t < end)[:, None] & (dim < D)[None, :]
            logits = tl.dot(x, tl.trans(tl.load(k + at, mask=there, other=0.0)), input_precision="ieee") * scale
            logits = tl.where((t < end)[None, :], logits, -1.0e30)
            now = tl.maximum(top, tl.max(logits, 1))
            w = tl.where((t < end)[None, :], tl.exp(logits - now[:, None]), 0.0)
            values = tl.load(v + at, mask=there, other=0.0)
            total = total * tl.exp(top - now) + tl.sum(w, 1)
            product = tl.dot(w.to(values.dtype), values, input_precision="ieee")
            acc = acc * tl.exp(top - now)[:, None] + product
            top = now
        tl.store(accs + (i * HQ + h)[:, None] * D + dim[None, :], acc, mask=mine)
        tl.store(tops + i * HQ + h, top, mask=m < G)
        tl.store(sums + i * HQ + h, total, mask=m < G)

    @triton.jit
    def join_kernel(
        accs, tops, sums, row_ptr, o, lse, HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr
    ):
        b = tl.program_id(0).to(tl.int64)
        h, dim = tl.arange(0, H), tl.arange(0, DIM)
        mine = (h < HQ)[:, None] & (dim < D)[None, :]
        top = tl.full([H], float("-inf"), tl.float32)
        total = tl.full([H], 0.0, tl.float32)
        acc = tl.full([H, DIM], 0.0, tl.float32)
        for i in range(tl.load(row_ptr + b), tl.load(row_ptr + b + 1)):
            at = tl.cast(i, tl.int64) * HQ + h
            theirs = tl.load(tops + at, mask=h < HQ, other=0.0)
            now = tl.maximum(top, theirs)
            total = total * tl.exp(top - now) + tl.load(sums + at, mask=h < HQ, other=1.0) * tl.exp(theirs - now)
            part = tl.load(accs + at[:, None] * D + dim[None, :], mask=mine, other=0.0)
            acc = acc * tl.exp(top - now)[:, None] + part * tl.exp(theirs - now)[:, None]
            top = now
        value = tl.where(total[:, None] > 0, acc / tl.maximum(total, 1e-37)[:, None], 0.0)
        tl.store(o + (b * HQ + h)[:, None] * D + dim[None, :], value.to(o.dtype.element_ty), mask=mine)
        tl.store(lse + b * HQ + h, tl.where(total > 0, top + tl.log(total), float("-inf")), mask=h < HQ)

    def planned_decode(q, k_cache, v_cache, block_tables, work, sm_scale=None, return_lse=False):
        check_tensors(q, k_cache, v_cache, block_tables, work)
        (B, Hq, D), (_, BS, Hkv, _), n = q.shape, k_cache.shape, len(work.start)
        new: dict[str, Any] = dict(dtype=torch.float32, device=q.device)
        accs, tops, sums = torch.zeros(n, Hq, D, **new), torch.zeros(n, Hq, **new), torch.zeros(n, Hq, **new)
        o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(B, Hq, **new)
        planned_decode_kernel[(Hkv, n)](
            q, k_cache, v_cache, block_tables, work.seq, work.start, work.end, accs, tops, sums, q.stride(0),
            block_tables.stride(0), sm_scale if sm_scale is not None else 1 / math.sqrt(D), HQ=Hq, HKV=Hkv, D=D,
            DIM=max(16, power(D)), BS=BS, M=max(16, power(Hq // Hkv)), T=16,
        )  # fmt: skip
        join_kernel[(B,)](accs, tops, sums, work.row_ptr, o, lse, HQ=Hq, H=power(Hq), D=D, DIM=power(D))
        return (o, lse) if return_lse else o

    return planned_decode
