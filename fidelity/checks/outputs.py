"""What comes out of a decode, held against what must come out: dtype, batch items, frames, the tuple."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from fidelity import snippet
from fidelity.checks.instance import Shape, by, corner, cornered, decode, instance, numbers
from fidelity.checks.subject import Subject
from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.models.interface import interface
from fidelity.records import DecodePlan, Model
from fidelity.registry import check
from fidelity.runner import sample_of
from fidelity.snippet import Script

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CLEARLY = 0.8
"""A shift in time is one where its error is at most this share of the error without it."""


def lacking(call: str, parameter: str | None = None) -> Callable[[Model], str | None]:
    """Why a model's class has no such call, or one without the parameter: what `lacks` of a check may be."""

    def lacks(model: Model) -> str | None:
        found = interface(model.family.name).calls.get(call)
        if found is None:
            return f"{model.family.name} has no {call}"
        return None if parameter is None or parameter in found else f"{model.family.name}.{call} takes no {parameter}"

    return lacks


def _one_item(shape: Shape) -> str | None:
    return None if shape[0] > 1 else "a batch of one is alone"


def _alone_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    snippet.apply(script, plan)
    one = script.decode((1, *shape[1:]), "one")
    script.say(f"full = {script.decode(shape)}", f"sample = torch.cat([{one} for one in latents.split(1)])")


