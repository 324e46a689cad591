"""L2 written in other ways, all of them right."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from selftests.alternatives import alternative


def check_decode(q, k_cache, v_cache, block_tables, context_lens, any_strides=False):
    """The same refusals as other exceptions, in another order; any_strides: the kernel knows what to do with gaps."""
    if len({x.device for x in (q, k_cache, v_cache, block_tables, context_lens)}) > 1:
        raise ValueError("devices")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype != q.dtype:
        raise TypeError("dtypes")
    if {block_tables.dtype, context_lens.dtype} != {torch.int32}:
        raise TypeError("block_tables and context_lens must be int32")
    sequences, query_heads, dim = q.shape
    if tuple(context_lens.shape) != (sequences,) or block_tables.shape[0] != sequences:
        raise IndexError("a row and a length for each sequence")
    if k_cache.shape != v_cache.shape or k_cache.shape[-1] != dim:
        raise ValueError("shapes")
    if query_heads < k_cache.shape[2] or query_heads % k_cache.shape[2]:
        raise ValueError("heads")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("caches must be contiguous")
    if not any_strides:
        if (dim > 1 and q.stride(2) != 1) or (query_heads > 1 and q.stride(1) != dim):
            raise ValueError("rows of q must be dense")
        if (sequences > 1 and context_lens.stride(0) != 1) or block_tables[:1].stride(1) != 1:
            raise ValueError("block_tables and context_lens must be dense")


@alternative
def a_page_at_a_time():
    """A program a query head, a tile a page, no tl.dot, exp; every stride of q, of the table and of the lengths."""

    @triton.jit
    def paged_decode_kernel(
        q, k, v, tables, lens, o, qb, qh, qd, tb, tc, ls, scale,
        PAGE: tl.constexpr, GROUP: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, P: tl.constexpr, W: tl.constexpr,
    ):  # fmt: skip
        b, h = tl.program_id(1).to(tl.int64), tl.program_id(0)
        n = tl.load(lens + b * ls)
        d, t = tl.arange(0, W), tl.arange(0, P)
        query = tl.load(q + b * qb + h * qh + d * qd, mask=d < D, other=0).to(tl.float32) * scale
        best, weight = -float("inf"), 0.0
        result = tl.zeros([W], tl.float32)
        for c in range(0, (n + PAGE - 1) // PAGE):
            page = tl.load(tables + b * tb + c * tc).to(tl.int64)
            live = (t < PAGE) & (t < n - c * PAGE)
            at = ((page * PAGE + t) * HKV + h // GROUP)[:, None] * D + d[None, :]
            mask = live[:, None] & (d < D)[None, :]
            s = tl.sum(tl.load(k + at, mask=mask, other=0).to(tl.float32) * query[None, :], 1)
            s = tl.where(live, s, -float("inf"))
            new = tl.maximum(best, tl.max(s, 0))
            w = tl.exp(s - new)
            old = tl.exp(best - new)
            values = tl.load(v + at, mask=mask, other=0).to(tl.float32)
            result = result * old + tl.sum(w[:, None] * values, 0)
            weight = weight * old + tl.sum(w, 0)
            best = new
        result = result / tl.maximum(weight, 1e-30)
        tl.store(o + (b * tl.num_programs(0) + h) * D + d, result.to(o.dtype.element_ty), mask=d < D)

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        check_decode(q, k_cache, v_cache, block_tables, context_lens, any_strides=True)
        (B, H, D), (_, page, heads, _) = q.shape, k_cache.shape
        scale = D**-0.5 if sm_scale is None else sm_scale
        o = q.new_empty(q.shape)
        paged_decode_kernel[(H, B)](
            q, k_cache, v_cache, block_tables, context_lens, o, *q.stride(), *block_tables.stride(),
            context_lens.stride(0), scale, PAGE=page, GROUP=H // heads, HKV=heads, D=D,
            P=triton.next_power_of_2(page), W=triton.next_power_of_2(D),
        )  # fmt: skip
        return o

    return paged_decode


@triton.jit
def tile_of(tables, b, first, n, h, row, PAGE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
            W: tl.constexpr, T: tl.constexpr):  # fmt: skip
    t, d = first + tl.arange(0, T), tl.arange(0, W)
    page = tl.load(tables + b * row + t // PAGE, mask=t < n, other=0).to(tl.int64)
    at = page * (PAGE * HKV * D) + t % PAGE * (HKV * D) + h * D
    return at[:, None] + d[None, :], t < n, (t < n)[:, None] & (d < D)[None, :]


@alternative
def two_passes():
    """The largest logit of all first, then the weights: nothing is ever shrunk. One program a sequence, no tl.dot."""

    @triton.jit
    def paged_decode_kernel(q, k, v, tables, lens, o, q_row, t_row, scale, PAGE: tl.constexpr, HKV: tl.constexpr,
                            G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, T: tl.constexpr):  # fmt: skip
        b = tl.program_id(0).to(tl.int64)
        n = tl.load(lens + b)
        d = tl.arange(0, W)
        for head in range(0, HKV * G):
            x = tl.load(q + b * q_row + head * D + d, mask=d < D, other=0).to(tl.float32) * scale
            top = tl.full([T], -float("inf"), tl.float32)
            for first in range(0, n, T):
                at, live, mask = tile_of(tables, b, first, n, head // G, t_row, PAGE, HKV, D, W, T)
                s = tl.sum(tl.load(k + at, mask=mask, other=0).to(tl.float32) * x[None, :], 1)
                top = tl.maximum(top, tl.where(live, s, -float("inf")))
            largest = tl.max(top, 0)
            total = tl.zeros([T], tl.float32)
            result = tl.zeros([T, W], tl.float32)
            for first in range(0, n, T):
                at, live, mask = tile_of(tables, b, first, n, head // G, t_row, PAGE, HKV, D, W, T)
                s = tl.sum(tl.load(k + at, mask=mask, other=0).to(tl.float32) * x[None, :], 1)
                w = tl.where(live, tl.exp2((s - largest) * 1.4426950408889634), 0)
                total += w
                result += w[:, None] * tl.load(v + at, mask=mask, other=0).to(tl.float32)
            weight = tl.sum(total, 0)
            answer = tl.where(weight > 0, tl.sum(result, 0) / weight, 0)
            tl.store(o + (b * HKV * G + head) * D + d, answer.to(o.dtype.element_ty), mask=d < D)

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        check_decode(q, k_cache, v_cache, block_tables, context_lens)
        (B, H, D), (_, page, heads, _) = q.shape, k_cache.shape
        width = triton.next_power_of_2(D)
        o = torch.empty_like(q, memory_format=torch.contiguous_format)
        paged_decode_kernel[(B,)](
            q, k_cache, v_cache, block_tables, context_lens, o, q.stride(0), block_tables.stride(0),
            1 / math.sqrt(D) if sm_scale is None else float(sm_scale),
            PAGE=page, HKV=heads, G=H // heads, D=D, W=width, T=max(16, 4096 // width),
        )  # fmt: skip
        return o

    return paged_decode


@alternative
def halves_and_a_merge():
    """Each sequence in two parts, of which a second kernel makes one: two launches, however many sequences."""

    @triton.jit
    def paged_decode_kernel(
        q, k, v, tables, lens, part, top, total, q_row, t_row, scale,
        PAGE: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
        R: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
    ):  # fmt: skip
        b, half, h = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        n = tl.load(lens + b)
        middle = n // 2
        start = tl.where(half == 0, 0, middle)
        end = tl.where(half == 0, middle, n)
        r, d = tl.arange(0, R), tl.arange(0, W)
        mine = (r < G)[:, None] & (d < D)[None, :]
        x = tl.load(q + b * q_row + (h * G + r)[:, None] * D + d[None, :], mask=mine, other=0)
        m = tl.full([R], -1e30, tl.float32)
        z = tl.zeros([R], tl.float32)
        a = tl.zeros([R, W], tl.float32)
        for first in range(start, end, T):
            t = first + tl.arange(0, T)
            page = tl.load(tables + b * t_row + t // PAGE, mask=t < end, other=0).to(tl.int64)
            at = ((page * PAGE + t % PAGE) * HKV + h) * D
            there = (d < D)[:, None] & (t < end)[None, :]
            keys = tl.load(k + at[None, :] + d[:, None], mask=there, other=0)
            s = tl.dot(x, keys, input_precision="ieee") * scale
            s = tl.where((t < end)[None, :], s, -float("inf"))
            new = tl.maximum(m, tl.max(s, 1))
            w = tl.exp(s - new[:, None])
            values = tl.load(v + at[:, None] + d[None, :], mask=(t < end)[:, None] & (d < D)[None, :], other=0)
            z = z * tl.exp(m - new) + tl.sum(w, 1)
            a = a * tl.exp(m - new)[:, None]
            a = tl.dot(w.to(values.dtype), values, acc=a, input_precision="ieee")
            m = new
        row = (b * HKV + h) * G + r
        tl.store(part + (row * 2 + half)[:, None] * D + d[None, :], a, mask=mine)
        tl.store(top + row * 2 + half, m, mask=r < G)
        tl.store(total + row * 2 + half, z, mask=r < G)

    @triton.jit
    def merge(part, top, total, o, D: tl.constexpr, W: tl.constexpr):
        row, d = tl.program_id(0).to(tl.int64), tl.arange(0, W)
        m0, m1 = tl.load(top + row * 2), tl.load(top + row * 2 + 1)
        m = tl.maximum(m0, m1)
        w0, w1 = tl.exp(m0 - m), tl.exp(m1 - m)
        z = tl.load(total + row * 2) * w0 + tl.load(total + row * 2 + 1) * w1
        a0 = tl.load(part + row * 2 * D + d, mask=d < D, other=0)
        a1 = tl.load(part + (row * 2 + 1) * D + d, mask=d < D, other=0)
        answer = (a0 * w0 + a1 * w1) / tl.where(z == 0, 1, z)
        tl.store(o + row * D + d, answer.to(o.dtype.element_ty), mask=d < D)

    def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
        check_decode(q, k_cache, v_cache, block_tables, context_lens)
        (B, H, D), (_, page, heads, _) = q.shape, k_cache.shape
        scale = 1 / math.sqrt(D) if sm_scale is None else sm_scale
        part = torch.empty(B, H, 2, D, device=q.device)
        top, total = torch.empty(2, B, H, 2, device=q.device)
        o = torch.empty(B, H, D, dtype=q.dtype, device=q.device)
        width = max(16, triton.next_power_of_2(D))
        paged_decode_kernel[(B, 2, heads)](
            q, k_cache, v_cache, block_tables, context_lens, part, top, total, q.stride(0), block_tables.stride(0),
            scale, PAGE=page, HKV=heads, G=H // heads, D=D,
            R=max(16, triton.next_power_of_2(H // heads)), W=width, T=max(16, 2048 // width),
        )  # fmt: skip
        merge[(B * H,)](part, top, total, o, D=D, W=width)
        return o

    return paged_decode
