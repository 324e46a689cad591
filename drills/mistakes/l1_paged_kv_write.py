"""L1's mistakes: slots that are not where the token is, and kernels that write where no token goes.

Each is right but for what its lesson says. What several of them share stands first, and is right. Where one mistake is
a case of another, the special one stands before the general one: of two that explain a result equally, the first is
named.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from drills.mistakes import mistake


def _check_tokens(block_table, seq_idx, positions, block_size, skip=None):
    """slot_mapping's checks of its arguments, but the one called `skip`."""
    B, W = block_table.shape
    assert skip == "block_size" or block_size >= 1, "block_size must be at least 1"
    assert skip == "lengths" or seq_idx.shape == positions.shape, "seq_idx and positions must have one length"
    assert skip == "seq_idx" or (seq_idx >= 0).all(), "seq_idx must not be negative"
    assert (seq_idx < B).all(), "seq_idx is past the last row of block_table"
    assert skip == "positions" or (positions >= 0).all(), "positions must not be negative"
    assert skip in ("width", "block_size") or (positions < W * block_size).all(), "positions are past the table's row"


def _look_up(block_table, rows, columns):
    """The block ids at these places of the table, as int64; a place outside of it or a negative id is refused."""
    B, W = block_table.shape
    assert ((rows >= 0) & (rows < B)).all(), "block_table has too few rows"
    assert ((columns >= 0) & (columns < W)).all(), "block_table has too few columns"
    blocks = block_table[rows.long(), columns.long()].long()
    assert (blocks >= 0).all(), "block_table has no block there"
    return blocks


