"""What a wrong decode looks like, in words: scale, shift, ranges, rounding, order, place.

`causes` is asked about a decode that is not green. It names what the pixels show and nothing on an honest one: the
thresholds come from measured decodes of a trained model, see docs/design/seam-detectors.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fidelity.detectors import place
from fidelity.lazy import torch
from fidelity.records import DecodePlan, Receipts
from fidelity.signal import DataRange, Pair, levels

if TYPE_CHECKING:
    from torch import Tensor

Cause = tuple[str, str]
"""A diagnosis of the closed list, and a sentence with what was seen."""

EXPLAINS = 0.5
"""Share of the squared difference that an affine law must explain. Measured: a latent gain of half a percent 0.96 and
more (0.65 under bf16), honest tiling at most 0.25, bf16 at most 0.12."""
ALIKE = 2.0
"""A scale moves the channels' gains alike: none by more than this times another."""
LEAST_GAIN = 0.002
"""A gain nearer to 1 is not named; 0.18125 for 0.18215 gives 0.005."""
LEAST_OFFSET = 0.1
"""Grey levels; a smaller shift is not named."""
MATCHES = 0.5
"""What another order, place or range must leave of the error, to be the one."""
CUT, VARIES = 0.001, 1.0
"""Share of the values that are equal to the extreme one, where the golden's spread by so many levels: they were cut."""
MANY = 4096
"""Values of a sample that are never of 256 kinds only, unless they were whole numbers once."""
LEAST_ERROR = 0.25
"""Grey levels RMS under which order and place are not looked into: such an error has no shape of its own."""


