"""L3: the merge of partial answers, and the decode that makes them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drills import lane
from drills.lane import DEVICE
from drills.tests import _oracle
from drills.tests._judge import CLOSE, REFUSALS
from drills.tests._paged import EXAMPLES, caches, decode_args, few, generator, guarded, has_room, ints, randint

EMPTY = -math.inf  # the lse of a part without tokens
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu("bf16 arithmetic is wrong in Triton's interpreter"))


def merge_splits(o_part, lse):
    """Row by row over the parts that have tokens, in float64."""
    batch, heads, _, dim = o_part.shape
    o = torch.zeros(batch, heads, dim, dtype=torch.float64)
    merged = torch.full((batch, heads), EMPTY, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            there = [(x, part) for x, part in zip(lse[b, h].tolist(), o_part[b, h].double()) if x != EMPTY]
            if there:
                top = max(x for x, _ in there)
                total = sum(math.exp(x - top) for x, _ in there)
                o[b, h] = sum(math.exp(x - top) * part for x, part in there) / total
                merged[b, h] = top + math.log(total)
    return o.float(), merged.float()


def split_kv_decode(
    q, k_cache, v_cache, block_tables, context_lens, num_splits, sm_scale=None, return_lse=False
):  # fmt: skip
    """Attention that is not split at all."""
    o, lse = _oracle.attention(q, k_cache, v_cache, block_tables, context_lens, sm_scale)
    return (o.to(q.dtype), lse.float()) if return_lse else o.to(q.dtype)


def fenced(x):
    """A copy of x with NaN before and after it in memory: whoever reads past its ends must show."""
    margin = 256 * x.shape[-1]
    whole = torch.full((x.numel() + 2 * margin,), math.nan, dtype=x.dtype, device=DEVICE)
    inside = whole[margin : margin + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside


def gapped(x):
    """The same values in every other place of a larger tensor's last dimension."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


def parts(lse, dim=16, seed=1):
    """[o_part, lse]: random outputs of parts with these lse, [B, Hq, S]; the output of an empty one is 0."""
    lse = torch.as_tensor(lse, dtype=torch.float32)
    o_part = torch.randn(*lse.shape, dim, generator=generator(seed))
    o_part[lse == EMPTY] = 0
    return [fenced(o_part), fenced(lse)]


def some_lse(splits, batch=2, heads=3, seed=1):
    """[B, Hq, S]: what softmaxes over a few dozen tokens have."""
    return torch.randn(batch, heads, splits, generator=generator(seed + 100)) + 3


def merge(judge, o_part, lse, *, close=CLOSE[torch.float32], hint=None):
    return judge.agrees("merge_splits", o_part, lse, oracle=merge_splits, close=close, hint=hint)


# Stage 1: merging two parts


def worked(*more):
    """The docstring's parts: logits [ln 8] with V = 1 and [0, 0] with V = 0; `more` are (output, lse) of others."""
    both = [(1.0, math.log(8)), (0.0, math.log(2)), *more]
    o_part, lse = (torch.tensor(x).view(1, 1, len(both), *dims) for x, dims in zip(zip(*both), ((1,), ())))
    return [fenced(o_part), fenced(lse)]


