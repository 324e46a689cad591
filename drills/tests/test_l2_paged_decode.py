"""L2: decode attention over the block table, with an online softmax and grouped heads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drills.lane import DEVICE
from drills.tests import _oracle
from drills.tests._judge import CLOSE, REFUSALS
from drills.tests._paged import decode_args, few, generator, has_room, ints

ROOM = 1024  # values after q, the table and the lengths in memory: reading past one must show, not end the process


def paged_decode(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
    return _oracle.attention(q, k_cache, v_cache, block_tables, context_lens, sm_scale)[0].to(q.dtype)


def roomy(x, fill=0):
    """x at the start of a longer allocation."""
    room = torch.full((x.numel() + ROOM,), fill, dtype=x.dtype, device=DEVICE)
    room[: x.numel()] = x.flatten()
    return room[: x.numel()].view(x.shape)


def arguments(seed, lens, page_size=4, heads=(1, 1), dim=16, dtype=torch.float32, stale=False):
    """A batch and [q, k_cache, v_cache, block_tables, context_lens].

    stale: where no token is stand the numbers and the page ids of an earlier batch, instead of NaN and poison.
    """
    of, args = decode_args(seed, lens, page_size, heads, dim, dtype)
    if stale:
        rng = generator(seed + 1)
        for cache in args[1:3]:
            old = torch.randn(cache.shape, generator=rng).to(dtype).to(DEVICE)
            cache.copy_(torch.where(cache.isnan(), old, cache))
        args[3].clamp_(0, of.pool - 1)
    return of, [roomy(args[0], 1), *args[1:3], roomy(args[3]), roomy(args[4])]


def decodes(judge, args, hint=None, close=None, **options):
    close = close or CLOSE[args[0].dtype]
    return judge.agrees("paged_decode", *args, oracle=paged_decode, close=close, hint=hint, **options)


def with_logits(logits, values=None, dtype=torch.float32):
    """One head and one sequence, in one page, whose tokens have these logits at the default scale, and these values."""
    of, args = arguments(3, [len(logits)], len(logits), dtype=dtype, stale=True)
    q, k_cache, v_cache = args[:3]
    q.zero_()
    q[..., 0] = 4  # 4 · x / sqrt(16) is x
    (page,) = of.rows[0]
    k_cache[page] = 0
    k_cache[page, :, 0, 0] = torch.tensor(logits)
    if values is not None:
        v_cache[page] = 0
        v_cache[page, :, 0, : len(values[0])] = torch.tensor(values, dtype=dtype)
    return args


# Stage 1: attention within one page


@pytest.mark.kernel
@pytest.mark.stage(1)
def test_one_token(judge):
    """one token: its weight is 1, and its V comes back"""
    decodes(judge, arguments(1, [1], 1, stale=True)[1], "Whatever else a tile holds is no token, and weighs 0.")


@pytest.mark.kernel
@pytest.mark.stage(1)
def test_worked_example(judge):
    """16 tokens, V = [position, 1], the first weighs twice as much: [120/17, 1]"""
    args = with_logits([math.log(2), *[0.0] * 15], [[p, 1] for p in range(16)])
    decodes(judge, args, "The weights are exp(logit), 2 and fifteen times 1: their sum is 17.")


@pytest.mark.kernel
@pytest.mark.stage(1)
@pytest.mark.parametrize("tokens", [16, 7])
def test_one_page(judge, tokens):
    """tokens in a page of 16"""
    args = arguments(2, [tokens], 16, stale=True)[1]
    decodes(judge, args, f"Only {tokens} positions are tokens: the others have a weight of 0.")


@pytest.mark.kernel
@pytest.mark.stage(1)
@pytest.mark.parametrize("about", [120, -120, -70_000])
def test_large_logits(judge, about):
    """logits that exp cannot take in float32"""
    args = with_logits([about + (p * 5 % 16 - 8) / 4 for p in range(16)])
    hint = (
        "exp(120) is inf and exp(-120) is 0 in float32: subtract the largest logit of the tokens first. "
        "Look for it from -inf on, not from 0, and let dead positions have -inf."
    )
    decodes(judge, args, hint, close=1e-4 if abs(about) < 1000 else 2e-2)  # float32 near 100,000 has steps of 1/128


@pytest.mark.kernel
@pytest.mark.stage(1)
@pytest.mark.parametrize("logits", ["rising", "falling"])
def test_many_tiles(judge, logits):
    """600 tokens, more than a tile, each logit above or below the last"""
    rising = [float(p - 300) for p in range(600)]
    hint = (
        "A tile is no page: it is a fixed power of two, and there is a loop over them. When one raises the largest "
        "logit from a to b, what was summed up so far, of the weights and of V, shrinks by exp(a - b)."
    )
    decodes(judge, with_logits(rising if logits == "rising" else rising[::-1]), hint, close=1e-4)


@pytest.mark.kernel
@pytest.mark.stage(1)
def test_the_kernel_decodes(judge):
    """the work is done by paged_decode_kernel"""
    judge.works_in_its_kernel("paged_decode", *arguments(4, [4], stale=True)[1])


# Stage 2: the pages of a sequence


@pytest.mark.kernel
@pytest.mark.stage(2)
def test_docstring_example(judge):
    """the example of the docstring: 5 tokens in pages 2 and 0"""
    args = arguments(5, [5], stale=True)[1]
    rng = generator(6)
    for cache in args[1:3]:
        cache[[2, 0]] = torch.randn(2, 4, 1, 16, generator=rng).to(DEVICE)
    decodes(judge, [*args[:3], roomy(ints([[2, 0]])), args[4]], "Token 4 is k_cache[0, 0], not k_cache[3, 0].")


@pytest.mark.kernel
@pytest.mark.stage(2)
@pytest.mark.parametrize("page_size", [1, 3, 6, 16, 256])
def test_page_sizes(judge, page_size):
    """three pages, the last with a token or more"""
    args = arguments(7, [2 * page_size + (page_size + 1) // 2], page_size, stale=True)[1]
    decodes(judge, args, "Position p is in column p // page size of the table's row, at place p % page size.")


@pytest.mark.kernel
@pytest.mark.stage(2)
def test_a_ragged_batch(judge):
    """three sequences of 5, 9 and 2 tokens"""
    args = arguments(8, [5, 9, 2], stale=True)[1]
    decodes(judge, args, "Each sequence has its own row of the table, its own length, its own q.")


@pytest.mark.kernel
@pytest.mark.stage(2)
def test_whole_pages(judge):
    """lengths that are multiples of the page"""
    decodes(judge, arguments(9, [8], stale=True)[1], "8 tokens are 2 pages of 4, and the last one is full.")


@pytest.mark.kernel
@pytest.mark.stage(2)
def test_many_pages(judge):
    """100 pages of 6: tiles begin and end anywhere in a page"""
    hint = "One tile holds tokens of several pages: every position looks up its own."
    decodes(judge, arguments(10, [597], 6, stale=True)[1], hint)


@pytest.mark.kernel
@pytest.mark.stage(2)
def test_as_many_launches_for_more_sequences(judge):
    """as many kernel launches for 3 sequences as for 1"""

    def of(sequences):
        return arguments(11, [3] * sequences, stale=True)[1]

    judge.no_growth("paged_decode", of, 1, 3, "sequences", "launch once: the grid runs over the sequences")


@pytest.mark.kernel
@pytest.mark.stage(2)
@pytest.mark.parametrize("more", ["pages", "KV heads"])
def test_as_many_launches(judge, more):
    """as many kernel launches for 3 pages as for 1, and for 3 KV heads"""

    def of(n):
        return arguments(11, [4 * n], stale=True)[1] if more == "pages" else arguments(11, [3], heads=(n, n))[1]

    judge.no_growth("paged_decode", of, 1, 3, more, "launch once: programs take the heads, a loop in them the pages")


# Stage 3: query heads that share K and V


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_head_mapping(judge):
    """6 query heads, 2 KV heads whose V begins with 10 and 20: 10, 10, 10, 20, 20, 20"""
    args = arguments(12, [3], heads=(6, 2), stale=True)[1]
    args[2][:, :, 0, 0], args[2][:, :, 1, 0] = 10, 20
    decodes(judge, args, "Query head h reads KV head h // 3.")


@pytest.mark.kernel
@pytest.mark.stage(3)
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1)], ids=str)
def test_groups(judge, heads):
    """groups of 1, 2, 4, 8, 16 and 32 query heads"""
    decodes(judge, arguments(13, [5], heads=heads, stale=True)[1], "Query head h reads KV head h // (Hq // Hkv).")


@pytest.mark.kernel
@pytest.mark.stage(3)
@pytest.mark.parametrize("heads", [(6, 3), (17, 1)], ids=str)
def test_odd_groups(judge, heads):
    """a group, or a number of heads, that is no power of two"""
    hint = "The rows of a tile that are no query head are masked, in the load of q and in the store of o."
    decodes(judge, arguments(14, [5], heads=heads, stale=True)[1], hint)


@pytest.mark.kernel
@pytest.mark.stage(3)
def test_groups_in_a_batch(judge):
    """two sequences with groups of 3"""
    decodes(judge, arguments(15, [5, 3], heads=(6, 2), stale=True)[1], "A sequence has Hq rows in q and in o.")


# Stage 4: memory that is not yours to read


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_nan_past_the_length(judge, which):
    """NaN in the rest of the last page and in every page that is not the sequence's"""
    # Page 0 is nobody's: it is what a masked look-up finds, and holds NaN too.
    stale, args = arguments(30, [5], stale=True)[1], arguments(30, [5])[1]
    there = 1 if which == "k_cache" else 2
    hint = "A weight of 0 does not hide it, for 0 · NaN is NaN: load only what is live, and 0 for the rest."
    decodes(judge, [*stale[:there], args[there], *stale[there + 1 :]], hint)