def _right_slots(block_table, seq_idx, positions, block_size):
    _check_tokens(block_table, seq_idx, positions, block_size)
    return _look_up(block_table, seq_idx, positions // block_size) * block_size + positions % block_size


# slot_mapping: another slot


@mistake("slot-mapping", fails=["test_worked_example", "test_tokens_in_any_order"])
def position_as_batch_index():
    """The token's index in the batch is taken for its position in the sequence: use positions[t], never t."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        t = torch.arange(len(positions), device=positions.device)
        return _look_up(block_table, seq_idx, t // block_size) * block_size + t % block_size

    return slot_mapping


@mistake("slot-mapping", fails=["test_worked_example", "test_tokens_in_any_order", "test_dead_columns_are_not_read"])
def first_row_for_all():
    """Every token is looked up in row 0 of the block table: the row is the token's sequence, seq_idx[t]."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        blocks = _look_up(block_table, torch.zeros_like(seq_idx), positions // block_size)
        return blocks * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_worked_example", "test_block_sizes"])
def one_token_a_sequence():
    """gather pairs token t with row t of the table, which is a decode step only: take rows by seq_idx first."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        blocks = block_table.gather(1, (positions.long() // block_size)[:, None])[:, 0].long()
        return blocks * block_size + positions % block_size

    return slot_mapping


@mistake("slot-mapping", fails=["test_worked_example", "test_block_sizes", "test_positions_past_float32"])
def division_and_remainder_swapped():
    """position % block_size chose the block and position // block_size the place in it: it is the other way round."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        return _look_up(block_table, seq_idx, positions % block_size) * block_size + positions // block_size

    return slot_mapping


@mistake(
    "slot-mapping",
    fails=["test_worked_example", "test_block_sizes", "test_refuses"],
    seen=["vllm#51031", "vllm#31540", "vllm-ascend#7019"],
)
def constant_block_size():
    """The slots are those of blocks of 16, whatever block_size says: writer and mapper must agree on the block size."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        assert block_size >= 1 and seq_idx.shape == positions.shape and (positions >= 0).all()
        return _look_up(block_table, seq_idx, positions // 16) * 16 + positions % 16

    return slot_mapping


@mistake("slot-mapping", fails=["test_worked_example", "test_slots_past_int32"], seen=["vllm-vulkan#78"])
def position_as_slot():
    """The position itself is returned as the slot: a sequence's blocks lie anywhere in the pool, so ask the table."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _right_slots(block_table, seq_idx, positions, block_size)
        return positions.long()

    return slot_mapping


@mistake("slot-mapping", fails=["test_worked_example", "test_tokens_in_any_order", "test_slots_past_int32"])
def block_id_unscaled():
    """The block id is added to the offset as it is: a block begins at slot id · block_size."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        return _look_up(block_table, seq_idx, positions // block_size) + positions % block_size

    return slot_mapping


@mistake("slot-mapping", fails=["test_worked_example", "test_slots_past_int32", "test_tokens_in_any_order"])
def offset_forgotten():
    """All tokens of a block get its first slot, so each overwrites the last: add position % block_size."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        return _look_up(block_table, seq_idx, positions // block_size) * block_size

    return slot_mapping


@mistake("slot-mapping", fails=["test_block_sizes", "test_tokens_in_any_order"], seen=["MinivLLM#76"])
def length_modulo_block_size():
    """(length % block_size) - 1 is -1 for the last token of a full block: the offset is position % block_size."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        length = positions + 1
        return _look_up(block_table, seq_idx, positions // block_size) * block_size + length % block_size - 1

    return slot_mapping


@mistake("slot-mapping", fails=["test_worked_example", "test_positions_past_float32"])
def column_rounded_up():
    """The position was divided rounding up, which counts blocks: the index of the block it is in rounds down."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        columns = (positions + block_size - 1) // block_size
        return _look_up(block_table, seq_idx, columns) * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_worked_example", "test_a_table_that_is_a_view"])
def table_read_down_the_columns():
    """The flattened table is indexed column · B + row, but it is stored row by row: row · W + column."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        at = (positions // block_size).long() * block_table.shape[0] + seq_idx
        return block_table.flatten()[at].long() * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_dead_columns_are_not_read", "test_random_batches"])
def width_of_the_columns_in_use():
    """Rows of the flattened table are as long as the longest sequence here: they are W wide, used or not."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        columns = (positions // block_size).long()
        width = columns.max() + 1 if len(columns) else 0
        return block_table.flatten()[seq_idx * width + columns].long() * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_a_table_that_is_a_view"])
def table_taken_as_dense():
    """The kernel steps W entries a row, but the table may be cut out of a wider one: step block_table.stride(0)."""

    @triton.jit
    def slot_kernel(table, seq_idx, positions, slots, T, W, block_size, TILE: tl.constexpr):
        t = tl.arange(0, TILE)
        row, position = tl.load(seq_idx + t, mask=t < T, other=0), tl.load(positions + t, mask=t < T, other=0)
        block = tl.load(table + row * W + position // block_size, mask=t < T, other=0).to(tl.int64)
        tl.store(slots + t, block * block_size + position % block_size, mask=t < T)

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _right_slots(block_table, seq_idx, positions, block_size)
        slots = torch.empty(positions.shape, dtype=torch.int64, device=positions.device)
        T, W = len(positions), block_table.shape[1]
        tile = triton.next_power_of_2(max(T, 1))
        slot_kernel[(1,)](block_table, seq_idx, positions, slots, T, W, block_size, TILE=tile)
        return slots

    return slot_mapping


@mistake("batch", fails=["test_tokens_in_any_order", "test_a_table_that_is_a_view"])
def slots_grouped_by_sequence():
    """The slots are right but come sequence by sequence: slot t belongs to token t, in whatever order tokens are."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        slots = _right_slots(block_table, seq_idx, positions, block_size)
        return torch.cat([slots[seq_idx == row] for row in range(len(block_table))])

    return slot_mapping


# slot_mapping: number types


@mistake("slot-mapping", fails=["test_worked_example", "test_dtypes_of_the_inputs"])
def slots_in_the_tables_dtype():
    """int32 ids give int32 slots, while kernels that read slots read int64: widen the ids with .long()."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _right_slots(block_table, seq_idx, positions, block_size)
        blocks = block_table[seq_idx.long(), positions.long() // block_size]
        return blocks * block_size + (positions % block_size).to(blocks.dtype)

    return slot_mapping


@mistake("slot-mapping", fails=["test_slots_past_int32"])
def product_in_int32():
    """id · block_size was computed in int32 and widened afterwards, when it had wrapped: widen the ids first."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _right_slots(block_table, seq_idx, positions, block_size)
        blocks = block_table[seq_idx.long(), positions.long() // block_size].int()
        return (blocks * block_size + positions.int() % block_size).long()

    return slot_mapping


@mistake("slot-mapping", fails=["test_positions_past_float32"])
def division_in_floats():
    """positions / block_size is a float32, which rounds past 2^24: // stays in integers."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        columns = (positions / block_size).int()
        return _look_up(block_table, seq_idx, columns) * block_size + positions % block_size

    return slot_mapping


# slot_mapping: what must be refused, and what must not


@mistake("batch", fails=["test_refuses"], seen=["vllm#53982"])
def next_row_read():
    """A position past its row finds the next sequence's block in the flat table: check position < W · block_size."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size, skip="width")
        at = seq_idx.long() * block_table.shape[1] + positions // block_size
        assert (at < block_table.numel()).all(), "positions are past the table's end"
        blocks = block_table.flatten()[at].long()
        assert (blocks >= 0).all(), "block_table has no block there"
        return blocks * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_refuses"])
def negative_sequence_wraps():
    """Row -1 is the last row to torch, another sequence's: check that seq_idx is not negative."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size, skip="seq_idx")
        blocks = block_table[seq_idx.long(), positions.long() // block_size].long()
        assert (blocks >= 0).all(), "block_table has no block there"
        return blocks * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_refuses"])
def negative_position_wraps():
    """-1 // block_size is -1, to torch the last column, and the slot looks real: check that no position is negative."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size, skip="positions")
        blocks = block_table[seq_idx.long(), positions.long() // block_size].long()
        assert (blocks >= 0).all(), "block_table has no block there"
        return blocks * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_refuses"])
def block_size_unchecked():
    """A block size of 0 divides by zero and a negative one turns // and % round: check that it is at least 1."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size, skip="block_size")
        columns = positions.long() // block_size
        assert (columns < block_table.shape[1]).all(), "positions are past the table's row"
        blocks = block_table[seq_idx.long(), columns].long()
        assert (blocks >= 0).all(), "block_table has no block there"
        return blocks * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_refuses"])
def lengths_broadcast():
    """A single seq_idx or position is stretched over many of the other: check that there is one of each a token."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size, skip="lengths")
        return _look_up(block_table, seq_idx, positions // block_size) * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_refuses_an_unallocated_block", "test_refuses"])
def invalid_becomes_padding():
    """A token without a place gets slot -1, and its K and V are lost without a word: -1 is for padding, so refuse."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        assert block_size >= 1 and seq_idx.shape == positions.shape
        B, W = block_table.shape
        columns = positions // block_size
        valid = (seq_idx >= 0) & (seq_idx < B) & (columns >= 0) & (columns < W)
        blocks = block_table[seq_idx.clamp(0, B - 1).long(), columns.clamp(0, W - 1).long()].long()
        return torch.where(valid & (blocks >= 0), blocks * block_size + positions % block_size, -1)

    return slot_mapping


@mistake("batch", fails=["test_refuses"])
def clamped_into_range():
    """Clamping turns an index out of range into someone else's slot and hides the error: refuse it."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        assert block_size >= 1 and seq_idx.shape == positions.shape
        B, W = block_table.shape
        seq_idx, positions = seq_idx.clamp(0, B - 1), positions.clamp(0, W * block_size - 1)
        return _look_up(block_table, seq_idx, positions // block_size) * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_refuses_an_unallocated_block"])
def only_minus_one_is_no_block():
    """Only -1 was looked for, but any negative id means that no block is there: check for ids below 0."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        blocks = block_table[seq_idx.long(), positions.long() // block_size].long()
        assert (blocks != -1).all(), "block_table has no block there"
        return blocks * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_refuses_an_unallocated_block"], seen=["sparkinfer#185"])
def unallocated_block_used():
    """A block id of -1 gives a negative slot, which the writer takes for padding and drops: check the ids."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _check_tokens(block_table, seq_idx, positions, block_size)
        blocks = block_table[seq_idx.long(), positions.long() // block_size].long()
        return blocks * block_size + positions % block_size

    return slot_mapping


@mistake("batch", fails=["test_dead_columns_are_not_read", "test_random_batches"])
def dead_columns_checked():
    """What lies past a sequence's blocks may be anything, -1 too: check only the ids that are looked up."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        assert (block_table >= 0).all(), "block_table must not be negative"
        return _right_slots(block_table, seq_idx, positions, block_size)

    return slot_mapping


@mistake("batch", fails=["test_no_tokens"])
def maximum_of_no_positions():
    """max() of an empty tensor raises, and a step may have no tokens: (positions < limit).all() is true of none."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        assert positions.max() < block_table.shape[1] * block_size, "positions are past the table's row"
        return _right_slots(block_table, seq_idx, positions, block_size)

    return slot_mapping


# slot_mapping: the manner


@mistake("batch", fails=["test_worked_example", "test_a_shorter_step_after_a_longer_one"], seen=["vllm-ascend#15417"])
def whole_buffer_returned():
    """The buffer came back whole, with a longer step's slots behind this step's: return T slots, or the rest as -1."""
    buffer = torch.zeros(1024, dtype=torch.int64)

    def slot_mapping(block_table, seq_idx, positions, block_size):
        nonlocal buffer
        buffer = buffer.to(positions.device)
        buffer[: len(positions)] = _right_slots(block_table, seq_idx, positions, block_size)
        return buffer.clone()

    return slot_mapping


@mistake("batch", fails=["test_a_shorter_step_after_a_longer_one"], tells=False)
def one_buffer_for_all_steps():
    """Every step writes into the same tensor, so the slots of the step before change under whoever holds them."""
    buffer = torch.zeros(1024, dtype=torch.int64)

    def slot_mapping(block_table, seq_idx, positions, block_size):
        nonlocal buffer
        buffer = buffer.to(positions.device)
        buffer[: len(positions)] = _right_slots(block_table, seq_idx, positions, block_size)
        return buffer[: len(positions)]

    return slot_mapping


@mistake("batch", fails=["test_vectorised"], seen=["vllm-vulkan#43"], tells=False)
def loop_over_tokens():
    """A Python loop launches torch operations for every token: index with whole tensors, all tokens at once."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        slots = torch.zeros(positions.shape, dtype=torch.int64, device=positions.device)
        _check_tokens(block_table, seq_idx, positions, block_size)
        for t in range(len(positions)):
            slots[t] = _look_up(block_table, seq_idx[t], positions[t] // block_size) * block_size
            slots[t] += positions[t] % block_size
        return slots

    return slot_mapping


@mistake("batch", fails=["test_vectorised"], seen=["vllm-omni#1614"], tells=False)
def lists_on_the_host():
    """.tolist() waits for the GPU in every step, and then Python loops: the same in tensors stays on the device."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        _right_slots(block_table, seq_idx, positions, block_size)
        table, tokens = block_table.tolist(), zip(seq_idx.tolist(), positions.tolist())
        slots = [table[row][p // block_size] * block_size + p % block_size for row, p in tokens]
        return torch.tensor(slots, dtype=torch.int64, device=positions.device)

    return slot_mapping


@mistake("slot-mapping", fails=["test_worked_example", "test_refuses_an_unallocated_block"])
def slots_of_zero():
    """Every slot is 0: the shape and the dtype are right, now compute the values."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        return torch.zeros(positions.shape, dtype=torch.int64, device=positions.device)

    return slot_mapping


@mistake("slot-mapping", fails=["test_worked_example", "test_vectorised"], tells=False)
def slots_from_the_reference():
    """The reference was imported instead of the mapping being written, and the suite does not let it."""

    def slot_mapping(block_table, seq_idx, positions, block_size):
        from drills.solutions import l1_paged_kv_write

        return l1_paged_kv_write.slot_mapping(block_table, seq_idx, positions, block_size)

    return slot_mapping


# reshape_and_cache. What its mistakes share: the checks, the kernel, the launch.


@triton.jit
def reshape_and_cache_kernel(
    key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    column = tl.arange(0, TILE)
    live = column < tl.where(slot >= 0, HD, 0)
    at = slot * HD + column
    tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
    tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)


def _width(x):
    return x.shape[-2] * x.shape[-1]


_CHECKS = {  # each of the arguments as a namespace
    "int64_slots": lambda a: a.slots.dtype == torch.int64,
    "flat_slots": lambda a: a.slots.dim() == 1,
    "dense_slots": lambda a: a.slots.is_contiguous(),
    "one_cache_shape": lambda a: a.k_cache.shape == a.v_cache.shape,
    "one_dtype": lambda a: a.key.dtype == a.value.dtype == a.k_cache.dtype == a.v_cache.dtype,
    "shape_of_rows": lambda a: a.key.shape[1:] == a.value.shape[1:] == a.k_cache.shape[2:],
    "a_row_a_slot": lambda a: min(len(a.key), len(a.value)) >= a.slots.numel(),
    "dense_rows": lambda a: a.key[:1].is_contiguous() and a.value[:1].is_contiguous(),
    "dense_caches": lambda a: a.k_cache.is_contiguous() and a.v_cache.is_contiguous(),
}


def _check(key, value, k_cache, v_cache, slots, **other_checks):
    arguments = SimpleNamespace(key=key, value=value, k_cache=k_cache, v_cache=v_cache, slots=slots)
    for name, passes in (_CHECKS | other_checks).items():
        assert passes(arguments), f"refused: {name.replace('_', ' ')}"


def _launch(kernel, key, value, k_cache, v_cache, slots, *more, bits=True, programs=None, width=None):
    """One program a token and a tile as wide as a row, unless told otherwise; `more` follows the two strides."""
    if bits:
        sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32}
        key, value, k_cache, v_cache = (x.view(sizes[x.element_size()]) for x in (key, value, k_cache, v_cache))
    HD = _width(k_cache)
    tile = triton.next_power_of_2(HD) if width is None else width
    programs = slots.numel() if programs is None else programs
    grid = programs if isinstance(programs, tuple) else (programs,)
    strides = key.stride(0), value.stride(0)
    kernel[grid](key, value, k_cache, v_cache, slots, *strides, *more, HD=HD, TILE=tile)


def _with(kernel=reshape_and_cache_kernel, **other_checks):
    """reshape_and_cache with another kernel, or with other checks."""

    def reshape_and_cache(*args):
        _check(*args, **other_checks)
        _launch(kernel, *args)

    return reshape_and_cache


def _without(*checks):
    return _with(**{check: lambda a: True for check in checks})


# reshape_and_cache: another row


@mistake("writing-rows", fails=["test_one_row", "test_every_slot"])
def nothing_arrives():
    """No kernel ran, or it wrote into a copy, as reshape, contiguous or cache[i][j] make: write to the cache itself."""

    def reshape_and_cache(*args):
        _check(*args)

    return reshape_and_cache


@mistake("writing-rows", fails=["test_one_row", "test_every_slot"])
def returns_the_caches():
    """The caches are written and returned too: the caller keeps them, so write in place and return None."""

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _with()(key, value, k_cache, v_cache, slots)
        return k_cache, v_cache

    return reshape_and_cache


@mistake("writing-rows", fails=["test_one_row", "test_every_slot"])
def value_forgotten():
    """Only key's rows are written: value's go to v_cache, at the same slots."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


@mistake("writing-rows", fails=["test_one_row", "test_every_slot"])
def key_in_both_caches():
    """key's rows went into v_cache too: load value for the second store."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


@mistake("writing-rows", fails=["test_one_row", "test_every_slot"])
def caches_swapped():
    """key's rows are in v_cache and value's in k_cache: put the launch's arguments in the order of the kernel's."""

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        _launch(reshape_and_cache_kernel, key, value, v_cache, k_cache, slots)

    return reshape_and_cache


@mistake("writing-rows", fails=["test_one_row", "test_many_heads"])
def first_head_only():
    """Only D values of each row are written, its first head: a row is H · D values."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, D, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, D, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots, k_cache.shape[3])

    return reshape_and_cache


@mistake("writing-rows", fails=["test_one_row", "test_many_heads"])
def slot_times_head_dim():
    """Slots are D values apart in the kernel, but H · D in the cache, so rows overlap: multiply the slot by H · D."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, D, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot * D + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots, k_cache.shape[3])

    return reshape_and_cache


@mistake("writing-rows", fails=["test_one_row", "test_many_heads"])
def heads_and_dims_transposed():
    """A row is stored as [D, H]: it is [H, D] in key and in the cache, so copy it as it lies."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, D, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot * HD + column % D * (HD // D) + column // D
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots, k_cache.shape[3])

    return reshape_and_cache


@mistake("writing-rows", fails=["test_one_row", "test_write_block_sizes"], seen=["vllm#49012"])
def cache_of_heads_first():
    """The kernel writes blocks of [H, BS, D], but this cache has [BS, H, D]: a slot's heads lie next to each other."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, BS, D, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot // BS * BS * HD + column // D * BS * D + slot % BS * D + column % D
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots, k_cache.shape[1], k_cache.shape[3])

    return reshape_and_cache


@mistake("writing-rows", fails=["test_write_block_sizes"], seen=["vllm#51031"])
def slot_split_by_16():
    """The slot was taken apart with blocks of 16: k_cache.shape[1] is the block size, and slot · H · D needs none."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, BS, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot // 16 * BS * HD + slot % 16 * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots, k_cache.shape[1])

    return reshape_and_cache


@mistake("writing-rows", fails=["test_one_row", "test_rows_in_any_order"])
def token_as_slot():
    """Row t was written to slot t: load slots[t] and write there."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = token * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


@mistake("writing-rows", fails=["test_rows_in_any_order", "test_write_block_sizes"])
def consecutive_slots():
    """Rows follow the first one's slot, which is right in a fresh prefill only: each token has a slot of its own."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, TILE)
        live = column < tl.where(tl.load(slots + token) >= 0, HD, 0)
        slot = tl.load(slots) + token
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


@mistake("writing-rows", fails=["test_every_slot", "test_rows_in_any_order"])
def slot_0_skipped():
    """slot > 0 skips slot 0, which is a slot like any other: padding is slot < 0."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot > 0, HD, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


# reshape_and_cache: padding, and rows of any width


@mistake("masks", fails=["test_padding", "test_other_negative_slots"])
def padding_written():
    """Slot -1 is the row before the cache, someone else's memory, and padding was written there: mask all of it."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < HD
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


@mistake("masks", fails=["test_padding", "test_the_kernel_writes"], seen=["vllm#43810"])
def padding_as_python_index():
    """torch reads index -1 as the last slot and writes padding there: use a kernel, which can skip a row."""

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        for rows, cache in ((key, k_cache), (value, v_cache)):
            cache.view(torch.uint8).view(-1, cache[0, 0].nbytes)[slots] = (
                rows[: len(slots)].view(torch.uint8).flatten(1)
            )

    return reshape_and_cache


@mistake("masks", fails=["test_padding", "test_random_writes"], seen=["rvllm#32"])
def padding_to_slot_0():
    """Padding is sent to slot 0, where a token lives: mask the store where slot < 0, no slot is free for it."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        slot = tl.where(slot >= 0, slot, 0)
        column = tl.arange(0, TILE)
        live = column < HD
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


@mistake("masks", fails=["test_other_negative_slots"])
def only_minus_one_skipped():
    """slot != -1 lets -2 through, which is before the cache as well: padding is any slot < 0."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot != -1, HD, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


@mistake("masks", fails=["test_padding", "test_random_writes"])
def padding_ends_the_program():
    """A program of four tokens returns when its first is padding, and the other three are lost: mask each token."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, T, HD: tl.constexpr, TILE: tl.constexpr
    ):
        first = tl.program_id(0).to(tl.int64) * 4
        column = tl.arange(0, TILE)
        if tl.load(slots + first) >= 0:
            for i in range(4):
                token = first + i
                slot = tl.load(slots + token, mask=token < T, other=-1)
                live = column < tl.where(slot >= 0, HD, 0)
                at = slot * HD + column
                tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
                tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        T = len(slots)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots, T, programs=triton.cdiv(T, 4))

    return reshape_and_cache


@mistake("masks", fails=["test_one_row", "test_rows_in_any_order", "test_a_captured_batch"])
def tokens_past_the_last():
    """The last program of four tokens runs past T and writes what lies behind slots: mask token < T too."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        column = tl.arange(0, TILE)
        for i in range(4):
            token = tl.program_id(0).to(tl.int64) * 4 + i
            slot = tl.load(slots + token)
            live = column < tl.where(slot >= 0, HD, 0)
            at = slot * HD + column
            tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
            tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        programs = triton.cdiv(len(slots), 4)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots, programs=programs)

    return reshape_and_cache


@mistake("masks", fails=["test_a_captured_batch", "test_random_writes"], seen=["vllm#13922"])
def a_program_for_each_key():
    """The grid has len(key) programs, but key may be padded and have more rows: the number of tokens is len(slots)."""

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots, programs=len(key))

    return reshape_and_cache


@mistake("masks", fails=["test_odd_widths", "test_random_writes"], seen=["mojo_opset#266"])
def unmasked_tail():
    """The whole power-of-two tile is stored, so other widths run on into the next slot: mask column < H · D."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, TILE, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


@mistake("masks", fails=["test_padding", "test_odd_widths"])
def mask_on_the_load_only():
    """Masked lanes load 0, and the store without a mask writes that 0 over a neighbour: mask the store as well."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0))
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0))

    return _with(reshape_and_cache_kernel)


@mistake("masks", fails=["test_odd_widths"], seen=["lmdeploy#3781"])
def tile_of_exactly_a_row():
    """tl.arange takes powers of two only, and H · D may be 80: use the next power of two and mask column < H · D."""

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots, width=_width(k_cache))

    return reshape_and_cache


@mistake("masks", fails=["test_odd_widths", "test_random_writes"])
def last_tile_left_out():
    """H · D // TILE counts whole tiles, and the rest of the row is never written: round up, and mask the last one."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        HD = _width(k_cache)
        tile = min(1 << (HD.bit_length() - 1), 128)
        programs = len(slots), HD // tile
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots, programs=programs, width=tile)

    return reshape_and_cache


