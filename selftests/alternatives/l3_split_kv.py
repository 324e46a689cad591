"""L3 written in other ways, all of them right."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from selftests.alternatives import alternative


def check_parts(o_part, lse):
    if o_part.dtype is not torch.float32 or lse.dtype is not torch.float32:
        raise TypeError("o_part and lse must be float32")
    if o_part.ndim != 4 or tuple(lse.shape) != tuple(o_part.shape[:-1]):
        raise ValueError("o_part must be [B, Hq, S, D] and lse [B, Hq, S]")
    if not (o_part.is_contiguous() and lse.is_contiguous()):
        raise ValueError("o_part and lse must be contiguous")


def check_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits):
    """The same refusals as other exceptions, in another order."""
    if num_splits < 1:
        raise ValueError("num_splits")
    if q.ndim != 3 or block_tables.ndim != 2 or context_lens.ndim != 1:
        raise ValueError("dimensions")
    if not (len(q) == len(block_tables) == len(context_lens)):
        raise IndexError("sequences")
    if block_tables.dtype != torch.int32 or context_lens.dtype != torch.int32:
        raise TypeError("block_tables and context_lens must be int32")
    if q.dtype != k_cache.dtype or q.dtype != v_cache.dtype:
        raise TypeError("dtypes")
    if len({x.device for x in (q, k_cache, v_cache, block_tables, context_lens)}) > 1:
        raise ValueError("devices")
    if k_cache.shape != v_cache.shape or k_cache.shape[-1] != q.shape[-1] or q.shape[1] % k_cache.shape[2]:
        raise ValueError("shapes")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and q[:1].is_contiguous()):
        raise ValueError("layouts")
    if block_tables.shape[1] > 1 and block_tables.stride(1) != 1:
        raise ValueError("block_tables")


def merge_launch(kernel, grid, o_part, lse, **constants):
    check_parts(o_part, lse)
    B, Hq, S, D = o_part.shape
    o = torch.empty((B, Hq, D), dtype=torch.float32, device=lse.device)
    merged = torch.empty((B, Hq), dtype=torch.float32, device=lse.device)
    kernel[grid(B * Hq, D)](o_part, lse, o, merged, S, D=D, P=triton.next_power_of_2(D), **constants)
    return o, merged


@triton.jit
def one_by_one_kernel(o_part, lse_part, o, lse, S, D: tl.constexpr, P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, P)
    here = float("-inf")
    acc = tl.full([P], 0.0, tl.float32)
    for s in range(S):
        x = tl.load(lse_part + row * S + s)
        part = tl.load(o_part + (row * S + s) * D + d, mask=d < D, other=0.0)
        high = tl.maximum(here, x)
        low = tl.minimum(here, x)
        both = high + tl.log(1.0 + tl.exp(tl.where(low == float("-inf"), float("-inf"), low - high)))
        share = tl.where(x == float("-inf"), 0.0, tl.exp(x - both))
        acc += share * (part - acc)
        here = both
    tl.store(o + row * D + d, acc, mask=d < D)
    tl.store(lse + row, here)


def merged_one_by_one(o_part, lse):
    return merge_launch(one_by_one_kernel, lambda rows, dim: (rows,), o_part, lse)


@alternative
def part_by_part():
    """The parts merged one by one: each takes its share of what was merged so far, and no sum is kept."""

    @triton.jit
    def merge_splits_kernel(o_part, lse_part, o, lse, S, D: tl.constexpr, P: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, P)
        here = float("-inf")
        acc = tl.full([P], 0.0, tl.float32)
        for s in range(S):
            x = tl.load(lse_part + row * S + s)
            part = tl.load(o_part + (row * S + s) * D + d, mask=d < D, other=0.0)
            high = tl.maximum(here, x)
            low = tl.minimum(here, x)
            both = high + tl.log(1.0 + tl.exp(tl.where(low == float("-inf"), float("-inf"), low - high)))
            share = tl.where(x == float("-inf"), 0.0, tl.exp(x - both))
            acc += share * (part - acc)
            here = both
        tl.store(o + row * D + d, acc, mask=d < D)
        tl.store(lse + row, here)

    def merge_splits(o_part, lse):
        return merge_launch(merge_splits_kernel, lambda rows, dim: (rows,), o_part, lse)

    return merge_splits


@alternative
def largest_first():
    """Two passes over the parts: the largest lse, then sums in base 2."""

    @triton.jit
    def merge_splits_kernel(o_part, lse_part, o, lse, S, D: tl.constexpr, P: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, P)
        top = -1.0e38
        for s in range(S):
            top = tl.maximum(top, tl.load(lse_part + row * S + s))
        total = 0.0
        acc = tl.full([P], 0.0, tl.float32)
        for s in range(S):
            weight = tl.exp2((tl.load(lse_part + row * S + s) - top) * 1.4426950408889634)
            total += weight
            acc += weight * tl.load(o_part + (row * S + s) * D + d, mask=d < D, other=0.0)
        tl.store(o + row * D + d, tl.where(total > 0, acc / total, 0.0), mask=d < D)
        tl.store(lse + row, tl.where(total > 0, top + tl.log2(total) * 0.6931471805599453, float("-inf")))

    def merge_splits(o_part, lse):
        return merge_launch(merge_splits_kernel, lambda rows, dim: (rows,), o_part, lse)

    return merge_splits


@alternative
def dims_in_the_grid():
    """A 2-D grid over rows and tiles of 8 dims; each program takes all lse in one tile, and parts by a dot product."""

    @triton.jit
    def merge_splits_kernel(o_part, lse_part, o, lse, S, D: tl.constexpr, P: tl.constexpr, N: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        s, d = tl.arange(0, N), tl.program_id(1) * 8 + tl.arange(0, 8)
        x = tl.load(lse_part + row * S + s, mask=s < S, other=float("-inf"))
        top = tl.max(x, 0)
        top = tl.where(top > float("-inf"), top, 0.0)
        weights = tl.exp(x - top)
        total = tl.sum(weights, 0)
        weights /= tl.maximum(total, 1e-37)
        at = o_part + (row * S + s)[:, None] * D + d[None, :]
        part = tl.load(at, mask=(s[:, None] < S) & (d[None, :] < D), other=0.0)
        tl.store(o + row * D + d, tl.sum(weights[:, None] * part, 0), mask=d < D)
        if tl.program_id(1) == 0:
            tl.store(lse + row, tl.log(total) + top)

    def merge_splits(o_part, lse):
        many = triton.next_power_of_2(o_part.shape[2]) if o_part.ndim == 4 else 1
        return merge_launch(merge_splits_kernel, lambda rows, dim: (rows, triton.cdiv(dim, 8)), o_part, lse, N=many)

    return merge_splits


@alternative
def two_rows_a_program():
    """Two rows a program, the last program's masked, in tiles of 4 parts."""

    @triton.jit
    def merge_splits_kernel(o_part, lse_part, o, lse, S, ROWS, D: tl.constexpr, P: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) * 2 + tl.arange(0, 2)
        d = tl.arange(0, P)
        top = tl.full([2], -3.0e38, tl.float32)
        total = tl.full([2], 0.0, tl.float32)
        acc = tl.full([2, P], 0.0, tl.float32)
        for first in range(0, S, 4):
            s = first + tl.arange(0, 4)
            live = (row < ROWS)[:, None] & (s < S)[None, :]
            at = row[:, None] * S + s[None, :]
            x = tl.load(lse_part + at, mask=live, other=float("-inf"))
            part = tl.load(
                o_part + at[:, :, None] * D + d[None, None, :], mask=live[:, :, None] & (d < D)[None, None, :], other=0
            )
            higher = tl.maximum(top, tl.max(x, 1))
            weights = tl.exp(x - higher[:, None])
            shrink = tl.exp(top - higher)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * part, 1)
            top = higher
        mine = (row < ROWS)[:, None] & (d < D)[None, :]
        tl.store(o + row[:, None] * D + d[None, :], acc / tl.maximum(total, 1e-30)[:, None], mask=mine)
        tl.store(lse + row, tl.where(total > 0, top + tl.log(total), float("-inf")), mask=row < ROWS)

    def merge_splits(o_part, lse):
        check_parts(o_part, lse)
        B, Hq, S, D = o_part.shape
        o, merged = torch.empty(B, Hq, D, device=lse.device), torch.empty(B, Hq, device=lse.device)
        P = triton.next_power_of_2(D)
        merge_splits_kernel[(triton.cdiv(B * Hq, 2),)](o_part, lse, o, merged, S, B * Hq, D=D, P=P)
        return o, merged

    return merge_splits


