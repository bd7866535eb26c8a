"""Doctored videos: films panned and zoomed over the shipped photographs, decoded by `reference-kl` frame by frame, and
candidates that must fail or must not, each named for the designed outcome.

(1, 3, T, H, W) in [-1, 1]. Amplitudes are in grey levels (127.5 to the unit). Two chunks of nine and eight frames and
more meet where `axis` says.
"""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import torch

from fidelity import registry
from fidelity.optimizations.plan import apply_plan
from fidelity.photographs import PHOTOGRAPHS
from fidelity.records import DecodePlan, Measurement, Temporal, TileAxis
from fidelity.registry import DETECTORS

RANGE = (-1.0, 1.0)
SIZE, FRAMES = 96, 17
FILMS = {
    "face": ("photo-pair", 0, (1.3, 0.4), 1.01),
    "cup": ("photo-pair", 1, (-2.5, 1.0), 1.0),
    "galaxies": ("photo-night", 0, (0.5, 0.5), 0.995),
}
"""Photograph, its part, pixels by which the view moves each frame, and by how much it widens."""


def axis(band: int = 0, frames: int = FRAMES) -> TileAxis:
    """Chunks that begin at frame 5 and every eighth from there, four frames to a latent one, as a causal decoder's."""
    return TileAxis((0, *range(5, frames, 8)), band, 8 + band, frames)