@mistake("masks", fails=["test_a_wide_row"])
def wide_rows_cut_short():
    """The tile stops at 1,024 values and the rest of a wider row is missing: cover H · D, or loop over tiles."""

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        tile = min(triton.next_power_of_2(_width(k_cache)), 1024)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots, width=tile)

    return reshape_and_cache


# reshape_and_cache: strides, number types and offsets


@mistake("addresses", fails=["test_fused_qkv", "test_different_strides"], seen=["flashinfer#588"])
def row_stride_ignored():
    """Row t was read at t · H · D, but rows of a fused QKV tensor are further apart: pass key.stride(0) and use it."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * HD + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * HD + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


@mistake("addresses", fails=["test_different_strides", "test_one_row_for_all"])
def one_stride_for_key_and_value():
    """value is read with key's row stride, but they may be views of different tensors: pass value.stride(0) too."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * key_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


# The caches that show an int32 offset are too large to try a mistake on: the tests' own words tell.


@mistake("addresses", fails=["test_a_cache_past_int32"], seen=["vllm#1486", "tokenspeed#501"], tells=False)
def slot_offset_in_int32():
    """slot · H · D wraps at 2^31, which a cache of 2 GiB in int8 reaches: load the slot as int64 and keep it so."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token).to(tl.int32)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


@mistake("addresses", fails=["test_a_key_past_int32"], tells=False)
def token_offset_in_int32():
    """tl.program_id is an int32, so token · stride wraps at 2^31: program_id(0).to(tl.int64) first."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    return _with(reshape_and_cache_kernel)


