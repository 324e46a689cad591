"""F1: block tables as FlashInfer's CSR pages, plan and run, and the conversion without a host read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drills.lane import DEVICE, ON_GPU
from drills.tests import _oracle
from drills.tests._judge import CLOSE, REFUSALS
from drills.tests._paged import (
    batch,
    decode_args,
    few,
    filled_caches,
    generator,
    guarded,
    ints,
    ragged,
)

INTEGERS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
FROM_FLASHINFER = (RuntimeError, BufferError)  # where FlashInfer itself refuses, its error will do

MASKED = "a mask of the live part, torch.arange(W) < pages[:, None], takes all rows at once"

# The example of the drill: page size 4, lengths [9, 2, 5]
TABLE, LENS, PAGE = [[9, 3, 7], [2, -1, -1], [5, 1, -1]], [9, 2, 5], 4
INDPTR, INDICES, LAST = [0, 3, 4, 6], [9, 3, 7, 2, 5, 1], [1, 2, 1]


def to_csr(judge, table, lens, page_size, hint=None):
    args = table, lens, page_size
    return judge.agrees("block_table_to_csr", *args, oracle=_oracle.block_table_to_csr, hint=hint)


# Stage 1: block table to CSR


@pytest.mark.stage(1)
def test_worked_example(judge):
    """the worked example of the docstring"""
    to_csr(judge, ints(TABLE), ints(LENS), PAGE)


@pytest.mark.stage(1)
@pytest.mark.parametrize(("length", "page_size"), [(16, 16), (100, 16), (17, 16), (1, 16), (12, 4), (3, 1)], ids=str)
def test_last_page(judge, length, page_size):
    """the last page of one sequence"""
    pages = -(-length // page_size)
    to_csr(judge, ints([list(range(3, 3 + pages))]), ints([length]), page_size)


@pytest.mark.stage(1)
def test_permuted_pages(judge):
    """pages in no order, all rows full"""
    to_csr(judge, ints([[8, 0, 5], [7, 2, 6], [1, 9, 4]]), ints([12, 9, 11]), 4)


@pytest.mark.stage(1)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_ragged_batch(judge, page_size):
    """a ragged batch"""
    rng = generator(1)
    of = batch(rng, ragged(rng, 5, page_size, 4 * page_size), page_size)
    to_csr(judge, of.table, of.context_lens, page_size)


# Stage 2: CSR at its edges


@pytest.mark.stage(2)
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64], ids=["table int32", "table int64"])
@INTEGERS
def test_always_int32(judge, dtype, table_dtype):
    """all three results are int32, whatever integers come in"""
    to_csr(
        judge, ints([[3, 1], [0, 2]], table_dtype), ints([5, 5], dtype), 4, "FlashInfer takes int32 and nothing else."
    )


@pytest.mark.stage(2)
@pytest.mark.parametrize("poison", [999, -1, 2**30])
def test_a_wider_table(judge, poison):
    """a table wider than any row needs, poison past the live part"""
    wide = [[*(page for page in row if page >= 0), *[poison] * 8][:8] for row in TABLE]
    to_csr(judge, ints(wide), ints(LENS), PAGE)


@pytest.mark.stage(2)
def test_a_table_that_is_a_view(judge):
    """a block table cut out of a larger one"""
    whole = ints([[0, *row, 0] for row in TABLE] + [[0] * 5])
    to_csr(judge, whole[:3, 1:4], ints(LENS), PAGE)


@pytest.mark.stage(2)
def test_an_empty_batch(judge):
    """no sequences, B = 0"""
    to_csr(judge, ints([]).view(0, 3), ints([]), PAGE)


@pytest.mark.stage(2)
def test_vectorised(judge):
    """as many torch operations for 256 sequences as for 2"""

    def arguments(n):
        return ints([[3, 1, 2]] * n), ints([9] * n), 4

    judge.no_growth("block_table_to_csr", arguments, 2, 256, "sequences", MASKED)


@pytest.mark.stage(2)
@pytest.mark.parametrize(
    ("table", "lens", "page_size", "because"),
    [
        ([[9, 3, 7], [2, 0, 0], [5, 1, 0]], [9, 0, 5], 4, "row 1 has no tokens"),
        ([[9, 3, 7], [2, 0, 0], [5, 1, 0]], [9, 2, -5], 4, "row 2 has -5 tokens"),
        ([[9, 3]], [9], 4, "row 0 needs 3 pages and the table has 2 columns: a mask would cut it short"),
        ([[9, 3], [1, 2]], [8, 9], 4, "row 1 needs 3 pages and the table has 2 columns"),
        ([[9, -1, 7], [2, 0, 0]], [9, 2], 4, "row 0 has page -1 in use"),
        ([[9, 3, 7], [-2, 0, 0]], [9, 2], 4, "row 1 has page -2 in use"),
        ([[9, 3, 7]], [9, 2], 4, "there are 2 lengths for 1 row"),
        ([[9, 3, 7], [2, 0, 0]], [9], 4, "there is 1 length for 2 rows"),
        ([[9, 3, 7]], [9], 0, "a page of 0 tokens holds nothing"),
        ([[9, 3, 7]], [9], -4, "a page cannot have -4 tokens"),
    ],
    ids=["length 0", "negative length", "narrow table", "narrow for one row", "page -1 in use", "page -2 in use",
         "more lengths", "fewer lengths", "page size 0", "negative page size"],
)  # fmt: skip
def test_csr_refuses(judge, table, lens, page_size, because):
    """what block_table_to_csr must refuse"""
    judge.refuses("block_table_to_csr", ints(table), ints(lens), page_size, because=because)


@pytest.mark.stage(2)
@few
@given(seed=st.integers(0, 2**20), batch_size=st.integers(1, 7), page_size=st.integers(1, 17))
def test_random_batches(judge, seed, batch_size, page_size):
    """random batches"""
    rng = generator(seed)
    of = batch(rng, ragged(rng, batch_size, page_size, 4 * page_size), page_size)
    to_csr(judge, of.table, of.context_lens, page_size)


# Stage 3: CSR to block table


def from_csr(judge, indptr, indices, last, *rest):
    return judge.agrees("csr_to_block_table", indptr, indices, last, *rest, oracle=_oracle.csr_to_block_table)


@pytest.mark.stage(3)
@INTEGERS
def test_way_back(judge, dtype):
    """the worked example the other way"""
    from_csr(judge, ints(INDPTR, dtype), ints(INDICES, dtype), ints(LAST, dtype), PAGE)


@pytest.mark.stage(3)
@pytest.mark.parametrize("last", [1, 16])
def test_one_page(judge, last):
    """one sequence of one page"""
    from_csr(judge, ints([0, 1]), ints([5]), ints([last]), 16)


@pytest.mark.stage(3)
@pytest.mark.parametrize("max_blocks", [3, 8])
def test_max_blocks(judge, max_blocks):
    """a table of max_blocks columns, padded with 0"""
    from_csr(judge, ints(INDPTR), ints(INDICES), ints(LAST), PAGE, max_blocks)


@pytest.mark.stage(3)
def test_way_back_of_nothing(judge):
    """no sequences, B = 0"""
    from_csr(judge, ints([0]), ints([]), ints([]), PAGE)


@pytest.mark.stage(3)
def test_way_back_vectorised(judge):
    """as many torch operations for 256 sequences as for 2"""

    def arguments(n):
        return ints(range(0, 2 * n + 1, 2)), ints(range(2 * n)), ints([3] * n), 4

    judge.no_growth("csr_to_block_table", arguments, 2, 256, "sequences", MASKED)


@pytest.mark.stage(3)
@pytest.mark.parametrize(
    ("indptr", "indices", "last", "page_size", "max_blocks", "because"),
    [
        ([1, 3, 4, 6], INDICES, LAST, 4, None, "indptr starts at 1"),
        ([0, 4, 3, 6], INDICES, LAST, 4, None, "indptr decreases from 4 to 3"),
        ([0], INDICES, LAST, 4, None, "indptr has 1 entry for 3 sequences"),
        ([0, 3, 4, 5, 6], INDICES, LAST, 4, None, "indptr has 5 entries for 3 sequences"),
        ([0, 3, 4, 5], INDICES, LAST, 4, None, "indptr ends at 5 and there are 6 indices"),
        ([0, 3, 4, 9], INDICES, LAST, 4, None, "indptr ends at 9 and there are 6 indices"),
        ([0, 2, 2, 5], INDICES[:5], LAST, 4, None, "sequence 1 has no pages"),
        (INDPTR, INDICES, [1, 5, 1], 4, None, "sequence 1 has 5 tokens in a page of 4"),
        (INDPTR, INDICES, [0, 2, 1], 4, None, "sequence 0 has 0 tokens in its last page"),
        (INDPTR, INDICES, [1, 2, -1], 4, None, "sequence 2 has -1 tokens in its last page"),
        (INDPTR, INDICES, LAST, 4, 2, "sequence 0 has 3 pages and max_blocks is 2"),
        (INDPTR, INDICES, LAST, 0, None, "a page of 0 tokens holds nothing"),
    ],
    ids=["starts at 1", "decreases", "too short", "too long", "ends early", "ends late", "no pages", "last above page",
         "last 0", "last negative", "max_blocks too small", "page size 0"],
)  # fmt: skip
def test_way_back_refuses(judge, indptr, indices, last, page_size, max_blocks, because):
    """what csr_to_block_table must refuse"""
    args = ints(indptr), ints(indices), ints(last), page_size, max_blocks
    judge.refuses("csr_to_block_table", *args, because=because)


@pytest.mark.stage(3)
@few
@given(seed=st.integers(0, 2**20), batch_size=st.integers(1, 7), page_size=st.integers(1, 17))
def test_round_trips(judge, seed, batch_size, page_size):
    """there and back again, both ways"""
    rng = generator(seed)
    of = batch(rng, ragged(rng, batch_size, page_size, 4 * page_size), page_size)
    csr = to_csr(judge, of.table, of.context_lens, page_size).returned
    table, lens = from_csr(judge, *csr, page_size, of.table.shape[1]).returned
    to_csr(judge, table, lens, page_size)


# Stage 4: plan and run


def decodes(judge, args, hint=None, **options):
    close = CLOSE[args[0].dtype]
    return judge.agrees("flashinfer_decode", *args, oracle=_oracle.flashinfer_decode, close=close, hint=hint, **options)


@pytest.mark.stage(4)
def test_decode(judge):
    """a ragged batch, two query heads a KV head"""
    decodes(judge, decode_args(1, LENS)[1])


@pytest.mark.stage(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_decode_dtypes(judge, dtype, page_size):
    """both dtypes, with pages of 1 and of 16"""
    lens = [1, 16, 33, 2048 if ON_GPU else 40]
    decodes(judge, decode_args(2, lens, page_size, dtype=dtype)[1], "plan defaults to float16: pass it both dtypes.")


@pytest.mark.stage(4)
@pytest.mark.parametrize("group", [1, 4, 8, 7, 5])
def test_decode_groups(judge, group):
    """query heads a KV head"""
    decodes(judge, decode_args(3, [9, 2, 5], heads=(2 * group, 2))[1])


@pytest.mark.stage(4)
@pytest.mark.parametrize("heads", [(4, 4), (8, 4)], ids=str)
def test_as_many_heads_as_page_slots(judge, heads):
    """a page as long as there are KV heads, where the wrong kv_layout has the right shape"""
    decodes(
        judge, decode_args(4, LENS, 4, heads)[1], "The cache is [NB, page_size, Hkv, D], which FlashInfer calls NHD."
    )


@pytest.mark.stage(4)
def test_one_sequence(judge):
    """one sequence, B = 1, with heads of 128"""
    decodes(judge, decode_args(5, [7], dim=128)[1], "The scale is 1/sqrt(D): here D is 128, elsewhere 64.")


@pytest.mark.stage(4)
def test_a_skewed_batch(judge):
    """one long sequence among short ones"""
    decodes(judge, decode_args(6, [8192 if ON_GPU else 120, 1, 3, 2, 5, 1], 16)[1])


@pytest.mark.stage(4)
def test_many_pages(judge):
    """2,048 pages of one token"""
    decodes(judge, decode_args(7, [2047, 1], 1, heads=(2, 1))[1], "Does the workspace hold the partial outputs?")


@pytest.mark.stage(4)
def test_lengths_of_int64(judge):
    """block tables and lengths of int64"""
    _, args = decode_args(8, LENS, table_dtype=torch.int64)
    decodes(judge, [*args[:4], args[4].long()])


@pytest.mark.stage(4)
def test_a_strided_q(judge):
    """q is a view into a fused QKV tensor"""
    of, args = decode_args(9, LENS)
    qkv = torch.randn(3, 8, 64, generator=generator(1)).half().to(DEVICE)
    decodes(judge, [qkv[:, :4], *args[1:]], or_refuses=REFUSALS + FROM_FLASHINFER)


@pytest.mark.stage(4)
def test_lse_to_base_2(judge):
    """the lse of one token with logit s is s · log2(e)"""
    _, args = decode_args(10, [1], 4, heads=(2, 1))
    outcome = judge.call("flashinfer_decode", *args, True)
    q, k = args[0][0].double().cpu(), args[1][args[3][0, 0], 0, 0].double().cpu()
    logits = (q @ k / 8).tolist()
    got = outcome.returned
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        judge.fail("flashinfer_decode", args, [f"with return_lse=True, expected (o, lse), got a {type(got).__name__}"])
    for h, logit in enumerate(logits):
        seen = float(got[1].reshape(-1)[h])
        if math.isclose(seen, logit, rel_tol=5e-3, abs_tol=1e-3):
            judge.fail("flashinfer_decode", args, [
                f"lse of query head {h} is {seen:.4f}, the logit itself: that is the natural logarithm",
                f"FlashInfer's is to base 2: {logit / math.log(2):.4f}. Return it as it comes",
            ])  # fmt: skip
    judge.agrees(
        "flashinfer_decode", *args, True, oracle=_oracle.flashinfer_decode, close=5e-3, hint="lse is to base 2."
    )


@pytest.mark.stage(4)
def test_lse(judge):
    """o and lse of a ragged batch"""
    _, args = decode_args(11, [9, 2, 16, 30])
    judge.agrees("flashinfer_decode", *args, True, oracle=_oracle.flashinfer_decode, close=5e-3)


@pytest.mark.stage(4)
@pytest.mark.parametrize("return_lse", [False, True], ids=["o", "o and lse"])
def test_the_wrapper_runs(judge, return_lse):
    """the attention is FlashInfer's: planned once, run once"""
    _, args = decode_args(12, LENS)
    seen = judge.call("flashinfer_decode", *args, return_lse).observed.wrapper
    for what in ("planned", "run"):
        if seen[what] != 1:
            judge.fail("flashinfer_decode", args, [
                f"BatchDecodeWithPagedKVCacheWrapper was {what} {seen[what]} times in one decode step, expected once",
            ])  # fmt: skip