def causes(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> list[Cause]:
    """Name what the pixels show: `(diagnosis, sentence)`, surest first; empty where nothing is recognised.

    Tensors (B, C, [T,] H, W), fp32, on the CPU. Samples of other shapes are named `geometry`, values that are not
    finite `non_finite`. Raises EvaluationError if dtype or range do not fit.
    """
    if tuple(candidate.shape) != tuple(golden.shape):
        return [("geometry", place.shape_sentence(tuple(candidate.shape), tuple(golden.shape)))]
    pair = Pair(candidate, golden, data_range)
    if pair.unusable():
        share = 1 - len(pair.good) / pair.count
        return [("non_finite", f"{pair.unusable()} ({share:.0%} of the images)")]
    if pair.exact:
        return []
    found: list[Cause] = []
    for look in LOOKS:
        found += [cause for cause in look(pair, plan, receipts) if cause[0] not in {name for name, _ in found}]
        if found and look in DECISIVE:
            break  # a swapped or shifted picture has an affine fit too, which would mean nothing
    return found


# ---------------------------------------------------------------- order and place


def order(pair: Pair, plan: DecodePlan, receipts: Receipts) -> Iterator[Cause]:
    """Images of the batch, or channels, in another order."""
    # a whole item of another place is a share of it too, of 100 %
    yield from list(place.batch_order(pair, MATCHES, LEAST_ERROR)) or place.batch_ghost(pair, LEAST_ERROR)
    yield from place.channel_order(pair, MATCHES, LEAST_ERROR)


def position(pair: Pair, plan: DecodePlan, receipts: Receipts) -> Iterator[Cause]:
    """The whole picture, or one tile, moved, mirrored, or shown twice."""
    yield from place.moved(pair, MATCHES, LEAST_ERROR)
    yield from place.tiles(pair, plan, receipts, MATCHES, LEAST_ERROR)


# ---------------------------------------------------------------- values


def ranges(pair: Pair, plan: DecodePlan, receipts: Receipts) -> Iterator[Cause]:
    """[0, 1] taken for [-1, 1] or the other way round, once more than it should be."""
    golden, candidate = pair.golden, pair.candidate
    before = _rms(candidate - golden)
    laws: dict[str, Callable[[Tensor], Tensor]] = {
        "(x + 1) / 2, so it was taken from [-1, 1] to [0, 1] once too often": lambda x: (x + 1) / 2,
        "2·x − 1, so it was taken from [0, 1] to [-1, 1] once too often": lambda x: 2 * x - 1,
    }
    for words, law in laws.items():
        for clipped in (False, True):
            expected = law(golden.clamp(*pair.data_range)).clamp(*pair.data_range) if clipped else law(golden)
            if _rms(candidate - expected) < 0.1 * before and before * levels(pair.data_range) > 1:
                yield "double_normalised", f"the sample is the golden's x as {words}"
                return


def affine(pair: Pair, plan: DecodePlan, receipts: Receipts) -> Iterator[Cause]:
    """A gain or an offset of each channel that explains most of the difference."""
    gains, offsets, by_gain, by_offset = fit(pair)
    explained = by_gain + by_offset
    if explained < EXPLAINS:
        return
    share = f"which explains {explained:.0%} of the squared difference"
    slopes = [gain - 1 for gain in gains]
    alike = min(slopes) * max(slopes) > 0 and max(map(abs, slopes)) <= ALIKE * min(map(abs, slopes))
    # a gain of the latents turns the picture about the decoder's own grey, which moves the picture's mean as well
    if alike and min(map(abs, slopes)) >= LEAST_GAIN and by_gain >= 0.1 * explained:
        yield (
            "scale",
            f"contrast is {_list(gains, '.4f')} times the golden's, {share}: compare scaling_factor, mean and std with "
            "the model's config",
        )
    elif by_offset >= EXPLAINS and max(map(abs, offsets)) >= LEAST_OFFSET and _in_all_frames(pair):
        yield (
            "shift",
            f"channels are moved by {_list(offsets, '+.2f')} grey levels, {share}: compare shift_factor and mean with "
            "the model's config",
        )


def _in_all_frames(pair: Pair) -> bool:
    """Whether each frame is moved by half of what all are, at least: a part of a video that is lighter is no shift."""
    if pair.frames == 1:
        return True
    means = pair.grey(range(pair.count)).mean((1, 2, 3)).view(pair.batch, pair.frames)
    whole = means.mean(1, keepdim=True)
    return bool((means * whole.sign() >= 0.5 * whole.abs()).all())


def fit(pair: Pair) -> tuple[list[float], list[float], float, float]:
    """Least squares candidate = mean + gain·(golden − mean) + offset, a channel at a time over all images.

    Returns gains, offsets in grey levels, and the shares of the squared difference that gains and offsets explain.
    """
    images = range(pair.count)
    difference = pair.grey(images).transpose(0, 1).flatten(1).double()
    golden = pair.unit(pair.golden, images).transpose(0, 1).flatten(1).double() * 255
    centred = golden - golden.mean(1, keepdim=True)
    offset = difference.mean(1)
    power = centred.square().mean(1).clamp_min(1e-9)
    slope = (centred * (difference - offset[:, None])).mean(1) / power
    total = difference.square().mean(1).sum().clamp_min(1e-12)
    by_gain = (slope.square() * power).sum() / total
    by_offset = offset.square().sum() / total
    return (1 + slope).tolist(), offset.tolist(), float(by_gain), float(by_offset)


def rounding(pair: Pair, plan: DecodePlan, receipts: Receipts) -> Iterator[Cause]:
    """Values cut down to whole levels instead of rounded; values cut at the range that the golden leaves."""
    images = range(pair.count)
    value = pair.unit(pair.candidate, images) * 255
    whole = (value - value.round()).abs().max() < 0.02
    low, high = pair.data_range
    clipped = pair.golden.clamp(low, high)
    difference = (pair.candidate - clipped) * levels(pair.data_range)
    bias = float(difference.mean())
    if whole and -0.65 < bias < -0.35 and float((difference > 0.02).double().mean()) < 0.001:
        yield "truncation", f"values are whole levels and {bias:+.2f} levels off on average: cut down, not rounded"
    elif value.numel() >= MANY and (distinct := value.unique().numel()) <= 256:
        said = f"the sample takes only {distinct} values, {bias:+.2f} levels off on average: it went through integers"
        yield "truncation", said
    outside = float((pair.golden != clipped).double().mean())
    if outside > 0 and torch.equal(pair.candidate, clipped):
        yield "clipping", f"the sample is the golden cut at the range: {outside:.2%} of its values lie outside"
        return
    for words, end, beyond in (
        ("above", pair.candidate.max(), torch.greater_equal),
        ("below", pair.candidate.min(), torch.less_equal),
    ):
        cut = pair.candidate == end
        share = float(cut.double().mean())
        there = pair.golden[cut]
        varied = there.numel() > 1 and float(there.std()) * levels(pair.data_range) > VARIES
        if share > CUT and varied and float(beyond(there, end).double().mean()) > 0.95 and _share(pair, cut) > 0.5:
            level = float((end - low) * levels(pair.data_range))
            yield "clipping", f"nothing is {words} {level:.1f} levels, where {share:.2%} of the sample is cut off"
            return


# ---------------------------------------------------------------- frames


def frames(pair: Pair, plan: DecodePlan, receipts: Receipts) -> Iterator[Cause]:
    """Frames moved in time, or showing their neighbours."""
    if pair.frames > 1:
        yield from place.frame_shift(pair, MATCHES, LEAST_ERROR)


LOOKS: Sequence[Callable[[Pair, DecodePlan, Receipts], Iterator[Cause]]] = (
    order,
    frames,
    position,
    ranges,
    rounding,
    affine,
)
DECISIVE = (order, frames, position, ranges, rounding)


def _share(pair: Pair, where: Tensor) -> float:
    """Share of the squared difference that lies there."""
    squares = (pair.candidate - pair.golden).square().double()
    return float(squares[where].sum() / squares.sum().clamp_min(1e-12))


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _list(values: Sequence[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)