@pytest.mark.kernel
@pytest.mark.stage(4)
def test_empty_sequence(judge):
    """a sequence with no tokens gives zeros, and the one before is as ever"""
    decodes(
        judge,
        arguments(17, [5, 0], stale=True)[1],
        "Store zeros where there is no token; the sums are 0 there, and 0 / 0 is NaN.",
    )


@pytest.mark.kernel
@pytest.mark.stage(4)
@pytest.mark.parametrize("dead", ["ids of other pages", "ids of no page"])
def test_a_wider_table(judge, dead):
    """a table of 8 columns where 2 are enough"""
    of, args = arguments(18, [5])
    table = args[3].repeat(1, 2)
    if dead == "ids of other pages":
        table.clamp_(0, of.pool - 1)
    hint = "The length says how many columns of a row are in use, and what follows may be any number: do not use it."
    decodes(judge, [*args[:3], roomy(table), args[4]], hint)


@pytest.mark.kernel
@pytest.mark.stage(4)
@few
@given(data=st.data(), page_size=st.integers(1, 6), group=st.integers(1, 5))
def test_random_batches(judge, data, page_size, group):
    """random batches"""
    sequences, kv_heads = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]), label="sequences, KV heads")
    length = st.integers(0, 3 * page_size)
    lens = data.draw(st.lists(length, min_size=sequences, max_size=sequences), label="lengths")
    seed, dim = data.draw(st.integers(0, 2**20), label="seed"), data.draw(st.sampled_from([16, 32]), label="dim")
    decodes(judge, arguments(seed, lens, page_size, (group * kv_heads, kv_heads), dim)[1])


