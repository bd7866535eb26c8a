"""How well the reach foretells what tiles cost: predicted beside measured RMSE over a sweep of overlaps.

    python benchmarks/reach.py [--model reference-kl] [--tile 16] [--tile 24] [--latents photo-pair …]

Each set of latents is predicted twice: by a probe of itself, and by a probe of the first (other content). Grey levels,
all items of a batch together, as the report has them.
"""

from __future__ import annotations

import argparse
import math
import time

import torch

from fidelity import reach
from fidelity.records import DecodePlan, Tiling
from fidelity.registry import LATENTS, MODELS, load_plugins
from fidelity.runner import Runner
from fidelity.signal import levels

OVERLAPS = (0.0, 0.125, 0.25, 0.375, 0.5)
NAMES = ("photo-pair", "photo-512", "photo-text", "photo-texture", "photo-night", "normal", "flat", "ramp", "contrast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="reference-kl")
    parser.add_argument("--tile", type=int, action="append")
    parser.add_argument("--latents", nargs="+", default=list(NAMES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    load_plugins()
    runner = Runner(MODELS.get(asked.model))
    ratios: dict[tuple[str, str], list[float]] = {}
    first = None
    for name in asked.latents:
        latents = LATENTS.get(name).make(runner.model, runner.module).tensor
        start = time.perf_counter()
        own = reach.probe(runner, latents)
        print(f"{name}  probe {time.perf_counter() - start:.2f} s, ", end="")
        first = first or own
        start = time.perf_counter()
        full = runner.decode(latents, DecodePlan(), trace=False).sample
        print(f"full decode {time.perf_counter() - start:.2f} s")
        print(f"  lost context {' '.join(f'{lost:.2f}' for lost in own.edge)} · tone {own.tone} in {own.sizes}")
        kind = "photographs" if name.startswith("photo-") else "drawn"
        for tile in asked.tile or (16, 24):
            size = (latents.shape[-2], latents.shape[-1])
            if not runner.model.family.will_tile(size, Tiling(tile, 0.0)):
                continue
            for overlap in OVERLAPS:
                tiling = Tiling(tile, overlap)
                grid = runner.model.family.tile_grid(runner.model.geometry, size, tiling)
                told, foreign = (reach.predict(each, grid, runner.model.geometry.spatial) for each in (own, first))
                sample = runner.decode(latents, DecodePlan(tiling=tiling), trace=False).sample
                seen = float((sample - full).double().square().mean().sqrt()) * levels(runner.model.data_range)
                said = f"measured {seen:6.2f}  predicted {told:6.2f} ({told / seen:.2f})"
                by_first = f"by the first {foreign:6.2f} ({foreign / seen:.2f})"
                print(f"  tile {tile:3} overlap {overlap:<5g} {said}  {by_first}", flush=True)
                ratios.setdefault((kind, "a probe of themselves"), []).append(told / seen)
                if first is not own:
                    ratios.setdefault((kind, f"a probe of {asked.latents[0]}"), []).append(foreign / seen)
    for (kind, by), found in sorted(ratios.items()):
        mean = math.exp(sum(map(math.log, found)) / len(found))
        print(f"{kind} by {by}: {len(found)} tilings, ratio {min(found):.2f} to {max(found):.2f}, mean {mean:.2f}")


if __name__ == "__main__":
    main()