@pytest.mark.kernel
@pytest.mark.stage(1)
def test_merge_worked_example(judge):
    """the worked example of the docstring"""
    hint = "0.7233 and 0.8808 are what two bases give: exp goes with ln, exp2 with log2."
    merge(judge, *worked(), hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(1)
def test_merge_two_parts(judge):
    """two parts a row, several rows"""
    merge(judge, *parts(some_lse(2)))


@pytest.mark.kernel
@pytest.mark.stage(1)
def test_merge_one_part(judge):
    """one part is its own merge"""
    merge(judge, *parts(some_lse(1)))


@pytest.mark.kernel
@pytest.mark.stage(1)
@pytest.mark.parametrize("splits", [3, 5, 8])
def test_merge_several_parts(judge, splits):
    """more parts than two, also no power of two"""
    hint = "each row has its own S parts, and a tile of a power of two may be longer: mask the rest."
    merge(judge, *parts(some_lse(splits)), hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(1)
@pytest.mark.parametrize("dim", [1, 20, 80])
def test_merge_odd_dims(judge, dim):
    """a head dim that is no power of two, and one of 1"""
    merge(judge, *parts(some_lse(3), dim=dim))


@pytest.mark.kernel
@pytest.mark.stage(1)
@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_merge_many_parts(judge, order):
    """130 parts, in any order"""
    lse = torch.linspace(-4, 4, 130)
    lse = {"rising": lse, "falling": lse.flip(0), "mixed": lse[torch.randperm(130, generator=generator(3))]}[order]
    hint = "in a loop over tiles of parts, all that was summed so far shrinks when a larger lse comes."
    merge(judge, *parts(lse.expand(1, 2, 130), dim=80), hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(1)
@pytest.mark.parametrize("level", [500, -500])
def test_merge_large_lse(judge, level):
    """an lse whose exponential float32 cannot hold"""
    hint = "exp(500) is inf and exp(-500) is 0: take the largest lse of the row from each before exp, and add it back."
    merge(judge, *parts(some_lse(4) + level), close=2e-4, hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(1)
@pytest.mark.parametrize("first", [-150.0, 150.0])
def test_merge_lse_far_apart(judge, first):
    """parts that weigh nothing beside another"""
    merge(judge, *parts([[[first, -first, 0.0], [0.0, first, -first]]]))


@pytest.mark.kernel
@pytest.mark.stage(1)
def test_merge_in_two_steps(judge):
    """a merge of merges is the merge of all"""
    o_part, lse = parts(some_lse(7))
    halves = [
        merge(judge, o_part[:, :, cut].contiguous(), lse[:, :, cut].contiguous()).returned
        for cut in (slice(0, 3), slice(3, 7))
    ]
    again = [torch.stack(both, dim=2) for both in zip(*halves)]
    o, merged = merge_splits(o_part.cpu(), lse.cpu())
    hint = "the lse that comes back must be that of all tokens, for the next merge weighs by it."
    judge.agrees("merge_splits", *again, oracle=lambda *_: (o, merged), close=CLOSE[torch.float32], hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(1)
def test_merge_returns_new_tensors(judge):
    """a second merge leaves the first one's result as it was"""
    first = merge(judge, *parts(some_lse(3), seed=1)).returned
    kept = [x.clone() for x in first]
    args = parts(some_lse(3, seed=2), seed=2)
    merge(judge, *args)
    if not all(map(torch.equal, first, kept)):
        judge.fail(
            "merge_splits", args, ["overwrote what the call before had returned", "return new tensors each time"]
        )


@pytest.mark.kernel
@pytest.mark.stage(1)
def test_the_kernel_merges(judge):
    """the parts are merged by merge_splits_kernel"""
    judge.works_in_its_kernel("merge_splits", *parts(some_lse(3)))


@pytest.mark.kernel
@pytest.mark.stage(1)
def test_merge_launches(judge):
    """as many launches for 24 parts as for 2"""
    advice = "launch once: each program runs over the parts of its rows"
    judge.no_growth("merge_splits", lambda n: parts(some_lse(n, 1, 2)), 2, 24, "parts", advice)


# Stage 2: parts that are empty


@pytest.mark.kernel
@pytest.mark.stage(2)
@pytest.mark.parametrize("place", [2, 1, 0], ids=["last", "between", "first"])
def test_merge_an_empty_part(judge, place):
    """the worked example with an empty part more"""
    o_part, lse = (x.flatten().tolist() for x in worked())
    o_part.insert(place, 0.0)
    lse.insert(place, EMPTY)
    args = fenced(torch.tensor(o_part).view(1, 1, 3, 1)), fenced(torch.tensor(lse).view(1, 1, 3))
    merge(judge, *args, hint="an empty part weighs exp(-inf) = 0; as an lse of 0 it would weigh 1, and give 0.7273.")


@pytest.mark.kernel
@pytest.mark.stage(2)
def test_merge_all_parts_empty(judge):
    """a row of nothing but empty parts, beside others"""
    lse = some_lse(3)
    lse[0, 1] = lse[1, 2] = EMPTY
    hint = "-inf - -inf and 0 / 0 are NaN: such a row is (0, -inf)."
    merge(judge, *parts(lse), hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(2)
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_merge_nothing_but_empty_parts(judge, splits):
    """all parts of all rows are empty"""
    hint = "Two places need a guard: the exponent, -inf - -inf, and the division, 0 / 0. The answer is (0, -inf)."
    merge(judge, *parts(torch.full((1, 2, splits), EMPTY)), hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(2)
@pytest.mark.parametrize("live", [0, 70, 129])
def test_merge_one_of_many_has_tokens(judge, live):
    """130 parts, all but one empty"""
    lse = torch.full((1, 1, 130), EMPTY)
    lse[..., live] = 1.5
    hint = "a running maximum is -inf until the first part with tokens, and -inf - -inf is NaN."
    merge(judge, *parts(lse, dim=80), hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(2)
def test_merge_empty_beside_very_small(judge):
    """empty parts beside parts with an lse of -500"""
    merge(judge, *parts([[[-500.0, EMPTY, -501.0, EMPTY]]]), hint="an lse of -500 is small, and not empty.")


@pytest.mark.kernel
@pytest.mark.stage(2)
def test_merge_an_empty_merge(judge):
    """what merging empty parts gives can be merged again"""
    o, lse = merge(judge, *parts(torch.full((1, 2, 3), EMPTY))).returned
    o_part, other = parts(some_lse(1, 1, 2))
    merge(judge, torch.stack([o, o_part[:, :, 0]], 2), torch.stack([lse, other[:, :, 0]], 2))


@pytest.mark.kernel
@pytest.mark.stage(2)
def test_merge_reads_nothing_on_the_host(judge):
    """whether a part is empty is not looked at on the host"""
    judge.waits_for_nothing("merge_splits", *parts([[[1.0, EMPTY], [EMPTY, EMPTY]]]))


@pytest.mark.kernel
@pytest.mark.stage(2)
@few
@given(seed=st.integers(0, 2**20), splits=st.integers(1, 9), heads=st.integers(1, 3), dim=st.integers(1, 20))
def test_merge_random_parts(judge, seed, splits, heads, dim):
    """random parts, some of them empty"""
    lse = some_lse(splits, 1, heads, seed) * 4
    lse[torch.rand(lse.shape, generator=generator(seed)) < 0.3] = EMPTY
    merge(judge, *parts(lse, dim, seed))


MERGE_SPOILED = {
    "parts of float16": (lambda parts, lse: (parts.half(), lse), "o_part is float16, and must be float32"),
    "an lse of float16": (lambda parts, lse: (parts, lse.half()), "lse is float16, and must be float32"),
    "an lse of float64": (lambda parts, lse: (parts, lse.double()), "lse is float64, and must be float32"),
    "more lse than parts": (lambda parts, lse: (parts, fenced(torch.zeros(2, 3, 5))), "a row has 5 lse for 4 parts"),
    "fewer lse than parts": (lambda parts, lse: (parts, fenced(torch.zeros(2, 3, 3))), "a row has 3 lse for 4 parts"),
    "an lse of fewer sequences": (lambda parts, lse: (parts, lse[:1]), "lse has 1 sequence, o_part has 2"),
    "an lse of splits first": (
        lambda parts, lse: (parts, lse.transpose(1, 2).contiguous()), "lse is [B, S, Hq]: as large, in another order"
    ),
    "an lse with a dimension more": (lambda parts, lse: (parts, lse[..., None]), "lse must be [B, Hq, S]"),
    "parts without their splits": (
        lambda parts, lse: (parts[:, :, 0].contiguous(), lse), "o_part must be [B, Hq, S, D]"
    ),
    "parts with gaps": (lambda parts, lse: (gapped(parts), lse), "o_part is every other value of a larger tensor"),
    "parts of splits first": (
        lambda parts, lse: (parts.transpose(1, 2).contiguous().transpose(1, 2), lse),
        "o_part is [B, S, Hq, D] turned round, not contiguous",
    ),
    "an lse with gaps": (lambda parts, lse: (parts, gapped(lse)), "lse is every other value of a larger tensor"),
}  # fmt: skip


@pytest.mark.kernel
@pytest.mark.stage(2)
@pytest.mark.parametrize("spoiled", MERGE_SPOILED)
def test_merge_refuses(judge, spoiled):
    """what merge_splits must refuse"""
    spoil, because = MERGE_SPOILED[spoiled]
    judge.refuses("merge_splits", *spoil(*parts(some_lse(4))), because=because)


# Stage 3: a sequence in splits


def decode(judge, lens, num_splits, sm_scale=None, *, return_lse=False, close=None, hint=None, seed=1, **options):
    """One call on a batch with these lengths, compared with attention that is not split."""
    _, args = decode_args(seed, lens, **{"heads": (1, 1), "dim": 16, "dtype": torch.float32, **options})
    close = close or CLOSE[args[0].dtype]
    rest = num_splits, sm_scale, return_lse
    return judge.agrees("split_kv_decode", *args, *rest, oracle=split_kv_decode, close=close, hint=hint)


def by_hand(logits, values, page_size, table):
    """One sequence of one head: its logits times a scale of 1, its values, and the page of each column of its table."""
    k_cache, v_cache = caches(max(table) + 1, page_size, 1, len(values[0]))
    for cache in (k_cache, v_cache):
        cache.fill_(math.nan)
    for position, (logit, value) in enumerate(zip(logits, values)):
        slot = table[position // page_size], position % page_size
        k_cache[slot] = torch.tensor([logit] + [0.0] * (len(value) - 1))
        v_cache[slot] = torch.tensor(value)
    q = torch.zeros(1, 1, len(values[0]), device=DEVICE)
    q[..., 0] = 1
    return [q, k_cache, v_cache, ints([table]), ints([len(logits)])]


def five_tokens():
    """The docstring's sequence: the first token has a logit of ln 2, the others of 0, and token p holds [p, 1]."""
    return by_hand([math.log(2), 0, 0, 0, 0], [[float(p), 1.0] for p in range(5)], 4, [2, 0])


@pytest.mark.kernel
@pytest.mark.stage(3)
@pytest.mark.parametrize("num_splits", [3, 5])
def test_any_cut(judge, num_splits):
    """any number of splits gives the same"""
    decode(judge, [13], num_splits, heads=(2, 1))


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_two_splits(judge):
    """two tokens and one, as in the example of merge_splits"""
    args = by_hand([0, 0, math.log(8)], [[0.0, 1.0], [0.0, 1.0], [1.0, 1.0]], 2, [1, 0])
    hint = "0.7233 and 0.8808 are two bases mixed up; 1.2 in dim 1 are parts that were not divided by their sum."
    judge.agrees("split_kv_decode", *args, 2, 1.0, oracle=split_kv_decode, close=2e-5, hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_worked_example(judge):
    """the sequence of the docstring, cut in the middle of a page"""
    judge.agrees("split_kv_decode", *five_tokens(), 2, 1.0, oracle=split_kv_decode, close=2e-5)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_one_split(judge):
    """one split is plain attention"""
    decode(judge, [6], 1, heads=(4, 2))


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_many_splits(judge):
    """17 splits of a token each"""
    decode(judge, [17], 17)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_uneven_length(judge):
    """a length that the number of splits does not divide"""
    hint = "each token belongs to one split: none is left over, and none is in two."
    decode(judge, [10], 4, hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_ragged_batch(judge):
    """sequences of different lengths: each is cut by its own"""
    decode(judge, [3, 14], 2, heads=(2, 1))


@pytest.mark.kernel
@pytest.mark.stage(3)
@pytest.mark.parametrize("page_size", [1, 3, 6, 16])
def test_page_sizes(judge, page_size):
    """pages of any size, with cuts in the middle of them"""
    decode(judge, [3 * page_size + 2], 2, page_size=page_size)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_long_splits(judge):
    """splits that are longer than a tile"""
    hint = "within a split as in L2: all that was summed so far shrinks when a larger logit comes."
    decode(judge, [700], 2, page_size=16, hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(3)
@pytest.mark.parametrize("heads", [(6, 2), (5, 1)], ids=str)
def test_groups(judge, heads):
    """query heads that share K and V"""
    decode(judge, [7], 2, heads=heads)


@pytest.mark.kernel
@pytest.mark.stage(3)
@pytest.mark.parametrize("dim", [20, 80])
def test_dims(judge, dim):
    """a head dim that is no power of two"""
    decode(judge, [7], 2, dim=dim)


@pytest.mark.kernel
@pytest.mark.stage(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=lambda d: str(d).removeprefix("torch."))
def test_dtypes(judge, dtype):
    """what comes back has q's dtype"""
    decode(judge, [40], 2, dtype=dtype, dim=64)


@pytest.mark.kernel
@pytest.mark.stage(3)
@pytest.mark.parametrize("sm_scale", [0.0, 0.7])
def test_scales(judge, sm_scale):
    """a scale of its own, 0.0 too"""
    decode(judge, [7], 2, sm_scale, dim=32)


@pytest.mark.kernel
@pytest.mark.stage(3)
@pytest.mark.parametrize("view", ["q", "block_tables"])
def test_views(judge, view):
    """an argument that is cut out of a larger tensor"""
    of, (q, k_cache, v_cache, table, lens) = decode_args(1, [7, 9, 4], heads=(2, 1), dim=16, dtype=torch.float32)
    if view == "q":
        fused = torch.ones(3, 5, 16, device=DEVICE)
        fused[:, 1:3] = q
        q = fused[:, 1:3]
    else:
        wide = ints([[of.rows[0][0]] * (table.shape[1] + 3)] * 3)  # what is around it are ids of pages in use
        wide[:, 2:-1] = table.where((table >= 0) & (table < of.pool), wide[:, 2:-1])
        table = wide[:, 2:-1]
    hint = f"Row b of {view} begins at b · {view}.stride(0)."
    judge.agrees("split_kv_decode", q, k_cache, v_cache, table, lens, 1, oracle=split_kv_decode, close=2e-5, hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_the_kernel_decodes(judge):
    """the splits are made by split_kv_kernel, and no part of the work by torch"""
    _, args = decode_args(1, [7], heads=(1, 1), dim=16, dtype=torch.float32)
    judge.works_in_its_kernel("split_kv_decode", *args, 2)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_launches_for_more_splits(judge):
    """as many launches for 3 splits as for 1"""
    _, args = decode_args(1, [7], heads=(1, 1), dim=16, dtype=torch.float32)
    advice = "launch once: the grid runs over the splits, so that they run at the same time"
    judge.no_growth("split_kv_decode", lambda n: [*args, n], 1, 3, "splits", advice)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_launches_for_more_sequences(judge):
    """as many launches for 3 sequences as for 1"""

    def arguments(sequences):
        return [*decode_args(1, [5] * sequences, heads=(1, 1), dim=16, dtype=torch.float32)[1], 1]

    advice = "launch once: the grid runs over the sequences"
    judge.no_growth("split_kv_decode", arguments, 1, 3, "sequences", advice)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_launches_for_more_heads(judge):
    """as many launches for 3 KV heads as for 1"""

    def arguments(heads):
        return [*decode_args(1, [5], heads=(heads, heads), dim=16, dtype=torch.float32)[1], 1]

    judge.no_growth("split_kv_decode", arguments, 1, 3, "KV heads", "launch once: the grid runs over the KV heads")


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_parts_that_cancel(judge):
    """float16, and splits whose answers are 1000.25 and -1000: half of 0.25 is left"""
    _, args = decode_args(1, [4], heads=(1, 1), dim=16)
    args[0].zero_()
    values = torch.tensor([1000, 1000.5, -1000, -1000], dtype=torch.float16, device=DEVICE)
    args[2][args[3][0, 0]] = values[:, None, None]
    hint = (
        "Near 1000 float16 has steps of 1/2: the parts are float32, whatever q is, and o is rounded once, at the end."
    )
    judge.agrees("split_kv_decode", *args, 2, oracle=split_kv_decode, close=3e-3, hint=hint)


@pytest.mark.skipif(not has_room(9), reason="needs 9 GiB of memory in one piece, little of it touched")
@pytest.mark.kernel
@pytest.mark.stage(3)
def test_a_cache_past_int32(judge):
    """a page whose offset in the cache does not fit in int32"""
    judge.reads_far_pages("split_kv_decode", ints([3, *[0] * 1024])[:1], 2)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_nothing_is_read_on_the_host(judge):
    """no length is looked at on the host"""
    _, args = decode_args(1, [7], heads=(1, 1), dim=16, dtype=torch.float32)
    judge.waits_for_nothing("split_kv_decode", *args, 2)


# Stage 4: more splits than tokens


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize(
    ("length", "num_splits"),
    [
        (1, 2),
        (5, 4),
        (3, 8),
        pytest.param(9, 64, marks=pytest.mark.gpu("the interpreter takes a second for 64 splits")),
    ],
)
def test_more_splits_than_tokens(judge, length, num_splits):
    """splits for which no token is left"""
    hint = "an empty split is (0, -inf), written like any other; 0 / 0 would be NaN."
    decode(judge, [length], num_splits, hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(4)
def test_short_beside_long(judge):
    """a single token beside a longer sequence"""
    decode(judge, [1, 14], 3)


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("lens", [[0], [5, 0]], ids=str)
def test_no_tokens(judge, lens):
    """a length of 0 gives zeros, and changes nothing for the others"""
    decode(judge, lens, 2, hint="where all splits are empty, the merge gives (0, -inf), never NaN.")


@pytest.mark.kernel
@pytest.mark.stage(4)
@settings(few, max_examples=EXAMPLES // 2)
@given(seed=st.integers(0, 2**20), batch_size=st.integers(1, 2), page_size=st.integers(1, 6), splits=st.integers(1, 4))
def test_random_batches(judge, seed, batch_size, page_size, splits):
    """random lengths, 0 too, pages and splits"""
    rng = generator(seed)
    lens = [randint(rng, 0, 3 * page_size) for _ in range(batch_size)]
    decode(judge, lens, splits, page_size=page_size, seed=seed)


VALUES = 129 * 64 * 1024 * 256  # of partial output: one sequence's more than 2^31


@pytest.mark.gpu("the partial outputs take 8 GiB, which the interpreter is too slow for")
@pytest.mark.skipif(lane.ON_GPU and not has_room(27), reason="needs 27 GiB of memory in one piece")
@pytest.mark.kernel
@pytest.mark.stage(4)
def test_partials_past_int32(judge):
    """more than 2^31 partial values"""
    _, args = decode_args(1, [3] * 129, page_size=16, heads=(64, 1), dim=256)
    # The allocator hands out the rest of one large block next: what goes 2^31 values too early lands in `before`.
    room = torch.empty(27 << 30, dtype=torch.int8, device=DEVICE)
    del room
    before = torch.full((8 << 30,), 77, dtype=torch.int8, device=DEVICE)
    o = judge.call("split_kv_decode", *args, 1024, huge=True).returned
    last = slice(-1, None)
    want = _oracle.attention(*(x[last].cpu() if i in (0, 3, 4) else x.cpu() for i, x in enumerate(args)))[0]
    hit = bool((before[: 1 << 30] != 77).any())
    if hit or not (o[last].cpu() - want).abs().max() <= 1e-2:
        where = ["partial values went 2^31 values too early"] if hit else ["the last sequence is wrong"]
        judge.fail("split_kv_decode", [*args, 1024], [
            *where,
            f"there are {VALUES:,} partial values, and the last sequence's begin at 2^31: compute the offset in int64",
        ])  # fmt: skip


# Stage 5: the lse of the whole


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_lse_worked_example(judge):
    """the lse of the docstring's sequence, ln 6"""
    hint = "the natural logarithm: 2.58496 is to base 2; ln 2 · (max + log2 of the sum), if your logits were for exp2."
    judge.agrees("split_kv_decode", *five_tokens(), 2, 1.0, True, oracle=split_kv_decode, close=2e-5, hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_lse_of_any_cut(judge, num_splits):
    """any number of splits gives the same lse"""
    hint = "each token counts once: an lse that is ln n too large counts everything n times."
    decode(judge, [9], num_splits, return_lse=True, heads=(2, 1), hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=lambda d: str(d).removeprefix("torch."))
def test_lse_is_float32(judge, dtype):
    """the lse is float32, whatever q is"""
    decode(judge, [9], 2, return_lse=True, dtype=dtype)


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_lse_past_float16(judge):
    """an lse that float16 cannot hold"""
    _, (q, k_cache, v_cache, *rest) = decode_args(1, [5], heads=(2, 1), dim=16)
    q.fill_(100)
    k_cache[~k_cache.isnan()] = 100  # all logits are 16 · 100 · 100
    v_cache[~v_cache.isnan()] = 0  # float32 has no more than 1/64 up there, and weights made of it are off by 1 %
    args = q, k_cache, v_cache, *rest, 2, 1.0, True
    judge.agrees("split_kv_decode", *args, oracle=split_kv_decode, close=3e-3)


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_lse_of_no_tokens(judge):
    """the lse of nothing is -inf"""
    decode(judge, [5, 0], 2, return_lse=True, hint="the logarithm of an empty sum is -inf.")


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("sm_scale", [0.0, 0.7])
def test_lse_scales(judge, sm_scale):
    """the lse is of the scaled logits; with a scale of 0.0 it is ln n"""
    decode(judge, [7], 2, sm_scale, return_lse=True)


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits(judge, sign):
    """logits whose exponential float32 cannot hold, far apart"""
    logits = [sign * x for x in (250.0, 251.0, 120.0, 121.0, 119.0, 250.5)]
    args = by_hand(logits, [[float(p), 1.0] for p in range(6)], 4, [1, 0])
    hint = "each part's exponentials are taken from its own largest logit, and the merge's from the largest lse."
    judge.agrees("split_kv_decode", *args, 3, 1.0, True, oracle=split_kv_decode, close=2e-4, hint=hint)


# Stage 6: refusing what would be wrong


def good():
    """Arguments that are fine: each refusal spoils one of them."""
    _, args = decode_args(12, [5, 3], heads=(4, 2), dim=16, dtype=torch.float32)
    return dict(zip(("q", "k_cache", "v_cache", "block_tables", "context_lens"), args), num_splits=1)


def interleaved(cache):
    """The same cache, cut out of one tensor that holds K and V of a page next to each other, kv[:, 0]."""
    pages, *rest = cache.shape
    kv = guarded((pages, 2, *rest), cache.dtype)
    kv[:, 0] = cache
    return kv[:, 0]


SPOILED = {
    "no splits": (lambda g: dict(num_splits=0), "num_splits is 0, and somebody must read the tokens"),
    "a negative number of splits": (lambda g: dict(num_splits=-2), "num_splits is -2"),
    "a strided k_cache": (
        lambda g: dict(k_cache=interleaved(g["k_cache"])), "k_cache is kv[:, 0], every other page: as dense, V is read"
    ),
    "a strided v_cache": (lambda g: dict(v_cache=interleaved(g["v_cache"])), "v_cache is kv[:, 0], not contiguous"),
    "caches of heads first": (
        lambda g: {name: g[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "v_cache")},
        "the caches are [NB, H, BS, D] turned round, not contiguous",
    ),
    "a v_cache of fewer pages": (lambda g: dict(v_cache=g["v_cache"][:-1]), "v_cache has fewer pages than k_cache"),
    "caches of another head dim": (
        lambda g: dict(q=torch.zeros(2, 4, 8, device=DEVICE)), "q has a head dim of 8, the caches 16"
    ),
    "heads that do not divide": (
        lambda g: dict(q=torch.zeros(2, 3, 16, device=DEVICE)), "3 query heads cannot share 2 KV heads evenly"
    ),
    "q of another dtype": (lambda g: dict(q=g["q"].half()), "q is float16, the caches float32"),
    "a v_cache of another dtype": (
        lambda g: dict(v_cache=g["v_cache"].half()), "v_cache is float16, the rest float32"
    ),
    "q of two dimensions": (lambda g: dict(q=g["q"].flatten(1)), "q must be [B, Hq, D]"),
    "rows of q with gaps": (lambda g: dict(q=gapped(g["q"])), "q's rows are not dense"),
    "heads of q with gaps": (
        lambda g: dict(q=torch.zeros(2, 8, 16, device=DEVICE)[:, ::2]), "q's rows are every other head, not dense"
    ),
    "a block table of int64": (
        lambda g: dict(block_tables=g["block_tables"].long()), "block_tables is int64, read as int32 one id becomes two"
    ),
    "a block table with gaps": (
        lambda g: dict(block_tables=gapped(g["block_tables"])), "the rows of block_tables are not dense"
    ),
    "a block table of fewer rows": (
        lambda g: dict(block_tables=g["block_tables"][:1]), "block_tables has 1 row for 2 sequences"
    ),
    "a flat block table": (
        lambda g: dict(block_tables=g["block_tables"].flatten()), "block_tables must be [B, W]"
    ),
    "lengths of int64": (
        lambda g: dict(context_lens=g["context_lens"].long()), "context_lens is int64, read as int32 half are 0"
    ),
    "fewer lengths": (lambda g: dict(context_lens=g["context_lens"][:1]), "there is 1 length for 2 sequences"),
    "lengths of two dimensions": (
        lambda g: dict(context_lens=g["context_lens"][:, None]), "context_lens must be [B]"
    ),
}  # fmt: skip


@pytest.mark.kernel
@pytest.mark.stage(6)
@pytest.mark.parametrize("spoiled", SPOILED)
def test_refuses(judge, spoiled):
    """must be refused"""
    spoil, because = SPOILED[spoiled]
    args = good()
    args |= spoil(args)
    judge.refuses("split_kv_decode", *args.values(), because=because)


@pytest.mark.gpu("without a GPU all tensors are on one device")
@pytest.mark.kernel
@pytest.mark.stage(6)
@pytest.mark.parametrize("name", ["k_cache", "block_tables", "context_lens"])
def test_refuses_another_device(judge, name):
    """an argument that was left on the CPU"""
    args = good()
    args |= {name: args[name].cpu()}
    judge.refuses("split_kv_decode", *args.values(), because=f"{name} is on the CPU, q on the GPU")


@pytest.mark.kernel
@pytest.mark.stage(6)
def test_strided_lengths(judge):
    """lengths that are a strided view: read as they are, or refused"""
    args = good()
    args |= {"context_lens": gapped(args["context_lens"])}
    judge.agrees("split_kv_decode", *args.values(), oracle=split_kv_decode, close=2e-5, or_refuses=REFUSALS)
