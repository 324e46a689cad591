"""L2's speed: one program a (sequence, KV head), against FlashInfer and the floor."""

from __future__ import annotations

from collections.abc import Iterator

from drills.bench._decode import SHAPES, Step
from drills.implementation import Implementation


def cases(impl: Implementation) -> Iterator[tuple[str, dict[str, float]]]:
    for name, shape in SHAPES.items():
        step = Step(*shape)
        calls = step.calls(impl.function("paged_decode"), step.context_lens)
        yield f"paged_decode, {name}", step.times({impl.name: calls} | step.flashinfer())
