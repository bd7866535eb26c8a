"""What metrics and detectors share: the checked pair, grey levels, frames as images, Lab, and the golden's memory.

Samples are (B, C, H, W) or (B, C, T, H, W), fp32. A frame is measured as an image of its own; an item of the batch
is as bad as its worst frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.records import Better, Measurement

if TYPE_CHECKING:
    from torch import Tensor

DataRange = tuple[float, float]
GREY_LEVELS = 255.0
_MEMORY: Any = None


class Pair:
    """A candidate and its golden, checked, with frames folded into images: (N, C, H, W), N = B·T.

    `bad` lists the images of which either side is not finite; nothing but their share can be measured there.
    Raises EvaluationError if shapes, dtype, rank or range do not fit: nothing is resized, cast or inferred.
    """

    def __init__(self, candidate: Tensor, golden: Tensor, data_range: DataRange):
        check(candidate, golden, data_range)
        self.data_range = (float(data_range[0]), float(data_range[1]))
        self.batch = candidate.shape[0]
        self.frames = candidate.shape[2] if candidate.ndim == 5 else 1
        self.sources = candidate, golden
        self.candidate, self.golden = fold(candidate.detach()), fold(golden.detach())
        self.exact = bool(torch.equal(candidate, golden))
        self.candidate_ok = finite(self.candidate)
        self.golden_ok = self.recall("finite", lambda: finite(self.golden))

    @property
    def count(self) -> int:
        return self.batch * self.frames

    @property
    def good(self) -> list[int]:
        """Images of which both sides are finite."""
        return [i for i in range(self.count) if self.candidate_ok[i] and self.golden_ok[i]]

    def grey(self, images: Sequence[int]) -> Tensor:
        """Candidate − golden of these images in grey levels, unclipped."""
        return self._pick(self.candidate, images).sub(self._pick(self.golden, images)).mul_(levels(self.data_range))

    def unit(self, side: Tensor, images: Sequence[int]) -> Tensor:
        """These images of one side mapped to [0, 1], unclipped."""
        low, high = self.data_range
        return self._pick(side, images).sub(low).div_(high - low)

    def _pick(self, side: Tensor, images: Sequence[int]) -> Tensor:
        return side if len(images) == self.count else side[list(images)]

    def unusable(self) -> str | None:
        """Why some image cannot be measured, or None."""
        for ok, name in ((self.candidate_ok, "candidate"), (self.golden_ok, "golden")):
            bad = [i for i, fine in enumerate(ok) if not fine]
            if bad:
                return f"{name} is not finite: image {bad[0] // self.frames}" + (
                    f" and {len(bad) - 1} more of {self.count}" if len(bad) > 1 else ""
                )
        return None

    def measure(
        self, function: Callable[[Sequence[int]], Sequence[float]], better: Better, **about: Any
    ) -> Measurement:
        """Call `function` on the measurable images; each item of the batch gets its worst frame, the rest None."""
        good = self.good
        values: list[float | None] = [None] * self.count
        if good:
            for i, value in zip(good, function(good)):
                values[i] = float(value) if math.isfinite(value) else None
        return self.summarise(values, better, **about)

    def summarise(
        self,
        values: Sequence[float | None],
        better: Better,
        *,
        where: Callable[[int], dict[str, Any]] | None = None,
        reason: str | None = None,
        **about: Any,
    ) -> Measurement:
        """A Measurement of one value an image. `where` adds to the place of the worst image."""
        per_image = []
        worst_frames = []
        for item in range(self.batch):
            frame, value = Measurement.worst(values[item * self.frames : (item + 1) * self.frames], better)
            per_image.append(value)
            worst_frames.append(frame)
        item, value = Measurement.worst(per_image, better)
        place = self.place(item * self.frames + worst_frames[item])
        if value is not None and where is not None:
            place |= where(item * self.frames + worst_frames[item])
        if value is None:
            reason = reason or self.unusable() or "the result is not finite"
        if self.frames > 1:
            about["details"] = {**about.get("details", {}), "per_frame": tuple(values)}
        return Measurement(
            value=value,
            per_image=tuple(per_image),
            where=place,
            reason=reason,
            exact=self.exact,
            better=better,
            **about,
        )

    def place(self, image: int) -> dict[str, Any]:
        """`image` (batch item) and, of a video, `frame`."""
        item = {"image": image // self.frames}
        return item | {"frame": image % self.frames} if self.frames > 1 else item

    def recall(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, once per golden and range."""
        return recall(self.sources[1], (key, self.data_range), make)

    def recall_both(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, once per candidate, golden and range."""
        candidate, golden = self.sources
        return _recall(recall(candidate, "goldens", _weak_dictionary), golden, (key, self.data_range), make)

    def lab(self, images: Sequence[int]) -> tuple[Tensor, Tensor]:
        """CIE Lab of these images, clipped to the declared range: candidate and golden, (n, 3, H, W) each."""
        whole = range(self.count)
        golden = self.recall("lab", lambda: lab(self.unit(self.golden, whole).clamp_(0, 1)))
        candidate = recall(
            self.sources[0], ("lab", self.data_range), lambda: lab(self.unit(self.candidate, whole).clamp_(0, 1))
        )
        return self._pick(candidate, images), self._pick(golden, images)


def check(candidate: Tensor, golden: Tensor, data_range: DataRange) -> None:
    """Raise EvaluationError, in one line, unless the two samples can be compared value by value."""
    if tuple(candidate.shape) != tuple(golden.shape):
        raise EvaluationError(
            f"candidate has shape {tuple(candidate.shape)}, golden {tuple(golden.shape)}: "
            "samples are compared value by value and never resized"
        )
    if candidate.ndim not in (4, 5) or not candidate.numel():
        raise EvaluationError(
            f"a sample has shape {tuple(candidate.shape)}: expected (B, C, [T,] H, W), none of them 0"
        )
    for name, sample in (("candidate", candidate), ("golden", golden)):
        if sample.dtype != torch.float32:
            raise EvaluationError(
                f"{name} is {sample.dtype}: samples are cast to float32 once, before they are measured"
            )
        if sample.device.type != "cpu":
            raise EvaluationError(f"{name} is on {sample.device}: samples are measured on the CPU")
    low, high = data_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise EvaluationError(f"data_range is ({low}, {high}): expected the declared (low, high), low < high, finite")


def fold(sample: Tensor) -> Tensor:
    """(B, C, T, H, W) as (B·T, C, H, W); (B, C, H, W) as it is."""
    return sample if sample.ndim == 4 else sample.transpose(1, 2).flatten(0, 1)


def finite(images: Tensor) -> list[bool]:
    """Whether each image has finite values only. (A sum is finite or not much faster than its every value.)"""
    sums = images.flatten(1).abs().sum(1)
    return [bool(torch.isfinite(s)) or bool(torch.isfinite(image).all()) for s, image in zip(sums, images)]


def levels(data_range: DataRange) -> float:
    """Grey levels per unit of the declared range."""
    low, high = data_range
    return GREY_LEVELS / (high - low)


def top_share(values: Tensor, share: float) -> list[float]:
    """Of each row, the smallest of its `share` largest values (at least one of them)."""
    count = max(1, math.ceil(values.shape[1] * share))
    return torch.topk(values, count, dim=1, sorted=False).values.amin(1).tolist()


def recall(sample: Tensor, key: Any, make: Callable[[], Any]) -> Any:
    """What `make` returns, once per sample: kept as long as that tensor lives and is not written to."""
    global _MEMORY
    if _MEMORY is None:
        _MEMORY = _weak_dictionary()
    return _recall(_MEMORY, sample, key, make)


def _recall(memory: Any, sample: Tensor, key: Any, make: Callable[[], Any]) -> Any:
    now = None if sample.is_inference() else sample._version
    version, kept = memory.get(sample, (now, None))
    if kept is None or version != now:
        kept = {}
        memory[sample] = (now, kept)
    if key not in kept:
        kept[key] = make()
    return kept[key]


def _weak_dictionary() -> Any:
    """A dictionary that compares tensors by identity and does not keep them alive."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


_TO_XYZ = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))
_WHITE_D65 = (0.95047, 1.0, 1.08883)


def lab(rgb: Tensor) -> Tensor:
    """CIE L*a*b* (D65, 2°) of sRGB images (N, 3, H, W) in [0, 1], as scikit-image's `rgb2lab` within 1e-3."""
    linear = torch.where(rgb > 0.04045, ((rgb + 0.055) / 1.055).pow(2.4), rgb / 12.92)
    matrix = torch.tensor(_TO_XYZ) / torch.tensor(_WHITE_D65)[:, None]
    xyz = torch.einsum("ij,njhw->nihw", matrix, linear)
    # exp(log/3): torch has no cube root, and pow is slower
    f = torch.where(xyz > 0.008856, xyz.clamp_min(1e-6).log_().div_(3).exp_(), xyz * 7.787 + 16.0 / 116.0)
    x, y, z = f.unbind(1)
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), dim=1)
