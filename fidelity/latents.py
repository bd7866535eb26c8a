"""Named deterministic latents: encoded photographs, drawn and seeded ones, and a user's own.

Everything is made on the CPU in fp32 (and cast later), from generators of its own, so that a name means the same
latents everywhere. Encoded photographs depend on the encoder's kernels in the last bits, so a golden keeps the latents
that it was made from; the other recipes give the same bits on every machine.

"Denoiser units" are what a diffusion model works in (spread about 1); "decoder units" what `vae.decode` takes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fidelity.errors import LatentsError
from fidelity.lazy import np, torch
from fidelity.photographs import PANS, PHOTOGRAPHS, Photograph
from fidelity.records import Geometry, Latents, LatentSource, Model, Scaling
from fidelity.registry import LATENTS, unknown
from fidelity.tensorfile import FLOATS, read_header

if TYPE_CHECKING:
    from PIL import Image
    from torch import nn


# ---------------------------------------------------------------- what every recipe ends with


def digest(tensor: torch.Tensor) -> str:
    """32 hex digits of BLAKE2b over dtype, shape and bytes."""
    plain = tensor.detach().cpu().contiguous()
    hasher = hashlib.blake2b(f"{plain.dtype}{tuple(plain.shape)}".encode(), digest_size=16)
    hasher.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def check(latents: torch.Tensor, model: Model, source: str) -> None:
    """Raise LatentsError, in one line that names `source`, if `model` cannot take these latents."""
    _check_shape(tuple(latents.shape), model.geometry, source)
    if not latents.is_floating_point():
        raise LatentsError(f"{source}: latents are {latents.dtype}, expected a floating-point dtype")
    bad = ~torch.isfinite(latents)
    if bad.any():
        first = bad.nonzero()[0].tolist()
        raise LatentsError(f"{source}: {int(bad.sum())} of {latents.numel()} values are NaN or inf, first at {first}")


def unscale(latents: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """From denoiser units to decoder units: · std / factor + mean (or shift), as diffusers' pipelines do."""
    shape = (1, -1) + (1,) * (latents.ndim - 2)
    if scaling.std is not None:
        latents = latents * torch.tensor(scaling.std, dtype=latents.dtype).view(shape)
    if scaling.factor is not None:
        latents = latents / scaling.factor
    if scaling.mean is not None:
        return latents + torch.tensor(scaling.mean, dtype=latents.dtype).view(shape)
    return latents if scaling.shift is None else latents + scaling.shift


def _check_shape(shape: Sequence[int], geometry: Geometry, source: str) -> None:
    layout = "(B, C, T, H, W)" if geometry.video else "(B, C, H, W)"
    if len(shape) != len(layout.split(",")):
        raise LatentsError(f"{source}: latents have {len(shape)} axes {list(shape)}, the model takes {layout}")
    if 0 in shape:
        raise LatentsError(f"{source}: latents are empty: {list(shape)}")
    if shape[1] != geometry.latent_channels:
        raise LatentsError(f"{source}: latents have {shape[1]} channels, the model takes {geometry.latent_channels}")
    if geometry.size not in (None, tuple(shape[-2:])):
        side = "×".join(map(str, geometry.size))
        raise LatentsError(f"{source}: latents are {shape[-2]}×{shape[-1]}, the model decodes {side} alone")


def _finish(tensor: torch.Tensor, model: Model, source: LatentSource, image: torch.Tensor | None = None) -> Latents:
    tensor = tensor.detach().to("cpu", torch.float32).contiguous()
    check(tensor, model, f"latents {source.name!r}")
    expected = source.shape(model.geometry)
    if tuple(tensor.shape) != expected:
        raise LatentsError(f"latents {source.name!r}: came out as {list(tensor.shape)}, expected {list(expected)}")
    return Latents(source.name, tensor, digest(tensor), image)


# ---------------------------------------------------------------- photographs


