"""L1 written in other ways, all of them right."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from selftests.alternatives import alternative


def check_tokens(block_table, seq_idx, positions, block_size):
    if block_size <= 0:
        raise ValueError("block_size")
    if seq_idx.numel() != positions.numel():
        raise ValueError("seq_idx and positions")
    if not len(positions):
        return
    lowest, highest = positions.min().item(), positions.max().item()
    if lowest < 0 or highest // block_size >= block_table.shape[1]:
        raise IndexError("positions")
    if seq_idx.min() < 0 or seq_idx.max() >= block_table.shape[0]:
        raise IndexError("seq_idx")


def check_rows(key, value, k_cache, v_cache, slots):
    """The same refusals as other exceptions, in another order."""
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("caches must be contiguous")
    if k_cache.shape != v_cache.shape or key.shape[1:] != k_cache.shape[2:] or value.shape[1:] != k_cache.shape[2:]:
        raise ValueError("shapes")
    if len({key.dtype, value.dtype, k_cache.dtype, v_cache.dtype}) != 1:
        raise TypeError("dtypes")
    if slots.dtype is not torch.int64:
        raise TypeError("slots must be int64")
    if slots.dim() != 1 or min(key.shape[0], value.shape[0]) < slots.shape[0]:
        raise IndexError("slots")
    H, D = key.shape[1:]
    for x in (key, value):
        if (D > 1 and x.stride(2) != 1) or (H > 1 and x.stride(1) != D):
            raise ValueError("rows must be dense")


@alternative
def one_flat_index():
    """The table flattened, one index_select by row · W + column."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        check_tokens(block_table, seq_idx, positions, block_size)
        column = torch.div(positions, block_size, rounding_mode="floor")
        flat = block_table.reshape(-1).long()
        blocks = flat.index_select(0, seq_idx.long() * block_table.shape[1] + column.long())
        if (blocks < 0).any():
            raise ValueError("block_table")
        return torch.add(positions - column * block_size, blocks * block_size)

    return slot_mapping


@alternative
def gather_by_column():
    """Rows first, then a gather along the columns; the remainder by subtraction."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        check_tokens(block_table, seq_idx, positions, block_size)
        rows = block_table[seq_idx.long()].to(torch.int64)
        column = positions.to(torch.int64) // block_size
        blocks = rows.gather(1, column[:, None])[:, 0]
        if blocks.numel() and blocks.min() < 0:
            raise AssertionError("an unallocated block")
        return (blocks - column) * block_size + positions

    return slot_mapping


@alternative
def every_slot_first():
    """The slots of all positions of all sequences as one [B, W · block_size] table, then one lookup."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        check_tokens(block_table, seq_idx, positions, block_size)
        offsets = torch.arange(block_size, device=block_table.device)
        table = (block_table.long()[:, :, None] * block_size + offsets).flatten(1)
        slots = table[seq_idx.long(), positions.long()]
        if not bool(torch.all(slots >= 0)):
            raise ValueError("block_table")
        return slots

    return slot_mapping


@alternative
def early_return():
    """The kernel returns at once for padding."""

    @triton.jit
    def reshape_and_cache_kernel(k, v, kc, vc, slots, ks, vs, N: tl.constexpr, P: tl.constexpr):
        t = tl.program_id(0)
        slot = tl.load(slots + t)
        if slot < 0:
            return
        i = tl.arange(0, P)
        tl.store(kc + slot * N + i, tl.load(k + t.to(tl.int64) * ks + i, mask=i < N, other=0), mask=i < N)
        tl.store(vc + slot * N + i, tl.load(v + t.to(tl.int64) * vs + i, mask=i < N, other=0), mask=i < N)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        check_rows(key, value, k_cache, v_cache, slots)
        if not len(slots):
            return
        same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[key.element_size()]
        tensors = [x.view(same_size) for x in (key, value, k_cache, v_cache)]
        width = key.shape[1] * key.shape[2]
        launch = functools.partial(reshape_and_cache_kernel[len(slots), 1, 1], *tensors, slots.contiguous())
        launch(key.stride(0), value.stride(0), N=width, P=triton.next_power_of_2(width), num_warps=1)

    return reshape_and_cache


@alternative
def tensor_in_the_grid():
    """A 2-D grid: the second axis chooses between K and V."""

    @triton.jit
    def reshape_and_cache_kernel(k, v, kc, vc, slots, ks, vs, N: tl.constexpr, P: tl.constexpr):
        t = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + t)
        i = tl.arange(0, P)
        live = (i < N) & (slot >= 0)
        if tl.program_id(1) == 0:
            tl.store(kc + slot * N + i, tl.load(k + t * ks + i, mask=live, other=0), mask=live)
        else:
            tl.store(vc + slot * N + i, tl.load(v + t * vs + i, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel, lambda tokens, width: (tokens, 2))


@alternative
def several_tokens_a_program():
    """Four tokens a program, the last program's masked."""

    @triton.jit
    def reshape_and_cache_kernel(k, v, kc, vc, slots, T, ks, vs, N: tl.constexpr, P: tl.constexpr):
        t = tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4)
        slot = tl.load(slots + t, mask=t < T, other=-1)
        i = tl.arange(0, P)[None, :]
        live = (i < N) & (slot >= 0)[:, None]
        tl.store(kc + slot[:, None] * N + i, tl.load(k + t[:, None] * ks + i, mask=live, other=0), mask=live)
        tl.store(vc + slot[:, None] * N + i, tl.load(v + t[:, None] * vs + i, mask=live, other=0), mask=live)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        check_rows(key, value, k_cache, v_cache, slots)
        T, N = len(slots), key.shape[1] * key.shape[2]
        a = (*_bits(key, value, k_cache, v_cache), slots.contiguous(), T, key.stride(0), value.stride(0))
        reshape_and_cache_kernel[(triton.cdiv(T, 4),)](*a, N=N, P=triton.next_power_of_2(N))

    return reshape_and_cache