# Stage 5: scales, widths, dtypes and strides


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("sm_scale", [-0.5, 0.0, 1.0])
def test_scales(judge, sm_scale):
    """a scale that is given"""
    decodes(judge, [*arguments(19, [7])[1], sm_scale], "1 / sqrt(D) is only for a scale of None.")


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("dim", [128, 256, 80, 20, 1])
def test_head_dims(judge, dim):
    """head dims of every kind"""
    heads = (2, 2) if dim == 20 else (1, 1)
    decodes(
        judge, arguments(20, [6], heads=heads, dim=dim)[1], "A tile's width is a power of two: mask what is past D."
    )


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize(
    "dtype",
    [torch.float16,
     pytest.param(torch.bfloat16, marks=pytest.mark.gpu("bf16 arithmetic is wrong in Triton's interpreter"))],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)  # fmt: skip
def test_dtypes(judge, dtype):
    """o has q's dtype"""
    decodes(judge, arguments(21, [9], heads=(2, 1), dim=64, dtype=dtype)[1])


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_float32_is_kept(judge):
    """float32 to its last digits"""
    hint = 'On a GPU tl.dot rounds float32 to TF32 unless told otherwise: input_precision="ieee".'
    decodes(judge, arguments(22, [70], 16, dim=64)[1], hint)


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_sums_in_float32(judge):
    """700 float16 values of about 100: their sum is more than float16 can hold"""
    args = with_logits([0.0] * 700, dtype=torch.float16)
    args[2].copy_((args[2] + 100).clamp(96, 104))
    decodes(judge, args, "float16 ends at 65,504: keep the running sums in float32.")


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_logits_in_float32(judge):
    """float16 q and K with logits of 40: exp makes their last digits the first ones of the weights"""
    args = with_logits([40 + p / 256 for p in range(32)], dtype=torch.float16)
    args[1][..., 1] = torch.arange(32, device=DEVICE)[None, :, None] / 16
    args[0][..., 1] = 1 / 8
    decodes(judge, args, "Near 40 float16 has steps of 1/32: keep the logits in float32.")


