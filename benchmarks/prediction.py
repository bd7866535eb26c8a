"""Predicted memory against measured: the reference matrix, small models of five classes, published figures of CUDA.

    python benchmarks/prediction.py                    # every 6th plan of the matrix, measured here
    python benchmarks/prediction.py --every 1 --write  # all of them, and the plot of docs/design/prediction.md
    python benchmarks/prediction.py --results runs/reference      # the matrix as a run measured it
    python benchmarks/prediction.py --families                    # each published configuration at a real size

Measured is the allocated peak by the allocator's own events. Nothing is fitted to any of it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from prediction_families import of_published_families
from prediction_plot import Point, plot

from fidelity import optimizations, predict, registry, suite
from fidelity.environment import make_deterministic
from fidelity.memory import allocator
from fidelity.models import configs
from fidelity.optimizations.precision import is_emulated
from fidelity.records import DecodePlan, Model, Temporal, Tiling
from fidelity.runner import Runner

GIB, LIMIT_CPU, LIMIT_CUDA = 2**30, 0.05, 0.15
PLOT = Path(__file__).resolve().parent.parent / "docs" / "design" / "prediction.svg"

KL = {"_class_name": "AutoencoderKL", "block_out_channels": [8, 16], "in_channels": 3, "out_channels": 3,
      "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
      "latent_channels": 4, "norm_num_groups": 2}  # fmt: skip
WAN = {"_class_name": "AutoencoderKLWan", "base_dim": 16, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
       "temperal_downsample": [False, True, True], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}  # fmt: skip
DC = {"_class_name": "AutoencoderDC", "in_channels": 3, "latent_channels": 4, "attention_head_dim": 2,
      "encoder_block_types": ["ResBlock", "EfficientViTBlock"],
      "decoder_block_types": ["ResBlock", "EfficientViTBlock"],
      "encoder_block_out_channels": [8, 8], "decoder_block_out_channels": [8, 8], "encoder_qkv_multiscales": [[], [5]],
      "decoder_qkv_multiscales": [[], [5]], "encoder_layers_per_block": [1, 1], "decoder_layers_per_block": [1, 1],
      "downsample_block_type": "conv", "upsample_block_type": "interpolate", "decoder_norm_types": "rms_norm",
      "decoder_act_fns": "silu", "scaling_factor": 0.41407}  # fmt: skip
TINY = {"_class_name": "AutoencoderTiny", "encoder_block_out_channels": [32] * 4, "num_encoder_blocks": [1] * 4,
        "decoder_block_out_channels": [32] * 4, "num_decoder_blocks": [1] * 4}  # fmt: skip
HUNYUAN = {"_class_name": "AutoencoderKLHunyuanVideo", "block_out_channels": [8, 8, 8, 8], "latent_channels": 4,
           "layers_per_block": 1, "norm_num_groups": 4}  # fmt: skip
FAMILIES = (
    (KL, ((1, 4, 64, 64), (2, 4, 33, 65))),
    (WAN, ((1, 4, 1, 32, 32), (1, 4, 3, 32, 32), (1, 4, 5, 24, 40), (2, 4, 2, 32, 32))),
    (DC, ((1, 4, 64, 64), (2, 4, 64, 48))),
    (TINY, ((1, 4, 32, 32), (2, 4, 64, 64))),
    (HUNYUAN, ((1, 4, 2, 16, 16), (1, 4, 3, 32, 32))),
)
PUBLISHED = (  # configuration, side, dtype, allocated and reserved GiB, held out
    ("qwen-image", 512, "fp16", 1.27, 1.31, False),
    ("qwen-image", 1024, "fp16", 4.37, 5.25, False),
    ("qwen-image", 1536, "fp16", 9.53, 11.74, True),
    ("qwen-image", 2048, "fp16", 16.75, 20.80, True),
    ("sd15", 512, "fp32", None, 1.70e9 / GIB, True),
    ("sdxl", 1024, "fp16", None, 3.23e9 / GIB, True),
    ("sdxl", 1024, "fp32", None, 5.57e9 / GIB, True),
    ("sd15", 512, "fp16", None, 1018 / 1024, True),
    ("sd15", 1024, "fp16", None, 4226 / 1024, True),
    ("sd15", 2048, "fp16", None, 16994 / 1024, True),
    ("sdxl", 1024, "fp16", None, 4274 / 1024, True),
    ("flux", 512, "fp16", None, 1068 / 1024, True),
    ("flux", 1024, "fp16", None, 4260 / 1024, True),
    ("flux", 2048, "fp16", None, 16932 / 1024, True),
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--every", type=int, default=6, help="measure every n-th plan of the matrix (default 6)")
    options.add_argument("--results", type=Path, help="take the measured figures from a run's folder")
    options.add_argument("--suite", type=Path, default=Path("suites/reference.toml"))
    options.add_argument("--write", action="store_true", help=f"write {PLOT}")
    options.add_argument("--families", nargs="*", metavar="NAME", help="predict these (all) at a real size")
    given = options.parse_args()
    registry.load_plugins()
    if given.families is not None:  # as a program decodes: deterministic algorithms pad by index, which needs more
        torch.set_num_threads(1)
        sys.exit(not of_published_families(given.families or list(configs.known())))
    make_deterministic(1)  # as a run's workers are: kernels have buffers per thread
    points = [
        *_told("reference matrix", of_run(given.results) if given.results else of_matrix(given.suite, given.every))
    ]
    points += _told("five classes", of_families())
    points += _told("CUDA, published", of_published())
    points += _told("the law, over sizes measured here", of_law())
    of_speed()
    if given.write:
        PLOT.write_text(plot(points), encoding="utf-8")
        print(f"wrote {PLOT}")
    sys.exit(
        any(
            abs(p.error) > (LIMIT_CUDA if p.group == "CUDA allocated" else LIMIT_CPU)
            for p in points
            if p.group != "CUDA reserved"
        )
    )


def _told(title: str, points: Iterator[Point]) -> list[Point]:
    """Print each point as it comes, and the worst of them."""
    print(f"\n{title}\n{'':70} predicted    measured    error")
    found = []
    for point in points:
        found.append(point)
        sizes = f"{point.predicted / 2**20:9.2f} MiB {point.measured / 2**20:9.2f} MiB"
        print(f"{point.name:<66} {sizes} {point.error:+8.2%}", flush=True)
    for group in dict.fromkeys(point.group for point in found):
        errors = sorted(abs(point.error) for point in found if point.group == group)
        print(f"{group}: {len(errors)} decodes, median error {errors[len(errors) // 2]:.3%}, worst {errors[-1]:.2%}")
    return found


# ---------------------------------------------------------------- measured on this CPU


def of_matrix(path: Path, every: int) -> Iterator[Point]:
    """The judged plans of a suite that have a figure of their own, each pair of latents' shape and plan once."""
    loaded = suite.load(path, registry)
    seen: dict[tuple[Any, ...], Any] = {}
    for case in loaded.judged:
        model = registry.MODELS.get(case.model)
        shape = registry.LATENTS.get(case.latents).shape(model.geometry)
        if case.check is None and not is_emulated(case.plan, "cpu"):
            built = {key: value for key, value in model.config.items() if key != "force_upcast"}  # what is not built
            seen.setdefault((str(built), shape, case.plan.id), (model, shape, case.plan))
    runners: dict[str, Runner] = {}
    for model, shape, plan in list(seen.values())[::every]:
        runner = runners.setdefault(model.name, Runner(model))
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        yield _point(model, shape, plan, runner.peak_bytes(latents, plan) or math.nan)


