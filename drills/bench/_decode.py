"""The decode steps that are timed: fp16, 32 query heads of 128, pages of 16 in random places.

FLOOR is no program: it is the bytes of K and V over the rate at which this card copies, measured in the same run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from drills.bench.timing import medians

HEADS, DIM, PAGE = 32, 128, 16
FLOOR = "copy floor"
BYTES_IN_FLIGHT = 1 << 29  # of K and V over all sets of a shape: several times the last-level cache

_random = torch.randint(1, 8193, (128,), generator=torch.Generator().manual_seed(0)).tolist()
SHAPES: dict[str, tuple[list[int], int]] = {  # lengths, KV heads
    "B=1, 32k": ([32768], 8),
    "B=8, 4k": ([4096] * 8, 8),
    "B=64, 2k": ([2048] * 64, 8),
    "B=64, one of 32k and 63 of 100": ([100] * 31 + [32768] + [100] * 32, 8),
    "B=128, random up to 8192": (_random, 8),
    "B=32, 2k, 32 KV heads": ([2048] * 32, 32),
}


class Step:
    """One shape's inputs, in several sets: each has its own pages, so that no cache holds those of the next call."""

    def __init__(self, lens: list[int], kv_heads: int):
        self.lens, self.kv_heads = lens, kv_heads
        counts = [-(-n // PAGE) for n in lens]
        self.bytes = 2 * sum(lens) * kv_heads * DIM * 2
        sets = max(1, min(8, BYTES_IN_FLIGHT // self.bytes))
        shape = (sets * sum(counts), PAGE, kv_heads, DIM)
        self.k_cache, self.v_cache = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in "kv")
        ids = torch.randperm(shape[0], dtype=torch.int32).view(sets, -1)
        self.indices = [row.cuda() for row in ids]
        self.tables = []
        for row in ids:
            pages = torch.nn.utils.rnn.pad_sequence(row.split(counts), batch_first=True)
            self.tables.append(pages.cuda())
        self.queries = [torch.randn(len(lens), HEADS, DIM, device="cuda", dtype=torch.float16) for _ in ids]
        self.context_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        self.counts = counts

    def calls(self, decode: Callable, *rest) -> list[Callable[[], torch.Tensor]]:
        """decode(q, k_cache, v_cache, block_tables, *rest), a call for each set."""
        return [
            functools.partial(decode, q, self.k_cache, self.v_cache, table, *rest)
            for q, table in zip(self.queries, self.tables)
        ]

    def flashinfer(self) -> dict[str, list[Callable[[], torch.Tensor]]]:
        """FlashInfer's two modes, planned for a CUDA graph. Empty where it is not installed."""
        try:
            import flashinfer
        except ImportError:
            return {}
        found: dict[str, list] = {"flashinfer": [], "flashinfer, tensor cores": []}
        indptr = torch.tensor([0, *self.counts], dtype=torch.int32).cumsum(0).int()
        last = torch.tensor([n - (c - 1) * PAGE for n, c in zip(self.lens, self.counts)], dtype=torch.int32)
        for tensor_cores, calls in enumerate(found.values()):
            for q, indices in zip(self.queries, self.indices):
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"), "NHD",
                    use_cuda_graph=True, use_tensor_cores=bool(tensor_cores),
                    paged_kv_indptr_buffer=indptr.cuda(), paged_kv_indices_buffer=torch.empty_like(indices),
                    paged_kv_last_page_len_buffer=last.cuda(),
                )  # fmt: skip
                wrapper.plan(
                    indptr, indices, last, HEADS, self.kv_heads, DIM, PAGE, q_data_type=q.dtype, kv_data_type=q.dtype
                )
                calls.append(functools.partial(wrapper.run, q, (self.k_cache, self.v_cache), out=torch.empty_like(q)))
        return found

    def times(self, candidates: dict[str, list[Callable[[], torch.Tensor]]]) -> dict[str, float]:
        """The floor, then the medians of the candidates, whose answers must agree: a wrong one has no speed."""
        answers = {name: calls[0]() for name, calls in candidates.items()}
        first, right = next(iter(answers.items()))
        for name, answer in answers.items():
            error = ((answer.float() - right.float()).norm() / right.float().norm()).item()
            if not error < 1e-2:
                raise SystemExit(f"{name} and {first} disagree by {error:.1e} of the norm: no speed is shown")
        return {FLOOR: self.bytes / copy_rate()} | medians(candidates)


@functools.cache
def copy_rate() -> float:
    """Bytes a microsecond, read and written, of a device-to-device copy of 256 MiB."""
    source = torch.randn(1 << 27, device="cuda", dtype=torch.float16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / medians({"copy": [functools.partial(target.copy_, source)]})["copy"]
