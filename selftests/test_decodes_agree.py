"""The reference's decodes give one answer: L2, L3 however it is split, L4 however it is planned, F1's FlashInfer."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from drills import implementation, lane, no_triton
from drills.tests._paged import copy_of, decode_args, generator

no_triton.install_if_missing()
pytestmark = pytest.mark.skipif(no_triton.MISSING, reason="needs Triton")

SOLUTIONS = implementation.select("solutions")
LENS = [37, 1, 64]


def call(name, *args):
    outcome = SOLUTIONS.run(name, *args)
    assert outcome.raised is None, outcome.raised
    return outcome.returned


def same(x, y):
    assert torch.allclose(x.float(), y.float(), rtol=3e-3, atol=3e-3)


def decodes(args):
    """o and the natural lse of each way to decode, by name."""
    q, _, _, _, lens = args
    kv_heads, page_size = args[1].shape[2], args[1].shape[1]
    yield "paged_decode", call("paged_decode", *args), None
    for splits in (1, 3, 12):
        yield f"{splits} splits", *call("split_kv_decode", *args, splits, None, True)
    for programs in (1, 30):
        work = call("plan_decode", lens.cpu(), page_size, kv_heads, programs)
        work = type(work)(*(x.to(q.device) for x in work))
        yield f"{programs} programs", *call("planned_decode", *args[:4], work, None, True)
    o, lse = call("flashinfer_decode", *args, True)
    yield "FlashInfer", o, lse * math.log(2)  # its lse is to base 2


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
def test_one_answer(heads):
    _, args = decode_args(5, LENS, 16, heads)
    found = list(decodes(args))
    (_, o, _), (_, _, lse) = found[0], found[1]
    for _, other, its in found:
        same(other, o)
        if its is not None:
            same(its, lse)


def test_parts_merge_in_any_order():
    """Merging is associative and commutative, and an empty part changes nothing."""
    rng = generator(6)
    o, lse = (
        torch.randn(2, 3, 4, 16, generator=rng).to(lane.DEVICE),
        torch.randn(2, 3, 4, generator=rng).to(lane.DEVICE),
    )
    o[0, 0, 1], lse[0, 0, 1] = 0, -math.inf
    whole = call("merge_splits", o, lse)
    for order in itertools.islice(itertools.permutations(range(4)), 1, None, 5):
        for x, y in zip(call("merge_splits", o[:, :, order].contiguous(), lse[:, :, order].contiguous()), whole):
            same(x, y)
    halves = [call("merge_splits", *copy_of((o[:, :, part], lse[:, :, part]))) for part in ([0, 1], [2, 3])]
    pair = (torch.stack([half[i] for half in halves], 2) for i in (0, 1))
    for x, y in zip(call("merge_splits", *pair), whole):
        same(x, y)