@pytest.mark.stage(4)
def test_planned_again(judge):
    """the next step, one token longer, in the same tensors: it needs a plan of its own"""
    of, args = decode_args(13, [5, 9], 4)
    _, k_cache, v_cache, _, context_lens = args
    context_lens -= 1
    decodes(judge, args)
    context_lens += 1  # sequence 0 goes from 4 tokens, one page, to 5, two pages
    decodes(judge, args, "A plan holds for the lengths it was made with: plan again in every step.")


# Stage 5: what FlashInfer does not notice


def spoil(**changes):
    """The arguments of a good call with some replaced; a change is a function of the good ones."""

    def apply():
        _, args = decode_args(14, LENS, heads=(4, 2))
        named = dict(zip(("q", "k_cache", "v_cache", "block_tables", "context_lens"), args))
        return [*(named | {name: change(named) for name, change in changes.items()}).values()]

    return apply


def entry(row, column, page):
    def change(named):
        table = named["block_tables"].clone()
        table[row, column] = page
        return table

    return change


SILENT = {
    "more queries than sequences": (
        spoil(q=lambda a: a["q"].repeat(2, 1, 1)[:4].contiguous()), "q has 4 rows for 3 sequences"
    ),
    "fewer queries than sequences": (spoil(q=lambda a: a["q"][:2]), "q has 2 rows for 3 sequences"),
    "heads that do not divide": (
        spoil(q=lambda a: torch.ones(3, 5, 64, dtype=torch.float16, device=DEVICE)), "5 query heads over 2 KV heads"
    ),
    "another head dim": (
        spoil(q=lambda a: torch.ones(3, 4, 128, dtype=torch.float16, device=DEVICE)), "q has head dim 128, the cache 64"
    ),
    "q of another dtype": (spoil(q=lambda a: a["q"].bfloat16()), "q is bfloat16, the caches float16"),
    "v of another dtype": (spoil(v_cache=lambda a: a["v_cache"].bfloat16()), "v_cache is bfloat16, k_cache float16"),
    "v of another shape": (spoil(v_cache=lambda a: a["v_cache"][:-1]), "v_cache has a page less than k_cache"),
    "interleaved caches": (
        spoil(k_cache=lambda a: torch.stack([a["k_cache"], a["v_cache"]], 1)[:, 0]),
        "k_cache is kv[:, 0], not contiguous, while v_cache is: they are read with the same strides",
    ),
    "a page past the pool": (spoil(block_tables=entry(1, 0, 10_000)), "sequence 1 is on page 10000"),
    "a negative page": (spoil(block_tables=entry(2, 1, -1)), "sequence 2 has page -1 in use"),
    "a length of 0": (spoil(context_lens=lambda a: ints([9, 0, 5])), "sequence 1 has no tokens"),
    "a narrow table": (
        spoil(block_tables=lambda a: a["block_tables"][:, :2].contiguous()), "sequence 0 needs 3 pages of 2 columns"
    ),
}  # fmt: skip


@pytest.mark.stage(5)
@pytest.mark.parametrize("spoiled", SILENT)
def test_silent(judge, spoiled):
    """must be refused before FlashInfer sees it"""
    arguments, because = SILENT[spoiled]
    judge.refuses("flashinfer_decode", *arguments(), because=because, also=FROM_FLASHINFER)


@pytest.mark.stage(5)
def test_a_strided_last_dimension(judge):
    """a q whose last dimension has gaps: read as it is, or refused"""
    _, args = decode_args(15, LENS)
    q = torch.randn(3, 4, 128, generator=generator(2)).half().to(DEVICE)[:, :, ::2]
    decodes(judge, [q, *args[1:]], or_refuses=REFUSALS + FROM_FLASHINFER)


@pytest.mark.stage(5)
@pytest.mark.skipif(ON_GPU, reason="needs the stand-in: the real wrapper's error ends the capture and the process' GPU")
def test_in_a_capture(judge):
    """called while a CUDA graph is captured: planning reads on the host, which a graph cannot hold"""
    _, args = decode_args(16, LENS)
    if judge.impl.run("flashinfer_decode", *args, capturing=True).raised is None:
        judge.fail("flashinfer_decode", args, [
            "returned as if all were well, but a CUDA graph is being captured",
            "plan() raises then, for it reads on the host: let its error out",
        ])  # fmt: skip


