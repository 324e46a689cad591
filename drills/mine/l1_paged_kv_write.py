"""L1 · Write new K and V rows into a paged cache.

The cache is a pool of blocks, [NB, BS, H, D]. Seen as NB·BS rows of H·D values, a row's number is its slot.
vLLM calls the two functions by these names (PagedAttention, arXiv 2309.06180, section 4).
"""

# Run: pytest drills/tests/test_l1_paged_kv_write.py   or: drills test l1

import torch
import triton
import triton.language as tl


def slot_mapping(block_table, seq_idx, positions, block_size):
    """Where each new token's K and V go: slot = block_table[seq, position // block_size] · block_size + the rest.

    block_table [B, W] int32 or int64: block ids; entries past a sequence's blocks may hold anything.
    seq_idx, positions [T] int32 or int64: which row of the table, and the token's place in its sequence.
    Returns [T] int64 on the inputs' device. The number of torch operations does not depend on T; T = 0 is fine.
    Refused (AssertionError naming the argument): a block_size below 1; seq_idx and positions of different
    lengths; a seq_idx outside 0..B-1; a negative position, or one past the row's last column; a negative block id.

    >>> slot_mapping([[9, 3, 7], [2, 5, 0]], seq_idx=[0, 0, 1], positions=[5, 9, 2], block_size=4)  # as tensors
    [13, 29, 10]        # token 0: 5 // 4 = 1 -> block 3, 5 % 4 = 1 -> slot 3·4 + 1 = 13
    """
    raise NotImplementedError("L1 slot_mapping is yours to write")


@triton.jit
def reshape_and_cache_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, key_stride, value_stride,
    HD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a token: row `token` of key and value goes to row `slot` of the caches."""
    raise NotImplementedError("L1 reshape_and_cache_kernel is yours to write")


def reshape_and_cache(key, value, k_cache, v_cache, slots):
    """Copy row t of key and value into row slots[t] of the caches, bit for bit, in place.

    key, value [T', H, D], T' >= T: rows past slots are padding. Each row's [H, D] is dense; the row strides are
    free, and need not agree (views of one fused QKV tensor). k_cache, v_cache [NB, BS, H, D], contiguous.
    slots [T] int64, contiguous: a negative slot is padding, nothing is written for it; no two others are equal.
    One dtype for all four, of 1, 2 or 4 bytes; any H·D; every offset in int64; T = 0 is fine. Slots past the cache
    are not looked for, that would wait for the GPU. What is not addressed stays as it was.
    Refused before anything is written (AssertionError naming the argument): shapes, dtypes or devices that
    disagree, fewer rows than slots, a row that is not dense, a cache or slots not contiguous, slots not int64.

    >>> reshape_and_cache(key, value, k_cache, v_cache, slots=[13, -1, 10])  # BS = 4
    # key[0] -> k_cache[3, 1]; token 1 is padding; key[2] -> k_cache[2, 2]; value likewise
    """
    raise NotImplementedError("L1 reshape_and_cache is yours to write")
