"""L1's mistakes: slots that are not where the token is, and kernels that write where no token goes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from drills.mistakes import mistake


@mistake("slot-mapping", fails=["test_worked_example", "test_tokens_in_any_order"], seen=["vllm-vulkan#78"])
def position_as_batch_index():
    """The token's index in the batch is taken for its position in the sequence: use positions[t], never t."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        t = torch.arange(len(positions), device=positions.device)
        blocks = block_table[seq_idx.long(), t // block_size].long()
        return blocks * block_size + t % block_size

    return slot_mapping


@triton.jit
def _kernel_with_everything_right(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    column = tl.arange(0, TILE)
    live = column < tl.where(slot >= 0, HD, 0)
    k = tl.load(key_ptr + token * key_stride + column, mask=live, other=0)
    v = tl.load(value_ptr + token * value_stride + column, mask=live, other=0)
    tl.store(k_cache_ptr + slot * HD + column, k, mask=live)
    tl.store(v_cache_ptr + slot * HD + column, v, mask=live)


@mistake("masks", fails=["test_odd_widths", "test_random_writes"], seen=["vllm#41257"])
def unmasked_tail():
    """The program stores its whole power-of-two tile, so a row of another width runs on into the next slot."""

    @triton.jit
    def reshape_and_cache_kernel(
        key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots_ptr + token)
        column = tl.arange(0, TILE)
        if slot >= 0:
            tl.store(k_cache_ptr + slot * HD + column, tl.load(key_ptr + token * key_stride + column))
            tl.store(v_cache_ptr + slot * HD + column, tl.load(value_ptr + token * value_stride + column))

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        HD = k_cache.shape[2] * k_cache.shape[3]
        reshape_and_cache_kernel[(len(slots),)](
            key, value, k_cache, v_cache, slots, key.stride(0), value.stride(0), HD=HD, TILE=triton.next_power_of_2(HD)
        )  # fmt: skip

    return reshape_and_cache
