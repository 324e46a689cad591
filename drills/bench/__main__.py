"""python -m drills.bench [DRILL...]: the speed of what DRILLS_IMPL selects (mine by default), on a GPU.

A drill is timed by `cases(impl)` of drills/bench/<its module>.py, which yields a title and microseconds by name; the
first name is what the others are compared with. Example: DRILLS_IMPL=solutions python -m drills.bench l4
"""

from __future__ import annotations

import importlib
import sys

import torch
import triton

from drills import catalog, implementation


def main(names: list[str]) -> int:
    if "-h" in names or "--help" in names:
        print(__doc__)
        return 0
    try:
        drills = [catalog.find(name) for name in names] or catalog.DRILLS
        impl = implementation.selected()
    except (KeyError, implementation.SelectionError) as error:
        print(error.args[0], file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("python -m drills.bench needs a GPU, and torch sees none here", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {impl.name}")
    for drill in drills:
        if not (catalog.PACKAGE / "bench" / drill.file).exists():
            print(f"\n{drill.id}: nothing is timed")
            continue
        for title, times in importlib.import_module(f"drills.bench.{drill.module}").cases(impl):
            print(f"\n{drill.id} {title}", flush=True)
            base = next(iter(times))
            for name, time in times.items():
                print(f"  {name:<26} {time:8.2f} us   {times[base] / time:6.1%} of the speed of {base}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
