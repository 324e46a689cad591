"""Where code runs: on a GPU, or on the CPU through Triton's interpreter. Import this before anything imports Triton."""

from __future__ import annotations

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
    how = "Triton's interpreter" if importlib.util.find_spec("triton") else "no Triton on this platform"
    return f"CPU, {how} and a strict stand-in for FlashInfer"
