"""Where code runs: on a GPU, or on the CPU through Triton's interpreter. Import this before anything imports Triton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if ON_GPU else "cpu"


def describe() -> str:
    """The lane of this run, as results name it."""
    if ON_GPU:
        return f"GPU, {torch.cuda.get_device_name()}"
    how = "no Triton on this platform"
    if importlib.util.find_spec("triton"):
        how = "Triton's interpreter"
        if _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
            how += " (too old for numpy 2.4, range(n) fails: triton#9171; pip install -U triton, or numpy below 2.4)"
    return f"CPU, {how} and a strict stand-in for FlashInfer"


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])