@mistake("addresses", fails=["test_bit_for_bit"])
def through_float32():
    """On the way through float32 the bits of a NaN change: a cache write copies bits, so view all four as integers."""

    @triton.jit
    def reshape_and_cache_kernel(
        key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        k = tl.load(key + token * key_stride + column, mask=live, other=0.0).to(tl.float32)
        v = tl.load(value + token * value_stride + column, mask=live, other=0.0).to(tl.float32)
        at = slot * HD + column
        tl.store(k_cache + at, k.to(k_cache.dtype.element_ty), mask=live)
        tl.store(v_cache + at, v.to(v_cache.dtype.element_ty), mask=live)

    def reshape_and_cache(*args):
        _check(*args)
        _launch(reshape_and_cache_kernel, *args, bits=False)

    return reshape_and_cache


# reshape_and_cache: what must be refused, and what must not


@mistake("host-checks", fails=["test_write_refuses"], seen=["flashinfer#527", "aiter#3492"])
def only_k_cache_checked():
    """k_cache is checked to be contiguous and v_cache is not: kv[:, 1] is as strided as kv[:, 0], check both."""
    return _with(dense_caches=lambda a: a.k_cache.is_contiguous())


@mistake("host-checks", fails=["test_write_refuses"], seen=["flashinfer#527", "aiter#3492", "aiter#3640"])
def strided_cache_taken_as_dense():
    """Dense blocks are not enough: kv[:, 0] is every other block, and K lands on V, so check all of it, not [:1]."""
    return _with(dense_caches=lambda a: a.k_cache[:1].is_contiguous() and a.v_cache[:1].is_contiguous())


@mistake("host-checks", fails=["test_write_refuses"])
def cache_made_contiguous():
    """.contiguous() of a strided cache is a copy, and the rows written there are lost with it: refuse such a cache."""

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
        _check(key, value, k_cache, v_cache, slots)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots)

    return reshape_and_cache


