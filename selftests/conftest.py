"""The repository's own tests: of the seam, the suite, its messages, the catalogue of mistakes and the commands."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

os.environ.setdefault("DRILLS_EXAMPLES", "8")  # this runs the suite on hundreds of functions

from drills import lane  # noqa: F401  (before anything imports Triton)
from drills.tests import _flashinfer_contract

GOLDEN = Path(__file__).parent / "golden"

if not lane.ON_GPU:
    _flashinfer_contract.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew: then read the diff")


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compare a text with selftests/golden/<name>.txt. Line numbers and directories are left out of it."""

    def compare(name: str, text: str) -> None:
        text = re.sub(r"(\.py):\d+", r"\1:N", text)
        text = re.sub(r"/\S+/(?=[\w.]+\.py)", ".../", text).rstrip() + "\n"
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.is_file(), f"{path} is missing: pytest --update-golden writes it"
        assert text == path.read_text(), (
            f"{path.name} differs: if that is meant, pytest --update-golden, and read the diff"
        )

    return compare