# Stage 6: one plan for all layers


def layers_args(layers=3, **options):
    """Arguments of flashinfer_decode_layers: the same pages in every layer, other numbers in them."""
    rng = generator(20)
    of, (q, k_cache, v_cache, table, lens) = decode_args(21, LENS, **options)
    qs, kv_caches = [q], [(k_cache, v_cache)]
    for _ in range(layers - 1):
        qs.append(torch.randn(q.shape, generator=rng).to(q.dtype).to(DEVICE))
        kv_caches.append(filled_caches(rng, of, k_cache.shape[2], k_cache.shape[3], k_cache.dtype))
    return [qs, kv_caches, table, lens]


@pytest.mark.stage(6)
@pytest.mark.parametrize("layers", [1, 3])
def test_layers(judge, layers):
    """every layer with its own q and caches"""
    args = layers_args(layers)
    judge.agrees("flashinfer_decode_layers", *args, oracle=_oracle.flashinfer_decode_layers, close=3e-3)


@pytest.mark.stage(6)
@pytest.mark.parametrize(
    ("dtype", "heads"), [(torch.bfloat16, (8, 2)), (torch.float16, (7, 1))], ids=["bf16", "group 7"]
)
def test_layers_planned_right(judge, dtype, heads):
    """the plan's dtypes and groups"""
    args = layers_args(2, dtype=dtype, heads=heads)
    judge.agrees("flashinfer_decode_layers", *args, oracle=_oracle.flashinfer_decode_layers, close=CLOSE[dtype])


