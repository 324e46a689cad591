"""Triton has no build for macOS. This stands in for it there, so that a drill's other functions can be written and run.

`import triton` and `@triton.jit` work; launching a kernel raises. The suite skips what needs a launch.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

WHY = "it has no build for this platform; use Linux, or a Linux container"
MISSING = importlib.util.find_spec("triton") is None


class _Kernel:
    def __init__(self, function: Any):
        self.__name__ = function.__name__

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(f"{self.__name__} cannot be launched without Triton: {WHY}")


def _jit(function: Any = None, **options: Any) -> Any:
    return _jit if function is None else _Kernel(function)


def install_if_missing() -> None:
    """Put the stand-in where `import triton` finds it, unless Triton is there."""
    if not MISSING or "triton" in sys.modules:
        return
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.language, language.constexpr = language, object  # type: ignore[attr-defined]
    triton.jit = _jit  # type: ignore[attr-defined]
    triton.cdiv = lambda x, y: -(-x // y)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    sys.modules["triton"], sys.modules["triton.language"] = triton, language
