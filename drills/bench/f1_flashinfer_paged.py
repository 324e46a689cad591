"""F1's speed: the conversion for CUDA graphs, against a kernel that does nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import triton

from drills.bench.timing import medians
from drills.implementation import Implementation

PAGES, PAGE_SIZE = 65536, 16


@triton.jit
def empty_kernel():
    pass


def cases(impl: Implementation) -> Iterator[tuple[str, dict[str, float]]]:
    for batch in (64, 256, 1024):
        yield f"block_table_to_csr_into, B={batch}, {PAGES} pages", csr_into(impl, batch)


def csr_into(impl: Implementation, batch: int) -> dict[str, float]:
    """All rows full."""
    convert = impl.function("block_table_to_csr_into")
    width = PAGES // batch
    calls = []
    for _ in range(32):
        tables = torch.randperm(PAGES, device="cuda", dtype=torch.int32).view(batch, width)
        lens = torch.full((batch,), width * PAGE_SIZE, device="cuda", dtype=torch.int32)
        buffers = [torch.zeros(n, device="cuda", dtype=torch.int32) for n in (batch + 1, PAGES, batch)]
        calls.append(functools.partial(convert, tables, lens, PAGE_SIZE, *buffers))
    return medians({"empty kernel": [lambda: empty_kernel[(1,)]()] * len(calls), impl.name: calls})