@pytest.mark.stage(6)
def test_planned_once(judge):
    """3 layers: one plan, three runs"""
    args = layers_args(3)
    seen = judge.call("flashinfer_decode_layers", *args).observed.wrapper
    for what, most in (("constructed", 1), ("planned", 1), ("run", 3)):
        if seen[what] > most or (what != "constructed" and seen[what] < most):
            judge.fail("flashinfer_decode_layers", args, [
                f"the wrapper was {what} {seen[what]} times for 3 layers, expected {'at most ' * (most == 1)}{most}",
                "the pages are the same in each layer: a plan takes longer than the attention it plans",
            ])  # fmt: skip


@pytest.mark.stage(6)
def test_layers_planned_again(judge):
    """the next step, one token longer, in the same tensors"""
    args = layers_args(2)
    args[3] -= ints([1, 0, 1])
    judge.agrees("flashinfer_decode_layers", *args, oracle=_oracle.flashinfer_decode_layers, close=3e-3)
    args[3] += ints([1, 0, 1])
    judge.agrees(
        "flashinfer_decode_layers", *args, oracle=_oracle.flashinfer_decode_layers, close=3e-3,
        hint="A plan holds for the lengths it was made with: plan once in every step.",
    )  # fmt: skip


def layer(which, **changes):
    """Spoil one layer of a good call."""

    def apply():
        args = layers_args(3)
        qs, kv_caches = args[:2]
        if "q" in changes:
            qs[which] = changes["q"](qs[which])
        if "kv" in changes:
            kv_caches[which] = changes["kv"](*kv_caches[which])
        return args

    return apply


