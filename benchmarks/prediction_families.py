"""What each published configuration needs at a real size, on either device: `prediction.py --families`."""

from __future__ import annotations

import time

from fidelity import predict
from fidelity.errors import RequestError
from fidelity.models import configs
from fidelity.records import DecodePlan, Model
from fidelity.wording import in_units

REAL = {"picture": (1024, 1024), "video": (480, 832)}
FRAMES = 81


def of_published_families(names: list[str]) -> bool:
    """Print what each published configuration needs in bf16, on either device. Whether all could be predicted."""
    print(f"{'':27} {'size':>10} frames {'cpu':>11} {'cuda':>11} {'reserved':>11}   core seconds")
    done = True
    for name in names:
        model = configs.from_name(name)
        size, frames = _real_size(model)
        start, figures = time.process_time(), []
        try:
            for device in ("cpu", "cuda"):
                shape = predict.latents_shape(model, size, frames, 1)
                figures.append(predict.of_shape(model, shape, DecodePlan(dtype="bf16"), device))
        except RequestError as error:
            done = False
            print(f"{name:<27} not predicted: {error}", flush=True)
            continue
        cpu, cuda = figures
        bytes_ = [cpu.allocated_peak_bytes, cuda.allocated_peak_bytes, cuda.reserved_peak_bytes or 0]
        told = " ".join(f"{in_units(each):>11}" for each in bytes_)
        print(
            f"{name:<27} {size[0]:>5}×{size[1]:<4} {frames or 1:>6} {told} {time.process_time() - start:>8.1f}",
            flush=True,
        )
    return done


def _real_size(model: Model) -> tuple[tuple[int, int], int | None]:
    """A picture of 1024², or a video of 480 × 832 and about 81 frames, as near as the class takes it."""
    geometry = model.geometry
    if geometry.size is not None:
        return (geometry.size[0] * geometry.spatial, geometry.size[1] * geometry.spatial), None
    height, width = (
        side // geometry.spatial * geometry.spatial for side in REAL["video" if geometry.video else "picture"]
    )
    if not geometry.video:
        return (height, width), None
    lengths = (geometry.sample_frames(count) for count in range(model.family.least_frames, FRAMES + 1))
    return (height, width), min(lengths, key=lambda frames: abs(frames - FRAMES))