@mistake("host-checks", fails=["test_write_refuses"])
def rows_taken_as_dense():
    """Only the row stride reaches the kernel, so the gaps in key[:, :, ::2] are copied too: refuse rows with gaps."""
    return _without("dense_rows")


@mistake("host-checks", fails=["test_fused_qkv", "test_every_other_row"])
def strided_rows_refused():
    """key.is_contiguous() refuses views of a fused QKV tensor, the usual input: ask it of a single row, key[:1]."""
    return _with(dense_rows=lambda a: a.key.is_contiguous() and a.value.is_contiguous())


@mistake("host-checks", fails=["test_one_head_of_any_stride"])
def stride_of_one_head_compared():
    """stride(1) == D refuses a tensor of one head, where no step is ever made: is_contiguous() knows such strides."""
    return _with(dense_rows=lambda a: a.key.stride()[1:] == a.value.stride()[1:] == a.k_cache.stride()[2:])


@mistake("host-checks", fails=["test_no_tokens_to_write"])
def first_row_of_no_rows():
    """key[0] raises where there are no rows, and a step may have none: the slice key[:1] is then empty, and dense."""
    return _with(dense_rows=lambda a: a.key[0].is_contiguous() and a.value[0].is_contiguous())


@mistake("host-checks", fails=["test_write_refuses"])
def sizes_of_dtypes_compared():
    """int32 and float32 have one size, and their bits mean different numbers: compare the dtypes themselves."""
    return _with(one_dtype=lambda a: len({x.element_size() for x in (a.key, a.value, a.k_cache, a.v_cache)}) == 1)


