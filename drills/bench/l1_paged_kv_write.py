"""L1's speed: writing rows, against copying as many bytes and the other ways to write them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from drills.bench.timing import medians
from drills.implementation import Implementation

H, D, BLOCK_SIZE = 8, 128, 16
BYTES_IN_FLIGHT = 1 << 29  # of inputs and outputs a round: several times the last-level cache


def cases(impl: Implementation) -> Iterator[tuple[str, dict[str, float]]]:
    for tokens in (256, 8192, 65536):
        yield f"reshape_and_cache, T={tokens}", paged_kv_write(impl, tokens)


def paged_kv_write(impl: Implementation, tokens: int) -> dict[str, float]:
    """fp16, K and V views of one fused QKV tensor, slots in random order."""
    write = impl.function("reshape_and_cache")
    bytes_a_call = 4 * tokens * H * D * 2
    sets = max(2, min(64, BYTES_IN_FLIGHT // bytes_a_call))
    blocks = 2 * tokens // BLOCK_SIZE + 1
    candidates: dict[str, list] = {"copy": [], impl.name: [], "flashinfer append": [], "index_put": []}
    for _ in range(sets):
        qkv = torch.randn(tokens, 3, H, D, device="cuda", dtype=torch.float16)
        key, value = qkv[:, 1], qkv[:, 2]
        k_cache = torch.zeros(blocks, BLOCK_SIZE, H, D, device="cuda", dtype=torch.float16)
        v_cache = torch.zeros_like(k_cache)
        slots = torch.randperm(blocks * BLOCK_SIZE, device="cuda")[:tokens]
        source = torch.randn(2 * tokens, H, D, device="cuda", dtype=torch.float16)
        target = torch.empty_like(source)
        candidates["copy"].append(functools.partial(target.copy_, source))
        candidates[impl.name].append(functools.partial(write, key, value, k_cache, v_cache, slots))
        candidates["index_put"].append(functools.partial(_index_put, key, value, k_cache, v_cache, slots))
        append = _flashinfer_append(key, value, k_cache, v_cache)
        if append is not None:
            candidates["flashinfer append"].append(append)
    return medians({name: calls for name, calls in candidates.items() if calls})


def _index_put(key, value, k_cache, v_cache, slots):
    k_cache.view(-1, H, D)[slots] = key
    v_cache.view(-1, H, D)[slots] = value


def _flashinfer_append(key, value, k_cache, v_cache):
    """FlashInfer's own writer on the same amount of data: full blocks in random order, tokens shuffled."""
    try:
        import flashinfer
    except ImportError:
        return None
    tokens = len(key)
    shuffled = torch.randperm(tokens, device="cuda", dtype=torch.int32)
    pages = torch.randperm(len(k_cache), device="cuda", dtype=torch.int32)[: -(-tokens // BLOCK_SIZE)]
    indptr = torch.arange(len(pages) + 1, device="cuda", dtype=torch.int32)
    last = torch.full((len(pages),), BLOCK_SIZE, device="cuda", dtype=torch.int32)
    return functools.partial(
        flashinfer.append_paged_kv_cache,
        key, value, shuffled // BLOCK_SIZE, shuffled % BLOCK_SIZE, (k_cache, v_cache), pages, indptr, last,
    )  # fmt: skip
