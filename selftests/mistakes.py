"""The proof of a drill's catalogue, shared by its two test files: each runs in one process, in order."""

from __future__ import annotations

from collections import defaultdict

import pytest

from drills import catalog
from drills.mistakes import LANES, Mistake, catalogue, proof, shows_here

NAMED_AT_LEAST = 0.85  # of the mistakes whose output can tell, as many must be the first diagnosis of their own output


def entries(drill: catalog.Drill) -> list:
    return [pytest.param(entry, id=entry.name) for entry in catalogue(drill)]


def check_fails(entry: Mistake, results: dict[str, proof.Proof]) -> None:
    """The suite fails this mistake, in the tests that its entry names."""
    if not shows_here(entry):
        pytest.skip(f"needs the other lane, {LANES[entry.lane]}: only there it shows")
    result = results[entry.name] = proof.prove_one(entry, everything=False)
    assert result.failed, f"{entry.name} survives: the suite needs a test that fails it"
    survived = set(entry.fails) - result.killers
    assert not survived, f"{entry.name} is to fail {sorted(survived)}, but fails {sorted(result.killers)}"


def check_no_two_alike(drill: catalog.Drill, results: dict[str, proof.Proof]) -> None:
    """No two mistakes of a function fail the same tests with the same messages: one of them would prove nothing."""
    _need_all(drill, results)
    alike = defaultdict(list)
    for entry in catalogue(drill):
        if entry.name in results:
            said = {test: _problem(message) for test, message in results[entry.name].failed.items()}
            alike[entry.function, tuple(sorted(said.items()))].append(entry.name)
    same = [names for names in alike.values() if len(names) > 1]
    assert not same, f"these fail alike in the tests they name: {same}"


def check_diagnosis(drill: catalog.Drill, results: dict[str, proof.Proof]) -> None:
    """Most mistakes are called by their own name in the first message that names one; those that cannot, by none."""
    _need_all(drill, results)
    tell = [entry for entry in catalogue(drill) if entry.tells and entry.name in results]
    other = {e.name: results[e.name].first_diagnosis for e in tell if results[e.name].first_diagnosis != e.name}
    rate = 1 - len(other) / len(tell)
    assert rate >= NAMED_AT_LEAST, f"{rate:.0%} named by their own name; the others: {other}"


def _problem(message: str) -> str:
    """A message without its diagnosis."""
    lines = message.splitlines()
    diagnosis = ("  This is ", "  This may be ", "  It has happened", "  Read ")
    return "\n".join(line for line in lines if not line.startswith(diagnosis))


def _need_all(drill: catalog.Drill, results: dict[str, proof.Proof]) -> None:
    missing = [e.name for e in catalogue(drill) if e.name not in results and shows_here(e)]
    if missing:
        pytest.skip(f"run the whole file: it looks at all mistakes together, and {len(missing)} were not run")