@mistake("host-checks", fails=["test_write_refuses"])
def other_dtypes_converted():
    """A store converts to the cache's dtype without a word, and whoever mixed them up never hears of it: refuse."""

    def reshape_and_cache(*args):
        _check(*args, one_dtype=lambda a: True)
        _launch(reshape_and_cache_kernel, *args, bits=len({x.dtype for x in args[:4]}) == 1)

    return reshape_and_cache


@mistake("host-checks", fails=["test_write_refuses"])
def widths_compared():
    """[4, 2] and [2, 4] have the same H · D, and heads come out torn apart: compare H and D, not their product."""
    return _with(shape_of_rows=lambda a: _width(a.key) == _width(a.value) == _width(a.k_cache))


@mistake("host-checks", fails=["test_write_refuses"])
def row_shapes_unchecked():
    """Rows of another H or D are cut off or run on into the next row: compare them with the caches' H and D."""
    return _without("shape_of_rows")


@mistake("host-checks", fails=["test_write_refuses"])
def cache_sizes_compared():
    """Caches of one size may be cut into other blocks, and then V's readers look elsewhere: compare the shapes."""
    return _with(one_cache_shape=lambda a: a.k_cache.numel() == a.v_cache.numel())


@mistake("host-checks", fails=["test_write_refuses"])
def cache_shapes_unchecked():
    """A v_cache with fewer blocks than k_cache is written past its end: check that the caches have one shape."""
    return _with(one_cache_shape=lambda a: a.k_cache.shape[2:] == a.v_cache.shape[2:])