def _image_shape(name: str, count: int, size: tuple[int, int], geometry: Geometry) -> tuple[int, ...]:
    (height, width), f = size, geometry.spatial
    if geometry.video or geometry.sample_channels != 3:
        kind = "videos" if geometry.video else f"{geometry.sample_channels} channels"
        raise LatentsError(f"latents {name!r}: a picture needs a model of 3-channel images, this one is of {kind}")
    if height % f or width % f:
        raise LatentsError(f"latents {name!r}: {height}×{width} is no multiple of the model's compression {f}")
    shape = (count, geometry.latent_channels, height // f, width // f)
    _check_shape(shape, geometry, f"latents {name!r}")
    return shape


def _encode(pictures: Sequence[Image.Image], model: Model, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and images; each picture is encoded alone, so that it does not depend on its neighbours."""
    low, high = model.data_range
    stacked = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2)
    image = (stacked.to(torch.float32) / 255 * (high - low) + low).contiguous()
    with torch.no_grad():
        return torch.cat([model.family.encode(module, one) for one in image.split(1)]), image


def _film(photo: Photograph, step: tuple[int, int], frames: int) -> torch.Tensor:
    """(3, T, H, W), 0 to 255: the photograph under a camera that moves by `step` pixels a frame."""
    stills = [np.asarray(photo.moved(step[0] * frame, step[1] * frame)) for frame in range(frames)]
    return torch.from_numpy(np.stack(stills)).permute(3, 0, 1, 2).to(torch.float32)


def _pan_source(name: str, summary: str, films: tuple[tuple[Photograph, tuple[int, int]], ...]) -> LatentSource:
    height, width = films[0][0].size

    def shape(geometry: Geometry) -> tuple[int, ...]:
        f = geometry.spatial
        if not geometry.video:
            raise LatentsError(f"latents {name!r}: a video needs a model of videos, this one is of images")
        if height % f or width % f:
            raise LatentsError(f"latents {name!r}: {height}×{width} is no multiple of the model's compression {f}")
        return (len(films), geometry.latent_channels, CLIP, height // f, width // f)

    def make(model: Model, module: nn.Module) -> Latents:
        shape(model.geometry)
        frames, (low, high) = model.geometry.sample_frames(CLIP), model.data_range
        video = torch.stack([_film(photo, step, frames) for photo, step in films]) / 255 * (high - low) + low
        with torch.no_grad():
            latents = torch.cat([model.family.encode(module, one) for one in video.split(1)])
        return _finish(latents, model, source, video)

    source = LatentSource(name, summary, shape, make, pictured=True)
    return source


def _photo_source(name: str, summary: str, photos: tuple[Photograph, ...]) -> LatentSource:
    def make(model: Model, module: nn.Module) -> Latents:
        source.shape(model.geometry)
        latents, image = _encode([photo.read() for photo in photos], model, module)
        return _finish(latents, model, source, image)

    shape = partial(_image_shape, name, len(photos), photos[0].size)
    source = LatentSource(name, summary, shape, make, pictured=True)
    return source


# ---------------------------------------------------------------- drawn and seeded, in denoiser units

CLIP = 6
"""Latent frames of a video: enough for three chunks of two."""
HEIGHT, WIDTH, FRAMES = 24, 32, 4
"""Latent pixels (and frames of a video) of what is drawn: more than a tile of 16 each way, and not square."""
SEED = 20260117


def _normal(shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal by inverse distribution in fp64, on a grid of 2⁻¹²: torch.randn's bits differ between CPUs."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") + 2.0**-54
    return torch.special.ndtri(uniform).mul(4096).round().div(4096)


def _channel_signs(shape: tuple[int, ...]) -> torch.Tensor:
    signs = 1.0 - 2.0 * (torch.arange(shape[1], dtype=torch.float64, device="cpu") % 2)
    return signs.view(1, -1, *(1,) * (len(shape) - 2))


def _axis_of(shape: tuple[int, ...], axis: int) -> torch.Tensor:
    """Index along `axis`, shaped to broadcast."""
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return torch.arange(shape[axis], dtype=torch.float64, device="cpu").view(view)


def _flat(shape: tuple[int, ...]) -> torch.Tensor:
    return (0.5 * _channel_signs(shape)).expand(shape)


def _ramp(shape: tuple[int, ...]) -> torch.Tensor:
    """Even channels rise from left to right, odd ones from top to bottom, from -1.5 to 1.5."""
    across = 3 * _axis_of(shape, -1) / (shape[-1] - 1) - 1.5
    down = 3 * _axis_of(shape, -2) / (shape[-2] - 1) - 1.5
    return torch.where(_channel_signs(shape) > 0, across, down).expand(shape)


def _contrast(shape: tuple[int, ...]) -> torch.Tensor:
    """Squares of 5 latent pixels, ±2: no tile begins where they do."""
    squares = (_axis_of(shape, -1) // 5 + _axis_of(shape, -2) // 5) % 2
    return ((4 * squares - 2) * _channel_signs(shape)).expand(shape)


def _hot_pixel(shape: tuple[int, ...]) -> torch.Tensor:
    """Zero but for one latent pixel of ±8, off every likely tile border."""
    latents = torch.zeros(shape, dtype=torch.float64, device="cpu")
    latents[..., shape[-2] * 10 // HEIGHT, shape[-1] * 19 // WIDTH] = 8.0
    return latents * _channel_signs(shape)


def _temporal_step(shape: tuple[int, ...]) -> torch.Tensor:
    """A cut: one seeded still for the first half of the frames, another for the rest; of two items, one backwards."""
    before, after = _normal((2, *shape[1:2], *shape[3:])).unbind(0)
    first = torch.arange(shape[2]) < shape[2] // 2
    film = torch.where(first.view(-1, 1, 1), before[:, None], after[:, None])
    return torch.stack([film, film.flip(1)])


def _step_source(name: str, summary: str) -> LatentSource:
    """Videos only."""

    def shape(geometry: Geometry) -> tuple[int, ...]:
        if not geometry.video:
            raise LatentsError(f"latents {name!r}: a step in time needs a model of videos, this one is of images")
        return (2, geometry.latent_channels, CLIP, 7, 10)

    def make(model: Model, module: nn.Module) -> Latents:
        drawn = _temporal_step(shape(model.geometry)).to(torch.float32)
        return _finish(unscale(drawn, model.scaling), model, source)

    source = LatentSource(name, summary, shape, make)
    return source


def _drawn_source(
    name: str,
    summary: str,
    batch: int,
    size: tuple[int, int],
    draw: Callable[[tuple[int, ...]], torch.Tensor],
) -> LatentSource:
    def shape(geometry: Geometry) -> tuple[int, ...]:
        return (batch, geometry.latent_channels, *((FRAMES,) if geometry.video else ()), *(geometry.size or size))

    def make(model: Model, module: nn.Module) -> Latents:
        drawn = draw(shape(model.geometry)).to(torch.float32)
        return _finish(unscale(drawn, model.scaling), model, source)

    source = LatentSource(name, summary, shape, make)
    return source


# ---------------------------------------------------------------- a user's own


def from_file(name: str, path: str | Path, *, tensor: str | None = None, scaled: bool) -> LatentSource:
    """Latents of a `.safetensors` file; `tensor` names the one to take where there are several.

    `scaled=True`: the file is in denoiser units and is unscaled by the model's convention; `scaled=False`: it is what
    `vae.decode` takes. Raises LatentsError for a missing or damaged file and an unknown or ambiguous tensor; shape and
    channels are checked by `shape`, values by `make`.
    """
    _check_name(name)
    path, label = Path(path).expanduser(), f"latents {name!r} ({path})"
    header = read_header(path, LatentsError)
    if tensor is None and len(header) != 1:
        raise LatentsError(f"{label}: holds {len(header)} tensors, name one of: {', '.join(header) or 'none'}")
    key = next(iter(header)) if tensor is None else tensor
    if key not in header:
        raise LatentsError(f"{label}: {unknown('tensor', key, header)}")
    info = header[key]
    if info.dtype not in FLOATS:
        raise LatentsError(f"{label}: tensor {key!r} is {info.dtype}, expected one of {', '.join(FLOATS)}")

    def shape(geometry: Geometry) -> tuple[int, ...]:
        _check_shape(info.shape, geometry, label)
        return info.shape

    def make(model: Model, module: nn.Module) -> Latents:
        from safetensors.torch import load_file

        shape(model.geometry)
        if scaled and model.scaling == Scaling():
            raise LatentsError(f"{label}: model {model.name!r} states no scaling, so give what its decoder takes")
        loaded = load_file(path, device="cpu")[key].to(torch.float32)
        return _finish(unscale(loaded, model.scaling) if scaled else loaded, model, source)

    source = LatentSource(name, f"{path.name}, {'denoiser' if scaled else 'decoder'} units", shape, make)
    return source


def from_image(name: str, path: str | Path) -> LatentSource:
    """A user's own picture, its middle cut to a multiple of the model's compression and encoded.

    Raises LatentsError if the file is missing, no picture, deeper than 8 bits, transparent, or smaller than one latent
    pixel.
    """
    _check_name(name)
    path, label = Path(path).expanduser(), f"latents {name!r} ({path})"
    width, height = _open(path, label).size

    def cut(geometry: Geometry) -> tuple[int, int]:
        f = geometry.spatial
        if height < f or width < f:
            raise LatentsError(f"{label}: {height}×{width} pixels are less than one latent pixel of {f}×{f}")
        return height - height % f, width - width % f

    def shape(geometry: Geometry) -> tuple[int, ...]:
        return _image_shape(name, 1, cut(geometry), geometry)

    def make(model: Model, module: nn.Module) -> Latents:
        shape(model.geometry)
        h, w = cut(model.geometry)
        left, top = (width - w) // 2, (height - h) // 2
        latents, image = _encode([_open(path, label).crop((left, top, left + w, top + h))], model, module)
        return _finish(latents, model, source, image)

    source = LatentSource(name, f"{path.name}, encoded", shape, make, pictured=True)
    return source


def _open(path: Path, label: str) -> Image.Image:
    """An upright RGB picture. Raises LatentsError."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as raw:
            picture = ImageOps.exif_transpose(raw)
            picture.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise LatentsError(f"{label}: cannot be read as a picture: {' '.join(str(error).split())}") from None
    if picture.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        raise LatentsError(f"{label}: pixels are of mode {picture.mode}, expected 8-bit grey or RGB")
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        if picture.getchannel("A").getextrema()[0] != 255:
            raise LatentsError(f"{label}: has transparent pixels: lay it on a background first")
    return picture.convert("RGB")


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise LatentsError(f"latents name {name!r}: use letters, digits, '.', '_' and '-' (it becomes a folder's name)")


for _name, (_summary, _photos) in PHOTOGRAPHS.items():
    LATENTS.add(_name, _photo_source(_name, _summary, _photos))
for _name, (_summary, _films) in PANS.items():
    LATENTS.add(_name, _pan_source(_name, _summary, _films))
for _source in (
    _step_source("temporal-step", "two videos with a cut in the middle"),
    _drawn_source("normal", "seeded normal, two items", 2, (HEIGHT, WIDTH), _normal),
    _drawn_source("small", "seeded normal, two small items", 2, (6, 9), _normal),
    _drawn_source("flat", "one value a channel", 1, (WIDTH, HEIGHT), _flat),
    _drawn_source("ramp", "low-frequency ramps, across and down", 1, (HEIGHT, WIDTH), _ramp),
    _drawn_source("contrast", "squares of high contrast", 1, (WIDTH, HEIGHT), _contrast),
    _drawn_source("hot-pixel", "zero but for one latent pixel of eight spreads", 1, (HEIGHT, WIDTH), _hot_pixel),
):
    LATENTS.add(_source.name, _source)
