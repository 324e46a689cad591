"""What the tests feed an implementation: random batches, caches inside guard regions, and copies of a call's arguments.

Nothing here is what a real engine would have by accident: page ids are permuted and some pages belong to nobody,
lengths are ragged and some are exact multiples of the page, whatever the contract says is never read is poison.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings

from drills.lane import DEVICE

EXAMPLES = int(os.environ.get("DRILLS_EXAMPLES", 20))  # fewer where the suite is run on hundreds of functions

# Random tests: the same examples in every run, cut down to the smallest that fails.
few = settings(
    max_examples=EXAMPLES,
    phases=[Phase.generate, Phase.shrink] if EXAMPLES >= 20 else [Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
)
POISON = (-1, 2**30, 999, -7)  # page ids past the live part of a row: reading one must show
GUARD_ROWS = 12


def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor of integers on the lane's device."""
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randint(rng: torch.Generator, low: int, high: int) -> int:
    """One integer in low..high, both included."""
    return int(torch.randint(low, high + 1, (1,), generator=rng))


def numbers(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values of any dtype: quarters that every float type holds exactly (so that a message reads well), or integers."""
    whole = torch.randint(-14, 15, shape, generator=rng)
    if dtype.is_floating_point:
        return (whole.float() / 4).to(dtype).to(DEVICE)
    return whole.to(dtype).to(DEVICE)


def any_bits(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a dtype, NaN payloads, infinities and -0.0 included: a copy must not touch them."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=rng)
    return raw.view(dtype).to(DEVICE)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, row: int | None = None) -> torch.Tensor:
    """A contiguous tensor in the middle of a larger allocation; all of it holds a pattern of values below -100.

    A write that leaves the tensor lands in the guards, where the judge sees it. `row`: the elements of one row
    (default: of the last dimension); there are GUARD_ROWS of them on either side.
    """
    row = row or shape[-1]
    size = torch.Size(shape).numel()
    pattern = -(torch.arange(size + 2 * GUARD_ROWS * row) % 17) - 101
    if not dtype.is_floating_point or dtype.itemsize > 1:
        whole = pattern.to(dtype)
    else:
        whole = (pattern % 17 + 101).to(torch.uint8).view(dtype)  # fp8 has no -101: take its bits as they come
    return whole.to(DEVICE)[GUARD_ROWS * row : GUARD_ROWS * row + size].view(shape)


def caches(
    blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty k_cache and v_cache [NB, BS, H, D], each between guards of its own."""
    shape = (blocks, block_size, heads, dim)
    return guarded(shape, dtype, heads * dim), guarded(shape, dtype, heads * dim)


@dataclass
class Batch:
    """Sequences in pages: a block table with poison past each row's live part."""

    page_size: int
    pool: int  # pages in the cache; not all are in use
    lens: list[int]
    rows: list[list[int]]  # the pages of each sequence, no more than it needs
    table: torch.Tensor  # [B, W] int32
    context_lens: torch.Tensor  # [B] int32


def batch(
    rng: torch.Generator, lens: list[int], page_size: int, extra_columns: int = 2, dtype: torch.dtype = torch.int32
) -> Batch:
    """A batch with these lengths, its page ids a random permutation of part of the pool."""
    counts = [-(-n // page_size) for n in lens]
    pool = sum(counts) + 3
    ids = torch.randperm(pool, generator=rng).tolist()
    rows = [[ids.pop() for _ in range(count)] for count in counts]
    width = max(counts, default=0) + extra_columns
    table = [[*row, *(POISON[(b + c) % len(POISON)] for c in range(width - len(row)))] for b, row in enumerate(rows)]
    return Batch(page_size, pool, lens, rows, ints(table, dtype).view(len(lens), width), ints(lens, dtype))


def ragged(rng: torch.Generator, batch_size: int, page_size: int, longest: int) -> list[int]:
    """Random lengths from 1 to `longest`; one is a single token, one an exact multiple of the page."""
    lens = [randint(rng, 1, longest) for _ in range(batch_size)]
    if batch_size >= 2:
        lens[0], lens[-1] = page_size * max(1, longest // page_size), 1
    return lens


def filled_caches(
    rng: torch.Generator, of: Batch, heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches that hold random K and V where the batch has tokens, and NaN everywhere else: it is never used."""
    pair = caches(of.pool, of.page_size, heads, dim, dtype)
    for cache in pair:
        cache.fill_(float("nan"))
        for row, length in zip(of.rows, of.lens):
            for position in range(length):
                page, offset = row[position // of.page_size], position % of.page_size
                cache[page, offset] = torch.randn(heads, dim, generator=rng).to(dtype).to(DEVICE)
    return pair


def decode_args(
    seed: int,
    lens: list[int],
    page_size: int = 4,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    dtype: torch.dtype = torch.float16,
    table_dtype: torch.dtype = torch.int32,
) -> tuple[Batch, list[Any]]:
    """A batch, and what every decode takes: [q, k_cache, v_cache, block_tables, context_lens].

    heads: (query heads, KV heads). The caches hold NaN wherever no token is, the table poison.
    """
    rng = generator(seed)
    of = batch(rng, lens, page_size, dtype=table_dtype)
    q = torch.randn(len(lens), heads[0], dim, generator=rng).to(dtype).to(DEVICE)
    return of, [q, *filled_caches(rng, of, heads[1], dim, dtype), of.table, of.context_lens]


def far_page() -> tuple[list[Any], torch.Tensor, torch.Tensor]:
    """A sequence of 3 tokens in a page whose offset in the cache does not fit in int32.

    Returns [q, k_cache, v_cache, block_tables, context_lens], what the page holds (K and V alike, [1, BS, 1, D]), and
    what is found instead where the offset has wrapped. One allocation of 9 GiB, most of which is never touched.
    """
    pages, shape, before, page = 131_074, (256, 1, 64), 2**31, 131_073  # 2^31 values are 131,072 such pages
    room = torch.empty(before + pages * 2**14, dtype=torch.float16, device=DEVICE)
    cache, rng = room[before:].view(pages, *shape), generator(28)
    held, wrapped = (torch.randn(1, *shape, generator=rng).half().to(DEVICE) for _ in range(2))
    cache[page] = held[0]
    at = page * 2**14 - 2**32 + before
    room[at : at + 2**14] = wrapped.flatten()
    q = torch.randn(1, 1, 64, generator=rng).half().to(DEVICE)
    return [q, cache, cache, ints([[page, *[0] * 1024]])[:, :1], ints([3, *[0] * 1024])[:1]], held, wrapped


def copy_of(value: Any, device: str | None = None, pad: int = 0) -> Any:
    """Arguments copied with their whole allocations: views keep strides, offsets and what they share, guards included.

    pad: as many bytes more (a multiple of 64) on either side of each allocation, so that wrong code stays inside.
    """
    made: dict[tuple[int, str], torch.Tensor] = {}

    def copy(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            target = device or str(x.device)
            key = (storage.data_ptr(), target)
            if key not in made:
                raw = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
                made[key] = torch.zeros(len(raw) + 2 * pad, dtype=torch.uint8, device=target)
                made[key][pad : pad + len(raw)] = raw
            offset = x.storage_offset() + pad // x.element_size()
            empty = torch.empty(0, dtype=x.dtype, device=target)
            return empty.set_(made[key].untyped_storage(), offset, x.size(), x.stride())
        if isinstance(x, (list, tuple)):
            items = [copy(item) for item in x]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)  # a named tuple takes them one by one
        return x

    return copy(value)


def has_room(gib: int) -> bool:
    """Whether one allocation of so many GiB can be had here. On a CPU only what is touched of it takes memory."""
    try:
        torch.empty(gib << 30, dtype=torch.int8, device=DEVICE)
    except RuntimeError:
        return False
    return True


def allocation(x: torch.Tensor) -> torch.Tensor:
    """All of the memory that a view lives in, in elements of its dtype, on the CPU."""
    storage = x.untyped_storage()
    return (
        torch.empty(0, dtype=x.dtype, device=x.device)
        .set_(storage, 0, torch.Size([len(storage) // x.element_size()]), [1])
        .cpu()
    )
