"""The suite passes right implementations that are written another way, and diagnoses nothing in them."""

from __future__ import annotations

import pytest

from drills import catalog
from drills.mistakes import proof
from selftests.alternatives import ALTERNATIVES


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_passes(name):
    function = ALTERNATIVES[name]()
    drill, _ = catalog.owner(function.__name__)
    stages = {n for n, stage in enumerate(drill.stages, 1) if stage.function == function.__name__}
    result = proof.run(name, function, lambda test, stage: stage in stages)
    assert not result.failed, "\n\n".join(result.failed.values())
    assert result.passed


def test_there_are_enough():
    """Every function of every drill has at least one, and there are fifteen or more."""
    covered = {factory().__name__ for factory in ALTERNATIVES.values()}
    assert covered == {function.name for drill in catalog.DRILLS for function in drill.functions}
    assert len(ALTERNATIVES) >= 15
