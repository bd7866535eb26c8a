"""The usual advice for Stable Diffusion, tested: "512-px tiles with 64 px of overlap: no visible seam, from several
gigabytes to a few hundred megabytes".

    python benchmarks/advice.py [--taef2 FOLDER] [--only memory|seams]

Memory is predicted for the published configurations (fp16 on CUDA; SDXL also in fp32, as its pipelines decode). Seams
are measured on three photographs of 512² with decoders that are trained: tiles of a half and of a quarter of the side,
which is what 512 px are of 1024² and of 2048², with an eighth of overlap, less and more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from fidelity import DecodePlan, Tiling, registry
from fidelity.measuring import measure
from fidelity.models import configs, from_path
from fidelity.predict import predict
from fidelity.prediction import in_units
from fidelity.runner import Runner

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
ADVICE = Tiling(64, 0.125)
PRECISIONS = (("sd15", DecodePlan(dtype="fp16")), ("sdxl", DecodePlan(dtype="fp16")),
              ("sdxl", DecodePlan(dtype="fp16", force_upcast=True)))  # fmt: skip
SHARES = ((2, 0.0), (2, 0.125), (2, 0.25), (4, 0.0), (4, 0.125), (4, 0.25))
"""Tiles to the picture's side, and their overlap."""
PHOTOGRAPHS = ("astronaut", "coffee", "chelsea")
MEASURED = ("rmse", "lpips_alex", "tile_step", "tile_tone", "visibility")


def memory() -> None:
    print(
        "predicted allocated peak on CUDA (of it weights): all at once, and in tiles of 512 px with 64 px of overlap\n"
    )
    print("| autoencoder | dtype | picture | at once | tiled | of it weights | decoder calls |")
    print("|---|---|---|--:|--:|--:|--:|")
    for name, plan in PRECISIONS:
        model = configs.from_name(name)
        for side in (1024, 2048):
            tiled_plan = DecodePlan(dtype=plan.dtype, force_upcast=plan.force_upcast, tiling=ADVICE)
            found = predict(model, (side, side), tiled_plan, device="cuda")
            calls = next(stage.calls for stage in found.stages if stage.name == "tile")
            assert found.untiled_peak_bytes is not None
            print(f"| {name} | {'fp32' if plan.force_upcast else plan.dtype} | {side}² | "
                  f"{in_units(found.untiled_peak_bytes)} | {in_units(found.allocated_peak_bytes)} | "
                  f"{in_units(found.weights_bytes)} | {calls} |", flush=True)  # fmt: skip


def photographs(data_range: tuple[float, float]) -> dict[str, torch.Tensor]:
    """The middle squares of scikit-image's photographs, (1, 3, 512, 512) in the range."""
    import skimage.data

    low, high = data_range
    squares = {name: ImageOps.fit(Image.fromarray(getattr(skimage.data, name)()), (512, 512)) for name in PHOTOGRAPHS}
    arrays = {name: np.asarray(square, dtype=np.float32) for name, square in squares.items()}
    return {name: torch.from_numpy(a).permute(2, 0, 1)[None] / 255 * (high - low) + low for name, a in arrays.items()}


def seams(taef2: Path | None) -> None:
    print(f"\nmeasured against the full decode in grey levels, the worst of {', '.join(PHOTOGRAPHS)} at 512²\n")
    print("| decoder | tiles to the side | overlap | RMSE | LPIPS | line (`tile_step`) | tone (`tile_tone`) | seen |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    models = [registry.MODELS.get("reference-kl")]
    if taef2 is not None:
        models.append(from_path("taef2", taef2))
    for model in models:
        runner = Runner(model)
        with torch.no_grad():
            made = {name: model.family.encode(runner.module, x) for name, x in photographs(model.data_range).items()}
        full = {name: runner.decode(latents, DecodePlan(), trace=False).sample for name, latents in made.items()}
        for tiles, overlap in SHARES:
            plan = DecodePlan(tiling=Tiling(64 // tiles, overlap))
            worst = dict.fromkeys(MEASURED, 0.0)
            for name, latents in made.items():
                for key, value in measured(runner, latents, full[name], plan).items():
                    worst[key] = max(worst[key], value)
            rmse, lpips, *lines = worst.values()
            cells = [
                model.name,
                str(tiles),
                f"{overlap:g}",
                f"{rmse:.2f}",
                f"{lpips:.4f}",
                *(f"{v:.1f}" for v in lines),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


def measured(runner: Runner, latents: torch.Tensor, full: torch.Tensor, plan: DecodePlan) -> dict[str, float]:
    """The measurements of one tiled decode. Exits where one could not be made: there is no verdict without it."""
    decoded = runner.decode(latents, plan, trace=False)
    found = measure(decoded.sample, full, plan, decoded.receipts, runner.model.data_range)
    values = {key: found[key].value for key in MEASURED}
    missing = [f"{key}: {found[key].reason}" for key, value in values.items() if value is None]
    if missing or not decoded.receipts["tiling"]["engaged"]:
        raise SystemExit(f"{runner.model.name}, {plan.id}: {missing or decoded.receipts['tiling']['reason']}")
    return {key: value for key, value in values.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taef2", type=Path, metavar="FOLDER", help="weights of TAEF2, to measure it too")
    parser.add_argument("--only", choices=("memory", "seams"))
    args = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    registry.load_plugins(("taef2",) if args.taef2 else ())
    if args.only != "seams":
        memory()
    if args.only != "memory":
        seams(args.taef2)


if __name__ == "__main__":
    main()
