"""Which parts of which decoders wait for memory and which for arithmetic, and what they reach on this machine.

    python benchmarks/roofline.py            # models that ship, run here; measured roofs
    python benchmarks/roofline.py --shapes   # published configurations at 1024² by shapes; 100 GB/s, 1000 GFLOP/s

Time needs a quiet machine. Parts that take less than a hundredth of a decode are left out of the first table.
"""

from __future__ import annotations

import argparse

import torch

from fidelity import registry
from fidelity.concurrency.together import seeded
from fidelity.models import configs
from fidelity.records import DecodePlan
from fidelity.roofline import roof

SHIPPED = (("reference-kl", (1, 4, 32, 32)), ("reference-tiny", (1, 4, 32, 32)), ("reference-video", (1, 4, 2, 16, 16)))
PUBLISHED = ("sdxl", "dc-ae-f32c32-sana", "qwen-image", "wan21", "wan22-ti2v", "taesd", "mochi", "ltx-video")
LEAST = 0.01


def run_here() -> None:
    print("| model | part | GFLOP | FLOP/byte | binds | ms | GFLOP/s | of the ceiling | by operator |")
    print("|---|---|--:|--:|---|--:|--:|--:|--:|")
    for name, shape in SHIPPED:
        model = registry.MODELS.get(name)
        found = roof.measure(model, seeded(model, shape))
        whole = found.whole.seconds or 0.0
        for one in (*found.parts, found.whole):
            if one.seconds is None or one.seconds < LEAST * whole:
                continue
            print(f"| {name} | {one.name} | {one.flops / 1e9:.2f} | {one.intensity or 0:.1f} | {one.bound or '–'} | "
                  f"{1e3 * one.seconds:.1f} | {one.achieved or 0:.1f} | {share(one.share)} | "
                  f"{share(one.share_by_operator)} |", flush=True)  # fmt: skip
        print(f"| {name} | *roofs* | | {found.ridge:.1f} | | | {found.compute.value:.1f} | | "
              f"{found.bandwidth.value:.1f} GB/s |")  # fmt: skip


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def on_shapes() -> None:
    print("| configuration | TFLOP | GB | FLOP/byte | at least s, by operator | of it where memory binds |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in PUBLISHED:
        model = configs.from_name(name)
        side, frames = 1024 // model.geometry.spatial, ((1,) if model.geometry.video else ())
        shape = (1, model.geometry.latent_channels, *frames, side, side)
        found = roof.measure(model, torch.zeros(shape), DecodePlan(), bandwidth=100, compute=1000, weights=False)
        whole = found.whole
        waits = whole.waiting_seconds / whole.least_seconds
        print(f"| {name} | {whole.flops / 1e12:.2f} | {whole.bytes / 1e9:.1f} | {whole.intensity or 0:.0f} | "
              f"{whole.least_seconds:.2f} | {waits:.0%} |", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", action="store_true")
    args = parser.parse_args()
    registry.load_plugins()
    (on_shapes if args.shapes else run_here)()


if __name__ == "__main__":
    main()
