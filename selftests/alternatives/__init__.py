"""Right implementations, each written in another way than the reference: a suite that fails one is over-fitted."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from drills import catalog

ALTERNATIVES: dict[str, Callable[[], Callable[..., Any]]] = {}


def alternative(factory: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
    """Enter a factory of a right function; its docstring says in what it is different."""
    assert factory.__doc__, f"{factory.__name__} does not say how it differs"
    assert factory.__name__ not in ALTERNATIVES
    ALTERNATIVES[factory.__name__] = factory
    return factory


for drill in catalog.DRILLS:
    importlib.import_module(f"{__name__}.{drill.module}")
