"""enable_tiling and disable_tiling: what their arguments promise, held against any class that has them.

What a check does is an act: done to the instance, and to an Echo of it for a program to paste.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fidelity import snippet
from fidelity.checks.instance import (
    Shape,
    by,
    corner,
    corner_shape,
    cornered,
    counted,
    decode,
    half,
    instance,
    no_longer,
    numbers,
)
from fidelity.checks.subject import Subject
from fidelity.errors import EvaluationError
from fidelity.models.interface import interface
from fidelity.records import DecodePlan, Model, Tiling
from fidelity.registry import check
from fidelity.snippet import Act, Script

if TYPE_CHECKING:
    from torch import Tensor

SIDES = ("min_size", "min_height", "min_width")
"""How the parameters end that give a tile's sides in sample pixels."""


# ---------------------------------------------------------------- what a class has


def _parameters(model: Model, call: str = "enable_tiling") -> tuple[str, ...] | None:
    """The parameters of a call of the class; None where it has no such call, or one that only raises."""
    found = interface(model.family.name)
    return found.calls.get(call) if "use_tiling" in found.attributes or call != "enable_tiling" else None


def _no_tiling(model: Model) -> str | None:
    return None if _parameters(model) is not None else f"{model.family.name} cannot tile"


def _no_arguments(model: Model) -> str | None:
    return _no_tiling(model) or (
        None if _parameters(model) else f"{model.family.name}.enable_tiling takes no arguments"
    )


def _no_sizes(model: Model) -> str | None:
    return _no_arguments(model) or (
        None if _sides(model) else f"{model.family.name}.enable_tiling takes no tile size in sample pixels"
    )


def _no_two_sides(model: Model) -> str | None:
    two = {"tile_sample_min_height", "tile_sample_min_width"} <= interface(model.family.name).attributes
    return _no_tiling(model) or (None if two else f"{model.family.name} has square tiles only")


def _sides(model: Model) -> tuple[str, ...]:
    """The parameters of enable_tiling that give a tile's height and width in sample pixels."""
    names = _parameters(model) or ()
    return tuple(name for name in names if name.startswith("tile_sample_min") and name.endswith(SIDES))


# ---------------------------------------------------------------- enable_tiling and its arguments


def _settings(module: Any) -> dict[str, Any]:
    """The instance's own plain attributes: flags and sizes."""
    return {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float))}


def _alone(model: Model, shape: Shape) -> Act:
    """A tile of half the picture, and nothing about stride or overlap."""
    given = dict.fromkeys(_sides(model), half(model, shape))
    return lambda vae: vae.enable_tiling(**given)


def _alone_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    script.do(_alone(script.model, shape))
    script.say(f"sample = {script.decode(shape)}")


@check(
    "tile_alone", diagnosis=("geometry",), unit="pixels", sets="tiling", lacks=_no_sizes, code=cornered(_alone_lines)
)
def tile_alone(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """enable_tiling with a tile and no stride cuts the picture into tiles, and leaves it its size."""
    item = corner(latents)
    with instance(runner) as vae:
        full, whole = counted(runner, item)
        with no_longer(runner, item):
            _alone(runner.model, tuple(latents.shape))(vae)
            sample, cut = counted(runner, item)
    runner.say(f"{by(full)} became {by(sample)} in {cut} calls of the decoder, {whole} without tiles")
    return numbers(*sample.shape, cut > whole), numbers(*full.shape, True)


def _arguments(model: Model, tiling: Tiling) -> dict[str, Any]:
    """What enable_tiling takes, of the values that the family sets for this tiling."""
    script = snippet.script(model)
    script.do(lambda vae: model.family.set_tiling(vae, model.geometry, tiling))
    return {name: vars(script.module)[name] for name in _parameters(model) or () if name in vars(script.module)}


def _arguments_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    assert plan.tiling is not None
    given = _arguments(script.model, plan.tiling)
    script.do(lambda vae: vae.enable_tiling(**given))
    script.say(f"sample = {script.decode(shape)}")


@check(
    "tiling_arguments",
    diagnosis=("not_as_specified",),
    needs="tiling",
    lacks=_no_arguments,
    code=cornered(_arguments_lines),
)
def tiling_arguments(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """enable_tiling with arguments decodes as the same values set as attributes do."""
    assert plan.tiling is not None
    item = corner(latents)
    by_attributes = runner.decode(item, plan)
    with instance(runner) as vae:
        vae.enable_tiling(**_arguments(runner.model, plan.tiling))
        return decode(runner, item), by_attributes


def _zero_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    names = _parameters(script.model) or ()
    name = next((name for name in names if "overlap" in name), names[0])
    script.do(lambda vae: vae.enable_tiling(**{name: 0}))
    script.say(f'print("{name}", vae.{name})')


@check("zero_argument", diagnosis=("not_engaged",), unit="arguments", lacks=_no_arguments, code=cornered(_zero_lines))
def zero_argument(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """enable_tiling(x=0) sets x to 0 or refuses it."""
    ignored = []
    for name in _parameters(runner.model) or ():
        with instance(runner) as vae:
            try:
                vae.enable_tiling(**{name: 0})
            except (ValueError, TypeError, NotImplementedError):  # refused: just as good
                continue
            if getattr(vae, name) != 0:
                ignored.append(f"{name} stayed {getattr(vae, name)}")
    runner.say(", ".join(ignored))
    return numbers(len(ignored)), numbers(0)


def _own_tile(model: Model, shape: Shape) -> Act:
    """A tile of half the picture by whatever the call takes, if it takes anything."""
    return _alone(model, shape) if _sides(model) else lambda vae: vae.enable_tiling()


def _forgets_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    shown = [f'print("{name}", vae.{name})' for name in _sides(script.model)[:1]]
    script.say(*shown)
    script.do(_own_tile(script.model, shape))
    script.do(lambda vae: vae.disable_tiling())
    script.do(lambda vae: vae.enable_tiling())
    script.say(*shown)


@check(
    "disable_forgets", diagnosis=("state_leak",), unit="settings", lacks=_no_arguments, code=cornered(_forgets_lines)
)
def disable_forgets(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """enable_tiling with sizes of one's own, then disable_tiling, leaves every setting as it was."""
    with instance(runner) as vae:
        before = _settings(vae)
        _own_tile(runner.model, tuple(latents.shape))(vae)
        vae.disable_tiling()
        after = _settings(vae)
    changed = [name for name in after if after[name] != before.get(name)]
    runner.say(", ".join(f"{name} {before.get(name)} → {after[name]}" for name in changed))
    return numbers(len(changed)), numbers(0)


def _restores_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    script.do(_own_tile(script.model, shape))
    script.say(f"tiled = {script.decode(shape)}")
    script.do(lambda vae: vae.disable_tiling())
    script.say(f"sample = {script.decode(shape)}")


@check("disable_restores", diagnosis=("state_leak",), sets="tiling", lacks=_no_tiling,
       code=cornered(_restores_lines))  # fmt: skip
def disable_restores(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A decode after a tiled one and disable_tiling gives the bits of the one before."""
    item = corner(latents)
    with instance(runner) as vae:
        first = decode(runner, item)
        with no_longer(runner, item):
            _own_tile(runner.model, tuple(latents.shape))(vae)
            decode(runner, item)
        vae.disable_tiling()
        return decode(runner, item), first


# ---------------------------------------------------------------- each side by its own tile


def _one_way(model: Model, shape: Shape, *, across: bool) -> Act:
    """Tiles as long as the corner's longer side one way, as its shorter side `across`, or else down; they abut."""
    short, long = sorted(corner_shape(shape)[-2:])
    tall, wide = (long, short) if across else (short, long)
    names = interface(model.family.name).attributes

    def act(vae: Any) -> None:
        model.family.set_tiling(vae, model.geometry, Tiling(short, 0.0))
        for side, tile in (("height", tall), ("width", wide)):
            sizes = {"sample_min": tile * model.geometry.spatial, "latent_min": tile,
                     "sample_stride": tile * model.geometry.spatial}  # fmt: skip
            for kind, size in sizes.items():
                if f"tile_{kind}_{side}" in names:
                    setattr(vae, f"tile_{kind}_{side}", size)

    return act


def _one_way_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    script.do(_one_way(script.model, shape, across=shape[-1] > shape[-2]))
    script.say("vae.decoder.register_forward_hook(lambda *_: print('a tile'))", f"sample = {script.decode(shape)}")


@check(
    "one_way", diagnosis=("geometry",), unit="cuts", sets="tiling", lacks=_no_two_sides, code=cornered(_one_way_lines)
)
def one_way(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Tiles higher than a wide picture cut it into columns, tiles wider than a tall one cut it into rows."""
    item = corner(latents)
    if item.shape[-2] == item.shape[-1]:
        raise EvaluationError("one_way: the latents are square, so height and width cannot be told apart: name others")
    wide = item if item.shape[-1] > item.shape[-2] else item.transpose(-1, -2).contiguous()
    seen: list[float] = []
    wanted: list[float] = []
    said: list[str] = []
    for across, picture in ((True, wide), (False, wide.transpose(-1, -2).contiguous())):
        with instance(runner) as vae:
            full = decode(runner, picture)
            runner.model.family.set_tiling(vae, runner.model.geometry, Tiling(picture.shape[-1 if across else -2], 0.0))
            _, whole = counted(runner, picture)  # some cut time as soon as they tile
            _one_way(runner.model, tuple(latents.shape), across=across)(vae)
            sample, cut = counted(runner, picture)
        said.append(f"{by(full)} became {by(sample)} in {cut} calls of the decoder, {whole} by one tile")
        seen += [*sample.shape, cut / whole]
        wanted += [*full.shape, -(-wide.shape[-1] // wide.shape[-2])]
    runner.say("; ".join(said))
    return numbers(*seen), numbers(*wanted)