def of_run(folder: Path) -> Iterator[Point]:
    """The same from the results of a run."""
    from fidelity.report import json

    for case in json.read(folder).cases:
        measured = case.memory.allocated_peak_bytes if case.memory is not None else None
        if measured is not None and case.model in registry.MODELS and case.latents in registry.LATENTS:
            model = registry.MODELS.get(case.model)
            yield _point(model, registry.LATENTS.get(case.latents).shape(model.geometry), case.plan, measured)


def _point(model: Model, shape: tuple[int, ...], plan: DecodePlan, measured: float) -> Point:
    found = predict.of_shape(model, shape, plan, "cpu")
    name = f"{model.name} {'×'.join(map(str, shape))} {plan.id}"
    return Point(model.family.name, name, found.allocated_peak_bytes, measured)


def of_families() -> Iterator[Point]:
    """Small instances of five classes in fp32 and bf16, plain."""
    for config, shapes in FAMILIES:
        family = registry.FAMILIES.get(config["_class_name"])
        model = family.describe(config["_class_name"].lower(), config, lambda: None)
        for dtype in (torch.float32, torch.bfloat16):
            module = family.build(config).to(dtype)
            for shape in shapes:
                latents = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
                plan = DecodePlan(dtype="fp32" if dtype is torch.float32 else "bf16")
                with torch.no_grad(), optimizations.apply_plan(module, DecodePlan(), model=model, device="cpu"):
                    _, trace = allocator.trace(lambda: family.decode(module, latents), module=module, device="cpu",  # noqa: B023
                                               decoder=family.decoder(module))  # fmt: skip
                yield _point(model, shape, plan, trace.allocated_peak_bytes or math.nan)


