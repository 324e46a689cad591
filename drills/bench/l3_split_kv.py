"""L3's speed for several num_splits: the best one depends on the shape."""

from __future__ import annotations

from collections.abc import Iterator

from drills.bench._decode import SHAPES, Step
from drills.implementation import Implementation

SPLITS = (1, 2, 4, 8, 16, 32, 64)


def cases(impl: Implementation) -> Iterator[tuple[str, dict[str, float]]]:
    decode = impl.function("split_kv_decode")
    for name, shape in SHAPES.items():
        step = Step(*shape)
        ours = {f"{impl.name}, {n} splits": step.calls(decode, step.context_lens, n) for n in SPLITS}
        yield f"split_kv_decode, {name}", step.times(ours | step.flashinfer())
