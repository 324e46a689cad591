"""python -m drills.bench: the speed of what DRILLS_IMPL selects (mine by default), on a GPU."""

from __future__ import annotations

import functools
import sys

import torch
import triton

from drills import implementation
from drills.bench.timing import medians

H, D, BLOCK_SIZE = 8, 128, 16
BYTES_IN_FLIGHT = 1 << 29  # of inputs and outputs a round: several times the last-level cache


@triton.jit
def empty_kernel():
    pass


def paged_kv_write(impl: implementation.Implementation, tokens: int) -> tuple[str, dict[str, float]]:
    """reshape_and_cache, fp16, K and V views of one fused QKV tensor, slots in random order."""
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
    return f"L1 reshape_and_cache, T={tokens}", medians({n: calls for n, calls in candidates.items() if calls})


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


def csr_into(impl: implementation.Implementation, batch: int, pages: int) -> tuple[str, dict[str, float]]:
    """block_table_to_csr_into, all rows full, against a kernel that does nothing."""
    convert = impl.function("block_table_to_csr_into")
    width, page_size = pages // batch, 16
    calls = []
    for _ in range(32):
        tables = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, width)
        lens = torch.full((batch,), width * page_size, device="cuda", dtype=torch.int32)
        sizes = (batch + 1, pages, batch)
        buffers = [torch.zeros(n, device="cuda", dtype=torch.int32) for n in sizes]
        calls.append(functools.partial(convert, tables, lens, page_size, *buffers))
    candidates: dict[str, list] = {"empty kernel": [lambda: empty_kernel[(1,)]()] * len(calls), impl.name: calls}
    return f"F1 block_table_to_csr_into, B={batch}, {pages} pages", medians(candidates)


def main() -> int:
    if not torch.cuda.is_available():
        print("python -m drills.bench needs a GPU, and torch sees none here", file=sys.stderr)
        return 1
    impl = implementation.selected()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {impl.name}")
    for title, times in (
        *(paged_kv_write(impl, tokens) for tokens in (256, 8192, 65536)),
        *(csr_into(impl, batch, 65536) for batch in (64, 256, 1024)),
    ):
        base = next(iter(times))
        print(f"\n{title}")
        for name, time in times.items():
            print(f"  {name:<18} {time:8.2f} us   {times[base] / time:6.1%} of the speed of {base}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