# ---------------------------------------------------------------- published for CUDA


def of_published() -> Iterator[Point]:
    """Allocated figures decide; reserved ones stand beside. Only the first two were looked at for the workspace."""
    for name, side, dtype, allocated, reserved, held_out in PUBLISHED:
        found = predict.predict(configs.from_name(name), (side, side), DecodePlan(dtype=dtype), device="cuda")
        about = f"{name} {side}² {dtype}"
        if allocated is not None:
            held = " (held out)" if held_out else ""
            yield Point("CUDA allocated", f"{about} allocated{held}", found.allocated_peak_bytes, allocated * GIB)
        yield Point("CUDA reserved", f"{about} reserved", found.reserved_peak_bytes or math.nan, reserved * GIB)


def of_law() -> Iterator[Point]:
    """The law that three predictions of up to 384² give, held against peaks measured at other sizes, also in tiles."""
    model = registry.MODELS.get("reference-kl")
    runner = Runner(model)
    for plan in (DecodePlan(), DecodePlan(tiling=Tiling(16, 0.25))):
        law = predict.predict(model, (256, 256), plan, with_law=True).law
        assert law is not None
        for height, width in ((192, 192), (320, 512), (640, 640), (768, 1024)):
            shape = (1, 4, height // 8, width // 8)
            latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            measured = runner.peak_bytes(latents, plan) or math.nan
            yield Point("the law", f"law {height}×{width} {plan.id}", law.peak(height, width), measured)


TILED, SMALL = (DecodePlan(dtype="fp16", tiling=Tiling(tile, 0.25)) for tile in (64, 32))


def of_speed() -> None:
    """How long large predictions take: wall, and of one core."""
    print("\nhow long")
    whole = DecodePlan(dtype="fp16")
    for name, size, frames, plan, budget in (
        ("sdxl", (4096, 4096), 1, whole, None),
        ("sdxl", (4096, 4096), 1, TILED, None),
        ("sdxl", (1024, 1024), 1, TILED, 4 * GIB),
        ("wan21", (720, 1280), 81, whole, None),
        ("wan21", (720, 1280), 81, SMALL, None),
        ("hunyuan-video", (720, 1280), 81, replace(SMALL, temporal=Temporal(4, 0.25)), None),
    ):  # fmt: skip
        start, spent = time.perf_counter(), time.process_time()
        found = predict.predict(configs.from_name(name), size, plan, frames=frames, device="cuda", budget=budget)
        took = f"in {time.perf_counter() - start:.1f} s, {time.process_time() - spent:.1f} s of a core"
        about = f"{name} {size[0]}×{size[1]}, {frames} frames, {plan.id}"
        room = f", {found.budget.height}×{found.budget.width} in 4 GiB" if found.budget is not None else ""
        print(f"{about}: {found.allocated_peak_bytes / GIB:.2f} GiB{room}, {took}", flush=True)


if __name__ == "__main__":
    main()
