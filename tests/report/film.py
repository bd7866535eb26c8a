"""A realistic RunResult of a video model, made without decoding anything: frames, chunks, an error of each frame."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fidelity import images
from fidelity.records import (
    CaseResult,
    DecodePlan,
    Measurement,
    MemoryTrace,
    Reason,
    Reference,
    RunResult,
    Temporal,
)
from tests.report.sample import MIB, photographs

MODEL, LATENTS = "reference-video", "clip-pair"
FRAMES, SIZE = 17, (96, 128)
CHUNKED = DecodePlan(temporal=Temporal(2, 0.5))
STARTS = (0, 5, 9, 13)
"""Where the chunks of CHUNKED begin, in sample frames."""
JUMP = 9
"""The frame at which the second item's chunk is lighter than the frame before."""


def clip() -> np.ndarray:
    """(2, 17, 96, 128, 3) in 0…255: two photographs, panned by two pixels a frame."""
    rows, columns = SIZE
    wide = [np.asarray(photograph, float) for photograph in photographs(2 * columns)]
    return np.stack(
        [np.stack([photo[20 : 20 + rows, 2 * t : 2 * t + columns] for t in range(FRAMES)]) for photo in wide]
    )


def decoded(golden: np.ndarray, plan: DecodePlan) -> np.ndarray:
    """What such a plan might do: rounding noise by dtype; of a chunked one, tone that jumps where a chunk begins."""
    noise = {"fp32": 0.0, "bf16": 1.1, "fp16": 0.3}[plan.dtype]
    out = golden + noise * np.random.default_rng(7).standard_normal(golden.shape)
    if plan.temporal is not None:
        out[0] += 0.6 * np.sin(np.arange(FRAMES))[:, None, None, None]
        out[1, JUMP:13] += 6.0
    return out


def build(folder: Path) -> RunResult:
    """Four plans of a video model on two clips of 17 frames, every frame in `folder`."""
    golden = clip()
    plans = (DecodePlan(), DecodePlan("bf16"), CHUNKED, DecodePlan("bf16", temporal=CHUNKED.temporal))
    return RunResult(
        suite={"name": "video", "path": "suites/video.toml", "seconds": 31.0},
        environment={"class": "cpu-avx512"},
        reference=(Reference(MODEL, LATENTS, 0.0, 1e-3, True, True),),
        cases=tuple(case(golden, plan, folder) for plan in plans),
    )


def case(golden: np.ndarray, plan: DecodePlan, folder: Path) -> CaseResult:
    found = decoded(golden, plan)
    error = np.sqrt(((found - golden) ** 2).mean((2, 3, 4)))  # (item, frame)
    item, frame = map(int, np.unravel_index(error.argmax(), error.shape))
    where = {"image": item, "frame": frame}
    kept = {"details": {"per_frame": tuple(map(float, error.ravel()))}, "exact": not error.any()}
    worst = float(error.max())
    spot = {**where, "x": 40, "y": 30}
    broken = worst > 4
    said = f"frame_rmse is {worst:.3g} grey levels, above the limit 4 in image {item}, frame {frame}"
    name = f"{MODEL}/{LATENTS}/{plan.id}"
    chunks = {"starts": list(STARTS), "band": 4, "tile": 5, "size": FRAMES}
    return CaseResult(
        id=name,
        model=MODEL,
        latents=LATENTS,
        plan=plan,
        verdict="fail" if broken else "pass",
        expected="fail" if broken else "pass",
        expected_diagnosis=("temporal_seam",) if broken else (),
        diagnosis=("temporal_seam",) if broken else (),
        reasons=(Reason("frame_rmse", said, worst, 4.0, "grey levels", ("temporal_seam",)),) if broken else (),
        receipts={"temporal": {"requested": True, "engaged": True, "reason": None, "grid": chunks}}
        if plan.temporal
        else {},
        measurements={
            "rmse": Measurement(
                "rmse", worst, "grey levels", per_image=tuple(map(float, error.max(1))), where=where, **kept
            ),
            "frame_rmse": Measurement(
                "frame_rmse",
                worst,
                "grey levels",
                where=where,
                details={"profile": error.tolist()},
                exact=not error.any(),
            ),
            "max_abs": Measurement("max_abs", float(np.abs(found - golden).max()), "grey levels", where=spot),
        },
        memory=MemoryTrace(allocated_peak_bytes=(60 if plan.temporal else 200) * MIB, method="events"),
        seconds={"decode": 2.0},
        images=images.save(_tensor(found), _tensor(golden), (0.0, 255.0), folder),
        frames=FRAMES,
        data_range=(0.0, 255.0),
        reproduce=f"fidelity run suites/video.toml --case {name}",
    )


def _tensor(video: np.ndarray) -> torch.Tensor:
    """(B, T, H, W, C) as a sample: (B, C, T, H, W), fp32."""
    return torch.from_numpy(np.moveaxis(video, -1, 1)).float()
