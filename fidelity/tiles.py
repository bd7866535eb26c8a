"""Which tiles a class decodes faithfully, why not the others, and where the tiles of one setting lie: from its config.

Nothing is decoded and nothing heavy imported. Tiles are in latent pixels, with what that is in sample pixels and as the
class's own attributes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from msgspec import Struct

from fidelity.errors import IllegalTiling, RequestError
from fidelity.models import legal_tiles
from fidelity.records import Geometry, Model, Temporal, TileAxis, Tiling

OVERLAPS = (0.0, 0.125, 0.25, 0.375, 0.5)
LARGEST, LARGEST_CHUNK = 128, 32
"""Latent pixels, and latent frames, up to which is looked."""
FAR = 10 * LARGEST
LAWS = {
    "causal": "one for the first latent frame, {f} for each later one",
    "every": "{f} for each latent frame",
    "odd": "{f} for each latent frame, but of an odd number of them one for the first",
    "clips": "clips of {clip} frames, each coded by itself",
}


class LegalTiles(Struct, frozen=True):
    """What a class can have at one overlap."""

    overlap: float
    tiles: tuple[int, ...]
    """Latent pixels, or latent frames."""
    first_illegal: int | None = None
    reason: str | None = None
    """Why the first illegal one is."""


class AxisTiles(Struct, frozen=True):
    """Tiles along one axis: where each begins and ends in sample pixels (frames), and how many are blended."""

    spans: tuple[tuple[int, int], ...]
    band: int


class Cut(Struct, frozen=True):
    """One legal setting: in latents, in sample pixels (frames), and as the class's own attributes."""

    tile: int
    overlap: float
    stride: int
    sample_tile: int
    sample_overlap: int
    sample_stride: int
    attributes: tuple[str, ...]
    """As lines of Python."""
    axes: dict[str, AxisTiles] = {}
    """`rows` and `cols`, or `frames`, where a size was given."""

    @property
    def count(self) -> int:
        """Decoder calls for one item, streaming apart."""
        total = 1
        for axis in self.axes.values():
            total *= len(axis.spans)
        return total


class TileReport(Struct, frozen=True):
    """Everything that `fidelity tiles` prints."""

    model: str
    family: str
    spatial: int
    temporal: int
    frames_law: str | None
    """Sample frames of a video, in words; None for pictures."""
    tile_controls: str
    temporal_controls: str
    tiles: tuple[LegalTiles, ...] = ()
    chunks: tuple[LegalTiles, ...] = ()
    size: tuple[int, int] | None = None
    frames: int | None = None
    """Of the sample."""
    latent_frames: int | None = None
    tiling: Cut | None = None
    chunking: Cut | None = None


def report(
    model: Model,
    *,
    size: tuple[int, int] | None = None,
    tiling: Tiling | None = None,
    frames: int | None = None,
    temporal: Temporal | None = None,
) -> TileReport:
    """What there is to know of a model's tiles. `size` and `frames` are the sample's.

    Raises IllegalTiling, with the reason and the nearest legal one, for a setting that the class cannot have, and
    RequestError for a size or a number of frames that the model cannot give.
    """
    family, geometry = model.family, model.geometry
    latent_size = _latent_size(model, size) if size is not None else None
    latent_frames = _latent_frames(model, frames) if frames is not None else None
    if geometry.size is not None and latent_size not in (None, geometry.size):
        only = "×".join(str(side * geometry.spatial) for side in geometry.size)
        raise RequestError(f"{model.name}: the class decodes {only} alone: leave --size out, or give that")
    return TileReport(
        model=model.name,
        family=family.name,
        spatial=geometry.spatial,
        temporal=geometry.temporal,
        frames_law=_law(geometry),
        tile_controls=family.tile_controls,
        temporal_controls=family.temporal_controls,
        tiles=tuple(_legal(model, overlap) for overlap in OVERLAPS) if family.tile_controls != "none" else (),
        chunks=tuple(_legal_chunks(model, overlap) for overlap in OVERLAPS) if family.temporal_attributes() else (),
        size=size,
        frames=frames,
        latent_frames=latent_frames,
        tiling=_tiled(model, tiling, latent_size) if tiling is not None else None,
        chunking=_chunked(model, temporal, latent_frames) if temporal is not None else None,
    )


# ---------------------------------------------------------------- sizes


def _latent_size(model: Model, size: tuple[int, int]) -> tuple[int, int]:
    f = model.geometry.spatial
    if size[0] % f or size[1] % f or 0 in size:
        near = "x".join(str(max(1, round(side / f)) * f) for side in size)
        raise RequestError(f"--size {size[0]}x{size[1]}: {model.name} gives multiples of {f} pixels; nearest: {near}")
    return size[0] // f, size[1] // f


def _latent_frames(model: Model, frames: int) -> int:
    geometry = model.geometry
    if not geometry.video:
        raise RequestError(f"--frames {frames}: {model.name} is a model of pictures: leave frames out")
    counts = {geometry.sample_frames(n): n for n in range(1, max(1, frames) + 2)}
    if frames not in counts:
        near = min(counts, key=lambda count: (abs(count - frames), count))
        law = _law(geometry)
        raise RequestError(f"--frames {frames}: {model.name} does not give as many: {law}; nearest: {near}")
    return counts[frames]


def _law(geometry: Geometry) -> str | None:
    return LAWS[geometry.frames].format(f=geometry.temporal, clip=geometry.clip) if geometry.video else None


# ---------------------------------------------------------------- what is legal


def _legal(model: Model, overlap: float) -> LegalTiles:
    tiles = legal_tiles(model.family, model.geometry, overlap, LARGEST)
    return _with_reason(overlap, tiles, LARGEST, lambda tile: _grid_of(model, Tiling(tile, overlap)))


def _legal_chunks(model: Model, overlap: float) -> LegalTiles:
    def ask(tile: int) -> Any:
        return model.family.chunks(model.geometry, FAR, Temporal(tile, overlap))

    tiles = tuple(tile for tile in range(1, LARGEST_CHUNK + 1) if _why_not(ask, tile) is None)
    return _with_reason(overlap, tiles, LARGEST_CHUNK, ask)


def _with_reason(overlap: float, tiles: tuple[int, ...], largest: int, ask: Any) -> LegalTiles:
    least = tiles[0] if tiles else 1
    odd = next((tile for tile in range(least, largest + 1) if tile not in tiles), None)
    return LegalTiles(overlap, tiles, odd, _why_not(ask, odd) if odd is not None else None)


def _why_not(ask: Any, tile: int) -> str | None:
    try:
        ask(tile)
    except IllegalTiling as error:
        return str(error)
    return None


def _grid_of(model: Model, tiling: Tiling) -> Any:
    """The grid of latents that this tile has to cut. Raises IllegalTiling."""
    size = model.geometry.size or (LARGEST + 1 + tiling.tile, LARGEST + 1 + tiling.tile)
    return model.family.tile_grid(model.geometry, size, tiling)


# ---------------------------------------------------------------- one setting


def _tiled(model: Model, tiling: Tiling, size: tuple[int, int] | None) -> Cut:
    f = model.geometry.spatial
    try:
        grid = _grid_of(model, tiling)
        grid = model.family.tile_grid(model.geometry, size, tiling) if size is not None else grid
    except IllegalTiling as error:
        if "nearest" in str(error) or model.family.tile_controls == "none":
            raise
        raise IllegalTiling(f"{error}; nearest legal: {_nearest(model, tiling)}") from None
    axes = {"rows": _spans(grid.rows), "cols": _spans(grid.cols)} if size is not None else {}
    set_ = written(lambda vae: model.family.set_tiling(vae, model.geometry, tiling), model)
    return _cut(tiling, f, _grid_of(model, tiling).rows.starts[1] // f, set_, axes)


def _chunked(model: Model, temporal: Temporal, frames: int | None) -> Cut:
    chunks, axes = model.family.chunks(model.geometry, FAR, temporal), {}
    if frames is not None:
        axes["frames"] = _spans(model.family.frame_axis(model.geometry, frames, temporal))
    set_ = written(lambda vae: model.family.set_temporal(vae, model.geometry, temporal), model)
    return _cut(temporal, model.geometry.temporal, chunks[1].start, set_, axes)


def _cut(
    cut: Tiling | Temporal, unit: int, stride: int, attributes: tuple[str, ...], axes: dict[str, AxisTiles]
) -> Cut:
    return Cut(tile=cut.tile, overlap=cut.overlap, stride=stride, sample_tile=cut.tile * unit,
               sample_overlap=(cut.tile - stride) * unit, sample_stride=stride * unit, attributes=attributes,
               axes=axes)  # fmt: skip


def _spans(axis: TileAxis) -> AxisTiles:
    spans = tuple((start, min(start + axis.tile, axis.size)) for start in axis.starts)
    return AxisTiles(spans, axis.band if len(spans) > 1 else 0)


def _nearest(model: Model, tiling: Tiling) -> str:
    """The nearest legal tile at this overlap, and the nearest overlap for this tile, in words."""
    tiles = legal_tiles(model.family, model.geometry, tiling.overlap, 2 * max(tiling.tile, 16))
    steps = [k / tiling.tile for k in range(tiling.tile)] if tiling.tile > 0 else []
    shares = [share for share in steps if tiling.tile in legal_tiles(model.family, model.geometry, share, tiling.tile)]
    found = []
    if shares:
        found.append(f"overlap {min(shares, key=lambda share: abs(share - tiling.overlap)):g} with this tile")
    if tiles:
        found.append(f"tile {min(tiles, key=lambda tile: abs(tile - tiling.tile))} with this overlap")
    return ", or ".join(found) or "none: leave tiling out"


class _Written:
    """Stands for an instance: what is set and called is written down, what was never set stays a name."""

    def __init__(self, name: str, lines: list[str], values: dict[str, Any]):
        self.__dict__.update(_name=name, _lines=lines, _values=values)

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._lines.append(f"{self._name}.{name} = {value!r}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        return _Written(f"{self._name}.{name}", self._lines, {})

    def __getitem__(self, key: Any) -> _Written:
        return _Written(f"{self._name}[{key!r}]", self._lines, {})

    def __iter__(self) -> Any:
        raise TypeError(f"{self._name} is not known without an instance, so it has no parts")

    def __call__(self, **given: Any) -> None:
        self._lines.append(f"{self._name}({', '.join(f'{key}={value!r}' for key, value in given.items())})")

    def __repr__(self) -> str:
        return self._name


def written(act: Any, model: Model) -> tuple[str, ...]:
    """What `act(vae)` sets and calls on an instance as the family settles it, as lines of Python."""
    lines: list[str] = []
    config = _Written("vae.config", lines, dict(model.config))
    vae = _Written("vae", lines, {"config": config, **model.config})
    getattr(model.family, "settle", lambda _: None)(vae)
    lines.clear()
    act(vae)
    return tuple(lines)


# ---------------------------------------------------------------- words


def lines(found: TileReport) -> list[str]:
    """The report in words, a line each."""
    video = f" · f_t {found.temporal}" if found.frames_law else ""
    out = [f"{found.model} · {found.family} · f {found.spatial}{video}"]
    out += [f"frames        {found.frames_law}"] if found.frames_law else []
    out.append(
        f"tiles         {found.tile_controls if found.tile_controls != 'none' else 'none: the class does not tile'}"
    )
    if found.frames_law:
        out.append(
            f"chunks        {found.temporal_controls if found.chunks else 'none: the class does not cut a video'}"
        )
    out += [_legal_line("tile", "latent pixels", each) for each in found.tiles]
    out += [_legal_line("chunk", "latent frames", each) for each in found.chunks]
    if found.tiling is not None:
        out += _cut_lines("tile", "latent pixels", "pixels", found.tiling)
    if found.chunking is not None:
        out += _cut_lines("chunk", "latent frames", "frames", found.chunking)
    return out


def _legal_line(kind: str, unit: str, legal: LegalTiles) -> str:
    # the class, and what is nearest, stand in every such reason
    bare = (legal.reason or "").partition(": ")[2].partition("; nearest")[0] or legal.reason
    why = f"; not {legal.first_illegal}: {bare}" if legal.first_illegal is not None else ""
    return f"{kind} o={legal.overlap:<6g} {ranges(legal.tiles)} {unit}{why}"


def _cut_lines(kind: str, unit: str, sample: str, cut: Cut) -> list[str]:
    out = [
        f"{kind} {cut.tile}, overlap {cut.overlap:g}: legal",
        f"  {cut.tile} {unit} every {cut.stride} = {cut.sample_tile} {sample} every {cut.sample_stride}, "
        f"{cut.sample_overlap} of them overlapping",
        *(f"  {line}" for line in cut.attributes),
    ]
    if cut.axes:
        sides = " × ".join(str(len(axis.spans)) for axis in cut.axes.values())
        out.append(f"  {sides}{f' = {cut.count}' if len(cut.axes) > 1 else ''} {kind}{'s' if cut.count != 1 else ''}")
    for name, axis in cut.axes.items():
        blended = f", the first {axis.band} of each later one blended" if axis.band else ""
        spans = [f"{start}–{stop}" for start, stop in axis.spans]
        if len(spans) > MANY:  # --json has them all
            spans = [*spans[:3], f"… {len(spans) - 5} more …", *spans[-2:]]
        out.append(f"  {name:<6}  {', '.join(spans)}{blended}")
    return out


def ranges(numbers: tuple[int, ...]) -> str:
    """`4, 8, … 128 (every 4)`, or the numbers themselves."""
    if not numbers:
        return "none"
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1:
        return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]} (every {steps.pop()})"
    return ", ".join(map(str, numbers))


MANY = 12
"""Tiles along an axis from which on only the first and last are printed."""