@mistake("host-checks", fails=["test_write_refuses"])
def only_keys_counted():
    """key has a row for each slot, but nobody counted value's: check both."""
    return _with(a_row_a_slot=lambda a: len(a.key) >= len(a.slots))


@mistake("host-checks", fails=["test_write_refuses"])
def rows_uncounted():
    """With fewer rows than slots the kernel reads on past the end of key: check len(key) >= len(slots), and value's."""
    return _without("a_row_a_slot")


@mistake("host-checks", fails=["test_write_refuses"])
def slots_of_any_integer():
    """int32 slots make slot · H · D an int32 product, which wraps in a large cache: refuse all but int64."""
    return _without("int64_slots")


@mistake("host-checks", fails=["test_write_refuses"])
def slots_of_any_shape():
    """slots.numel() counts a [T, 1] tensor as T slots, though it is not what was asked for: check slots.dim() == 1."""
    return _without("flat_slots")


@mistake("host-checks", fails=["test_strided_slots"])
def strided_slots_taken_as_dense():
    """The kernel steps one entry a token, through a view of every other entry as well: check slots.is_contiguous()."""
    return _without("dense_slots")


@mistake("host-checks", fails=["test_write_refuses"], tells=False)
def value_checked_after_key_is_written():
    """value is checked when key is already in the cache, so a refusal leaves half a token: check all, then write."""

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, key, k_cache, k_cache, slots)
        _launch(reshape_and_cache_kernel, key, key, k_cache, k_cache, slots)
        _check(key, value, k_cache, v_cache, slots)
        _launch(reshape_and_cache_kernel, value, value, v_cache, v_cache, slots)

    return reshape_and_cache


