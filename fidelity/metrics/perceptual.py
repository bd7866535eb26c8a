"""LPIPS with AlexNet, offline: weights carried in the package, loaded strictly, attested before they may score.

Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", CVPR 2018 (LPIPS v0.1). The
`lpips` package loads its heads with `strict=False`, and its trunk from the network; here the file's digest, its keys
and shapes, and the answer on a known pair are checked, and anything amiss is an AttestationError, never a score.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelity.errors import AttestationError
from fidelity.lazy import torch
from fidelity.records import Measurement
from fidelity.registry import metric
from fidelity.signal import DataRange, Pair

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = Path(__file__).resolve().parent.parent / "data" / "lpips" / "alexnet_lpips_fp16.safetensors"
BLAKE2B = "d7e9c3151dc783629e7350f26ca1781d"
"""blake2b of the file, 16 bytes."""
KNOWN_ANSWER, TOLERANCE = 0.081085, 0.0005
"""The distance of `known_pair()`; kernels of other CPUs move it by less than 1e-5."""
SMALLEST = 31
"""Below this many pixels AlexNet's pooling has nothing left."""


@metric("lpips_alex", unit="", better="lower")
def lpips_alex(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """LPIPS v0.1 distance on AlexNet features: 0 is equal, 0.1 is plain to see.

    Tensors (B, 3, [T,] H, W), fp32, mapped from the declared range to [-1, 1] and clipped there (the network saw
    nothing else). Raises AttestationError if the weights are missing, altered, or give a wrong answer on the known
    pair. The golden's features are computed once per golden.
    """
    pair = Pair(candidate, golden, data_range)
    channels, height, width = pair.candidate.shape[1:]
    if channels != 3 or min(height, width) < SMALLEST:
        reason = f"{channels}×{height}×{width} is no picture for AlexNet: 3 channels of at least {SMALLEST} px expected"
        return pair.summarise([None] * pair.count, "lower", reason=reason)
    model = attested()

    def distance(images: Sequence[int]) -> list[float]:
        if pair.exact:
            return [0.0] * len(images)
        own = pair.recall("lpips_alex", lambda: features(model, _prepare(pair, pair.golden, range(pair.count))))
        if len(images) != pair.count:
            own = [layer[list(images)] for layer in own]
        return compare(model, features(model, _prepare(pair, pair.candidate, images)), own).tolist()

    return pair.measure(distance, "lower", details={"weights": BLAKE2B})


def _prepare(pair: Pair, side: Tensor, images: Sequence[int]) -> Tensor:
    # NaN images of the golden stay in its remembered features, but are never among `images`
    return pair.unit(side, images).mul_(2).sub_(1).clamp_(-1, 1)


def features(model: Any, images: Tensor) -> list[Tensor]:
    """The five layers' features of (N, 3, H, W) in [-1, 1], each of unit length along its channels."""
    import lpips

    with torch.inference_mode(False), torch.no_grad():
        return [lpips.normalize_tensor(layer) for layer in model.net(model.scaling_layer(images))]


def compare(model: Any, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """LPIPS of two lists of features: (N,), one distance an image."""
    with torch.no_grad():
        layers = [head((a - b) ** 2).mean((1, 2, 3)) for head, a, b in zip(model.lins, first, second)]
    return torch.stack(layers).sum(0)


@cache
def attested() -> nn.Module:
    """The network, once a process, after it gave the known answer. Raises AttestationError."""
    model = load(WEIGHTS)
    first, second = known_pair()
    measured = compare(model, features(model, first), features(model, second)).item()
    if not abs(measured - KNOWN_ANSWER) <= TOLERANCE:
        raise AttestationError(
            f"LPIPS gives {measured:.6f} on the known pair, not {KNOWN_ANSWER} ± {TOLERANCE}: "
            "reinstall fidelity, or check the lpips and torch versions"
        )
    return model


def load(path: Path) -> nn.Module:
    """LPIPS with the weights of `path`, each checked. Raises AttestationError."""
    if not path.is_file():
        raise AttestationError(f"LPIPS weights are missing: {path}; reinstall fidelity")
    data = path.read_bytes()
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    if digest != BLAKE2B:
        raise AttestationError(
            f"LPIPS weights are altered: {path} has blake2b {digest}, not {BLAKE2B}; reinstall fidelity"
        )
    import safetensors.torch

    return fill(build(), safetensors.torch.load(data))


def build() -> nn.Module:
    """LPIPS without weights (on meta: nothing is drawn at random, nothing is downloaded)."""
    import lpips
    from lpips.lpips import ScalingLayer

    with warnings.catch_warnings(), torch.device("meta"):
        # torchvision's words on `pretrained=`, which lpips passes on; nobody here can heed them
        warnings.filterwarnings("ignore", message=".*'pretrained'|Arguments other than a weight", category=UserWarning)
        model = lpips.LPIPS(net="alex", pretrained=False, pnet_rand=True, verbose=False)
    model.scaling_layer = ScalingLayer()
    return model


def fill(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Put fp32 copies of `weights` in place, strictly. Raises AttestationError with the first key or shape amiss."""
    wanted: dict[str, Any] = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in sorted(wanted.keys() | weights.keys()):
        have = tuple(weights[name].shape) if name in weights else "missing"
        want = wanted.get(name, "not there")
        if have != want:
            raise AttestationError(f"LPIPS weights do not fit: {name} is {have} in the file, {want} in the network")
    for name, weight in weights.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(weight.float(), requires_grad=False))
    return model.eval()


def known_pair() -> tuple[Tensor, Tensor]:
    """Two pictures made by arithmetic alone, (1, 3, 64, 96) in [-1, 1]: rings on a ramp, then with a grating."""
    y = torch.arange(64, dtype=torch.float64).view(1, -1, 1)
    x = torch.arange(96, dtype=torch.float64).view(1, 1, -1)
    tint = torch.tensor([0.9, 0.6, 0.3], dtype=torch.float64).view(3, 1, 1)
    rings = torch.cos(((x - 40) ** 2 + (y - 30) ** 2) / 90) * tint * 0.5 + (x + y) / 160 - 0.5
    grating = 0.35 * torch.sin(x / 1.7 + y / 2.9) * (1 - tint) + 0.1
    return rings.float().clamp(-1, 1)[None], (rings + grating).float().clamp(-1, 1)[None]
