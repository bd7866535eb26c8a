"""Where pixels go: every size and tile at which cutting goes wrong, with the decoder painted over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from fidelity import coverage, snippet, sweep
from fidelity.checks.instance import Shape, instance
from fidelity.checks.subject import Subject
from fidelity.coverage import Fault
from fidelity.errors import EvaluationError, in_one_line
from fidelity.lazy import torch
from fidelity.models.interface import interface
from fidelity.records import DecodePlan, Model, Tiling
from fidelity.registry import check
from fidelity.snippet import Script
from fidelity.stub import Stub
from fidelity.sweep import Setting

if TYPE_CHECKING:
    from torch import Tensor

FEW = 3
"""Findings that a reason tells."""


@check("tile_geometry", diagnosis=("geometry",), sets="tiling")
def tile_geometry(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Every pixel is shown once, in its place, at each size, tile, batch and frame count where cutting goes wrong."""
    base = _base(runner.model, plan, "tile_geometry")
    if plan.settings:
        runner.decode(latents, plan)  # proves the plan's own settings: under paint nothing is computed
    stub, settings = Stub(runner.model, runner.module, runner.runner.device), sweep.settings(runner.model)
    found: Fault | None = None
    failed, crashes = 0, list[tuple[Setting, Exception]]()
    with stub.in_place():
        stub.reserve(settings)
        for setting in settings:
            try:
                fault = coverage.find(stub, setting, base)
            except EvaluationError:
                raise
            except Exception as error:  # a decode may raise anything; which setting did is the evidence
                crashes.append((setting, error))
                continue
            failed += fault is not None
            found = found or fault
        if found is not None:
            _, found = sweep.shrink(found.setting, lambda each: _again(stub, each, base), found)
    raised = f"{crashes[0][0]}: {in_one_line(crashes[0][1])}" if crashes else ""
    if found is None:
        if crashes:
            first = f"{len(crashes)} of {len(settings)} settings raise, the smallest with {raised}"
            raise RuntimeError(f"tile_geometry: {first}") from crashes[0][1]
        return torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    more = f"; {len(crashes)} raise, the first with {raised}" if crashes else ""
    runner.say(f"{found.setting}: {found.words} (the smallest of {failed} wrong of {len(settings)} settings{more})")
    return found.came, found.expected


def _again(stub: Stub, setting: Setting, base: DecodePlan) -> Fault | None:
    """What shrinking asks: only another geometry counts, not a crash on the way to it."""
    if not sweep.is_legal(stub.model, setting):
        return None
    try:
        return coverage.find(stub, setting, base)
    except Exception:  # another defect than the one that is being made smaller
        return None


def _base(model: Model, plan: DecodePlan, name: str) -> DecodePlan:
    """The plan that every setting is added to. Raises EvaluationError for one that paint cannot judge."""
    if plan.dtype != "fp32" or plan.temporal is not None:
        raise EvaluationError(f"{name}: sets tiles and chunks itself and judges paint in fp32: leave both out")
    return replace(plan, slicing=plan.slicing or model.reference_plan.slicing)


# ---------------------------------------------------------------- settings that a class cannot represent


def _no_tiles(model: Model) -> str | None:
    return None if illegal(model) else f"{model.family.name} has no tile and stride or overlap to get wrong"


def _program(model: Model, plan: DecodePlan, shape: Shape) -> str:
    asked = illegal(model)[0]
    frames = (asked.setting.frames,) if model.geometry.video else ()
    latents = (1, model.geometry.latent_channels, *frames, asked.setting.height, asked.setting.width)

    def write(script: Script) -> None:
        script.do(asked.act)
        script.say(f"sample = {script.decode(latents)}")

    return snippet.program(model, latents, write)


@check("illegal_tiling", diagnosis=("geometry",), sets="tiling", lacks=_no_tiles, code=_program)
def illegal_tiling(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A tile, stride or overlap that the class cannot represent is refused, or shows every pixel once all the same."""
    _base(runner.model, plan, "illegal_tiling")
    if plan.settings:
        raise EvaluationError("illegal_tiling: sets the instance as a user would: leave every option out of the plan")
    stub, asked = Stub(runner.model, runner.module, runner.runner.device), illegal(runner.model)
    found, crashes = list[tuple[str, Fault]](), list[tuple[str, Exception]]()
    with stub.in_place():
        stub.reserve(each.setting for each in asked)
        for each in asked:
            with instance(runner) as vae:
                try:
                    each.act(vae)
                except Exception:  # refused, which is what a class should do
                    continue
                try:
                    fault = coverage.find_as_set(stub, each.setting)
                except Exception as error:  # a decode may raise anything; which setting did is the evidence
                    crashes.append((str(each), error))
                    continue
                found += [(str(each), fault)] if fault else []
    words = [f"{said}: {fault.words}" for said, fault in found]
    words += [f"{said}: {in_one_line(error)}" for said, error in crashes]
    if not found:
        if crashes:
            raise RuntimeError(f"illegal_tiling: {'; '.join(words[:FEW])}") from crashes[0][1]
        return torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    runner.say(f"{len(words)} of {len(asked)} settings are accepted and wrong: {'; '.join(words[:FEW])}")
    return found[0][1].came, found[0][1].expected


class Asked(NamedTuple):
    """A setting of a class's own controls, and the latents to decode under it."""

    setting: Setting
    given: dict[str, Any]
    """By control: a parameter of enable_tiling, or an attribute."""
    called: bool
    """Whether enable_tiling takes them."""

    def act(self, vae: Any) -> None:
        """Set it as a user would."""
        vae.enable_tiling(**self.given if self.called else {})
        for name, value in {} if self.called else self.given.items():
            setattr(vae, name, value)

    def __str__(self) -> str:
        values = [f"{name}={value}" for name, value in self.given.items()]
        said = f"enable_tiling({', '.join(values)})" if self.called else f"{', '.join(values)} and enable_tiling()"
        return f"{said} on {self.setting}"


def illegal(model: Model) -> list[Asked]:
    """The nearest settings that the class cannot represent, each with what a user would do to have it.

    An overlap that makes no whole step, a stride or a tile of half a latent pixel, a stride beyond the tile. The sizes
    of the latents are two and three tiles and a bit.
    """
    f, names = model.geometry.spatial, _controls(model)
    asked = []
    if any("stride" in name or "overlap" in name for name in names):
        asked += [(tile, tile * f, int(tile * (1 - share) * f), share) for tile, share in _unrepresentable(model)]
    if any("stride" in name for name in names):
        asked += [(4, 4 * f, 6 * f, 0.0)]
        asked += [(4, 4 * f, 3 * f + f // 2, 0.125), (5, 4 * f + f // 2, 3 * f, 0.25)] if f > 1 else []
    frames = model.family.least_frames if model.geometry.video else 1
    parameters = interface(model.family.name).calls.get("enable_tiling", ())
    return [
        Asked(
            Setting(2 * tile + 1, 3 * tile + 2, frames=frames),
            _values(model, names, side, stride, share),
            called=bool(names) and set(names) <= set(parameters),
        )
        for tile, side, stride, share in asked
    ]


def _unrepresentable(model: Model, most: int = 2) -> Iterator[tuple[int, float]]:
    """The smallest tiles, from 4 on, that the class cannot have with the overlaps in use."""
    for overlap in (0.25, 0.125):
        tiles = [tile for tile in range(4, 16) if not _cuts(model, tile, overlap)]
        yield from ((tile, overlap) for tile in tiles[:most])


def _cuts(model: Model, tile: int, overlap: float) -> bool:
    return sweep.is_legal(model, Setting(3 * tile, 3 * tile, tiling=Tiling(tile, overlap)))


def _controls(model: Model) -> tuple[str, ...]:
    """How a user sets the class's tiles: parameters of enable_tiling, else attributes; none where it cannot tile."""
    found = interface(model.family.name)
    if model.geometry.size is not None or "use_tiling" not in found.attributes:
        return ()
    names = found.calls.get("enable_tiling") or tuple(sorted(found.attributes))
    return tuple(name for name in names if name.startswith("tile_") and "frames" not in name)


def _values(model: Model, names: tuple[str, ...], tile: int, stride: int, overlap: float) -> dict[str, Any]:
    """Tile and stride in sample pixels, and the overlap as a share, by the class's own controls."""
    by_kind: dict[str, Any] = {
        "stride": stride,
        "overlap_factor": overlap,
        "min_overlap": max(0, tile - stride),
        "latent_min": tile // model.geometry.spatial,
        "sample_min": tile,
    }
    values = {name: next((by_kind[kind] for kind in by_kind if kind in name), None) for name in names}
    return {name: value for name, value in values.items() if value is not None}
