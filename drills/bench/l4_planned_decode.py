"""L4's speed: a planned step, against FlashInfer and the floor. The plan itself is timed apart, by the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from drills.bench._decode import PAGE, SHAPES, Step
from drills.implementation import Implementation


def cases(impl: Implementation) -> Iterator[tuple[str, dict[str, float]]]:
    plan, decode = impl.function("plan_decode"), impl.function("planned_decode")
    for name, (lens, kv_heads) in SHAPES.items():
        step = Step(lens, kv_heads)
        args = torch.tensor(lens), PAGE, kv_heads, programs(lens, kv_heads)
        work = plan(*args)
        begun = time.perf_counter()
        plan(*args)
        spent = (time.perf_counter() - begun) * 1e6
        work = type(work)(*(x.cuda() for x in work))
        title = f"planned_decode, {name} (planned in {spent:.0f} us)"
        yield title, step.times({impl.name: step.calls(decode, work)} | step.flashinfer())


def programs(lens: list[int], kv_heads: int) -> int:
    """How many programs to plan for: what plan_decode's docstring says did best."""
    ragged = max(lens) > 1.5 * sum(lens) / len(lens)
    more = sum(lens) * kv_heads // 1024 if ragged else 0
    return max(4 * torch.cuda.get_device_properties(0).multi_processor_count, len(lens) * kv_heads + more)