@pytest.mark.kernel
@pytest.mark.stage(5)
@pytest.mark.parametrize("rows", ["of a fused QKV", "every other"])
def test_rows_of_q(judge, rows):
    """q's rows are further apart than they are long"""
    args = arguments(23, [5, 3], heads=(2, 1))[1]
    many = torch.randn(8, 4, 16, generator=generator(24)).to(DEVICE)
    q = many[:2, :2] if rows == "of a fused QKV" else many[:, :2].contiguous()[1:5:2]
    decodes(
        judge,
        [q, *args[1:]],
        "Row b of q begins at b · q.stride(0), row b of o at b · Hq · D. Such a q is the usual one: do not refuse it.",
    )


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_one_head_of_any_stride(judge):
    """one query head, whose stride is of no use, and says nothing"""
    args = arguments(25, [5, 3])[1]
    q = torch.randn(2, 64, generator=generator(26)).to(DEVICE).as_strided((2, 1, 16), (64, 99, 1))
    decodes(judge, [q, *args[1:]], "A row of q is dense if its values are: with one head there is nothing between.")


@pytest.mark.kernel
@pytest.mark.stage(5)
def test_a_table_that_is_a_view(judge):
    """a block table cut out of a larger one"""
    args = arguments(27, [9, 5])[1]
    whole = ints([[0] * (args[3].shape[1] + 3)] * 3)
    whole[:2, 2:-1] = args[3]
    table = roomy(whole)[:2, 2:-1]
    decodes(judge, [*args[:3], table, args[4]], "Row b of the table begins at b · block_tables.stride(0).")


big_memory = pytest.mark.skipif(not has_room(9), reason="needs 9 GiB of memory in one piece, little of it touched")


@big_memory
@pytest.mark.kernel
@pytest.mark.stage(5)
def test_a_cache_past_int32(judge):
    """a page whose offset in the cache does not fit in int32"""
    judge.reads_far_pages("paged_decode")


# Stage 6: refusing what would be wrong


def good():
    """Arguments that are fine: each refusal spoils one of them."""
    of, args = arguments(30, [5, 2], heads=(4, 2), stale=True)
    return dict(zip(("q", "k_cache", "v_cache", "block_tables", "context_lens"), args))


def some(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator(31)).to(dtype).to(DEVICE)


def interleaved(g, which):
    """A cache cut out of one tensor that holds both, kv[:, 0] or kv[:, 1]."""
    pages, *rest = g["k_cache"].shape
    return some(pages, 2, *rest)[:, which]


def turned_round(g):
    """A cache stored as [NB, Hkv, BS, D], seen as [NB, BS, Hkv, D]."""
    return g["k_cache"].transpose(1, 2).contiguous().transpose(1, 2)


