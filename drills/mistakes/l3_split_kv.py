"""L3's mistakes: parts that are weighed wrongly, and splits that leave tokens out, share them or read others.

Each is right but for what its lesson says. What several of them share stands first, and is right: kernels with a place
to put other lines in, which a mistake fills with its own.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from drills.mistakes import mistake

# merge_splits. What its mistakes share: the checks, the kernel, the launch.


@triton.jit
def merge_splits_kernel(
    o_part, lse_part, o, lse, S, HQ, D: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, MERGED: tl.constexpr
):
    """One program a row, all its parts in one tile. MERGED(x, part): (o, lse) of parts with lse x, for the mistakes."""
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
    x = tl.load(lse_part + row * S + split, mask=split < S, other=float("-inf"))
    there = (split < S)[:, None] & (dim < D)[None, :]
    part = tl.load(o_part + (row * S + split)[:, None] * D + dim[None, :], mask=there, other=0)
    if MERGED is None:
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        out, merged = tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), top + tl.log(total)
    else:
        out, merged = MERGED(x, part)
    tl.store(o + row * D + dim, out, mask=dim < D)
    tl.store(lse + row, merged)


_MERGE_CHECKS = {  # each of the arguments as a namespace
    "float32_parts": lambda a: a.o_part.dtype == torch.float32,
    "float32_lse": lambda a: a.lse.dtype == torch.float32,
    "an_lse_a_part": lambda a: a.o_part.dim() == 4 and a.lse.shape == a.o_part.shape[:3],
    "dense_parts": lambda a: a.o_part.is_contiguous(),
    "dense_lse": lambda a: a.lse.is_contiguous(),
}


def _check_parts(o_part, lse, **other_checks):
    arguments = SimpleNamespace(o_part=o_part, lse=lse)
    for name, passes in (_MERGE_CHECKS | other_checks).items():
        assert passes(arguments), f"refused: {name.replace('_', ' ')}"


def _launch_merge(kernel, o_part, lse, merged=None, parts=None, dim=None):
    """One program a row, and tiles as large as need be, unless told otherwise. What no program writes is 0."""
    B, Hq, S, D = o_part.shape
    o, lse_out = torch.zeros(B, Hq, D, device=lse.device), torch.zeros(B, Hq, device=lse.device)
    more = {"MERGED": merged} if kernel is merge_splits_kernel else {}
    parts, dim = parts or triton.next_power_of_2(S), dim or triton.next_power_of_2(D)
    kernel[(B * Hq,)](o_part, lse, o, lse_out, S, Hq, D=D, DIM=dim, PARTS=parts, **more)
    return o, lse_out


def _merging(merged=None, kernel=merge_splits_kernel, **other_checks):
    """merge_splits with other lines in its kernel, another kernel, or other checks."""

    def merge_splits(o_part, lse):
        _check_parts(o_part, lse, **other_checks)
        return _launch_merge(kernel, o_part, lse, merged)

    return merge_splits


def _merging_without(*checks):
    return _merging(**{check: lambda a: True for check in checks})


_right_merge = _merging()


# merge_splits: other weights


@mistake(
    "merging",
    fails=["test_merge_worked_example", "test_merge_two_parts", "test_merge_an_empty_part"],
    seen=["vllm#28840", "sglang#40903"],
)
def natural_lse_with_exp2():
    """The lse are natural logarithms and went into exp2, which gives 0.7233: exp undoes ln, exp2 undoes log2."""

    @triton.jit
    def merged(x, part):
        top = tl.max(x, 0)
        weights = tl.exp2(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), top + tl.log2(total)

    return _merging(merged)


@mistake(
    "merging",
    fails=["test_merge_worked_example", "test_merge_two_parts", "test_merge_an_empty_part"],
    seen=["vllm#28840", "sglang#40903"],
)
def log2_lse_with_exp():
    """The lse were turned to base 2 and still went into exp, which gives 0.8808: after · log2(e) comes exp2."""

    @triton.jit
    def merged(x, part):
        x *= 1.4426950408889634
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        lse = (top + tl.log(total)) * 0.6931471805599453
        return tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), lse

    return _merging(merged)


@mistake("lse", fails=["test_merge_worked_example", "test_merge_one_part", "test_merge_in_two_steps"])
def merged_lse_to_base_2():
    """o is right and the lse comes back to base 2, so the next merge weighs wrongly: multiply it by ln 2."""

    @triton.jit
    def merged(x, part):
        x *= 1.4426950408889634
        top = tl.max(x, 0)
        weights = tl.exp2(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), top + tl.log2(total)

    return _merging(merged)


@mistake("lse", fails=["test_merge_worked_example", "test_merge_two_parts", "test_merge_in_two_steps"])
def log2_added_to_a_natural_maximum():
    """max + log2(total) adds a natural logarithm to one of base 2: with exp the lse is max + log(total)."""

    @triton.jit
    def merged(x, part):
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), top + tl.log2(total)

    return _merging(merged)


@mistake("merging", fails=["test_merge_lse_far_apart", "test_merge_one_of_many_has_tokens"])
def weights_from_the_first_lse():
    """The first part's lse was subtracted in place of the largest: a later one 100 higher overflows, -inf gives NaN."""

    @triton.jit
    def merged(x, part):
        first = tl.sum(tl.where(tl.arange(0, x.shape[0]) == 0, x, 0.0), 0)
        weights = tl.exp(x - tl.where(tl.max(x, 0) == float("-inf"), 0.0, first))
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), first + tl.log(total)

    return _merging(merged)


@mistake("merging", fails=["test_merge_large_lse", "test_merge_empty_beside_very_small"])
def maximum_that_starts_at_0():
    """The running maximum began at 0, which is larger than an lse of -500, so every weight is 0: begin at -inf."""

    @triton.jit
    def merged(x, part):
        top = tl.maximum(tl.max(x, 0), 0.0)
        weights = tl.exp(x - top)
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), top + tl.log(total)

    return _merging(merged)


@mistake("merging", fails=["test_merge_large_lse", "test_merge_lse_far_apart", "test_merge_empty_beside_very_small"])
def weights_without_the_maximum():
    """exp(lse) is inf above 88 and 0 below -104: subtract the row's largest lse first, and add it back to the lse."""

    @triton.jit
    def merged(x, part):
        weights = tl.exp(x)
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), tl.log(total)

    return _merging(merged)


@mistake("merging", fails=["test_merge_worked_example", "test_merge_many_parts", "test_merge_lse_far_apart"])
def parts_averaged():
    """The parts' plain mean gives one key in a split as much as a thousand in another: weigh each by exp(lse)."""

    @triton.jit
    def merged(x, part):
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        there = tl.where(x > float("-inf"), 1.0, 0.0)
        o = tl.sum(there[:, None] * part, 0) / tl.maximum(tl.sum(there, 0), 1.0)
        return o, top + tl.log(tl.sum(weights, 0))

    return _merging(merged)


@mistake("merging", fails=["test_merge_worked_example", "test_merge_an_empty_part"])
def weights_of_lse_itself():
    """The weights are lse / sum of lse, which gives 0.75: an lse is a logarithm, so its weight is exp(lse)."""

    @triton.jit
    def merged(x, part):
        top = tl.max(x, 0)
        total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
        weights = tl.where(x > float("-inf"), x, 0.0)
        return tl.sum(weights[:, None] * part, 0) / tl.sum(weights, 0), top + tl.log(total)

    return _merging(merged)


@mistake("merging", fails=["test_merge_two_parts", "test_merge_worked_example", "test_merge_many_parts"])
def weights_not_divided_by_their_sum():
    """The weighted parts were added up and not divided: the weights are exp(lse - max), and their sum is not 1."""

    @triton.jit
    def merged(x, part):
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        return tl.sum(weights[:, None] * part, 0), top + tl.log(tl.sum(weights, 0))

    return _merging(merged)


@mistake("merging", fails=["test_merge_several_parts", "test_merge_in_two_steps"])
def weights_in_float16():
    """The weights were rounded to float16, three digits: what is merged is float32, so the weights are too."""

    @triton.jit
    def merged(x, part):
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top)).to(tl.float16).to(tl.float32)
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), top + tl.log(total)

    return _merging(merged)


