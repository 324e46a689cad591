"""L4's suite fails each mistake of its catalogue, and calls most by their name."""

from __future__ import annotations

import pytest

from drills import catalog
from drills.mistakes import proof
from selftests import mistakes

DRILL = catalog.find("L4")
RESULTS: dict[str, proof.Proof] = {}


@pytest.mark.parametrize("entry", mistakes.entries(DRILL))
def test_fails(entry):
    mistakes.check_fails(entry, RESULTS)


def test_no_two_alike():
    mistakes.check_no_two_alike(DRILL, RESULTS)


def test_diagnosis():
    mistakes.check_diagnosis(DRILL, RESULTS)
