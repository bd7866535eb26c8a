"""Whether every pixel of a decode is shown once and in its place: three paints that an honest class must give back.

*ones*: the weights of the tiles that show a pixel sum to one. *place*: each pixel is painted by its own place, so that
whatever is cropped, drifted, dropped or repeated shows another's. *tiles*: each tile has a value of its own, so that
it is seen where it shows, which must be where the family's `tile_grid` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from fidelity.lazy import torch
from fidelity.records import DecodePlan, TileAxis
from fidelity.stub import Call, Stub, by, frame_at
from fidelity.sweep import Setting

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 2e-5
"""Of paint between 0 and 1: blending rounds a few times 6e-8."""
PLACES = 1021
"""Values of the paint of places, 5e-4 apart; a neighbour with the same one is seen at the next pixel."""


class Fault(Struct, frozen=True):
    """What a setting came out as. The two tensors show it: they differ in shape or value."""

    setting: Setting
    words: str
    came: Tensor
    expected: Tensor


def expected_shape(stub: Stub, setting: Setting) -> tuple[int, ...]:
    """Of the full decode, by the model's geometry."""
    geometry = stub.model.geometry
    frames = (geometry.sample_frames(setting.frames),) if geometry.video else ()
    size = (setting.height * geometry.spatial, setting.width * geometry.spatial)
    return (setting.batch, geometry.sample_channels, *frames, *size)


def find(stub: Stub, setting: Setting, plan: DecodePlan) -> Fault | None:
    """What is wrong with this setting of a legal tiling, or None. What the decode raises passes through."""
    misplaced = _placed(stub, setting, plan)
    tiled = setting.tiling and stub.model.family.will_tile((setting.height, setting.width), setting.tiling)
    return misplaced or (_owned(stub, setting, plan) if tiled else None)


def find_as_set(stub: Stub, setting: Setting) -> Fault | None:
    """The same under whatever is set on the module already, where no grid says which tile should show where."""
    return _placed(stub, setting, None)


# ---------------------------------------------------------------- each pixel in its place


def _placed(stub: Stub, setting: Setting, plan: DecodePlan | None) -> Fault | None:
    place = Place(stub, setting)
    came = _decode(stub, setting, place.paint, plan)
    shape = expected_shape(stub, setting)
    if tuple(came.shape) != shape:
        words = f"the sample is {by(came.shape)}, the full decode's {by(shape)}"
        return Fault(setting, words, came, torch.ones(shape))
    expected = place.expected(shape)
    if bool((came - expected).abs().amax() <= TOLERANCE):  # NaN is not below it
        return None
    ones = _decode(stub, setting, lambda call: 1.0, plan)
    at = _worst(ones, torch.ones(shape))
    if not abs(float(ones[at]) - 1) <= TOLERANCE:
        words = f"weights sum to {float(ones[at]):.4g} at {_where(at)}, expected 1"
        return Fault(setting, words, ones, torch.ones(shape))
    at = _worst(came, expected)
    shown = [f"{name} {_shown(stub, setting, plan, place, axis, at)}" for axis, name in place.axes(came.ndim)]
    return Fault(setting, f"{_where(at)} shows what belongs to {', '.join(shown)}", came, expected)