# merge_splits: another lse


@mistake("lse", fails=["test_merge_worked_example", "test_merge_two_parts", "test_merge_in_two_steps"])
def largest_lse_returned():
    """The lse that came back is the largest of the parts': it is that of all tokens, max + log(sum of the weights)."""

    @triton.jit
    def merged(x, part):
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), top

    return _merging(merged)


@mistake("lse", fails=["test_merge_worked_example", "test_merge_in_two_steps", "test_merge_an_empty_part"])
def last_lse_returned():
    """The lse of the last part came back as that of all: it is max + log(sum of the weights) over all parts."""

    def merge_splits(o_part, lse):
        return _right_merge(o_part, lse)[0], lse[:, :, -1].contiguous()

    return merge_splits


@mistake("lse", fails=["test_merge_two_parts", "test_merge_large_lse", "test_merge_one_part"])
def maximum_not_added_back():
    """log(sum of the weights) is relative to the maximum that was subtracted: add that again, or the lse is near 0."""

    @triton.jit
    def merged(x, part):
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), tl.log(total)

    return _merging(merged)


@mistake("lse", fails=["test_merge_two_parts", "test_merge_an_empty_part"])
def lse_added_up():
    """The parts' lse were added, but logarithms add where numbers multiply: the sums add, log(exp(a) + exp(b))."""

    def merge_splits(o_part, lse):
        return _right_merge(o_part, lse)[0], lse.sum(-1)

    return merge_splits


# merge_splits: empty parts


@mistake(
    "empty-parts",
    fails=["test_merge_all_parts_empty", "test_merge_nothing_but_empty_parts"],
    seen=["flashinfer#4051", "vllm#39148"],
)
def infinity_minus_infinity():
    """Where all parts are empty, -inf - -inf and 0 / 0 are NaN: subtract 0 there, and divide by 1."""

    @triton.jit
    def merged(x, part):
        top = tl.max(x, 0)
        weights = tl.exp(x - top)
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / total, top + tl.log(total)

    return _merging(merged)


