"""What a learner is told, held by golden files: pytest --update-golden writes them anew, the diff is to be read."""

from __future__ import annotations

import sys

import pytest
import torch

from drills import catalog, implementation
from drills.tests import _oracle
from drills.tests._judge import Judge, Verdict
from drills.tests._paged import caches, generator, ints, numbers


def tokens():
    return ints([[9, 3, 7], [2, 5, 0]]), ints([0, 0, 1]), ints([5, 9, 2])


def verdict(function, check, stage=1):
    """The text of the verdict on `function`, in the reference's place, by check(judge). One is looked up among the
    mistakes; the others' texts should not change with the catalogue."""
    drill, _ = catalog.owner(function.__name__)
    judge = Judge(implementation.reference_with(function, "x"), drill, stage, "test_x", "what the test shows")
    with pytest.raises(Verdict) as caught:
        check(judge)
    if function is not known_mistake:
        return caught.value.text()
    assert caught.value.look_up
    return caught.value.text(caught.value.look_up())


def mapping(judge):
    judge.agrees("slot_mapping", *tokens(), 4, oracle=_oracle.slot_mapping)


def write(judge, slots=(3, -1, 0), heads=2, dim=4, **options):
    rng = generator(1)
    rows = [numbers(rng, (len(slots), heads, dim), torch.float32) for _ in "kv"]
    args = *rows, *caches(2, 4, heads, dim), ints(slots, torch.int64)
    judge.agrees("reshape_and_cache", *args, oracle=_oracle.reshape_and_cache, **options)


def right(block_table, seq_idx, positions, block_size):
    return _oracle.slot_mapping(block_table, seq_idx, positions, block_size)


def wrong_values(block_table, seq_idx, positions, block_size):
    return right(block_table, seq_idx, positions, block_size) + ints([0, 0, 1], torch.int64)


def wrong_dtype(block_table, seq_idx, positions, block_size):
    return right(block_table, seq_idx, positions, block_size).int()


def wrong_shape(block_table, seq_idx, positions, block_size):
    return right(block_table, seq_idx, positions, block_size)[:2]


def returns_none(block_table, seq_idx, positions, block_size):
    right(block_table, seq_idx, positions, block_size)


def raises(block_table, seq_idx, positions, block_size):
    return block_table[seq_idx.long(), positions.long()]


def exits(block_table, seq_idx, positions, block_size):
    sys.exit(0)


def disturbs(block_table, seq_idx, positions, block_size):
    slots = right(block_table, seq_idx, positions, block_size)
    positions += 1
    return slots


def known_mistake(block_table, seq_idx, positions, block_size):
    t = torch.arange(len(positions))
    return block_table[seq_idx.long(), t // block_size].long() * block_size + t % block_size


@pytest.mark.parametrize(
    "function",
    [wrong_values, wrong_dtype, wrong_shape, returns_none, raises, exits, disturbs, known_mistake],
    ids=lambda f: f.__name__,
)
def test_mapping(function, golden):
    name = function.__name__
    function.__name__ = "slot_mapping"
    try:
        golden(name, verdict(function, mapping))
    finally:
        function.__name__ = name


def no_block_size(judge):
    judge.refuses("slot_mapping", *tokens(), 0, because="a block of 0 tokens holds nothing")


def test_not_refused(golden):
    def slot_mapping(block_table, seq_idx, positions, block_size):
        return positions.long()

    golden("not_refused", verdict(slot_mapping, no_block_size, 2))


def test_refused_with_another_error(golden):
    def slot_mapping(block_table, seq_idx, positions, block_size):
        raise RuntimeError("no")

    golden("refused_with_another_error", verdict(slot_mapping, no_block_size, 2))


def test_refused_too_late(golden):
    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        k_cache[0, 0] = key[0]
        raise ValueError("value has another shape")

    rng = generator(1)
    args = numbers(rng, (1, 2, 4), torch.float32), numbers(rng, (1, 2, 3), torch.float32), *caches(2, 4, 2, 4)

    def check(judge):
        judge.refuses("reshape_and_cache", *args, ints([0], torch.int64), because="value has a head dim of 3, not 4")

    golden("refused_too_late", verdict(reshape_and_cache, check, 6))


def test_wrong_row(golden):
    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _oracle.reshape_and_cache(value, value, k_cache, v_cache, slots)

    golden("wrong_row", verdict(reshape_and_cache, write, 3))


def test_padding_written(golden):
    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        k_cache.view(-1, 2, 4)[slots] = key
        v_cache.view(-1, 2, 4)[slots] = value

    golden("padding_written", verdict(reshape_and_cache, write, 4))


def test_past_the_end(golden):
    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        _oracle.reshape_and_cache(key, value, k_cache, v_cache, slots)
        size = v_cache.numel() + 3
        v_cache.as_strided((size,), (1,))[-3:] = 0.5

    golden("past_the_end", verdict(reshape_and_cache, write, 4))


def test_attention(golden):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 8).half(), torch.randn(3, 4, 2, 8).half(), torch.randn(3, 4, 2, 8).half()
    args = q, k, v, ints([[2, 0], [1, -1]]), ints([6, 3])

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        o = _oracle.flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens)
        o[1, 2] = float("nan")
        return o

    def check(judge):
        judge.agrees(
            "flashinfer_decode", *args, oracle=_oracle.flashinfer_decode, close=3e-3, hint="What is past a row?"
        )

    golden("attention", verdict(flashinfer_decode, check, 4))
