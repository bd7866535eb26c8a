"""What the detectors cost beside one uncached LPIPS of the same pair.

    python benchmarks/detectors_cost.py [--threads 1]

Prints milliseconds for each detector and metric by itself, and the ratio of all detectors together, on one pair, to
LPIPS without a remembered golden. Every call gets fresh tensors; what depends on the grid alone is warm, as from the
second case of a run on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fidelity.records import DecodePlan, Temporal, Tiling  # noqa: E402
from fidelity.registry import DETECTORS, METRICS, Instrument, load_plugins  # noqa: E402
from tests.doctored import pictures as doctored  # noqa: E402
from tests.doctored import videos  # noqa: E402

REPEATS = 7
SHAPES = ((2, 3, 256, 256), (1, 3, 512, 512), (1, 3, 17, 128, 128))


def milliseconds(instruments: Sequence[Instrument], shape: tuple[int, ...], overlap: float) -> float:
    """The median over fresh pairs, of all these one after the other: in a run too they share what they know."""
    size, tile = shape[-2:], 16 if len(shape) == 4 else 8
    receipts = {
        "tiling": {"grid": msgspec.to_builtins(doctored.grid(overlap, (size[0], size[1]), tile))},
        "temporal": {"grid": msgspec.to_builtins(videos.axis(int(8 * overlap)))},
    }
    plan = DecodePlan(tiling=Tiling(tile, overlap), temporal=Temporal(2, overlap) if len(shape) == 5 else None)
    times = []
    for repeat in range(REPEATS + 1):
        golden, candidate = pair(shape, repeat)
        start = time.perf_counter()
        for instrument in instruments:
            instrument(candidate, golden, plan=plan, receipts=receipts, data_range=(-1.0, 1.0))
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[1:])


def pair(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A drawn picture, or one that moves, and it with noise: golden and candidate."""
    if len(shape) == 4:
        golden = doctored.golden(seed, (shape[-2], shape[-1]), shape[0])
        return golden, doctored.noise(golden, 0.3)
    picture = doctored.golden(seed, (2 * shape[-2], 2 * shape[-1]))
    film = videos.shoot(picture, shape[2], shape[-1], (2.0, 1.0), 1.0).transpose(0, 1)[None].contiguous()
    return film, videos.noise(film)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    load_plugins()
    for shape in SHAPES:
        for overlap in (0.0, 0.25):
            used = {n: each for n, each in DETECTORS.items() if len(shape) == 5 or not n.startswith("frame_")}
            costs = {name: milliseconds([each], shape, overlap) for name, each in used.items()}
            others = {name: milliseconds([each], shape, overlap) for name, each in METRICS.items()}
            total, lpips = milliseconds(list(used.values()), shape, overlap), others["lpips_alex"]
            temporal = milliseconds([each for name, each in used.items() if name.startswith("frame_")], shape, overlap)
            print(f"{'×'.join(map(str, shape))}, overlap {overlap:g}")
            for name, cost in (*costs.items(), *others.items()):
                print(f"  {name:18} {cost:7.1f} ms{'' if name in costs else '   (metric)'}")
            print(f"  all detectors {total:.1f} ms / LPIPS {lpips:.1f} ms = {total / lpips:.2f}"
                  + (f" (of frames {temporal:.1f} ms)" if temporal >= 1 else ""), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