@check("batch_alone", diagnosis=("not_as_specified",), inapplicable=_one_item, code=cornered(_alone_lines, items=2))
def batch_alone(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A batch gives what each of its items gives when it is decoded alone."""
    pair = corner(latents, items=2)
    alone = torch.cat([runner.decode(item, plan) for item in pair.split(1)])
    return runner.decode(pair, plan), alone


def _tuple_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    plain = script.decode(shape).removesuffix(".sample")
    script.say(f"sample = {plain.removesuffix(')')}, return_dict=False)[0]")


@check(
    "tuple_output", diagnosis=("not_as_specified",), lacks=lacking("decode", "return_dict"), code=cornered(_tuple_lines)
)
def tuple_output(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """decode(…, return_dict=False) gives a tuple whose first entry is the sample."""
    item = corner(latents)
    whole, bare = _raw(runner, item), _raw(runner, item, return_dict=False)
    if not isinstance(bare, tuple):
        raise EvaluationError(f"tuple_output: decode(…, return_dict=False) gave no tuple but {type(bare).__name__}")
    return sample_of(bare).float(), sample_of(whole).float()


def _raw(runner: Subject, latents: Tensor, **asked: Any) -> Any:
    """What the class's own decode returns, before the family makes a sample of it."""
    given: list[Any] = []
    with instance(runner) as vae:
        whole = vae.decode

        def spy(*args: Any, **kwargs: Any) -> Any:
            given.append(whole(*args, **{**kwargs, **asked}))
            raise _Seen

        vae.decode = spy
        with suppress(_Seen):
            decode(runner, latents)
    if not given:
        raise EvaluationError(f"{runner.model.family.name} does not call its class's decode")
    return given[0]


class _Seen(Exception):
    """Ends a decode whose output was taken."""


def _dtype_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    snippet.apply(script, plan)
    fed = f"latents.to({snippet.DTYPES[plan.dtype]})"
    script.say(f"sample = {script.decode(shape, fed)}", "print(sample.dtype)")


@check("half_output", diagnosis=("dtype",), unit="bytes", needs="precision", code=cornered(_dtype_lines))
def half_output(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A half-precision decode gives half-precision samples, however it is cut."""
    runner.decode(corner(latents), plan)
    given = runner.receipts["decoder"]["output"]
    if given not in BYTES:
        raise EvaluationError(f"half_output: the sample is {given}, whose size is not known here")
    runner.say(f"the sample is {given}")
    return numbers(BYTES[given]), numbers(4 if plan.force_upcast else 2)


# ---------------------------------------------------------------- frames


@check("frames_aligned", diagnosis=("misaligned",), unit="frames", needs="temporal")
def frames_aligned(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A video that is decoded in chunks shows each frame at its own time."""
    assert plan.temporal is not None
    item, family, geometry = corner(latents), runner.model.family, runner.model.geometry
    full = runner.decode(item, replace(plan, temporal=None))
    cut = runner.decode(item, plan)
    if cut.shape != full.shape:
        runner.say(f"{full.shape[2]} frames became {cut.shape[2]}")
        return numbers(cut.shape[2]), numbers(full.shape[2])
    starts = family.frame_axis(geometry, item.shape[2], plan.temporal).edges
    if not starts:
        raise EvaluationError("frames_aligned: the plan makes one chunk of these latents: name a shorter one")
    late = _shift(cut, full, starts[0], geometry.temporal)
    runner.say(f"from frame {starts[0]} on, the chunks show each frame {late} late")
    return numbers(late), numbers(0)


def _shift(cut: Tensor, full: Tensor, start: int, most: int) -> int:
    """By how many frames `cut` is late from frame `start` on: the shift with the least error, 0 unless clearly less."""
    frames = full.shape[2]

    def error(shift: int) -> float:
        times = [time for time in range(start, frames) if 0 <= time - shift < frames]
        return float((cut[:, :, times] - full[:, :, [time - shift for time in times]]).square().mean().sqrt())

    errors = {shift: error(shift) for shift in range(-most, most + 1) if start + abs(shift) < frames}
    best = min(errors, key=lambda shift: errors[shift])
    return best if errors[best] < CLEARLY * errors[0] else 0


def _no_framewise(model: Model) -> str | None:
    wanted = {"use_framewise_decoding", "num_latent_frames_batch_size"}
    return (
        None if wanted <= interface(model.family.name).attributes else f"{model.family.name} has no batches of frames"
    )


def _few_frames(shape: Shape) -> str | None:
    return None if len(shape) == 5 and shape[2] > 2 else "fewer than three latent frames have no second batch"


def _framewise_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    script.do(lambda vae: setattr(vae, "use_framewise_decoding", True))
    script.say(
        "other, last = latents.clone(), vae.num_latent_frames_batch_size - 1",
        "other[:, :, last] += 1  # the last latent frame of the first batch",
        f"moved = ({script.decode(shape, 'other')} - {script.decode(shape)}).abs().amax((0, 1, 3, 4))",
        'print("change of each frame", [round(float(each), 4) for each in moved])',
    )


@check("framewise_remembers", diagnosis=("temporal_seam",), unit="frames", inapplicable=_few_frames,
       lacks=_no_framewise, code=cornered(_framewise_lines))  # fmt: skip
def framewise_remembers(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A decode in batches of frames still knows, at the start of a batch, the frame before it."""
    item = corner(latents)
    with instance(runner) as vae:
        last = vae.num_latent_frames_batch_size - 1
        first_after = runner.model.geometry.sample_frames(last + 1)
        if last + 1 >= item.shape[2]:
            raise EvaluationError(f"framewise_remembers: {item.shape[2]} latent frames make one batch of {last + 1}")
        other = item.clone()
        other[:, :, last] += 1.0
        moved = partial(_moved, runner, item, other, first_after)
        full = moved()
        vae.use_framewise_decoding = True
        cut = moved()
    if not full:
        raise EvaluationError("framewise_remembers: the full decode does not look back either: nothing to remember")
    runner.say(f"frame {first_after}, the first of the second batch, does not know the latent frame before it")
    return numbers(cut), numbers(full)


def _moved(runner: Subject, one: Tensor, other: Tensor, frame: int) -> bool:
    """Whether this frame of the sample differs between the two latents, beyond rounding."""
    first, second = decode(runner, one)[:, :, frame], decode(runner, other)[:, :, frame]
    return bool((first - second).abs().max() > 1e-5)


def _call_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    script.do(lambda vae: vae._enable_framewise_decoding())
    script.say(f"sample = {script.decode(shape)}")


@check("framewise_size", diagnosis=("geometry",), unit="pixels and frames", inapplicable=_few_frames,
       lacks=lacking("_enable_framewise_decoding"), code=cornered(_call_lines))  # fmt: skip
def framewise_size(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """The class's own call for batches of frames leaves a video its size."""
    item = corner(latents)
    with instance(runner) as vae:
        full = decode(runner, item)
        vae._enable_framewise_decoding()
        sample = decode(runner, item)
    runner.say(f"{by(full)} became {by(sample)}")
    return numbers(*sample.shape), numbers(*full.shape)
