"""How things are timed: each candidate captured in a CUDA graph over several sets of inputs, replayed in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

ROUNDS = 60
A_GRAPH = 4  # calls or more: they share the microseconds that the launch of a graph takes


def medians(candidates: Mapping[str, Sequence[Callable[[], object]]]) -> dict[str, float]:
    """Microseconds a call, for each candidate. A candidate is a list of calls that do the same work on other memory,

    enough of it that no cache holds the inputs of the next. The candidates take turns, so that a drifting clock
    meets all of them.
    """
    several = {name: [*calls] * -(-A_GRAPH // len(calls)) for name, calls in candidates.items()}
    graphs = {name: _captured(calls) for name, calls in several.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / len(several[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()  # compiles, and warms up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph
