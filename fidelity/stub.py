"""A decoder replaced by paint: what a class cuts, drops, joins and blends is seen without decoding a picture.

The latents are random, so that each call's place in them is known from what it was given; the painter says what each
call gives back. The shape of that is the real decoder's, asked once on a few latent pixels.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.optimizations import apply_plan
from fidelity.optimizations.attributes import attributes_kept
from fidelity.records import DecodePlan, Geometry, Model
from fidelity.sweep import Setting

if TYPE_CHECKING:
    from torch import Tensor

TINY = 2
"""Latent pixels a side on which the real decoder is asked for the shape that it gives."""
SAME = 1e-4
"""Latents of spread 1 that differ by no more are the same: a convolution rounds otherwise at another size."""


class Box(Struct, frozen=True):
    """Which part of the latents one decoder call was given, in what the decoder takes (latent pixels, as a rule)."""

    item: int
    start: int
    """Latent frames start to stop; 0 to 1 of pictures."""
    stop: int
    top: int
    bottom: int
    left: int
    right: int


class Call(Struct, frozen=True):
    """One item of one decoder call, and what is painted for it."""

    box: Box
    frames: int
    """Frames of the sample that the call gives."""
    ratio: int
    """Pixels of what the decoder gives for one that it takes."""


Painter = Callable[[Call], "Tensor | float"]
"""A value, or a tensor (frames, height, width), the same for each channel."""


class Stub:
    """Paints in the place of one module's decoder. `decode` gives the class's own decode, put together of paint."""

    def __init__(self, model: Model, module: Any, device: str = "cpu"):
        self.model, self.module, self.device = model, module, device
        self.calls: list[Call] = []
        """Of the last decode, item by item."""
        self._asked: dict[str, _Answer] = {}
        self._own: dict[tuple[Any, str], Any] = {}
        """Caches that the decoder keeps by itself from call to call: the part, and the attribute's name."""
        self._base: Tensor | None = None
        self._taken: Tensor | None = None
        """The whole of `_base` as the decoder takes it: (B, c, T, H, W)."""
        self._values: list[float] = []
        """The first channel of `_taken`, sorted, and where in it each value is."""
        self._places: list[int] = []
        self._paint: Painter | None = None
        self._seen: list[Tensor] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stand in for the decoder."""
        decoder: Any = self.model.family.decoder(self.module)
        with attributes_kept(decoder, ("forward",)), torch.no_grad():
            self._honest = decoder.forward
            decoder.forward = self._forward
            yield

    def decode(self, setting: Setting, paint: Painter, plan: DecodePlan) -> Tensor:
        """The sample (B, C, [T,] H, W) in fp32 of latents of the setting's size, under `plan` as its settings say."""
        self.reserve([setting])
        with apply_plan(self.module, setting.plan(plan), model=self.model, device=self.device):
            return self.decode_as_set(setting, paint)

    def decode_as_set(self, setting: Setting, paint: Painter) -> Tensor:
        """The same under whatever is set on the module already; the setting's size alone counts, and is reserved."""
        latents = self._latents(setting)
        self.calls, self._paint = [], paint
        try:
            return self.model.family.decode(self.module, latents).detach().to("cpu", torch.float32)
        finally:
            self._paint = None

    @property
    def unit(self) -> int:
        """Latent pixels in one pixel of what the decoder takes: 1 but where latents are taken apart before it."""
        assert self._base is not None
        assert self._taken is not None
        return max(1, self._base.shape[-1] // self._taken.shape[-1])

    def _latents(self, setting: Setting) -> Tensor:
        assert self._base is not None
        cut = self._base[: setting.batch, :, : setting.frames, : setting.height, : setting.width]
        return cut.clone() if self.model.geometry.video else cut[:, :, 0].clone()

    def reserve(self, settings: Iterable[Setting]) -> None:
        """Make latents as large as any of these needs, and see what the decoder takes of them when nothing is cut:
        pointwise in every class, so that a crop of the one is the crop of the other."""
        channels = self.model.geometry.latent_channels
        shapes = [(each.batch, channels, each.frames, each.height, each.width) for each in settings]
        if self._base is not None:
            shapes.append(tuple(self._base.shape))  # type: ignore[arg-type]
        shape = tuple(map(max, zip(*shapes)))
        if self._base is None or tuple(self._base.shape) != shape:
            self._base = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device)
            self._taken = torch.cat([self._take(item) for item in self._base.split(1)])
            order = self._taken[:, 0].flatten().sort()
            self._values, self._places = order.values.tolist(), order.indices.tolist()

    def _take(self, item: Tensor) -> Tensor:
        """(1, c, T, H, W) as the decoder takes it when nothing is cut."""
        self._seen, self._paint = [], None
        with attributes_kept(self.module, ("use_tiling",)):
            if self.model.family.native_tiling(self.model.geometry) is not None:  # it tiles unasked
                self.module.use_tiling = False
            self.model.family.decode(self.module, item if self.model.geometry.video else item[:, :, 0])
        if not self._seen:
            raise EvaluationError("the decode went past the model's decoder: nothing of its tiles can be seen")
        taken = torch.cat(self._seen, dim=2)
        if taken.shape[2] != item.shape[2]:
            raise EvaluationError(
                f"the full decode gave its decoder {taken.shape[2]} of {item.shape[2]} latent frames: it is cut in time"
            )
        return taken

    def _forward(self, z: Tensor, *args: Any, **kwargs: Any) -> Any:
        deep = self._deep(z, kwargs)
        shape, rest = self._shape(z, args, kwargs)
        if self._paint is None:
            self._seen.append(deep.detach().clone())
            return _with(rest, z.new_zeros(shape))
        frames, ratio = shape[0] // len(deep) if len(shape) == 4 else shape[2], shape[-1] // z.shape[-1]
        out = z.new_empty(shape)
        items = out.unflatten(0, (len(deep), frames)).transpose(1, 2) if len(shape) == 4 else out
        for index, item in enumerate(deep):
            call = Call(self._box(item), frames, ratio)
            self.calls.append(call)
            painted = self._paint(call)
            items[index] = painted.to(out) if isinstance(painted, torch.Tensor) else painted
        return _with(rest, out)

    def _deep(self, z: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """What the decoder was given as (B, c, T, h, w), also where it takes frames as a batch of pictures."""
        shape = self.model.family.call_shape(self.model.geometry, tuple(z.shape), kwargs)
        if z.ndim == 4 and len(shape) == 5:
            return z.unflatten(0, (shape[0], shape[2])).transpose(1, 2)
        if tuple(shape) != tuple(z.shape):
            raise EvaluationError(
                f"the decoder of {self.model.family.name} takes {by(z.shape)}, no latents, so nothing can be placed"
            )
        return z if z.ndim == 5 else z.unsqueeze(2)

    def _box(self, item: Tensor) -> Box:
        """Where this part (c, t, h, w) lies in the latents. Raises EvaluationError if it lies nowhere."""
        assert self._taken is not None
        frames, height, width = item.shape[1:]
        first = float(item[0, 0, 0, 0])
        near = slice(bisect_left(self._values, first - SAME), bisect_right(self._values, first + SAME))
        for flat in self._places[near]:
            *outer, x = divmod(flat, self._taken.shape[-1])
            *outer, y = divmod(outer[0], self._taken.shape[-2])
            b, t = divmod(outer[0], self._taken.shape[-3])
            there = self._taken[b, :, t : t + frames, y : y + height, x : x + width]
            if there.shape == item.shape and bool(((there - item).abs() <= SAME).all()):
                return Box(b, t, t + frames, y, y + height, x, x + width)
        size = f"{frames} × {height}×{width}" if frames > 1 else f"{height}×{width}"
        raise EvaluationError(f"the decoder was given {size} latents that are no part of those to decode")

    def _shape(self, z: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], Any]:
        """The shape that the real decoder gives for `z`, and what it gives besides.

        It is asked once for each kind of call: the caches that it fills, those that it is handed and those of its own,
        are kept, and filled the same way the next time.
        """
        handed = [each for each in (*args, *kwargs.values()) if isinstance(each, list)]
        found = self._asked.get(self._key(z, args, kwargs))
        if found is None:
            found = self._ask(z, args, kwargs, handed)
        for cache, content in zip(handed, found.handed):
            cache[:] = content
        for (part, name), value in found.own.items():
            setattr(part, name, value)
        height, width = (side * out // TINY for side, out in zip(z.shape[-2:], found.shape[-2:]))
        return (*found.shape[:-2], height, width), found.rest

    def _ask(self, z: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], handed: list[list[Any]]) -> _Answer:
        before, key = self._held(), self._key(z, args, kwargs)
        tiny = z[..., :1, :1].expand(*z.shape[:-2], TINY, TINY).contiguous()
        given = self._honest(tiny, *_shrunk(args, z), **_shrunk(kwargs, z))
        output, rest = (given[0], given[1:]) if isinstance(given, tuple) else (getattr(given, "sample", given), None)
        after = self._held()
        own = {place: value for place, value in after.items() if before.get(place) is not value}
        if not own.keys() <= self._own.keys():  # what was asked before did not look at these
            self._asked.clear()
            self._own |= own
        found = _Answer(tuple(output.shape), rest, [list(each) for each in handed], own)
        self._asked[key] = found
        return found

    def _key(self, z: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        own = [getattr(part, name, None) for part, name in self._own]
        return f"{tuple(z.shape[:-2])} {z.dtype} {_kind(_shrunk(args, z))} {_kind(_shrunk(kwargs, z))} {_kind(own)}"

    def _held(self) -> dict[tuple[Any, str], Any]:
        """What the decoder's parts hold of their own."""
        parts = self.model.family.decoder(self.module).modules()
        return {(part, name): value for part in parts for name, value in vars(part).items() if name != "forward"}


class _Answer(NamedTuple):
    """What the real decoder did when it was asked."""

    shape: tuple[int, ...]
    rest: Any
    handed: list[list[Any]]
    own: dict[tuple[Any, str], Any]


def by(shape: Iterable[int]) -> str:
    """`1×3×24×36`."""
    return "×".join(map(str, shape))


def _with(rest: Any, out: Tensor) -> Any:
    return out if rest is None else (out, *rest)


def _shrunk(tree: Any, z: Tensor) -> Any:
    """Arguments besides the latents: pictures of the latents' size as small as those are. Caches are small already, as
    the decoder made them, and lists stay the very objects, which it fills."""
    if isinstance(tree, torch.Tensor) and tree.ndim >= 4 and tree.shape[-2:] == z.shape[-2:]:
        return tree[..., :1, :1].expand(*tree.shape[:-2], TINY, TINY).contiguous()
    if isinstance(tree, tuple):
        return tuple(_shrunk(each, z) for each in tree)
    if isinstance(tree, dict):
        return {name: _shrunk(each, z) if isinstance(each, torch.Tensor) else each for name, each in tree.items()}
    return tree


def _kind(tree: Any) -> str:
    """What decides the shape of an output: shapes of tensors, values of everything else."""
    if isinstance(tree, torch.Tensor):
        return f"tensor{tuple(tree.shape)}"
    if isinstance(tree, dict):
        return "{" + ",".join(f"{key}:{_kind(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (list, tuple)):
        return "[" + ",".join(map(_kind, tree)) + "]"
    return repr(tree)


def frame_at(geometry: Geometry, frames: int, latent: int) -> int:
    """The first sample frame of a latent frame, of `frames` of them; of one past the last, the sample's length."""
    return geometry.sample_frames(frames) - geometry.temporal * (frames - latent) if latent else 0