@mistake(
    "empty-parts",
    fails=["test_merge_an_empty_part", "test_merge_one_of_many_has_tokens", "test_merge_random_parts"],
    seen=["aiter#3641", "flash-attention#978"],
)
def first_part_empty():
    """A merge part by part begins at -inf, and an empty first part gives exp(-inf - -inf), NaN: guard both exp."""

    @triton.jit
    def merge_splits_kernel(o_part, lse_part, o, lse, S, HQ, D: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        dim = tl.arange(0, DIM)
        top, total, acc = float("-inf"), 0.0, tl.full([DIM], 0.0, tl.float32)
        for split in range(0, S):
            x = tl.load(lse_part + row * S + split)
            part = tl.load(o_part + (row * S + split) * D + dim, mask=dim < D, other=0)
            higher = tl.maximum(top, x)
            weight, shrink = tl.exp(x - higher), tl.exp(top - higher)
            total, acc, top = total * shrink + weight, acc * shrink + weight * part, higher
        tl.store(o + row * D + dim, acc / total, mask=dim < D)
        tl.store(lse + row, top + tl.log(total))

    return _merging(kernel=merge_splits_kernel)


@mistake(
    "empty-parts",
    fails=["test_merge_an_empty_part", "test_merge_all_parts_empty", "test_merge_random_parts"],
)
def empty_lse_taken_as_0():
    """-inf was replaced by 0, so an empty part weighs as much as a key with logit 0 (0.7273): exp(-inf) is 0 anyway."""

    def merge_splits(o_part, lse):
        return _right_merge(o_part, torch.where(lse == -math.inf, 0.0, lse))

    return merge_splits


@mistake("empty-parts", fails=["test_merge_all_parts_empty", "test_merge_nothing_but_empty_parts"])
def lse_0_of_nothing():
    """The lse of a row without tokens came back as 0, that of one key with logit 0: the log of an empty sum is -inf."""

    @triton.jit
    def merged(x, part):
        top = tl.max(x, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(x - top)
        total = tl.sum(weights, 0)
        total = tl.where(total > 0, total, 1.0)
        return tl.sum(weights[:, None] * part, 0) / total, top + tl.log(total)

    return _merging(merged)


@mistake("empty-parts", fails=["test_merge_all_parts_empty", "test_merge_an_empty_merge"])
def large_number_for_infinity():
    """-1e30 stood in for -inf, and what is empty came back with an lse of -1e30: to who reads it that is not empty."""

    def merge_splits(o_part, lse):
        return _right_merge(o_part, lse.clamp(min=-1e30))

    return merge_splits


# merge_splits: other parts


# merge_splits: other parts


def _in_tiles(tiles=None, shrinks_acc=True, shrinks_total=True):
    """A merge in a loop over tiles of 16 parts, whatever S is: over `tiles` of them, or all."""

    @triton.jit
    def merge_splits_kernel(
        o_part, lse_part, o, lse, S, TILES,
        D: tl.constexpr, DIM: tl.constexpr, ACC: tl.constexpr, TOTAL: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        dim = tl.arange(0, DIM)
        top, total, acc = float("-inf"), 0.0, tl.full([DIM], 0.0, tl.float32)
        for tile in range(0, TILES):
            split = tile * 16 + tl.arange(0, 16)
            x = tl.load(lse_part + row * S + split, mask=split < S, other=float("-inf"))
            there = (split < S)[:, None] & (dim < D)[None, :]
            part = tl.load(o_part + (row * S + split)[:, None] * D + dim[None, :], mask=there, other=0)
            higher = tl.maximum(top, tl.max(x, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights, shrink = tl.exp(x - base), tl.exp(top - base)
            total = total * (shrink if TOTAL else 1.0) + tl.sum(weights, 0)
            acc = acc * (shrink if ACC else 1.0) + tl.sum(weights[:, None] * part, 0)
            top = higher
        tl.store(o + row * D + dim, acc / tl.where(total > 0, total, 1.0), mask=dim < D)
        tl.store(lse + row, top + tl.log(total))

    def merge_splits(o_part, lse):
        _check_parts(o_part, lse)
        B, Hq, S, D = o_part.shape
        o, lse_out = torch.empty(B, Hq, D, device=lse.device), torch.empty(B, Hq, device=lse.device)
        merge_splits_kernel[(B * Hq,)](
            o_part, lse, o, lse_out, S, tiles or triton.cdiv(S, 16),
            D=D, DIM=triton.next_power_of_2(D), ACC=shrinks_acc, TOTAL=shrinks_total,
        )  # fmt: skip
        return o, lse_out

    return merge_splits


@mistake("merging", fails=["test_merge_many_parts", "test_merge_one_of_many_has_tokens"])
def parts_past_the_first_tile():
    """Only the parts of one tile are merged, here 16: take tiles until S is reached, or a tile as long as S."""
    return _in_tiles(tiles=1)


@mistake("merging", fails=["test_merge_many_parts"])
def merged_so_far_not_shrunk():
    """When a larger lse comes, what was summed so far still counts from the old one: multiply it by exp(old - new)."""
    return _in_tiles(shrinks_acc=False, shrinks_total=False)


@mistake("merging", fails=["test_merge_many_parts"])
def only_the_total_shrunk():
    """When a larger lse comes the weights' sum shrinks and the summed outputs do not: both count from the same lse."""
    return _in_tiles(shrinks_acc=False)


@mistake("merging", fails=["test_merge_several_parts", "test_merge_in_two_steps"])
def parts_of_the_next_row():
    """The tile of a power of two is longer than S, and what follows is the next row's parts: mask split < S."""

    @triton.jit
    def merge_splits_kernel(o_part, lse_part, o, lse, S, HQ, D: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        split, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
        x = tl.load(lse_part + row * S + split)
        there = (dim < D)[None, :]
        part = tl.load(o_part + (row * S + split)[:, None] * D + dim[None, :], mask=there, other=0)
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        out = tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0)
        tl.store(o + row * D + dim, out, mask=dim < D)
        tl.store(lse + row, top + tl.log(total))

    return _merging(kernel=merge_splits_kernel)


@mistake("empty-parts", fails=["test_merge_several_parts", "test_merge_in_two_steps"])
def masked_lse_of_0():
    """The masked lanes of the tile were loaded as 0, the lse of a key with logit 0: other=-inf makes them weigh 0."""

    @triton.jit
    def merge_splits_kernel(o_part, lse_part, o, lse, S, HQ, D: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        split, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
        x = tl.load(lse_part + row * S + split, mask=split < S, other=0.0)
        there = (split < S)[:, None] & (dim < D)[None, :]
        part = tl.load(o_part + (row * S + split)[:, None] * D + dim[None, :], mask=there, other=0)
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        out = tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0)
        tl.store(o + row * D + dim, out, mask=dim < D)
        tl.store(lse + row, top + tl.log(total))

    return _merging(kernel=merge_splits_kernel)


@mistake("merging", fails=["test_merge_several_parts", "test_merge_in_two_steps"])
def tile_of_exactly_the_parts():
    """tl.arange(0, S) must be a power of two: round S up for the tile, and mask the lanes past S."""

    def merge_splits(o_part, lse):
        _check_parts(o_part, lse)
        return _launch_merge(merge_splits_kernel, o_part, lse, parts=o_part.shape[2])

    return merge_splits


@mistake("merging", fails=["test_merge_odd_dims", "test_merge_many_parts"])
def tile_of_exactly_a_head():
    """tl.arange(0, D) must be a power of two: round D up for the tile, and mask the lanes past D."""

    def merge_splits(o_part, lse):
        _check_parts(o_part, lse)
        return _launch_merge(merge_splits_kernel, o_part, lse, dim=o_part.shape[3])

    return merge_splits


@mistake("merging", fails=["test_merge_odd_dims", "test_merge_many_parts"])
def dims_past_the_tile():
    """The tile is the power of two below D, and the dims past it are missing: round D up, and mask."""

    def merge_splits(o_part, lse):
        _check_parts(o_part, lse)
        D = o_part.shape[3]
        return _launch_merge(merge_splits_kernel, o_part, lse, dim=1 << (D.bit_length() - 1))

    return merge_splits


@mistake("merging", fails=["test_merge_two_parts", "test_merge_in_two_steps"])
def lse_read_splits_first():
    """lse was read as [B, S, Hq], and weighs other heads' parts: it is [B, Hq, S], a row's lse next to each other."""

    @triton.jit
    def merge_splits_kernel(o_part, lse_part, o, lse, S, HQ, D: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        split, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
        x = tl.load(lse_part + (row // HQ * S + split) * HQ + row % HQ, mask=split < S, other=float("-inf"))
        there = (split < S)[:, None] & (dim < D)[None, :]
        part = tl.load(o_part + (row * S + split)[:, None] * D + dim[None, :], mask=there, other=0)
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        out = tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0)
        tl.store(o + row * D + dim, out, mask=dim < D)
        tl.store(lse + row, top + tl.log(total))

    return _merging(kernel=merge_splits_kernel)


@mistake("merging", fails=["test_merge_two_parts", "test_merge_in_two_steps"])
def parts_read_splits_first():
    """o_part was read as [B, S, Hq, D]: it is [B, Hq, S, D], so part s of a row is at (row · S + s) · D."""

    @triton.jit
    def merge_splits_kernel(o_part, lse_part, o, lse, S, HQ, D: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        split, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
        x = tl.load(lse_part + row * S + split, mask=split < S, other=float("-inf"))
        there = (split < S)[:, None] & (dim < D)[None, :]
        at = (row // HQ * S + split) * HQ + row % HQ
        part = tl.load(o_part + at[:, None] * D + dim[None, :], mask=there, other=0)
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        out = tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0)
        tl.store(o + row * D + dim, out, mask=dim < D)
        tl.store(lse + row, top + tl.log(total))

    return _merging(kernel=merge_splits_kernel)


@mistake("merging", fails=["test_merge_two_parts", "test_merge_all_parts_empty"])
def first_row_merged_for_all():
    """Every program merged the parts of row 0: a program's row is its number, and begins at row · S."""

    def merge_splits(o_part, lse):
        o, merged = _right_merge(o_part[:1, :1].contiguous(), lse[:1, :1].contiguous())
        return o.expand(*o_part.shape[:2], -1).contiguous(), merged.expand(lse.shape[:2]).contiguous()

    return merge_splits


@mistake("merging", fails=["test_merge_two_parts", "test_merge_all_parts_empty"])
def heads_of_one_sequence():
    """There was a program for each head, so only the first sequence has a result: the grid is B · Hq programs."""

    def merge_splits(o_part, lse):
        _check_parts(o_part, lse)
        o, merged = (torch.zeros(x.shape[:2] + x.shape[3:], device=x.device) for x in (o_part, lse))
        o[:1], merged[:1] = _right_merge(o_part[:1], lse[:1])
        return o, merged

    return merge_splits


@mistake("merging", fails=["test_merge_two_parts", "test_merge_several_parts", "test_merge_in_two_steps"])
def last_part_left_out():
    """The loop over the parts ended one too early: range(0, S) has S parts, the last is S - 1."""

    def merge_splits(o_part, lse):
        lse = torch.cat([lse[:, :, : lse.shape[2] - 1], torch.full_like(lse[:, :, :1], -math.inf)], 2)
        return _right_merge(o_part, lse)

    return merge_splits


# merge_splits: what comes back


@mistake("merging", fails=["test_merge_worked_example", "test_merge_one_part"])
def merged_without_lse():
    """Only o came back: the lse of the whole belongs to it, and whoever merges further needs it."""

    def merge_splits(o_part, lse):
        return _right_merge(o_part, lse)[0]

    return merge_splits


@mistake("merging", fails=["test_merge_worked_example", "test_merge_one_part"])
def merged_lse_first():
    """(lse, o) came back: the order is (o, lse), as in all of the drills."""

    def merge_splits(o_part, lse):
        return _right_merge(o_part, lse)[::-1]

    return merge_splits


@mistake("merging", fails=["test_merge_worked_example", "test_merge_one_part"])
def merged_lse_keeps_a_dimension():
    """The lse came back as [B, Hq, 1], the shape that keepdim leaves: the splits are gone, so it is [B, Hq]."""

    def merge_splits(o_part, lse):
        o, merged = _right_merge(o_part, lse)
        return o, merged[..., None]

    return merge_splits


@mistake("merging", fails=["test_merge_worked_example", "test_merge_one_part"])
def merged_to_float16():
    """o was rounded to float16, though it may be merged again: o is float32, and the caller rounds at the end."""

    def merge_splits(o_part, lse):
        o, merged = _right_merge(o_part, lse)
        return o.half(), merged

    return merge_splits


@mistake("merging", fails=["test_merge_returns_new_tensors"], tells=False)
def one_result_for_all_calls():
    """Every call writes into the same two tensors, so the result before changes under whoever holds it."""
    kept: dict = {}

    def merge_splits(o_part, lse):
        o, merged = kept.setdefault((o_part.shape, lse.device), _right_merge(o_part, lse))
        for old, new in zip((o, merged), _right_merge(o_part, lse)):
            old.copy_(new)
        return o, merged

    return merge_splits


@mistake("merging", fails=["test_merge_worked_example", "test_merge_one_of_many_has_tokens"], tells=False)
def merged_over_the_first_part():
    """o was written over the first part, which is the caller's: make a new tensor for what is merged."""

    def merge_splits(o_part, lse):
        o, merged = _right_merge(o_part, lse)
        o_part[:, :, 0] = o
        return o, merged

    return merge_splits


@mistake("merging", fails=["test_merge_worked_example", "test_merge_two_parts"], tells=False)
def lse_scaled_in_place():
    """lse *= log2(e) changes the caller's tensor, and a second merge of it is wrong: make a new one, or use exp."""

    def merge_splits(o_part, lse):
        o, merged = _right_merge(o_part, lse)
        lse *= math.log2(math.e)
        return o, merged

    return merge_splits


# merge_splits: the manner


@mistake("merging", fails=["test_the_kernel_merges"], tells=False)
def merged_in_torch():
    """torch merged the parts in five launches that each go through memory: one kernel reads them once."""

    def merge_splits(o_part, lse):
        _check_parts(o_part, lse)
        merged = torch.logsumexp(lse, -1)
        weights = (lse - torch.where(merged == -math.inf, 0.0, merged)[..., None]).exp()
        return (weights[..., None] * o_part).sum(2), merged

    return merge_splits


@mistake("merging", fails=["test_the_kernel_merges"], tells=False)
def torch_merges_beside_a_kernel():
    """The kernel was launched and torch did the work: move the exponentials into the kernel."""

    def merge_splits(o_part, lse):
        o, merged = _right_merge(o_part, lse)
        weights = torch.softmax(torch.where(merged[..., None] == -math.inf, 0.0, lse), -1)
        return (weights[..., None] * o_part).sum(2), merged

    return merge_splits


@mistake("merging", fails=["test_the_kernel_merges"], tells=False)
def merge_kernel_of_another_name():
    """The kernel is right and is called something else: the suite, and a profile, look for merge_splits_kernel."""

    @triton.jit
    def kernel(o_part, lse_part, o, lse, S, HQ, D: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        split, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
        x = tl.load(lse_part + row * S + split, mask=split < S, other=float("-inf"))
        there = (split < S)[:, None] & (dim < D)[None, :]
        part = tl.load(o_part + (row * S + split)[:, None] * D + dim[None, :], mask=there, other=0)
        top = tl.max(x, 0)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights, 0)
        out = tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0)
        tl.store(o + row * D + dim, out, mask=dim < D)
        tl.store(lse + row, top + tl.log(total))

    return _merging(kernel=kernel)


@mistake("merging", fails=["test_merge_launches"], tells=False)
def a_launch_for_each_tile_of_parts():
    """Each 16 parts are merged by a launch of their own, and the results by another: one launch, with a loop inside."""

    def merge_splits(o_part, lse):
        _check_parts(o_part, lse)
        tiles = [
            _right_merge(o_part[:, :, first : first + 16].contiguous(), lse[:, :, first : first + 16].contiguous())
            for first in range(0, lse.shape[2], 16)
        ]
        return tiles[0] if len(tiles) == 1 else _right_merge(*(torch.stack(x, 2) for x in zip(*tiles)))

    return merge_splits


@mistake("empty-parts", fails=["test_merge_reads_nothing_on_the_host"], tells=False)
def emptiness_asked_on_the_host():
    """An if on lse waits for the GPU, in every layer, and cannot be captured: leave empty parts to the kernel."""

    def merge_splits(o_part, lse):
        _check_parts(o_part, lse)
        if (lse == -math.inf).all():
            return o_part[:, :, 0].clone(), lse[:, :, 0].clone()
        return _right_merge(o_part, lse)

    return merge_splits


# merge_splits: what must be refused


@mistake("host-checks", fails=["test_merge_refuses"])
def parts_of_any_dtype():
    """Parts of float16 have lost what the merge is to keep, and nobody hears of it: check that o_part is float32."""
    return _merging_without("float32_parts")


@mistake("host-checks", fails=["test_merge_refuses"])
def lse_of_any_dtype():
    """o_part's dtype is checked and lse's is not: float16 has three digits, and weights are exp(lse), so check both."""
    return _merging_without("float32_lse")


@mistake("host-checks", fails=["test_merge_refuses"])
def sizes_of_parts_compared():
    """lse.numel() · D == o_part.numel() holds for [B, S, Hq] as well: compare lse.shape with o_part.shape[:3]."""
    return _merging(an_lse_a_part=lambda a: a.lse.numel() * a.o_part.shape[-1] == a.o_part.numel())


@mistake("host-checks", fails=["test_merge_refuses"])
def splits_not_counted():
    """B and Hq are compared and S is not, so lse is read by o_part's S, which is not its own: compare all three."""
    return _merging(an_lse_a_part=lambda a: a.o_part.dim() == 4 and a.lse.shape[:2] == a.o_part.shape[:2])


@mistake("host-checks", fails=["test_merge_refuses"])
def one_row_of_parts_asked():
    """o_part[:1, :1] is dense in a transposed tensor as well, whose rows lie elsewhere: ask the whole of it."""
    return _merging(dense_parts=lambda a: a.o_part[:1, :1, :1].is_contiguous())


@mistake("host-checks", fails=["test_merge_refuses"])
def strided_parts_taken_as_dense():
    """The kernel steps D values a part, through a transposed o_part as well: check o_part.is_contiguous()."""
    return _merging_without("dense_parts")


@mistake("host-checks", fails=["test_merge_refuses"])
def strided_lse_taken_as_dense():
    """The kernel steps one value a part, through every other value of a larger lse too: check lse.is_contiguous()."""
    return _merging_without("dense_lse")


@mistake("host-checks", fails=["test_merge_refuses"])
def parts_copied_to_be_dense():
    """.contiguous() copies all parts in every layer, and nobody hears of it: refuse them instead."""

    def merge_splits(o_part, lse):
        return _right_merge(o_part.contiguous(), lse.contiguous())

    return merge_splits


# split_kv_decode. What its mistakes share: the checks, the kernel, the launch.


@triton.jit
def split_kv_kernel(
    q, k_cache, v_cache, tables, lens, o_part, lse_part, q_stride, table_stride, scale, S,
    PAGE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    SPAN: tl.constexpr, LIVE: tl.constexpr, LOGITS: tl.constexpr, FINISH: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """One program a (KV head, split, sequence). The last five arguments are a mistake's own lines, or None:

    SPAN(length, split, S, lens) -> the split's start and end. LIVE(position, end, length) -> the tokens that count.
    LOGITS(q, k, scale) -> the logits. FINISH(acc, top, total) -> what is stored as output and lse.
    PLACE(seq, head, split, HQ, S) -> where that goes, in outputs.
    """
    head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lens + seq)
    if SPAN is None:
        chunk = (length + S - 1) // S
        start, end = split * chunk, tl.minimum(split * chunk + chunk, length)
    else:
        start, end = SPAN(length, split, S, lens)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    heads = head * GROUP + row
    mine = (row < GROUP)[:, None] & (dim < D)[None, :]
    queries = tl.load(q + seq * q_stride + heads[:, None] * D + dim[None, :], mask=mine, other=0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, DIM], 0.0, tl.float32)
    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        there = position < tl.minimum(end, length)
        live = there
        if LIVE is not None:
            live = LIVE(position, end, length)
            there = live & (position < length)
        page = tl.load(tables + seq * table_stride + position // PAGE, mask=there, other=0).to(tl.int64)
        at = ((page * PAGE + position % PAGE) * HKV + head)[:, None] * D + dim[None, :]
        k = tl.load(k_cache + at, mask=there[:, None] & (dim < D)[None, :], other=0)
        v = tl.load(v_cache + at, mask=there[:, None] & (dim < D)[None, :], other=0)
        if LOGITS is None:
            logits = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        else:
            logits = LOGITS(queries, k, scale)
        logits = tl.where(live[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weights, shrink = tl.exp2(logits - higher[:, None]), tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    if FINISH is None:
        out, lse = acc / tl.where(total > 0, total, 1.0)[:, None], (top + tl.log2(total)) * 0.6931471805599453
    else:
        out, lse = FINISH(acc, top, total)
    if PLACE is None:
        place = (seq * HKV * GROUP + heads) * S + split
    else:
        place = PLACE(seq, heads, split, HKV * GROUP, S)
    tl.store(o_part + place[:, None] * D + dim[None, :], out, mask=mine)
    tl.store(lse_part + place, lse, mask=row < GROUP)


_CHECKS = {  # each of the arguments as a namespace
    "splits": lambda a: a.S >= 1,
    "dims_of_q": lambda a: a.q.dim() == 3,
    "dense_rows_of_q": lambda a: a.q[:1].is_contiguous(),
    "one_cache_shape": lambda a: a.k_cache.shape == a.v_cache.shape,
    "head_dim": lambda a: a.k_cache.shape[3] == a.q.shape[-1],
    "groups": lambda a: a.q.shape[1] % a.k_cache.shape[2] == 0,
    "one_dtype": lambda a: a.q.dtype == a.k_cache.dtype == a.v_cache.dtype,
    "one_device": lambda a: len({x.device for x in (a.q, a.k_cache, a.v_cache, a.tables, a.lens)}) == 1,
    "dense_caches": lambda a: a.k_cache.is_contiguous() and a.v_cache.is_contiguous(),
    "dims_of_tables": lambda a: a.tables.dim() == 2,
    "dims_of_lens": lambda a: a.lens.dim() == 1,
    "a_row_a_sequence": lambda a: len(a.tables) == len(a.q),
    "a_length_a_sequence": lambda a: len(a.lens) == len(a.q),
    "int32_tables": lambda a: a.tables.dtype == torch.int32,
    "int32_lens": lambda a: a.lens.dtype == torch.int32,
    "dense_tables": lambda a: a.tables.stride(-1) == 1 or a.tables.shape[-1] <= 1,
    "dense_lens": lambda a: a.lens.stride(-1) == 1 or a.lens.shape[-1] <= 1,
}
_HOOKS = ("SPAN", "LIVE", "LOGITS", "FINISH", "PLACE")


def _check(q, k_cache, v_cache, tables, lens, S, **other_checks):
    arguments = SimpleNamespace(q=q, k_cache=k_cache, v_cache=v_cache, tables=tables, lens=lens, S=S)
    for name, passes in (_CHECKS | other_checks).items():
        assert passes(arguments), f"refused: {name.replace('_', ' ')}"


def _parts(q, k_cache, v_cache, tables, lens, S, scale, kernel=split_kv_kernel, strides=None, fill=-math.inf, **more):
    """The launch: [o_part, lse_part]. `more` are the kernel's constants, where a mistake has others.

    What no program stores is an empty part, whatever memory held: (0, fill).
    """
    (B, Hq, D), (_, BS, Hkv, _) = q.shape, k_cache.shape
    o_part = torch.zeros(B, Hq, S, D, device=q.device)
    lse_part = torch.full((B, Hq, S), fill, device=q.device)
    rows, dim = (max(16, triton.next_power_of_2(n)) for n in (Hq // Hkv, D))
    tile = max(16, 8192 // (dim * q.element_size()))
    constants = dict.fromkeys(_HOOKS) if kernel is split_kv_kernel else {}
    constants |= dict(PAGE=BS, HKV=Hkv, GROUP=Hq // Hkv, D=D, ROWS=rows, DIM=dim, TILE=tile) | more
    strides = strides or (q.stride(0), tables.stride(0))
    kernel[(Hkv, S, B)](q, k_cache, v_cache, tables, lens, o_part, lse_part, *strides, scale, S, **constants)
    return o_part, lse_part


def _scale(q, sm_scale):
    """What the kernel multiplies its dot products by: log2(e) is for exp2."""
    return (1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale) * math.log2(math.e)


def _decoding(merge=_right_merge, scale=_scale, checks=None, **more):
    """split_kv_decode with another merge, scale, checks, or other lines or constants in its kernel."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale=None, return_lse=False):
        args = q, k_cache, v_cache, block_tables, context_lens, num_splits
        _check(*args, **checks or {})
        o, lse = merge(*_parts(*args, scale(q, sm_scale), **more))
        return (o.to(q.dtype), lse) if return_lse else o.to(q.dtype)

    return split_kv_decode


def _decoding_without(*unchecked, checks=None, **more):
    return _decoding(checks=dict.fromkeys(unchecked, lambda a: True) | (checks or {}), **more)


_right_decode = _decoding()


# split_kv_decode: other tokens


@mistake("splits", fails=["test_worked_example", "test_any_cut", "test_uneven_length"])
def chunk_rounded_down():
    """length // S tokens a split leaves the last length % S out: round up, and let the last split be shorter."""

    @triton.jit
    def span(length, split, S, lens):
        chunk = length // S
        return split * chunk, split * chunk + chunk

    return _decoding(SPAN=span)


@mistake("splits", fails=["test_any_cut", "test_uneven_length", "test_lse_worked_example"])
def end_not_clipped():
    """start + chunk may pass the length, and the lanes past it count with a logit of 0: take the minimum of both."""

    @triton.jit
    def span(length, split, S, lens):
        chunk = (length + S - 1) // S
        return split * chunk, split * chunk + chunk

    @triton.jit
    def live(position, end, length):
        return position < end

    return _decoding(SPAN=span, LIVE=live)


@mistake("splits", fails=["test_parts_that_cancel"])
def parts_in_the_dtype_of_q():
    """The splits' outputs were stored in q's 16 bits and rounded again after the merge: keep the parts in float32."""

    def split_kv_decode(q, *args):
        return _decoding(merge=lambda o, lse: _right_merge(o.to(q.dtype).float(), lse))(q, *args)

    return split_kv_decode


@mistake("splits", fails=["test_a_cache_past_int32"], tells=False)
def page_of_a_split_in_int32():
    """The page's offset was computed in int32 and wrapped: widen the page id to int64 before any product."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, *rest):
        page = k_cache[0].numel()
        offsets = (block_tables.long() * page + 2**31) % 2**32 - 2**31  # what int32 keeps of them
        return _right_decode(q, k_cache, v_cache, (offsets // page).int(), *rest)

    return split_kv_decode


@mistake("splits", fails=["test_launches_for_more_heads"], tells=False)
def one_launch_a_kv_head():
    """A launch for each KV head waits for the one before: put the KV heads on the grid, beside splits and sequences."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale=None, return_lse=False):
        group = q.shape[1] // k_cache.shape[2]
        parts = [
            _right_decode(
                q[:, h * group : (h + 1) * group].contiguous(),
                k_cache[:, :, h : h + 1].contiguous(), v_cache[:, :, h : h + 1].contiguous(),
                block_tables, context_lens, num_splits, sm_scale, True,
            )
            for h in range(k_cache.shape[2])
        ]  # fmt: skip
        o, lse = (torch.cat(each, 1) for each in zip(*parts))
        return (o, lse) if return_lse else o

    return split_kv_decode


@mistake("splits", fails=["test_two_splits", "test_any_cut", "test_lse_of_any_cut"])
def tile_past_the_split():
    """The tile was masked by the length, so it runs on into the next split's tokens, counted twice: mask by its end."""

    @triton.jit
    def live(position, end, length):
        return position < length

    return _decoding(LIVE=live)


@mistake("splits", fails=["test_worked_example", "test_any_cut", "test_page_sizes"])
def cut_rounded_down_to_a_page():
    """Each split began at the start of its first page and read what another split has too: begin at its own token."""

    @triton.jit
    def span(length, split, S, lens):
        chunk = (length + S - 1) // S
        start = split * chunk
        return start - start % 4, tl.minimum(start + chunk, length)

    return _decoding(SPAN=span)


@mistake("splits", fails=["test_any_cut", "test_lse_of_any_cut", "test_uneven_length"])
def both_ends_included():
    """The token at a split's end was read by it and by the next one: a split has start <= position < end."""

    @triton.jit
    def live(position, end, length):
        return (position <= end) & (position < length)

    return _decoding(LIVE=live)


@mistake("splits", fails=["test_two_splits", "test_any_cut", "test_long_splits"])
def from_the_first_token():
    """Every split began at token 0, so early tokens count once for each: split s begins at s · chunk."""

    @triton.jit
    def span(length, split, S, lens):
        chunk = (length + S - 1) // S
        return split * 0, tl.minimum(split * chunk + chunk, length)

    return _decoding(SPAN=span)


@mistake("splits", fails=["test_lse_worked_example", "test_lse_of_any_cut", "test_lse_scales"])
def every_split_reads_all():
    """Every split read the whole sequence: o is right, the lse is ln S too large, and the work was done S times."""

    @triton.jit
    def span(length, split, S, lens):
        return split * 0, length

    return _decoding(SPAN=span)


@mistake("splits", fails=["test_two_splits", "test_any_cut", "test_lse_of_any_cut"])
def first_split_only():
    """The grid has no programs for the other splits, so only the first part's tokens count: it is Hkv · S · B."""

    @triton.jit
    def span(length, split, S, lens):
        chunk = (length + S - 1) // S
        return split * length, tl.minimum(split * chunk + chunk, length)

    return _decoding(SPAN=span)


@mistake("splits", fails=["test_two_splits", "test_any_cut", "test_uneven_length"])
def last_split_left_out():
    """The last split, the shorter one, was left out: count the splits from 0 to S - 1, and clip the last one's end."""

    @triton.jit
    def span(length, split, S, lens):
        chunk = (length + S - 1) // S
        start, end = split * chunk, split * chunk + chunk
        return start, tl.where((split == S - 1) & (S > 1), start, tl.minimum(end, length))

    return _decoding(SPAN=span)


@mistake("splits", fails=["test_ragged_batch", "test_short_beside_long"])
def cut_by_the_first_length():
    """The chunk of sequence 0 was used for all, and longer ones lose their last tokens: cut each by its own length."""

    @triton.jit
    def span(length, split, S, lens):
        chunk = (tl.load(lens) + S - 1) // S
        return split * chunk, tl.minimum(split * chunk + chunk, length)

    return _decoding(SPAN=span)


@mistake("splits", fails=["test_uneven_length", "test_any_cut"])
def splits_further_apart_than_long():
    """The splits lie a rounded-up chunk apart and are not as long: take step and length of a split from one number."""

    @triton.jit
    def span(length, split, S, lens):
        chunk = (length + S - 1) // S
        start = split * ((chunk + 3) // 4 * 4)
        return start, tl.minimum(start + chunk, length)

    return _decoding(SPAN=span)


@mistake("splits", fails=["test_two_splits", "test_any_cut", "test_page_sizes"])
def position_within_the_split():
    """Tokens were counted from the split's start, so each split read the sequence's first ones: add the start."""

    @triton.jit
    def span(length, split, S, lens):
        chunk = (length + S - 1) // S
        return split * 0, tl.minimum(chunk, tl.maximum(length - split * chunk, 0))

    return _decoding(SPAN=span)


@mistake("splits", fails=["test_worked_example", "test_page_sizes", "test_any_cut"])
def split_end_rounded_to_a_page():
    """A split's end was rounded up to a page, so it has tokens of the next split too: mask by its own end."""

    @triton.jit
    def span(length, split, S, lens):
        chunk = (length + S - 1) // S
        end = tl.minimum(split * chunk + chunk, length)
        return split * chunk, tl.where(split * chunk < end, tl.minimum((end + 3) // 4 * 4, length), end)

    return _decoding(SPAN=span)


# split_kv_decode: another place for the parts


@mistake("splits", fails=["test_any_cut", "test_ragged_batch"])
def parts_stored_splits_first():
    """The parts were stored as [B, S, Hq] and merged as [B, Hq, S]: one order for both, (row · S + split)."""

    @triton.jit
    def place(seq, heads, split, HQ, S):
        return (seq * S + split) * HQ + heads

    return _decoding(PLACE=place)


@mistake("splits", fails=["test_two_splits", "test_any_cut", "test_lse_of_any_cut"])
def one_place_for_all_splits():
    """All splits of a row store to one place, and the last one there wins: each has its own, row · S + split."""

    @triton.jit
    def place(seq, heads, split, HQ, S):
        return (seq * HQ + heads) * S + split * 0

    return _decoding(PLACE=place)


@mistake("splits", fails=["test_ragged_batch", "test_no_tokens"])
def one_place_for_all_sequences():
    """The sequence is missing in the offset of the parts, so the last one overwrites the others: seq · Hq + head."""

    @triton.jit
    def place(seq, heads, split, HQ, S):
        return (seq * 0 + heads) * S + split

    return _decoding(PLACE=place)


@mistake("short-sequences", fails=["test_partials_past_int32"], seen=["sglang#28788"], lane="gpu", tells=False)
def place_in_int32():
    """(row · S + split) · D passes 2^31 when batch and splits are large: widen the sequence before any product."""

    @triton.jit
    def place(seq, heads, split, HQ, S):
        return (seq.to(tl.int32) * HQ + heads) * S + split

    return _decoding(PLACE=place)


# split_kv_decode: parts that do not fit their merge


@mistake("merging", fails=["test_two_splits", "test_any_cut", "test_large_logits"], seen=["vllm#28840", "sglang#40903"])
def parts_to_base_2():
    """The parts' lse are to base 2, as exp2 leaves them, and the merge takes exp: multiply them by ln 2."""

    @triton.jit
    def finish(acc, top, total):
        return acc / tl.where(total > 0, total, 1.0)[:, None], top + tl.log2(total)

    return _decoding(FINISH=finish)


@mistake("splits", fails=["test_two_splits", "test_any_cut", "test_uneven_length"])
def parts_not_normalised():
    """The parts were stored as sums, and their lse weighs their size once more (1.2 for 1): divide by total first."""

    @triton.jit
    def finish(acc, top, total):
        return acc, (top + tl.log2(total)) * 0.6931471805599453

    return _decoding(FINISH=finish)


@mistake("lse", fails=["test_two_splits", "test_any_cut", "test_lse_worked_example"])
def parts_lse_without_the_sum():
    """A part's lse was its largest logit alone, so many keys weigh as much as one: max + log(total)."""

    @triton.jit
    def finish(acc, top, total):
        return acc / tl.where(total > 0, total, 1.0)[:, None], top * 0.6931471805599453

    return _decoding(FINISH=finish)


@mistake("lse", fails=["test_two_splits", "test_any_cut", "test_large_logits"])
def parts_lse_without_the_maximum():
    """A part's lse was log(total), but total counts from that part's own largest logit: the lse is max + log(total)."""

    @triton.jit
    def finish(acc, top, total):
        return acc / tl.where(total > 0, total, 1.0)[:, None], tl.log2(total) * 0.6931471805599453

    return _decoding(FINISH=finish)


@mistake("lse", fails=["test_any_cut", "test_lse_of_any_cut", "test_lse_worked_example"])
def maximum_left_in_base_2():
    """ln 2 multiplied log2(total) and not the maximum, to base 2 as well: the lse is ln 2 · (max + log2(total))."""

    @triton.jit
    def finish(acc, top, total):
        return acc / tl.where(total > 0, total, 1.0)[:, None], top + tl.log2(total) * 0.6931471805599453

    return _decoding(FINISH=finish)


@mistake("merging", fails=["test_two_splits", "test_any_cut"])
def splits_averaged():
    """The splits' plain mean gives one key in a short split more than one in a long one: merge by lse."""

    def merge(o_part, lse):
        there = (lse > -math.inf).float()[..., None]
        return (there * o_part).sum(2) / there.sum(2).clamp(min=1), _right_merge(o_part, lse)[1]

    return _decoding(merge=merge)


@mistake("merging", fails=["test_large_logits"])
def merged_without_the_maximum():
    """The merge took exp(lse) as it is, inf above 88 and 0 below -104: subtract the row's largest lse first."""

    @triton.jit
    def merged(x, part):
        weights = tl.exp(x)
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0), tl.log(total)

    return _decoding(merge=_merging(merged))


@mistake("merging", fails=["test_many_splits"])
def splits_past_a_tile_of_16():
    """The merge has one tile of 16 parts, and later splits are lost: take tiles until num_splits is reached."""
    return _decoding(merge=_in_tiles(tiles=1))


# split_kv_decode: empty splits and empty sequences


@mistake(
    "short-sequences",
    fails=["test_more_splits_than_tokens", "test_no_tokens", "test_random_batches"],
    seen=["aiter#3641", "flash-attention#978"],
)
def empty_split_divided_by_0():
    """A split without tokens stored 0 / 0, and a weight of 0 times NaN is NaN: store (0, -inf), dividing by 1 there."""

    @triton.jit
    def finish(acc, top, total):
        return acc / total[:, None], (top + tl.log2(total)) * 0.6931471805599453

    return _decoding(FINISH=finish)


@mistake("short-sequences", fails=["test_more_splits_than_tokens", "test_short_beside_long"])
def empty_split_with_lse_0():
    """Splits without tokens returned early and left an lse of 0 in the buffer, a key's with logit 0: store -inf."""

    @triton.jit
    def finish(acc, top, total):
        lse = tl.where(total > 0, (top + tl.log2(total)) * 0.6931471805599453, 0.0)
        return acc / tl.where(total > 0, total, 1.0)[:, None], lse

    return _decoding(FINISH=finish)


@mistake("short-sequences", fails=["test_no_tokens", "test_lse_of_no_tokens"], seen=["flashinfer#4051", "vllm#39148"])
def no_tokens_merged_to_nan():
    """A sequence of length 0 has only empty splits, whose largest lse is -inf, and -inf - -inf is NaN: subtract 0."""

    @triton.jit
    def merged(x, part):
        top = tl.max(x, 0)
        weights = tl.exp(x - top)
        total = tl.sum(weights, 0)
        return tl.sum(weights[:, None] * part, 0) / total, top + tl.log(total)

    return _decoding(merge=_merging(merged))


@mistake("lse", fails=["test_lse_of_no_tokens"])
def lse_0_of_no_tokens():
    """A length of 0 got an lse of 0, as if there were a key with logit 0: the logarithm of an empty sum is -inf."""

    def merge(o_part, lse):
        o, merged = _right_merge(o_part, lse)
        return o, torch.where(merged == -math.inf, 0.0, merged)

    return _decoding(merge=merge)


@mistake("short-sequences", fails=["test_more_splits_than_tokens", "test_no_tokens"])
def more_splits_than_tokens_refused():
    """num_splits is one number for a whole batch, whose sequences may be a token long: splits may be empty."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, *rest):
        assert (context_lens >= num_splits).all(), "num_splits is larger than a length"
        return _right_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, *rest)

    return split_kv_decode


@mistake("short-sequences", fails=["test_short_beside_long", "test_more_splits_than_tokens", "test_uneven_length"])
def at_least_one_token_a_split():
    """max(1, length // S) a split is right for short sequences only: the rest of a long one is left out. Round up."""

    @triton.jit
    def span(length, split, S, lens):
        chunk = tl.maximum(length // S, 1)
        return tl.minimum(split * chunk, length), tl.minimum(split * chunk + chunk, length)

    return _decoding(SPAN=span)


# split_kv_decode: L2's rules


@mistake("splits", fails=["test_scales"])
def splits_scale_of_0_lost():
    """sm_scale or 1 / sqrt(D) takes 0.0 for no scale: ask whether sm_scale is None."""
    return _decoding(scale=lambda q, sm_scale: _scale(q, sm_scale or None))


@mistake("splits", fails=["test_dims"])
def splits_scaled_by_the_padded_dim():
    """The default scale was that of the tile's power of two: it is 1 / sqrt(D), of q's own D."""

    def scale(q, sm_scale):
        padded = max(16, triton.next_power_of_2(q.shape[-1]))
        return _scale(q, 1 / math.sqrt(padded) if sm_scale is None else sm_scale)

    return _decoding(scale=scale)


@mistake("splits", fails=["test_groups", "test_one_split"])
def split_heads_dealt_in_turn():
    """Query head h read KV head h % Hkv: neighbours share one, h // (Hq // Hkv)."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, *rest):
        _check(q, k_cache, v_cache, block_tables, context_lens, num_splits)
        heads = torch.arange(q.shape[1], device=q.device)
        dealt, back = (heads.view(n, -1).T.flatten() for n in (q.shape[1] // k_cache.shape[2], k_cache.shape[2]))
        result = _right_decode(q[:, dealt], k_cache, v_cache, block_tables, context_lens, num_splits, *rest)
        return tuple(x[:, back] for x in result) if isinstance(result, tuple) else result[:, back]

    return split_kv_decode


@mistake("splits", fails=["test_views"])
def rows_of_q_taken_as_neighbours():
    """Rows of q were taken to be Hq · D apart, but q may be cut out of a fused QKV tensor: pass q.stride(0)."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, *rest):
        strides = math.prod(q.shape[1:]), block_tables.stride(0)
        return _decoding(strides=strides)(q, k_cache, v_cache, block_tables, *rest)

    return split_kv_decode


@mistake("splits", fails=["test_views"])
def rows_of_the_table_taken_as_neighbours():
    """Rows of the block table were taken to be W apart, but it may be cut out of a wider one: pass its stride(0)."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, *rest):
        strides = q.stride(0), block_tables.shape[-1]
        return _decoding(strides=strides)(q, k_cache, v_cache, block_tables, *rest)

    return split_kv_decode


@mistake("splits", fails=["test_dtypes", "test_any_cut"], lane="gpu")
def splits_in_tf32():
    """tl.dot of float32 rounds to tf32, ten bits, unless told otherwise: input_precision="ieee"."""

    @triton.jit
    def logits(q, k, scale):
        return tl.dot(q, tl.trans(k), input_precision="tf32") * scale

    return _decoding(LOGITS=logits)


# split_kv_decode: what comes back


@mistake("splits", fails=["test_dtypes"])
def o_left_as_merged():
    """o came back as float32, as it was merged, though q is float16: .to(q.dtype) at the end."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale=None, return_lse=False):
        args = q, k_cache, v_cache, block_tables, context_lens, num_splits
        _check(*args)
        o, lse = _right_merge(*_parts(*args, _scale(q, sm_scale)))
        return (o, lse) if return_lse else o

    return split_kv_decode


@mistake("splits", fails=["test_two_splits", "test_one_split", "test_any_cut"])
def lse_returned_unasked():
    """(o, lse) came back though nobody asked for the lse: without return_lse it is o alone."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale=None, return_lse=False):
        return _right_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale, True)

    return split_kv_decode


@mistake("lse", fails=["test_lse_worked_example", "test_lse_of_any_cut"])
def lse_asked_and_not_given():
    """return_lse was asked for and only o came back: return (o, lse) then."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale=None, return_lse=False):
        return _right_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale)

    return split_kv_decode


def _returning(change):
    """split_kv_decode that does something to (o, lse) before it returns them."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale=None, return_lse=False):
        args = q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale, return_lse
        result = _right_decode(*args)
        return change(*result) if return_lse else result

    return split_kv_decode


@mistake("lse", fails=["test_lse_worked_example", "test_lse_of_any_cut"])
def lse_before_o():
    """(lse, o) came back: the order is (o, lse)."""
    return _returning(lambda o, lse: (lse, o))


@mistake("lse", fails=["test_lse_worked_example", "test_lse_of_any_cut", "test_lse_scales"])
def whole_lse_to_base_2():
    """The lse came back to base 2, which is FlashInfer's custom and not this drill's: multiply it by ln 2."""
    return _returning(lambda o, lse: (o, lse * math.log2(math.e)))


@mistake("lse", fails=["test_lse_is_float32", "test_lse_past_float16"])
def lse_rounded_like_o():
    """The lse was rounded to q's dtype, and in float16 65,520 is inf: it stays float32, for merges weigh by it."""
    return _returning(lambda o, lse: (o, lse.to(o.dtype)))


@mistake("lse", fails=["test_lse_past_float16", "test_lse_of_any_cut"])
def lse_through_float16():
    """The lse is float32 and was float16 on its way, which has three digits and ends at 65,504: float32 throughout."""
    return _returning(lambda o, lse: (o, lse.half().float()))


@mistake("lse", fails=["test_lse_worked_example", "test_lse_of_any_cut"])
def lse_of_three_dimensions():
    """The lse came back as [B, Hq, 1]: it is one number for each query head, [B, Hq]."""
    return _returning(lambda o, lse: (o, lse[..., None]))


@mistake("lse", fails=["test_lse_worked_example", "test_lse_of_any_cut"])
def lse_of_the_last_split():
    """The lse that came back is one split's: that of the whole is the merge's second result."""

    def merge(o_part, lse):
        return _right_merge(o_part, lse)[0], lse[..., -1].contiguous()

    return _decoding(merge=merge)


@mistake("lse", fails=["test_lse_worked_example", "test_lse_of_any_cut"])
def lse_of_every_split():
    """The lse came back as [B, Hq, S], the parts': return the merged one, [B, Hq]."""

    def merge(o_part, lse):
        return _right_merge(o_part, lse)[0], lse

    return _decoding(merge=merge)


# split_kv_decode: the manner


@mistake("splits", fails=["test_the_kernel_decodes"], tells=False)
def splits_merged_in_torch():
    """torch merged the parts, in several launches more: merge_splits does it in one."""

    def merge(o_part, lse):
        merged = torch.logsumexp(lse, -1)
        weights = (lse - torch.where(merged == -math.inf, 0.0, merged)[..., None]).exp()
        return (weights[..., None] * o_part).sum(2), merged

    return _decoding(merge=merge)


@mistake("splits", fails=["test_launches_for_more_splits"], tells=False)
def a_launch_for_each_split():
    """The splits are launched one after another, and so they run: make one launch, whose grid holds them all."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale=None, return_lse=False):
        args = q, k_cache, v_cache, block_tables, context_lens
        _check(*args, num_splits)
        for _ in range(num_splits - 1):
            _parts(*args, 1, _scale(q, sm_scale))
        return _right_decode(*args, num_splits, sm_scale, return_lse)

    return split_kv_decode


@mistake("splits", fails=["test_launches_for_more_sequences"], tells=False)
def sequences_launched_one_by_one():
    """Each sequence is a launch of its own, and small ones leave the GPU idle: put the sequences into the grid."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, *rest):
        _check(q, k_cache, v_cache, block_tables, context_lens, num_splits)
        each = [
            _right_decode(q[b:][:1], k_cache, v_cache, block_tables[b:][:1], context_lens[b:][:1], num_splits, *rest)
            for b in range(len(q))
        ]
        return tuple(map(torch.cat, zip(*each))) if isinstance(each[0], tuple) else torch.cat(each)

    return split_kv_decode


@mistake("splits", fails=["test_nothing_is_read_on_the_host"], tells=False)
def chunk_read_on_the_host():
    """context_lens.max() on the host waits for the GPU in every layer: each program loads its own length."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, *rest):
        int(context_lens.max())
        return _right_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, *rest)

    return split_kv_decode


@mistake("splits", fails=["test_the_kernel_decodes"], tells=False)
def splits_decoded_in_torch():
    """torch gathered all pages and took the softmax: the drill is the kernel that reads K and V where they are."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale=None, return_lse=False):
        _check(q, k_cache, v_cache, block_tables, context_lens, num_splits)
        (B, Hq, D), (NB, _, Hkv, _) = q.shape, k_cache.shape
        pages = block_tables.clamp(0, NB - 1).long()
        k, v = (cache[pages].flatten(1, 2).float().nan_to_num() for cache in (k_cache, v_cache))  # [B, N, Hkv, D]
        scale = 1 / math.sqrt(D) if sm_scale is None else sm_scale
        logits = torch.einsum("bhgd,bnhd->bhgn", q.float().view(B, Hkv, -1, D), k) * scale
        dead = torch.arange(k.shape[1], device=q.device) >= context_lens[:, None]
        logits = logits.masked_fill(dead[:, None, None], -math.inf)
        weights = torch.softmax(logits, -1).nan_to_num()
        o = torch.einsum("bhgn,bnhd->bhgd", weights, v).reshape(B, Hq, D).to(q.dtype)
        return (o, torch.logsumexp(logits, -1).view(B, Hq)) if return_lse else o

    return split_kv_decode


# split_kv_decode: what must be refused


@mistake("host-checks", fails=["test_refuses"])
def negative_num_splits():
    """assert num_splits refuses 0 and lets -2 pass, which is no number of splits either: num_splits >= 1."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, *rest):
        assert num_splits, "num_splits must not be 0"
        return _right_decode(q, k_cache, v_cache, block_tables, context_lens, abs(num_splits), *rest)

    return split_kv_decode


@mistake("host-checks", fails=["test_refuses"])
def num_splits_raised_to_1():
    """max(1, num_splits) hides a wrong number from whoever computed it: refuse what is below 1."""

    def split_kv_decode(q, k_cache, v_cache, block_tables, context_lens, num_splits, *rest):
        return _right_decode(q, k_cache, v_cache, block_tables, context_lens, max(1, num_splits), *rest)

    return split_kv_decode


@mistake("host-checks", fails=["test_refuses"])
def v_cache_not_looked_at():
    """Shape, dtype and layout were asked of k_cache alone, and v_cache is read by the same offsets: ask both."""
    return _decoding_without(
        "one_cache_shape",
        checks={
            "one_dtype": lambda a: a.q.dtype == a.k_cache.dtype,
            "dense_caches": lambda a: a.k_cache.is_contiguous(),
        },
    )


@mistake("host-checks", fails=["test_refuses"])
def strided_caches_split_as_dense():
    """kv[:, 0] is every other page of a tensor, and as dense K is read where V lies: check that both are contiguous."""
    return _decoding_without("dense_caches")


@mistake("host-checks", fails=["test_refuses"])
def head_dim_of_q_alone():
    """Caches with another D were read in steps of q's D, across their tokens: compare q's D with k_cache.shape[3]."""
    return _decoding_without("head_dim")


@mistake("host-checks", fails=["test_refuses"])
def query_heads_left_over():
    """Hq // Hkv rounds down, and a head that is left over is never written: check that Hq % Hkv is 0."""
    return _decoding_without("groups")


@mistake("host-checks", fails=["test_refuses"])
def gaps_in_q_read():
    """Only q's row stride reaches the kernel, so rows with gaps are read with what lies in them: check q[:1]."""
    return _decoding_without("dense_rows_of_q")


@mistake("host-checks", fails=["test_views"])
def views_of_q_refused():
    """q.is_contiguous() refuses views of a fused QKV tensor, the usual input: ask it of a single row, q[:1]."""
    return _decoding(checks={"dense_rows_of_q": lambda a: a.q.is_contiguous()})


@mistake("host-checks", fails=["test_refuses"])
def gaps_in_the_splits_table():
    """The kernel steps one entry a page, through every other entry of a wider table too: check stride(-1)."""
    return _decoding_without("dense_tables")


@mistake("host-checks", fails=["test_refuses"])
def lengths_in_a_column():
    """len() counts a [B, 1] tensor as B lengths, though it is not what was asked for: check context_lens.dim() == 1."""
    return _decoding_without("dims_of_lens")


@mistake("host-checks", fails=["test_strided_lengths"])
def gaps_between_lengths_read():
    """The kernel steps one entry a sequence, through every other entry of a view too: check context_lens.stride(0)."""
    return _decoding_without("dense_lens")


@mistake("host-checks", fails=["test_refuses_another_device"], lane="gpu")
def devices_left_to_triton():
    """Lengths and tables are often made on the CPU, and Triton's error names no argument: compare devices."""
    return _decoding_without("one_device")


@mistake("host-checks", fails=["test_refuses"])
def dtype_of_q_not_looked_at():
    """The caches' dtypes were compared with each other and not with q's, which is multiplied by them: compare all."""
    return _decoding(checks={"one_dtype": lambda a: a.k_cache.dtype == a.v_cache.dtype})


@mistake("host-checks", fails=["test_refuses"])
def indices_of_int64():
    """A kernel made for int32 reads one int64 as two, a number and a 0: check the dtypes of table and lengths."""
    return _decoding_without("int32_tables", "int32_lens")


@mistake("host-checks", fails=["test_refuses"])
def rows_and_lengths_uncounted():
    """With fewer rows or lengths than q has sequences the kernel reads on past them: compare both with q's B."""
    return _decoding_without("a_row_a_sequence", "a_length_a_sequence")
