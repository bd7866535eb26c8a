"""Pictures for the tests of metrics: deterministic, textured, in [-1, 1]."""

from __future__ import annotations

import numpy as np
import torch

from fidelity.records import DecodePlan, Measurement
from fidelity.registry import METRICS

RANGE = (-1.0, 1.0)


def picture(batch: int = 2, height: int = 64, width: int = 96, seed: int = 0) -> torch.Tensor:
    """Smooth structure with texture, (B, 3, H, W), inside [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.randn(batch, 3, height, width, generator=generator)
    smooth = torch.nn.functional.avg_pool2d(rough, 9, 1, 4) * 4
    return (smooth + 0.1 * rough).tanh()


def noisy(golden: torch.Tensor, amount: float = 0.02, seed: int = 1) -> torch.Tensor:
    return golden + amount * torch.randn(golden.shape, generator=torch.Generator().manual_seed(seed))


def measure(name: str, candidate: torch.Tensor, golden: torch.Tensor, data_range=RANGE) -> Measurement:
    return METRICS.get(name)(candidate, golden, plan=DecodePlan(), receipts={}, data_range=data_range)


def to_numpy(image: torch.Tensor) -> np.ndarray:
    """(3, H, W) as float64 (H, W, 3)."""
    return image.permute(1, 2, 0).double().numpy()