@alternative
def tiles_of_a_row():
    """A 2-D grid over tokens and tiles of 16 columns."""

    @triton.jit
    def reshape_and_cache_kernel(k, v, kc, vc, slots, ks, vs, N: tl.constexpr, P: tl.constexpr):
        t = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + t)
        i = tl.program_id(1) * 16 + tl.arange(0, 16)
        live = (i < N) & (slot >= 0)
        tl.store(kc + slot * N + i, tl.load(k + t * ks + i, mask=live, other=0), mask=live)
        tl.store(vc + slot * N + i, tl.load(v + t * vs + i, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel, lambda tokens, width: (tokens, triton.cdiv(width, 16)))


@alternative
def a_loop_over_tiles():
    """One program a token, which loops over tiles of 32 columns."""

    @triton.jit
    def reshape_and_cache_kernel(k, v, kc, vc, slots, ks, vs, N: tl.constexpr, P: tl.constexpr):
        t = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + t)
        for first in range(0, N, 32):
            i = first + tl.arange(0, 32)
            live = (i < N) & (slot >= 0)
            tl.store(kc + slot * N + i, tl.load(k + t * ks + i, mask=live, other=0), mask=live)
            tl.store(vc + slot * N + i, tl.load(v + t * vs + i, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel, lambda tokens, width: (tokens,))


@alternative
def block_and_offset():
    """The slot taken apart again: block · block stride + offset · row stride."""

    @triton.jit
    def reshape_and_cache_kernel(k, v, kc, vc, slots, ks, vs, N: tl.constexpr, P: tl.constexpr):
        t = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + t)
        block, offset = slot // 4, slot % 4  # whatever the real block size: the two make the slot again
        i = tl.arange(0, P).to(tl.int64)
        live = tl.where(slot >= 0, i < N, i < 0)
        where = block * (4 * N) + offset * N + i
        tl.store(kc + where, tl.load(k + t * ks + i, mask=live, other=0), mask=live)
        tl.store(vc + where, tl.load(v + t * vs + i, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel, lambda tokens, width: (tokens,))


@alternative
def two_launches():
    """One kernel that copies rows, launched for K and again for V, tuned by a heuristic."""

    @triton.heuristics({"P": lambda args: triton.next_power_of_2(args["N"])})
    @triton.jit
    def reshape_and_cache_kernel(rows, cache, slots, stride, N: tl.constexpr, P: tl.constexpr):
        t = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + t)
        i = tl.arange(0, P)
        live = (i < N) & (slot >= 0)
        tl.store(cache + slot * N + i, tl.load(rows + t * stride + i, mask=live, other=0), mask=live)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        check_rows(key, value, k_cache, v_cache, slots)
        k, v, kc, vc = _bits(key, value, k_cache, v_cache)
        for rows, cache in ((k, kc), (v, vc)):
            reshape_and_cache_kernel[(len(slots),)](
                rows, cache, slots.contiguous(), rows.stride(0), N=key.shape[1] * key.shape[2]
            )

    return reshape_and_cache


@alternative
def bytes_of_dense_rows():
    """Rows made contiguous first, everything copied as bytes."""

    @triton.jit
    def reshape_and_cache_kernel(k, v, kc, vc, slots, N: tl.constexpr, P: tl.constexpr):
        t = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + t)
        i = tl.arange(0, P)
        live = (i < N) & (slot >= 0)
        tl.store(kc + slot * N + i, tl.load(k + t * N + i, mask=live, other=0), mask=live)
        tl.store(vc + slot * N + i, tl.load(v + t * N + i, mask=live, other=0), mask=live)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        check_rows(key, value, k_cache, v_cache, slots)
        if not len(slots):
            return
        dense = [x.contiguous().view(torch.uint8) for x in (key, value)]
        N = key.shape[1] * key.shape[2] * key.element_size()
        reshape_and_cache_kernel[(len(slots),)](
            *dense,
            k_cache.view(torch.uint8),
            v_cache.view(torch.uint8),
            slots.clone(),
            N=N,
            P=triton.next_power_of_2(N),
        )

    return reshape_and_cache


def _bits(*tensors):
    return [x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]) for x in tensors]


def _with(kernel, grid):
    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        check_rows(key, value, k_cache, v_cache, slots)
        width = key.shape[1] * key.shape[2]
        a = (*_bits(key, value, k_cache, v_cache), slots.contiguous(), key.stride(0), value.stride(0))
        kernel[grid(len(slots), width)](*a, N=width, P=triton.next_power_of_2(width))

    return reshape_and_cache
