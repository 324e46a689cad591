"""L1 · Write new K and V rows into a paged cache.

The cache is a pool of blocks, [NB, BS, H, D]. Seen as NB·BS rows of H·D values, a row's number is its slot.
vLLM calls the two functions by these names (PagedAttention, arXiv 2309.06180, section 4).
"""

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
    B, W = block_table.shape
    assert block_size >= 1, f"block_size must be at least 1, got {block_size}"
    assert seq_idx.shape == positions.shape, "seq_idx and positions must both be [T]: one entry a token"
    assert ((seq_idx >= 0) & (seq_idx < B)).all(), f"seq_idx must be in 0..{B - 1}, the rows of block_table"
    assert (positions >= 0).all(), "positions must not be negative: they count from a sequence's first token"
    assert (positions < W * block_size).all(), f"positions must be below {W * block_size}, where block_table's rows end"
    blocks = block_table[seq_idx.long(), positions.long() // block_size].long()  # int32 id · block_size would overflow
    assert (blocks >= 0).all(), "block_table holds a negative id where a token goes: allocate the block first"
    return blocks * block_size + positions % block_size


@triton.jit
def reshape_and_cache_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, key_stride, value_stride,
    HD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a token: row `token` of key and value goes to row `slot` of the caches."""
    token = tl.program_id(0).to(tl.int64)  # int64 from here on: token · stride and slot · HD pass 2^31
    column = tl.arange(0, TILE)  # TILE is a power of two, HD need not be
    k = tl.load(key_ptr + token * key_stride + column, mask=column < HD, other=0)
    v = tl.load(value_ptr + token * value_stride + column, mask=column < HD, other=0)
    slot = tl.load(slots_ptr + token)  # the rows are on their way by now: waiting for the slot first costs 2 %
    live = column < tl.where(slot >= 0, HD, 0)  # padding writes nothing
    tl.store(k_cache_ptr + slot * HD + column, k, mask=live)
    tl.store(v_cache_ptr + slot * HD + column, v, mask=live)


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
    assert slots.dtype == torch.int64 and slots.dim() == 1 and slots.is_contiguous(), "slots must be [T] int64, dense"
    assert k_cache.dim() == 4 and k_cache.shape == v_cache.shape, "k_cache and v_cache must both be [NB, BS, H, D]"
    T, HD = len(slots), k_cache[0, 0].numel()
    for name, x in {"key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache}.items():
        same = x.dtype == k_cache.dtype and x.device == slots.device
        assert same, f"{name} is {x.dtype} on {x.device}, expected {k_cache.dtype} on {slots.device}: convert it first"
        assert x.shape[-2:] == k_cache.shape[2:], f"{name} is {x.shape}: its heads and head dim must be k_cache's"
    for name, x in {"key": key, "value": value}.items():
        assert x.dim() == 3 and len(x) >= T, f"{name} must be [T', H, D] with a row a slot, {T} or more, got {x.shape}"
        assert x[:1].is_contiguous(), f"{name}'s rows must be dense [H, D]: call .contiguous() on it"
    for name, x in {"k_cache": k_cache, "v_cache": v_cache}.items():
        assert x.is_contiguous(), f"{name} must be contiguous: pass the cache itself, not a strided view of it"
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[key.element_size()]  # a copy moves bits, not numbers
    key, value, k_cache, v_cache = (x.view(bits) for x in (key, value, k_cache, v_cache))
    strides, tile = (key.stride(0), value.stride(0)), triton.next_power_of_2(HD)
    warps = min(8, max(1, tile // 128))  # a few values a thread: narrow rows leave room for more programs
    reshape_and_cache_kernel[(T,)](key, value, k_cache, v_cache, slots, *strides, HD, tile, num_warps=warps)