LAYERS_REFUSED = {
    "more heads in a later layer": (
        layer(1, q=lambda q: q.repeat(1, 2, 1)), "layer 1 has 8 query heads, the plan is for 4"
    ),
    "another dtype in a later layer": (layer(2, q=lambda q: q.bfloat16()), "layer 2's q is bfloat16"),
    "another page size in a later layer": (
        layer(1, kv=lambda k, v: (k.view(-1, 2, 2, 64), v.view(-1, 2, 2, 64))),
        "layer 1 has pages of 2, the plan is for 4",
    ),
    "other KV heads in a later layer": (
        layer(2, kv=lambda k, v: (k[:, :, :1].contiguous(), v[:, :, :1].contiguous())), "layer 2 has 1 KV head, not 2"
    ),
    "more rows in a later layer": (layer(1, q=lambda q: q.repeat(2, 1, 1)), "layer 1 has 6 queries for 3 sequences"),
    "a smaller pool in a later layer": (
        layer(1, kv=lambda k, v: (k[:2].contiguous(), v[:2].contiguous())), "layer 1's pool ends before pages in use"
    ),
    "fewer caches than queries": (lambda: [a[:2] if i == 1 else a for i, a in enumerate(layers_args(3))], "2 caches"),
}  # fmt: skip


@pytest.mark.stage(6)
@pytest.mark.parametrize("spoiled", LAYERS_REFUSED)
def test_layers_refuse(judge, spoiled):
    """must be refused before FlashInfer sees it"""
    arguments, because = LAYERS_REFUSED[spoiled]
    judge.refuses("flashinfer_decode_layers", *arguments(), because=because, also=FROM_FLASHINFER)