def decoded(kernel, grid, q, k_cache, v_cache, table, lens, S, sm_scale, return_lse, **constants):
    """Checks, the launch of a kernel that takes these arguments, the merge part by part."""
    check_decode(q, k_cache, v_cache, table, lens, S)
    (B, Hq, D), (_, BS, Hkv, _) = q.shape, k_cache.shape
    lens = lens.contiguous()
    o_part = torch.empty(B, Hq, S, D, dtype=torch.float32, device=q.device)
    lse_part = torch.empty(B, Hq, S, dtype=torch.float32, device=q.device)
    scale = D**-0.5 if sm_scale is None else sm_scale
    P = max(16, triton.next_power_of_2(D))
    kernel[grid(B, Hq, S)](
        q, k_cache, v_cache, table, lens, o_part, lse_part, q.stride(0), table.stride(0), scale, S,
        BS=BS, HQ=Hq, HKV=Hkv, D=D, P=P, **constants,
    )  # fmt: skip
    o, lse = merged_one_by_one(o_part, lse_part)
    o = o.to(q.dtype)
    return (o, lse) if return_lse else o


@alternative
def tokens_dealt_in_turn():
    """Split s has the tokens s, s + S, s + 2S; a program a query head, products added up without tl.dot."""

    @triton.jit
    def split_kv_kernel(
        q, kc, vc, table, lens, o, lse, q_stride, t_stride, scale, S,
        BS: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    ):  # fmt: skip
        b, h, s = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        n = tl.load(lens + b)
        d = tl.arange(0, P)
        query = tl.load(q + b * q_stride + h * D + d, mask=d < D, other=0).to(tl.float32) * scale
        top, total = -3.0e38, 0.0
        acc = tl.full([P], 0.0, tl.float32)
        for first in range(s, n, 8 * S):
            p = first + tl.arange(0, 8) * S
            page = tl.load(table + b * t_stride + p // BS, mask=p < n, other=0).to(tl.int64)
            at = ((page * BS + p % BS) * HKV + h // (HQ // HKV))[:, None] * D + d[None, :]
            live = (p < n)[:, None] & (d < D)[None, :]
            logits = tl.sum(tl.load(kc + at, mask=live, other=0).to(tl.float32) * query[None, :], 1)
            logits = tl.where(p < n, logits, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, 0))
            weights = tl.exp(logits - higher)
            total = total * tl.exp(top - higher) + tl.sum(weights, 0)
            v = tl.load(vc + at, mask=live, other=0).to(tl.float32)
            acc = acc * tl.exp(top - higher) + tl.sum(weights[:, None] * v, 0)
            top = higher
        row = (b * HQ + h) * S + s
        tl.store(o + row * D + d, acc / tl.maximum(total, 1e-30), mask=d < D)
        tl.store(lse + row, tl.where(total > 0, top + tl.log(total), float("-inf")))

    def split_kv_decode(q, kc, vc, table, lens, num_splits, sm_scale=None, return_lse=False):
        return decoded(
            split_kv_kernel, lambda B, Hq, S: (B, Hq, S), q, kc, vc, table, lens, num_splits, sm_scale, return_lse
        )

    return split_kv_decode


@alternative
def whole_pages():
    """Splits of whole pages, a page at a time; splits that have none are done first."""

    @triton.jit
    def split_kv_kernel(
        q, kc, vc, table, lens, o, lse, q_stride, t_stride, scale, S,
        BS: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    ):  # fmt: skip
        s, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        n = tl.load(lens + b)
        pages = (n + BS - 1) // BS
        first, last = s * pages // S, (s + 1) * pages // S
        d, i = tl.arange(0, P), tl.arange(0, T)
        row = (b * HQ + h) * S + s
        tl.store(o + row * D + d, tl.full([P], 0.0, tl.float32), mask=d < D)
        tl.store(lse + row, float("-inf"))
        if first < last:
            query = tl.load(q + b * q_stride + h * D + d, mask=d < D, other=0).to(tl.float32)
            top, total = -3.0e38, 0.0
            acc = tl.full([P], 0.0, tl.float32)
            for column in range(first, last):
                page = tl.load(table + b * t_stride + column).to(tl.int64)
                live = (i < BS) & (column * BS + i < n)
                at = ((page * BS + i) * HKV + h // (HQ // HKV))[:, None] * D + d[None, :]
                k = tl.load(kc + at, mask=live[:, None] & (d < D)[None, :], other=0).to(tl.float32)
                v = tl.load(vc + at, mask=live[:, None] & (d < D)[None, :], other=0).to(tl.float32)
                logits = tl.where(live, tl.sum(k * query[None, :], 1) * scale, float("-inf"))
                higher = tl.maximum(top, tl.max(logits, 0))
                weights = tl.exp(logits - higher)
                total = total * tl.exp(top - higher) + tl.sum(weights, 0)
                acc = acc * tl.exp(top - higher) + tl.sum(weights[:, None] * v, 0)
                top = higher
            tl.store(o + row * D + d, acc / total, mask=d < D)
            tl.store(lse + row, top + tl.log(total))

    def split_kv_decode(q, kc, vc, table, lens, num_splits, sm_scale=None, return_lse=False):
        tile = triton.next_power_of_2(kc.shape[1])
        return decoded(
            split_kv_kernel, lambda B, Hq, S: (S, Hq, B), q, kc, vc, table, lens, num_splits, sm_scale, return_lse,
            T=tile,
        )  # fmt: skip

    return split_kv_decode


@alternative
def largest_logit_first():
    """Two passes over a split's tokens, and chunks as even as they can be; the grid is flat."""

    @triton.jit
    def split_kv_kernel(
        q, kc, vc, table, lens, o, lse, q_stride, t_stride, scale, S,
        BS: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        b, h, s = row // S // HQ, row // S % HQ, row % S
        n = tl.load(lens + b)
        first, last = s * n // S, (s + 1) * n // S
        d = tl.arange(0, P)
        query = tl.load(q + b * q_stride + h * D + d, mask=d < D, other=0).to(tl.float32) * scale
        top = float("-inf")
        for start in range(first, last, 16):
            p = start + tl.arange(0, 16)
            page = tl.load(table + b * t_stride + p // BS, mask=p < last, other=0).to(tl.int64)
            at = ((page * BS + p % BS) * HKV + h // (HQ // HKV))[:, None] * D + d[None, :]
            k = tl.load(kc + at, mask=(p < last)[:, None] & (d < D)[None, :], other=0).to(tl.float32)
            top = tl.maximum(top, tl.max(tl.where(p < last, tl.sum(k * query[None, :], 1), float("-inf")), 0))
        total = 0.0
        acc = tl.full([P], 0.0, tl.float32)
        for start in range(first, last, 16):
            p = start + tl.arange(0, 16)
            page = tl.load(table + b * t_stride + p // BS, mask=p < last, other=0).to(tl.int64)
            at = ((page * BS + p % BS) * HKV + h // (HQ // HKV))[:, None] * D + d[None, :]
            live = (p < last)[:, None] & (d < D)[None, :]
            k = tl.load(kc + at, mask=live, other=0).to(tl.float32)
            v = tl.load(vc + at, mask=live, other=0).to(tl.float32)
            weights = tl.where(p < last, tl.exp(tl.sum(k * query[None, :], 1) - top), 0.0)
            total += tl.sum(weights, 0)
            acc += tl.sum(weights[:, None] * v, 0)
        tl.store(o + row * D + d, acc / tl.where(total > 0, total, 1.0), mask=d < D)
        tl.store(lse + row, top + tl.log(total))

    def split_kv_decode(q, kc, vc, table, lens, num_splits, sm_scale=None, return_lse=False):
        return decoded(
            split_kv_kernel, lambda B, Hq, S: (B * Hq * S,), q, kc, vc, table, lens, num_splits, sm_scale, return_lse
        )

    return split_kv_decode