SPOILED = {
    "heads that do not divide": (lambda g: dict(q=some(2, 3, 16)), "3 query heads cannot share 2 KV heads evenly"),
    "fewer query heads than KV heads": (lambda g: dict(q=some(2, 1, 16)), "1 query head cannot have 2 KV heads"),
    "q of another dtype": (lambda g: dict(q=g["q"].half()), "q is float16, the caches float32"),
    "k_cache of another dtype": (lambda g: dict(k_cache=g["k_cache"].half()), "k_cache is float16, the rest float32"),
    "v_cache of another dtype": (lambda g: dict(v_cache=g["v_cache"].half()), "v_cache is float16, the rest float32"),
    "another head dim in q": (lambda g: dict(q=some(2, 4, 8)), "q has a head dim of 8, the caches 16"),
    "fewer pages in v_cache": (lambda g: dict(v_cache=g["v_cache"][:-1]), "v_cache has fewer pages than k_cache"),
    "another head dim in v_cache": (
        lambda g: dict(v_cache=roomy(g["v_cache"][..., :8])), "v_cache has a head dim of 8, k_cache 16"
    ),
    "caches of another page size": (
        lambda g: dict(v_cache=g["v_cache"].view(-1, 2, 2, 16)), "v_cache has pages of 2 tokens, k_cache of 4"
    ),
    "caches of another head count": (
        lambda g: dict(v_cache=g["v_cache"].view(-1, 4, 1, 16)), "v_cache has 1 head, k_cache 2"
    ),
    "a strided k_cache": (
        lambda g: dict(k_cache=interleaved(g, 0)),
        "k_cache is kv[:, 0], every other page: as dense, K is read from V, and a copy in every layer is no way out",
    ),
    "a strided v_cache": (lambda g: dict(v_cache=interleaved(g, 1)), "v_cache is kv[:, 1], not contiguous"),
    "caches of heads first": (
        lambda g: dict(k_cache=turned_round(g), v_cache=turned_round(g)),
        "the caches are [NB, Hkv, BS, D] turned round, not contiguous",
    ),
    "a table of int64": (
        lambda g: dict(block_tables=g["block_tables"].long()), "block_tables is int64: as int32, every other id is 0"
    ),
    "lengths of int64": (
        lambda g: dict(context_lens=g["context_lens"].long()), "context_lens is int64: as int32, every other is 0"
    ),
    "fewer rows in the table": (lambda g: dict(block_tables=g["block_tables"][:1]), "there is 1 row for 2 sequences"),
    "more rows in the table": (
        lambda g: dict(block_tables=ints([[0, 1], [2, 3], [4, 5]])), "there are 3 rows for 2 sequences"
    ),
    "fewer lengths": (lambda g: dict(context_lens=roomy(ints([5]))), "there is 1 length for 2 sequences"),
    "more lengths": (lambda g: dict(context_lens=ints([5, 2, 1])), "there are 3 lengths for 2 sequences"),
    "lengths of two dimensions": (lambda g: dict(context_lens=g["context_lens"][:, None]), "context_lens must be [B]"),
    "lengths on the host": (lambda g: dict(context_lens=g["context_lens"].cpu()), "the kernel cannot read the host"),
}  # fmt: skip
ON_THE_HOST = pytest.mark.gpu("without one, all tensors are on the host")


@pytest.mark.kernel
@pytest.mark.stage(6)
@pytest.mark.parametrize(
    "spoiled", [pytest.param(name, marks=[ON_THE_HOST] if "host" in name else []) for name in SPOILED]
)
def test_refuses(judge, spoiled):
    """what paged_decode must refuse"""
    spoil, because = SPOILED[spoiled]
    args = good()
    args |= spoil(args)
    judge.refuses("paged_decode", *args.values(), because=because)


LOOSE = {
    "a head of q with gaps": lambda g: dict(q=some(2, 4, 32)[..., ::2]),
    "every other head of q": lambda g: dict(q=some(2, 8, 16)[:, ::2]),
    "every other column of the table": lambda g: dict(
        block_tables=roomy(g["block_tables"].repeat_interleave(2, 1, output_size=2 * g["block_tables"].shape[1]))[
            :, ::2
        ]
    ),
    "every other length": lambda g: dict(context_lens=roomy(ints([5, 0, 2, 0]))[::2]),
}


@pytest.mark.kernel
@pytest.mark.stage(6)
@pytest.mark.parametrize("loose", LOOSE)
def test_gaps(judge, loose):
    """values that are not next to each other: read as they are, or refused"""
    args = good()
    args |= LOOSE[loose](args)
    decodes(judge, list(args.values()), "Refuse what the kernel would step through wrongly.", or_refuses=REFUSALS)


@pytest.mark.kernel
@pytest.mark.stage(6)
def test_nothing_is_read_on_the_host(judge):
    """the launch waits for nothing: no length and no page id is looked at on the host"""
    judge.waits_for_nothing("paged_decode", *arguments(32, [5, 2])[1])