def measure(name: str, candidate: torch.Tensor, golden: torch.Tensor, chunks: TileAxis | None = None) -> Measurement:
    chunks = axis(frames=golden.shape[2]) if chunks is None else chunks
    plan = DecodePlan(temporal=Temporal(chunks.tile // 4, chunks.band / chunks.tile))
    receipts = {"temporal": {"requested": True, "engaged": True, "grid": msgspec.to_builtins(chunks)}}
    return DETECTORS.get(name)(candidate, golden, plan=plan, receipts=receipts, data_range=RANGE)


# ---------------------------------------------------------------- films


def shoot(
    picture: torch.Tensor, frames: int, size: int, move: tuple[float, float], zoom: float, wide: float = 1.25
) -> torch.Tensor:
    """(frames, 3, size, size): views of the middle of (1, 3, H, W), moved by `move` (x, y) px and zoomed each."""
    height, width = picture.shape[-2:]
    views = []
    for frame in range(frames):
        side = size * wide * zoom**frame
        x, y = (width / 2 + move[0] * (frame - frames / 2), height / 2 + move[1] * (frame - frames / 2))
        theta = torch.tensor([[[side / width, 0, 2 * x / width - 1], [0, side / height, 2 * y / height - 1]]])
        grid = torch.nn.functional.affine_grid(theta.float(), [1, 3, size, size], align_corners=False)
        view = torch.nn.functional.grid_sample(
            picture, grid, mode="bicubic", padding_mode="reflection", align_corners=False
        )
        views.append(view.clamp(-1, 1))
    return torch.cat(views)


@cache
def film(name: str = "face", frames: int = FRAMES + 1, size: int = SIZE) -> torch.Tensor:
    """(frames, 3, size, size); one frame more than is decoded, so that a shift by a frame has one to show."""
    photograph, part, move, zoom = FILMS[name]
    picture = np.asarray(PHOTOGRAPHS[photograph][1][part].read(), dtype=np.float32)
    return shoot(torch.from_numpy(picture).permute(2, 0, 1)[None] / 127.5 - 1, frames, size, move, zoom)


@cache
def _reference():
    registry.load_plugins()
    model = registry.MODELS.get("reference-kl")
    return model, model.load()


@cache
def _latents(name: str) -> torch.Tensor:
    model, module = _reference()
    with torch.inference_mode():
        return model.family.encode(module, film(name))


@cache
def decoded(name: str = "face", dtype: str = "fp32") -> torch.Tensor:
    """(1, 3, FRAMES + 1, H, W): the film, each frame through the autoencoder in that precision."""
    model, module = _reference()
    latents = _latents(name).to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    with torch.inference_mode(), apply_plan(module, DecodePlan(dtype=dtype), model=model, device="cpu"):
        sample = model.family.decode(module, latents).float()
    return sample.transpose(0, 1)[None].clone()


def golden(name: str = "face") -> torch.Tensor:
    return decoded(name)[:, :, :FRAMES].contiguous()


def clean(name: str = "face", dtype: str = "bf16") -> torch.Tensor:
    return decoded(name, dtype)[:, :, :FRAMES].contiguous()


# ---------------------------------------------------------------- what must fail


def weight(chunks: TileAxis, chunk: int = 1) -> torch.Tensor:
    """The blend weight of one chunk, (T, 1, 1)."""
    position = torch.arange(chunks.size, dtype=torch.float32)

    def shown(start: int) -> torch.Tensor:
        return ((position - start) / chunks.band).clamp(0, 1) if chunks.band else (position >= start).float()

    here = shown(chunks.starts[chunk]) if chunk else torch.ones(chunks.size)
    later = shown(chunks.starts[chunk + 1]) if chunk + 1 < len(chunks.starts) else 0
    return (here - later)[:, None, None]


def jump(video: torch.Tensor, chunks: TileAxis, amplitude: float, chunk: int = 1) -> torch.Tensor:
    """One chunk lighter, hard or under its blend ramp."""
    return video + amplitude / 127.5 * weight(chunks, chunk)


def no_context(video: torch.Tensor, chunks: TileAxis, amplitude: float, seed: int = 3) -> torch.Tensor:
    """The first two frames of each chunk but the first are rough: what was before them was not seen."""
    out = video.clone()
    for start in chunks.edges:
        rough = torch.randn(out[:, :, start].shape, generator=torch.Generator().manual_seed(seed + start))
        out[:, :, start] += amplitude / 127.5 * rough
        out[:, :, start + 1] += amplitude / 255 * rough
    return out


def ghost(
    video: torch.Tensor, share: float, step: int = -1, frames: tuple[int, ...] = (5, 6), of: torch.Tensor | None = None
) -> torch.Tensor:
    """Some frames with a share of the frame `step` away, of `of` (default: the video's own)."""
    out, other = video.clone(), video if of is None else of
    for frame in frames:
        out[:, :, frame] = (1 - share) * video[:, :, frame] + share * other[:, :, frame + step]
    return out


def beat(video: torch.Tensor, amplitude: float, every: int = 8, phase: int = 1) -> torch.Tensor:
    """Brightness that jumps at every eighth frame, up and down in turn."""
    frame = torch.arange(video.shape[2])
    return video + amplitude / 127.5 * ((frame - phase).div(every, rounding_mode="floor") % 2).view(-1, 1, 1)


def flicker(video: torch.Tensor, amplitude: float, last: int = 4) -> torch.Tensor:
    """The last frames in turn darker and lighter, `amplitude` from one to the next."""
    frame = torch.arange(video.shape[2])
    sign = torch.where(frame % 2 == 0, 0.5, -0.5) * (frame >= video.shape[2] - last)
    return video + amplitude / 127.5 * sign.view(-1, 1, 1)


def off_by_one(longer: torch.Tensor, at: int = 9) -> torch.Tensor:
    """The wrong frame dropped at a joint: as many frames, and from `at` on each shows the next one."""
    return torch.cat([longer[:, :, :at], longer[:, :, at + 1 :]], dim=2)


def frozen(video: torch.Tensor, at: int = 6) -> torch.Tensor:
    """A frame shown twice, in place of the next."""
    out = video.clone()
    out[:, :, at] = video[:, :, at - 1]
    return out


def stale(video: torch.Tensor, amplitude: float, other: torch.Tensor) -> torch.Tensor:
    """A causal cache of another clip: its last frame's detail in the first three frames, less in each."""
    out = video.clone()
    left = other[:, :, -1] - torch.nn.functional.avg_pool2d(other[:, :, -1], 9, 1, 4, count_include_pad=False)
    left = left / left.square().mean().sqrt()
    for frame in range(3):
        out[:, :, frame] += amplitude / 127.5 * 0.5**frame * left
    return out


# ---------------------------------------------------------------- what must not fail


def each(video: torch.Tensor, change) -> torch.Tensor:
    """Every frame changed by itself."""
    return torch.stack([change(frame) for frame in video.unbind(2)], dim=2)


def noise(video: torch.Tensor, amount: float = 0.3, seed: int = 1) -> torch.Tensor:
    """Error of a few pixels' width, of each frame by itself. `amount`: levels RMS."""
    white = torch.randn(video.shape, generator=torch.Generator().manual_seed(seed))
    soft = each(white, lambda frame: torch.nn.functional.avg_pool2d(frame, 3, 1, 1))
    return video + soft * (amount / 127.5 / soft.square().mean().sqrt())


def fade(video: torch.Tensor) -> torch.Tensor:
    """Lighter and lighter, by three levels over the film."""
    return video + torch.linspace(0, 3 / 127.5, video.shape[2]).view(-1, 1, 1)


MUST_NOT_FAIL = {
    "equal": lambda video: video.clone(),
    "fp16_like_noise": lambda video: noise(video, 0.03),
    "bf16_like_noise": lambda video: noise(video, 0.3),
    "strong_noise": lambda video: noise(video, 3.0),
    "one_error_in_all_frames": lambda video: video + noise(torch.zeros_like(video[:, :, :1]), 2.0),
    "lighter_everywhere": lambda video: noise(video + 3 / 127.5),
    "lighter_and_lighter": lambda video: noise(fade(video)),
    "contrast_everywhere": lambda video: noise(video * 1.02),
    "blurred": lambda video: each(
        video, lambda frame: torch.nn.functional.avg_pool2d(frame, 3, 1, 1, count_include_pad=False)
    ),
    "bf16_cast": lambda video: video.bfloat16().float(),
    "eight_bits": lambda video: (video * 127.5).round() / 127.5,
}
