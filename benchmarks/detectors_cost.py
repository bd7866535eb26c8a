"""What the detectors cost beside one uncached LPIPS of the same pair.

    python benchmarks/detectors_cost.py [--threads 1]

Prints milliseconds for each detector and metric, and the ratio of all detectors together to LPIPS without a remembered
golden. Every call gets fresh tensors; what depends on the grid alone is warm, as from the second case of a run on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import msgspec
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fidelity.records import DecodePlan, Tiling  # noqa: E402
from fidelity.registry import DETECTORS, METRICS, Instrument, load_plugins  # noqa: E402
from tests.doctored import pictures as doctored  # noqa: E402

REPEATS = 7


def milliseconds(instrument: Instrument, shape: tuple[int, ...], overlap: float) -> float:
    """The median over fresh pairs."""
    tiles = doctored.grid(overlap, (shape[-2], shape[-1]))
    plan = DecodePlan(tiling=Tiling(16, overlap))
    receipts = {"tiling": {"grid": msgspec.to_builtins(tiles)}}
    times = []
    for repeat in range(REPEATS + 1):
        golden = doctored.golden(repeat, (shape[-2], shape[-1]), shape[0])
        candidate = doctored.noise(golden, 0.3)
        start = time.perf_counter()
        instrument(candidate, golden, plan=plan, receipts=receipts, data_range=(-1.0, 1.0))
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    load_plugins()
    for shape in ((2, 3, 256, 256), (1, 3, 512, 512)):
        for overlap in (0.0, 0.25):
            costs = {name: milliseconds(each, shape, overlap) for name, each in DETECTORS.items()}
            others = {name: milliseconds(each, shape, overlap) for name, each in METRICS.items()}
            total, lpips = sum(costs.values()), others["lpips_alex"]
            print(f"{'×'.join(map(str, shape))}, overlap {overlap:g}")
            for name, cost in (*costs.items(), *others.items()):
                print(f"  {name:18} {cost:7.1f} ms{'' if name in costs else '   (metric)'}")
            print(f"  all detectors {total:.1f} ms / LPIPS {lpips:.1f} ms = {total / lpips:.2f}", flush=True)


if __name__ == "__main__":
    main()