# reshape_and_cache: the manner


@mistake("writing-rows", fails=["test_the_kernel_writes"], tells=False)
def torch_beside_an_empty_kernel():
    """A kernel was launched and index assignment did the writing: move the copy into the kernel."""

    @triton.jit
    def reshape_and_cache_kernel():
        pass

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        reshape_and_cache_kernel[(1,)]()
        tokens = (slots >= 0).nonzero()[:, 0]
        for rows, cache in ((key, k_cache), (value, v_cache)):
            rows = rows.contiguous().view(torch.uint8).flatten(1)
            cache.view(torch.uint8).view(-1, rows.shape[1])[slots[tokens]] = rows[tokens]

    return reshape_and_cache


@mistake("writing-rows", fails=["test_the_kernel_writes"], tells=False)
def kernel_of_another_name():
    """The kernel is right and is called something else: the suite, and a profile, look for reshape_and_cache_kernel."""

    @triton.jit
    def kernel(key, value, k_cache, v_cache, slots, key_stride, value_stride, HD: tl.constexpr, TILE: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        column = tl.arange(0, TILE)
        live = column < tl.where(slot >= 0, HD, 0)
        at = slot * HD + column
        tl.store(k_cache + at, tl.load(key + token * key_stride + column, mask=live, other=0), mask=live)
        tl.store(v_cache + at, tl.load(value + token * value_stride + column, mask=live, other=0), mask=live)

    return _with(kernel)


@mistake("writing-rows", fails=["test_as_many_launches_for_more_tokens"], tells=False)
def a_launch_for_each_token():
    """Each token is a launch of its own, and each launch costs some 5 us: make one, whose grid runs over the tokens."""

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        for t in range(len(slots)):
            _launch(reshape_and_cache_kernel, key[t:], value[t:], k_cache, v_cache, slots[t : t + 1])

    return reshape_and_cache


@mistake("masks", fails=["test_nothing_is_read_on_the_host"], tells=False)
def slots_checked_on_the_host():
    """assert (slots < limit).all() waits for the GPU, in every layer, and cannot be captured: leave slots unread."""

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        assert (slots < k_cache.shape[0] * k_cache.shape[1]).all(), "slots are past the cache"
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots)

    return reshape_and_cache


@mistake("masks", fails=["test_other_negative_slots"], tells=False)
def slots_tidied_in_place():
    """clamp_ changes the caller's slots, which every layer of the step uses: compare in the kernel, slot >= 0."""

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _check(key, value, k_cache, v_cache, slots)
        _launch(reshape_and_cache_kernel, key, value, k_cache, v_cache, slots.clamp_(min=-1))

    return reshape_and_cache