class Place:
    """Paint by place: a value between 0.5 and 1 that each pixel of the sample shares with none of its neighbours."""

    def __init__(self, stub: Stub, setting: Setting):
        self.stub, self.setting = stub, setting
        self.ratio = 1

    def paint(self, call: Call) -> Tensor:
        frames, rows, cols = self._coordinates(call)
        return _hash(call.box.item, frames, rows, cols)

    def along(self, axis: int) -> object:
        """A painter whose paint rises along one axis: 0 items, 1 frames, 2 rows, 3 columns; PLACES steps to 1."""

        def paint(call: Call) -> Tensor:
            item = torch.tensor([call.box.item])
            coordinates = (item.view(1, 1, 1), *self._coordinates(call))
            whole = torch.zeros(call.frames, *self._size(call))
            return whole + coordinates[axis] / PLACES

        return paint

    def expected(self, shape: tuple[int, ...]) -> Tensor:
        """What a sample of this shape should be."""
        deep = shape if len(shape) == 5 else (*shape[:2], 1, *shape[2:])
        patch = self.patch
        rows, cols = (torch.arange(side) // patch for side in deep[-2:])
        items = [_hash(item, torch.arange(deep[2]).view(-1, 1, 1), rows.view(1, -1, 1), cols.view(1, 1, -1))
                 for item in range(deep[0])]  # fmt: skip
        whole = torch.stack(items)[:, None].expand(deep)
        return (whole if len(shape) == 5 else whole[:, :, 0]).float()

    @property
    def patch(self) -> int:
        """Pixels of the sample in one of what the decoder gives."""
        return max(1, self.stub.model.geometry.spatial * self.stub.unit // self.ratio)

    def axes(self, ndim: int) -> list[tuple[int, str]]:
        """What to look up of a pixel that shows another's, and what to call it."""
        frames = [(1, "frame")] if ndim == 5 else []
        return [(0, "item"), *frames, (2, "y"), (3, "x")]

    def _size(self, call: Call) -> tuple[int, int]:
        box = call.box
        return (box.bottom - box.top) * call.ratio, (box.right - box.left) * call.ratio

    def _coordinates(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Frames, rows and columns of what the call gives, in what the decoder gives. Frames end where the latents'
        do: what a causal decoder has too many, or too few, is at the front."""
        self.ratio = call.ratio
        end = frame_at(self.stub.model.geometry, self.setting.frames, call.box.stop)
        height, width = self._size(call)
        frames = torch.arange(end - call.frames, end)
        rows = torch.arange(height) + call.box.top * call.ratio
        cols = torch.arange(width) + call.box.left * call.ratio
        return frames.view(-1, 1, 1), rows.view(1, -1, 1), cols.view(1, 1, -1)


def _hash(item: int, frames: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    return 0.5 + 0.5 * ((item * 331 + frames * 617 + rows * 389 + cols * 127) % PLACES) / PLACES


def _shown(stub: Stub, setting: Setting, plan: DecodePlan | None, place: Place, axis: int, at: tuple[int, ...]) -> str:
    """The coordinate, along one axis, of what a pixel shows: a whole number, or a blend of several."""
    value = float(_decode(stub, setting, place.along(axis), plan)[at]) * PLACES
    value *= place.patch if axis > 1 else 1
    return f"{value:.4g}"


# ---------------------------------------------------------------- each tile where the grid says


def _owned(stub: Stub, setting: Setting, plan: DecodePlan) -> Fault | None:
    """Whether tiles lie, and show, where the family's grid says: alone in their own part, at all nowhere else."""
    assert setting.tiling is not None
    family, geometry = stub.model.family, stub.model.geometry
    values: dict[tuple[int, int, int], float] = {}

    def paint(call: Call) -> float:
        key = (call.box.item, call.box.top, call.box.left)
        return values.setdefault(key, 0.1 + 0.8 * (0.6180339887 * (len(values) + 1) % 1.0))

    came = _decode(stub, setting, paint, plan)
    grid = family.tile_grid(geometry, (setting.height, setting.width), setting.tiling)
    unit = geometry.spatial * stub.unit
    boxes = {((call.box.top, call.box.bottom), (call.box.left, call.box.right)) for call in stub.calls}
    wanted = {(row, col) for row in _extents(grid.rows, unit) for col in _extents(grid.cols, unit)}
    if boxes != wanted:
        odd = sorted(boxes - wanted) or sorted(wanted - boxes)
        (top, bottom), (left, right) = odd[0]
        cut = "is not in the grid" if boxes - wanted else "of the grid was not decoded"
        words = f"the tile of latent rows {top} to {bottom}, columns {left} to {right} {cut}"
        return Fault(setting, words, came, _nothing(came))
    low, high = torch.full_like(came, 2.0), torch.full_like(came, -2.0)
    for (item, top, left), value in values.items():
        here = (item, ..., _reach(grid.rows, top * unit), _reach(grid.cols, left * unit))
        low[here], high[here] = low[here].clamp_max(value), high[here].clamp_min(value)
    nearest = torch.minimum(torch.maximum(came, low), high)
    if bool(((came - nearest).abs().amax() <= TOLERANCE) & (low <= high).all()):
        return None
    at = _worst(came, nearest)
    key, _ = min(values.items(), key=lambda each: abs(each[1] - float(came[at])))
    words = f"{_where(at)} shows the tile at latent row {key[1]}, column {key[2]}, the grid says another"
    return Fault(setting, words, came, nearest)


def _extents(axis: TileAxis, unit: int) -> list[tuple[int, int]]:
    """First and last latent of each tile, as the decoder takes them."""
    return [(start // unit, min(start + axis.tile, axis.size) // unit) for start in axis.starts]


def _reach(axis: TileAxis, start: int) -> slice:
    """Where a tile may show: from its start to the end of the band of the next one."""
    index = axis.starts.index(start)
    end = axis.starts[index + 1] + axis.band if index + 1 < len(axis.starts) else axis.size
    return slice(start, min(end, axis.size))


# ---------------------------------------------------------------- words


def _decode(stub: Stub, setting: Setting, paint: object, plan: DecodePlan | None) -> Tensor:
    if plan is None:
        return stub.decode_as_set(setting, paint)  # type: ignore[arg-type]
    return stub.decode(setting, paint, plan)  # type: ignore[arg-type]


def _nothing(sample: Tensor) -> Tensor:
    """A sample that differs from this one in every pixel."""
    return torch.zeros_like(sample)


def _worst(came: Tensor, expected: Tensor) -> tuple[int, ...]:
    apart = torch.nan_to_num((came - expected).abs(), nan=torch.inf, posinf=torch.inf)
    return tuple(int(each) for each in torch.unravel_index(apart.argmax(), apart.shape))


def _where(at: tuple[int, ...]) -> str:
    """`item 1, frame 3, y 17, x 4` of an index (B, C, [T,] H, W)."""
    names = ("item", "channel", "frame", "y", "x") if len(at) == 5 else ("item", "channel", "y", "x")
    return ", ".join(f"{name} {value}" for name, value in zip(names, at) if name != "channel")