# Stage 7: without a host read


def into_args(table, lens, page_size, room=None):
    """Arguments of block_table_to_csr_into, its buffers between guards and full of numbers that are no result."""
    pages = sum(-(-n // page_size) for n in lens.tolist())
    buffers = [guarded((n,), torch.int32, 8) for n in (len(lens) + 1, pages if room is None else room, len(lens))]
    return [table, lens, page_size, *buffers]


def into(judge, *args, hint=None):
    judge.agrees("block_table_to_csr_into", *args, oracle=_oracle.block_table_to_csr_into, hint=hint)


@pytest.mark.kernel
@pytest.mark.stage(7)
def test_into(judge):
    """the worked example, into buffers"""
    into(judge, *into_args(ints(TABLE), ints(LENS), PAGE))


@pytest.mark.kernel
@pytest.mark.stage(7)
def test_into_larger_buffers(judge):
    """indices with room to spare: what is past the last page stays as it was"""
    into(judge, *into_args(ints(TABLE), ints(LENS), PAGE, room=20))


@pytest.mark.kernel
@pytest.mark.stage(7)
@pytest.mark.parametrize("lens", [[9, 0, 5], [0, 2, 0], [0, 0, 0], [9, 2, 0]], ids=str)
def test_into_empty_rows(judge, lens):
    """rows of length 0, the padding of a captured batch: no pages, a last_page_len of 0"""
    into(judge, *into_args(ints(TABLE), ints(lens), PAGE, room=8))


@pytest.mark.kernel
@pytest.mark.stage(7)
@pytest.mark.parametrize("room", [5, 3, 1])
def test_into_too_little_room(judge, room):
    """indices too small: nothing past its end, and indptr tells what was needed"""
    into(judge, *into_args(ints(TABLE), ints(LENS), PAGE, room=room))


@pytest.mark.kernel
@pytest.mark.stage(7)
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64], ids=["table int32", "table int64"])
@INTEGERS
def test_into_dtypes(judge, dtype, table_dtype):
    """int32 and int64 come in, int32 goes out"""
    into(judge, *into_args(ints(TABLE, table_dtype), ints(LENS, dtype), PAGE))


@pytest.mark.kernel
@pytest.mark.stage(7)
def test_into_a_view(judge):
    """a block table cut out of a larger one, its row stride not its width"""
    whole = ints([[0, *row, 0] for row in TABLE] + [[0] * 5])
    into(judge, *into_args(whole[:3, 1:4], ints(LENS), PAGE))


@pytest.mark.kernel
@pytest.mark.stage(7)
@pytest.mark.parametrize("lens", [[16, 32, 1], [1], [15, 16, 17, 31, 32, 33]], ids=str)
def test_into_exact_multiples(judge, lens):
    """lengths at and around multiples of the page"""
    of = batch(generator(30), lens, 16)
    into(judge, *into_args(of.table, of.context_lens, 16))


@pytest.mark.kernel
@pytest.mark.stage(7)
@pytest.mark.parametrize(("batch_size", "longest"), [(70, 12), (3, 5000)], ids=["70 rows", "1,250 pages in a row"])
def test_into_large(judge, batch_size, longest):
    """more rows, or more pages, than a small tile holds"""
    rng = generator(31)
    of = batch(rng, ragged(rng, batch_size, 4, longest), 4)
    into(judge, *into_args(of.table, of.context_lens, 4))


