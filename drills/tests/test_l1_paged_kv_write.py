"""L1: slots, and the kernel that writes K and V to them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drills.lane import DEVICE
from drills.tests import _oracle
from drills.tests._judge import REFUSALS
from drills.tests._paged import (
    any_bits,
    batch,
    caches,
    few,
    generator,
    guarded,
    has_room,
    ints,
    numbers,
    ragged,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


# Stage 1: the slot of a token


@pytest.mark.stage(1)
def test_worked_example(judge):
    """the worked example of the docstring"""
    table = ints([[9, 3, 7], [2, 5, 0]])
    judge.agrees("slot_mapping", table, ints([0, 0, 1]), ints([5, 9, 2]), 4, oracle=_oracle.slot_mapping)


@pytest.mark.stage(1)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_sizes(judge, block_size):
    """the first and the last position of each block"""
    table = ints([[4, 0, 6], [1, 5, 2]])
    positions = [p for c in range(3) for p in (c * block_size, (c + 1) * block_size - 1)]
    for sequence in (0, 1):
        args = table, ints([sequence] * 6), ints(positions), block_size
        judge.agrees("slot_mapping", *args, oracle=_oracle.slot_mapping)


@pytest.mark.stage(1)
def test_tokens_in_any_order(judge):
    """tokens of several sequences, mixed, some sequences without any"""
    table = ints([[9, 3], [7, 1], [4, 8], [2, 6]])
    args = table, ints([3, 1, 3, 0, 1]), ints([7, 0, 1, 6, 5]), 4
    judge.agrees("slot_mapping", *args, oracle=_oracle.slot_mapping)


# Stage 2: a whole batch of slots


@pytest.mark.stage(2)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64], ids=["table int32", "table int64"])
def test_dtypes_of_the_inputs(judge, table_dtype, index_dtype):
    """slots are int64, whatever integers come in"""
    table = ints([[9, 3, 7], [2, 5, 0]], table_dtype)
    args = table, ints([0, 1, 1], index_dtype), ints([5, 9, 2], index_dtype), 4
    judge.agrees("slot_mapping", *args, oracle=_oracle.slot_mapping)


@pytest.mark.stage(2)
def test_slots_past_int32(judge):
    """a block id whose slot does not fit in int32"""
    table = ints([[200_000_000, 3]])
    args = table, ints([0, 0]), ints([7, 16]), 16
    hint = "block id · block_size passes 2^31: widen the ids first."
    judge.agrees("slot_mapping", *args, oracle=_oracle.slot_mapping, hint=hint)


@pytest.mark.stage(2)
def test_positions_past_float32(judge):
    """a position that float32 cannot hold"""
    table = torch.arange(2**20 + 2, dtype=torch.int32, device=DEVICE)[None]
    args = table, ints([0, 0]), ints([2**24 + 15, 3]), 16
    judge.agrees("slot_mapping", *args, oracle=_oracle.slot_mapping)


@pytest.mark.stage(2)
def test_no_tokens(judge):
    """a step with no tokens, T = 0"""
    args = ints([[9, 3]]), ints([]), ints([]), 4
    judge.agrees("slot_mapping", *args, oracle=_oracle.slot_mapping)


@pytest.mark.stage(2)
def test_a_table_that_is_a_view(judge):
    """a block table cut out of a larger one"""
    whole = ints([[0, 9, 3, 7, 0], [0, 2, 5, 8, 0], [0, 0, 0, 0, 0]])
    args = whole[:2, 1:4], ints([1, 0, 1, 0]), ints([11, 8, 3, 0]), 4
    judge.agrees("slot_mapping", *args, oracle=_oracle.slot_mapping)


@pytest.mark.stage(2)
def test_dead_columns_are_not_read(judge):
    """poison past the live part of each row"""
    rng = generator(7)
    of = batch(rng, [9, 2, 5], 4, extra_columns=3)
    tokens = [(b, p) for b, n in enumerate(of.lens) for p in range(n)]
    args = of.table, ints([b for b, _ in tokens]), ints([p for _, p in tokens]), 4
    judge.agrees("slot_mapping", *args, oracle=_oracle.slot_mapping)


@pytest.mark.stage(2)
def test_a_shorter_step_after_a_longer_one(judge):
    """a short step after a long one: nothing stale, and the first result stays as it was"""
    table = ints([[2, 0, 5]])
    long = judge.agrees("slot_mapping", table, ints([0] * 4), ints([0, 1, 2, 3]), 4, oracle=_oracle.slot_mapping)
    kept = long.returned.clone()
    short = table, ints([0, 0]), ints([9, 10]), 4
    judge.agrees("slot_mapping", *short, oracle=_oracle.slot_mapping)
    if not torch.equal(long.returned, kept):
        judge.fail("slot_mapping", list(short), [
            f"overwrote the slots of the step before: {kept.tolist()} became {long.returned.tolist()}",
            "return a new tensor each time",
        ])  # fmt: skip


@pytest.mark.stage(2)
def test_vectorised(judge):
    """as many torch operations for 512 tokens as for 4"""
    table = torch.arange(64, dtype=torch.int32, device=DEVICE).view(4, 16)

    def arguments(tokens):
        return table, ints([t % 4 for t in range(tokens)]), ints([t % 64 for t in range(tokens)]), 4

    advice = "index with whole tensors: block_table[rows, columns] takes all tokens at once"
    judge.no_growth("slot_mapping", arguments, 4, 512, "tokens", advice)


@pytest.mark.stage(2)
@pytest.mark.parametrize(
    ("seq_idx", "positions", "block_size", "because"),
    [
        ([0], [8], 4, "position 8 is past row 0, which has 2 columns of 4"),
        ([1], [8], 4, "position 8 is past row 1, the last"),
        ([0, 0], [0, 1_000_000], 4, "position 1000000 is far past the row"),
        ([2], [0], 4, "sequence 2 is past the table's last row"),
        ([-1], [0], 4, "sequence -1 is no row, though an index of -1 would find the last one"),
        ([0], [-1], 4, "position -1 is no token"),
        ([0, 1], [1], 4, "there are 2 sequences for 1 position"),
        ([0], [1, 2], 4, "there is 1 sequence for 2 positions"),
        ([0], [1], 0, "a block of 0 tokens holds nothing"),
        ([0], [1], -4, "a block cannot have -4 tokens"),
    ],
    ids=[
        "position past the row", "position past the last row", "position far past", "sequence past the table",
        "negative sequence", "negative position", "fewer positions", "fewer sequences", "block size 0",
        "negative block size",
    ],
)  # fmt: skip
def test_refuses(judge, seq_idx, positions, block_size, because):
    """what slot_mapping must refuse"""
    args = ints([[9, 3], [7, 1]]), ints(seq_idx), ints(positions), block_size
    judge.refuses("slot_mapping", *args, because=because)


@pytest.mark.stage(2)
@pytest.mark.parametrize("block", [-1, -7])
def test_refuses_an_unallocated_block(judge, block):
    """a negative block id where a token goes"""
    args = ints([[9, block], [7, 1]]), ints([0, 0]), ints([2, 5]), 4
    judge.refuses(
        "slot_mapping", *args, because=f"position 5 has no block yet ({block}), and its slot would look like padding"
    )


@pytest.mark.stage(2)
@few
@given(seed=st.integers(0, 2**20), batch_size=st.integers(1, 6), block_size=st.integers(1, 17))
def test_random_batches(judge, seed, batch_size, block_size):
    """random batches"""
    rng = generator(seed)
    of = batch(rng, ragged(rng, batch_size, block_size, 3 * block_size), block_size)
    tokens = [(b, p) for b, n in enumerate(of.lens) for p in range(n)]
    order = torch.randperm(len(tokens), generator=rng).tolist()
    args = of.table, ints([tokens[i][0] for i in order]), ints([tokens[i][1] for i in order]), block_size
    judge.agrees("slot_mapping", *args, oracle=_oracle.slot_mapping)


# Stage 3: writing rows


SPARE = 6  # rows that key and value have in memory past their last, and slots past T: reading one must show


def buffered(slots, stale=()):
    """[T] slots at the start of a longer buffer, as in a captured batch: those of a longer step, or padding, follow."""
    return ints([*slots, *stale, *[-1] * 2 * SPARE], torch.int64)[: len(slots)]


def write(judge, slots, heads=2, dim=4, blocks=3, block_size=4, rows=None):
    """One call of reshape_and_cache on fresh caches, compared with the oracle in the whole of their allocations."""
    rng = generator(1)
    rows = len(slots) if rows is None else rows
    key, value = (numbers(rng, (rows + SPARE, heads, dim), torch.float32)[:rows] for _ in "kv")
    free = [s for s in range(blocks * block_size) if s not in slots]
    args = key, value, *caches(blocks, block_size, heads, dim), buffered(slots, free[-SPARE:])
    return judge.agrees("reshape_and_cache", *args, oracle=_oracle.reshape_and_cache)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_one_row(judge):
    """one token"""
    write(judge, [6])


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_rows_in_any_order(judge):
    """tokens whose slots are in no order"""
    write(judge, [9, 2, 11, 4, 0])


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_every_slot(judge):
    """a prefill that fills the cache from its first slot to its last"""
    write(judge, list(range(12)))


@pytest.mark.kernel
@pytest.mark.stage(3)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_write_block_sizes(judge, block_size):
    """block sizes of every kind"""
    write(judge, [2 * block_size, 0, 9 * block_size - 1], blocks=9, block_size=block_size)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_many_heads(judge):
    """8 heads of 16"""
    write(judge, [7, 1, 3], heads=8, dim=16)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_the_kernel_writes(judge):
    """the rows are written by reshape_and_cache_kernel"""
    rng = generator(2)
    args = [numbers(rng, (2, 2, 4), torch.float32) for _ in "kv"] + [*caches(3, 4, 2, 4), buffered([6, 1])]
    judge.works_in_its_kernel("reshape_and_cache", *args)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_as_many_launches_for_more_tokens(judge):
    """as many kernel launches for 24 tokens as for 2"""

    def arguments(tokens):
        rng = generator(2)
        args = [numbers(rng, (tokens, 2, 4), torch.float32) for _ in "kv"]
        return [*args, *caches(6, 4, 2, 4), buffered(range(tokens))]

    judge.no_growth("reshape_and_cache", arguments, 2, 24, "tokens", "launch once: the grid runs over the tokens")


# Stage 4: padding and odd widths


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("slots", [[5, -1, 0], [3, -1], [-1, 4], [-1], [-1, -1, -1]], ids=str)
def test_padding(judge, slots):
    """-1 is padding: nothing is written for it"""
    write(judge, slots, blocks=2)


@pytest.mark.kernel
@pytest.mark.stage(4)
def test_other_negative_slots(judge):
    """any negative slot is padding"""
    write(judge, [-2, 3, -8, -3, 0, -5], blocks=2)


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize(("slots", "rows"), [([5, 0], 4), ([2], 7)], ids=str)
def test_a_captured_batch(judge, slots, rows):
    """key and value have more rows than there are slots"""
    write(judge, slots, rows=rows)


@pytest.mark.kernel
@pytest.mark.stage(4)
def test_a_captured_step_reused(judge):
    """a buffer of 4 slots reused for 2 tokens, the rest set to -1"""
    write(judge, [8, 9, -1, -1], rows=4)


@pytest.mark.kernel
@pytest.mark.stage(4)
def test_nothing_is_read_on_the_host(judge):
    """the launch waits for nothing: no slot is looked at on the host"""
    rng = generator(2)
    args = [numbers(rng, (3, 2, 4), torch.float32) for _ in "kv"] + [*caches(3, 4, 2, 4), buffered([6, -1, 1])]
    judge.waits_for_nothing("reshape_and_cache", *args)


@pytest.mark.kernel
@pytest.mark.stage(4)
def test_no_tokens_to_write(judge):
    """T = 0"""
    write(judge, [])


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize(
    ("heads", "dim"), [(3, 2), (1, 1), (5, 1), (1, 7), (1, 80), (3, 48), (9, 16)], ids=lambda x: str(x)
)
def test_odd_widths(judge, heads, dim):
    """a row whose width is not a power of two"""
    write(judge, [3, 2, 11, 0], heads=heads, dim=dim)


@pytest.mark.kernel
@pytest.mark.stage(4)
def test_a_wide_row(judge):
    """a row of 2,560 values"""
    write(judge, [1, 3], heads=20, dim=128, blocks=1)


@pytest.mark.kernel
@pytest.mark.stage(4)
@few
@given(data=st.data(), heads=st.integers(1, 5), dim=st.integers(1, 12), block_size=st.integers(1, 6))
def test_random_writes(judge, data, heads, dim, block_size):
    """random slots, widths and padding"""
    free = list(range(3 * block_size))
    slots = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=5), label="slots")
    for at in data.draw(st.lists(st.integers(0, len(slots)), max_size=2), label="padding"):
        slots.insert(at, -1)
    extra = data.draw(st.integers(0, 2), label="rows past slots") if slots else 0  # no slots are no memory to misread
    write(judge, slots, heads, dim, block_size=block_size, rows=len(slots) + extra)


# Stage 5: strides, dtypes and big offsets


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_fused_qkv(judge):
    """key and value are views into one fused QKV tensor"""
    qkv = numbers(generator(3), (3, 3, 2, 4), torch.float32)
    args = qkv[:, 1], qkv[:, 2], *caches(3, 4, 2, 4), buffered([10, 3, 0])
    judge.agrees("reshape_and_cache", *args, oracle=_oracle.reshape_and_cache)


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("strided", ["key", "value"])
def test_different_strides(judge, strided):
    """the row strides of key and value differ"""
    rng = generator(4)
    wide, dense = numbers(rng, (3, 5, 4), torch.float32), numbers(rng, (9, 2, 4), torch.float32)[:3]
    key, value = (wide[:, 2:4], dense) if strided == "key" else (dense, wide[:, 1:3])
    args = key, value, *caches(3, 4, 2, 4), buffered([10, 3, 0])
    judge.agrees("reshape_and_cache", *args, oracle=_oracle.reshape_and_cache)


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_every_other_row(judge):
    """key and value hold every other row of a larger tensor, with a storage offset"""
    rng = generator(5)
    args = [numbers(rng, (9, 2, 4), torch.float32)[start::2] for start in (1, 2)]
    judge.agrees(
        "reshape_and_cache", *args, *caches(3, 4, 2, 4), buffered([7, -1, 2]), oracle=_oracle.reshape_and_cache
    )


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_one_row_for_all(judge):
    """a key expanded from one row, with a row stride of 0"""
    rng = generator(6)
    key = numbers(rng, (9, 2, 4), torch.float32)[:1].expand(3, 2, 4)
    args = key, numbers(rng, (3, 2, 4), torch.float32), *caches(3, 4, 2, 4), buffered([7, 9, 2])
    judge.agrees("reshape_and_cache", *args, oracle=_oracle.reshape_and_cache)


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_one_head_of_any_stride(judge):
    """with one head, the stride between heads says nothing and the rows are still dense"""
    rng = generator(8)
    args = [numbers(rng, (3, 6, 4), torch.float32)[:, 2::4] for _ in "kv"]
    judge.agrees("reshape_and_cache", *args, *caches(3, 4, 1, 4), buffered([7, 9, 2]), oracle=_oracle.reshape_and_cache)


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_bit_for_bit(judge, dtype):
    """every bit pattern arrives as it was"""
    rng = generator(9)
    args = any_bits(rng, (6, 4, 16), dtype), any_bits(rng, (6, 4, 16), dtype), *caches(2, 4, 4, 16, dtype)
    judge.agrees("reshape_and_cache", *args, buffered([6, 1, 3, -1, 0, 7]), oracle=_oracle.reshape_and_cache)


big_memory = pytest.mark.skipif(not has_room(7), reason="needs 7 GiB of memory in one piece, little of it touched")
BIG = dict(heads=8, dim=128, block_size=16, blocks=131_074)  # 2^31 int8 values are 131,072 such blocks


@big_memory
@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("slot", [2_097_157, 2_097_151], ids=["past 2^31", "just before"])
def test_a_cache_past_int32(judge, slot):
    """a slot whose offset in the cache does not fit in int32"""
    width = BIG["heads"] * BIG["dim"]
    size = BIG["blocks"] * BIG["block_size"] * width
    shape = (BIG["blocks"], BIG["block_size"], BIG["heads"], BIG["dim"])
    # One allocation, most of which is never touched: room for a wrapped offset, then v_cache, then k_cache.
    room = torch.empty(3 * size, dtype=torch.int8, device=DEVICE)
    v_cache, k_cache = room[size : 2 * size].view(shape), room[2 * size :].view(shape)
    rng = generator(10)
    key, value = numbers(rng, (1, 8, 128), torch.int8), numbers(rng, (1, 8, 128), torch.int8)
    spots = {f"{name}_cache slot {slot}": n * size + slot * width for name, n in (("v", 1), ("k", 2))}
    wraps = {f"{spot}, 2^32 values too early": at - 2**32 for spot, at in spots.items() if at >= 2**32}
    wraps |= {f"{spot}, 2^31 values too early": at - 2**31 for spot, at in spots.items()}
    for at in [*spots.values(), *(at for at in wraps.values() if at >= 0)]:
        room[at : at + width] = 77
    args = key, value, k_cache, v_cache, buffered([slot])
    judge.call("reshape_and_cache", *args, huge=True)
    small = [*args[:2], *("[131074,16,8,128 int8]" for _ in "kv"), args[4]]
    for (spot, at), row in zip(spots.items(), (value, key)):
        if not torch.equal(room[at : at + width], row.flatten()):
            hit = [name for name, start in wraps.items() if start >= 0 and (room[start : start + width] != 77).any()]
            judge.fail("reshape_and_cache", small, [
                f"{spot} was not written" + (f"; the row went to {hit[0]}" if hit else ""),
                "the offset slot · H · D passes 2^31: compute it in int64",
            ])  # fmt: skip


@big_memory
@pytest.mark.kernel
@pytest.mark.stage(5)
def test_a_key_past_int32(judge):
    """a token whose offset in key and value does not fit in int32"""
    before, stride = 2**31, 2**30 + 64  # room for a wrapped offset; row 2 begins past 2^31
    room = torch.empty(before + 3 * stride, dtype=torch.int8, device=DEVICE)
    rng = generator(11)
    key, value = (room.as_strided((3, 2, 8), (stride, 8, 1), before + at) for at in (0, 16))
    for x in (key, value):
        x.copy_(numbers(rng, (3, 2, 8), torch.int8))
    k_cache, v_cache = caches(1, 4, 2, 8, torch.int8)
    slots = buffered([3, 0, 2])
    judge.call("reshape_and_cache", key, value, k_cache, v_cache, slots, huge=True)
    for name, x, cache in (("key", key, k_cache), ("value", value, v_cache)):
        for row, slot in enumerate([3, 0, 2]):
            if not torch.equal(cache[0, slot], x[row]):
                huge = f"[3,2,8 int8 strides {[stride, 8, 1]}]"
                judge.fail("reshape_and_cache", [huge, huge, k_cache, v_cache, slots], [
                    f"{name[0]}_cache slot {slot} does not hold {name}'s row {row}",
                    "the offset token · stride passes 2^31: compute it in int64",
                ])  # fmt: skip


# Stage 6: refusing what would corrupt


def good():
    """Arguments that are fine: each refusal spoils one of them."""
    rng = generator(12)
    key, value = numbers(rng, (3, 2, 4), torch.float32), numbers(rng, (3, 2, 4), torch.float32)
    k_cache, v_cache = caches(3, 4, 2, 4)
    return dict(key=key, value=value, k_cache=k_cache, v_cache=v_cache, slots=buffered([7, 2, 4]))


def interleaved(which):
    """A cache cut out of one tensor that holds both, kv[:, 0] or kv[:, 1]."""
    return guarded((3, 2, 4, 2, 4), torch.float32, 8)[:, which]


SPOILED = {
    "a strided k_cache": (
        lambda g: dict(k_cache=interleaved(0)), "k_cache is kv[:, 0], every other block: as dense, it overwrites V"
    ),
    "a strided v_cache": (lambda g: dict(v_cache=interleaved(1)), "v_cache is kv[:, 1], not contiguous"),
    "caches of heads first": (
        lambda g: dict(k_cache=guarded((3, 2, 4, 4), torch.float32).transpose(1, 2),
                       v_cache=guarded((3, 2, 4, 4), torch.float32).transpose(1, 2)),
        "the caches are [NB, H, BS, D] turned round, not contiguous",
    ),
    "a row that is not dense": (
        lambda g: dict(key=numbers(generator(1), (3, 2, 8), torch.float32)[:, :, ::2]), "key's rows are not dense"
    ),
    "a value that is not dense": (
        lambda g: dict(value=numbers(generator(1), (3, 4, 4), torch.float32)[:, ::2]), "value's rows are not dense"
    ),
    "a transposed key": (
        lambda g: dict(key=numbers(generator(1), (3, 4, 2), torch.float32).transpose(1, 2)), "key's rows are not dense"
    ),
    "fewer keys than slots": (lambda g: dict(key=g["key"][:2]), "key has 2 rows for 3 slots"),
    "fewer values than slots": (lambda g: dict(value=g["value"][:2]), "value has 2 rows for 3 slots"),
    "another head count": (
        lambda g: dict(key=numbers(generator(1), (3, 4, 4), torch.float32)), "key has 4 heads, the cache 2"
    ),
    "another head dim": (
        lambda g: dict(value=numbers(generator(1), (3, 2, 8), torch.float32)), "value has a head dim of 8, the cache 4"
    ),
    "heads and dim swapped": (
        lambda g: dict(key=numbers(generator(1), (3, 4, 2), torch.float32)), "key is [T, 4, 2] and the cache [.., 2, 4]"
    ),
    "caches of different shapes": (lambda g: dict(v_cache=g["v_cache"][:2]), "v_cache has fewer blocks than k_cache"),
    "caches of another block size": (
        lambda g: dict(v_cache=guarded((6, 2, 2, 4), torch.float32, 8)), "v_cache has blocks of 2, k_cache of 4"
    ),
    "key of another dtype": (lambda g: dict(key=g["key"].half()), "key is float16, the caches float32"),
    "value of another dtype": (lambda g: dict(value=g["value"].half()), "value is float16, the caches float32"),
    "a cache of another dtype": (
        lambda g: dict(v_cache=guarded((3, 4, 2, 4), torch.float16, 8)), "v_cache is float16, the rest float32"
    ),
    "an integer of the same size": (
        lambda g: dict(key=g["key"].to(torch.int32)), "key is int32, the caches float32: the same size, other numbers"
    ),
    "slots of int32": (lambda g: dict(slots=g["slots"].int()), "slots are int32, read as int64 two become one"),
    "slots of two dimensions": (lambda g: dict(slots=g["slots"][:, None]), "slots must be [T]"),
}  # fmt: skip


@pytest.mark.kernel
@pytest.mark.stage(6)
@pytest.mark.parametrize("spoiled", SPOILED)
def test_write_refuses(judge, spoiled):
    """must be refused, with nothing written"""
    spoil, because = SPOILED[spoiled]
    args = good()
    args |= spoil(args)
    judge.refuses("reshape_and_cache", *args.values(), because=because)


@pytest.mark.kernel
@pytest.mark.stage(6)
def test_strided_slots(judge):
    """slots that are a strided view: read as they are, or refused"""
    args = good() | dict(slots=ints([7, 0, 2, 0, 4, 0], torch.int64)[::2])
    judge.agrees("reshape_and_cache", *args.values(), oracle=_oracle.reshape_and_cache, or_refuses=REFUSALS)