@pytest.mark.kernel
@pytest.mark.stage(7)
def test_no_host_read(judge):
    """one launch of block_table_to_csr_kernel, and no value read on the host"""
    args = into_args(ints(TABLE), ints(LENS), PAGE)
    before = [*args]
    seen = judge.call("block_table_to_csr_into", *args, forbid_sync=True).observed
    problem = None
    if seen.host_reads:
        problem = [f"reads device data on the host, which no CUDA graph can replay: {seen.host_reads[0]}"]
    elif seen.torch_writes:
        problem = [f"torch's {seen.torch_writes[0]} wrote into the buffers: the kernel is to do it"]
    elif seen.launches != {"block_table_to_csr_kernel": 1}:
        found = ", ".join(f"{name} {n} times" for name, n in seen.launches.items()) or "no kernel"
        problem = [f"launched {found}, expected block_table_to_csr_kernel once"]
    if problem:
        judge.fail("block_table_to_csr_into", before, problem)


INTO_REFUSED = {
    "indptr too short": (lambda a: {3: a[3][:3]}, "indptr has 3 entries for 3 sequences, it needs 4"),
    "last_page_len too short": (lambda a: {5: a[5][:2]}, "last_page_len has 2 entries for 3 sequences"),
    "indptr of int64": (lambda a: {3: a[3].long()}, "indptr is int64, FlashInfer takes int32"),
    "indices of int64": (lambda a: {4: a[4].long()}, "indices are int64, FlashInfer takes int32"),
    "last_page_len of int64": (lambda a: {5: a[5].long()}, "last_page_len is int64, FlashInfer takes int32"),
    "fewer lengths than rows": (lambda a: {1: a[1][:2]}, "there are 2 lengths for 3 rows"),
    "page size 0": (lambda a: {2: 0}, "a page of 0 tokens holds nothing"),
}


@pytest.mark.kernel
@pytest.mark.stage(7)
@pytest.mark.parametrize("spoiled", INTO_REFUSED)
def test_into_refuses(judge, spoiled):
    """what can be refused without reading a value"""
    change, because = INTO_REFUSED[spoiled]
    args = into_args(ints(TABLE), ints(LENS), PAGE)
    for at, value in change(args).items():
        args[at] = value
    judge.refuses("block_table_to_csr_into", *args, because=because)


@pytest.mark.kernel
@pytest.mark.stage(7)
@few
@given(seed=st.integers(0, 2**20), page_size=st.integers(1, 9), data=st.data())
def test_into_random(judge, seed, page_size, data):
    """random batches with empty rows"""
    lens = data.draw(st.lists(st.integers(0, 4 * page_size), min_size=1, max_size=6), label="lengths")
    of = batch(generator(seed), lens, page_size)
    pages = sum(len(row) for row in of.rows)
    room = data.draw(st.integers(max(1, pages - 2), pages + 3), label="room")
    into(judge, *into_args(of.table, of.context_lens, page_size, room))


@pytest.mark.gpu("a CUDA graph is captured and replayed")
@pytest.mark.kernel
@pytest.mark.stage(7)
def test_replayed(judge):
    """captured once in a CUDA graph, replayed with other lengths and pages"""
    rng = generator(32)
    of = batch(rng, [9, 2, 5, 30], 4, extra_columns=4)
    args = into_args(of.table, of.context_lens, 4, room=24)
    replay, _ = judge.impl.capture("block_table_to_csr_into", *args)
    for lens in ([9, 2, 5, 30], [1, 0, 12, 31], [0, 0, 0, 0], [48, 4, 8, 16]):
        other = batch(rng, [max(n, 1) for n in lens], 4, extra_columns=0)
        args[0].zero_()
        args[0][:, : other.table.shape[1]] = other.table[:, : args[0].shape[1]]
        args[1].copy_(ints(lens))
        wanted = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
        _oracle.block_table_to_csr_into(*wanted)
        replay()
        for name, got, want in zip(("indptr", "indices", "last_page_len"), args[3:], wanted[3:]):
            if not torch.equal(got.cpu(), want):
                judge.fail("block_table_to_csr_into", args, [f"replayed with lengths {lens}: {name} differs",
                           f"    expected {want.tolist()}", f"    got      {got.tolist()}"])  # fmt: skip
