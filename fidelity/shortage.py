"""Memory ran out inside a case: whether it did, where, what lived then, and which plan would have fitted.

An exception counts as exhaustion where an allocator says so. oneDNN does not: it says that it could not make something,
which may have other causes; that counts only where a memory limit held and the same decode passes without it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from fidelity import exhaustion, predict, stages
from fidelity.errors import RequestError, in_one_line
from fidelity.estimate import seconds
from fidelity.exhaustion import Exhaustion
from fidelity.lazy import torch
from fidelity.memory import allocator
from fidelity.memory.available import available_bytes
from fidelity.optimizations.encode import encodes
from fidelity.optimizations.precision import is_emulated
from fidelity.records import Case, DecodePlan, Exhausted, MemoryTrace, Model, Reason
from fidelity.registry import OPTIMIZATIONS
from fidelity.suite import Suite
from fidelity.wording import in_units

UNKNOWN = "unknown"
UNITS = ("force_upcast", "scaling_factor", "shift_factor", "latents_mean", "latents_std")
"""What of a config says how latents are scaled: no shape depends on it."""
LEAST_UNCOUNTED, SHARE_UNCOUNTED = 8 * 2**20, 0.25
"""From how many bytes on, and from which share of a limit, what torch's allocator did not hand out is told: a trace
keeps notes of its own, and an interpreter its objects."""
DEATH = "the process that decoded is gone: nobody can tell the stage, the module, or what was alive"


# ---------------------------------------------------------------- what happened


def of_error(error: BaseException, limit: int | None, passes: Callable[[], bool]) -> Exhausted | None:
    """What ran out of memory when a decode raised `error`, without the plan that fits; None if it was something else.

    `limit`: the bytes that were allowed. `passes`: whether the same decode passes without it, asked only in doubt.
    """
    guilty = next((each for each in _chain(error) if _says_so(each)), None)
    if guilty is None:
        guilty = next((each for each in _chain(error) if _may_be(each)), None)
        if guilty is None or limit is None or not passes():
            return None
    refusal = _read(guilty)
    seen = _seen(error)
    stage, _ = stages.stage_of(refusal.frames)
    inner = stages.innermost(refusal.frames)
    place = inner.where if inner is not None else ""
    untold = [] if seen is not None else ["no trace followed this decode"]
    untold += [seen.reason] if seen is not None and seen.reason is not None else []
    untold += _uncounted(seen, refusal.requested, limit)
    return Exhausted(
        stage=seen.stage if stage == UNKNOWN and seen is not None else stage,
        module=seen.module if seen is not None and seen.module else place,
        message=in_one_line(guilty),
        requested_bytes=refusal.requested,
        alive_bytes=seen.alive_bytes if seen is not None else refusal.allocated,
        limit_bytes=limit,
        held=seen.held if seen is not None else (),
        reason="; ".join(untold) or None,
    )


def of_death(message: str, limit: int | None) -> Exhausted:
    """What is known of a worker that died of memory, without the plan that fits; `message` says how it died."""
    return Exhausted(UNKNOWN, "", message, None, None, limit, reason=DEATH)


def caught(memory: MemoryTrace) -> list[Reason]:
    """That a decode was refused memory, caught it and went on: whatever it fell back to, that is not its plan.

    Not on CUDA, where convolution libraries ask for workspaces that they can do without.
    """
    if not memory.refused or memory.method != allocator.CPU_METHOD:
        return []
    often = "once" if memory.refused == 1 else f"{memory.refused} times"
    said = f"the decode was refused memory {often}, caught that and went on: what it then did is not its plan"
    return [Reason("memory", said, memory.refused, 0, "refusals", ("memory",))]


def _seen(error: BaseException) -> allocator.Interrupted | None:
    """What lived when the decode raised, whatever was raised since by what undoes a plan."""
    return next((seen for each in _chain(error) if (seen := allocator.interrupted(each)) is not None), None)


def _uncounted(seen: allocator.Interrupted | None, requested: int | None, limit: int | None) -> list[str]:
    """That most of a limit went to memory that torch's allocator never handed out, which no smaller tile lowers."""
    if seen is None or seen.alive_bytes is None or requested is None or limit is None:
        return []
    if seen.trace.method != allocator.CPU_METHOD:
        return []
    rest = limit - requested - (seen.alive_bytes - (seen.trace.weights_bytes or 0))
    if rest < max(LEAST_UNCOUNTED, limit * SHARE_UNCOUNTED):
        return []
    return [f"{in_units(rest)} of what is allowed were taken past torch's allocator, by numpy or another library"]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it was raised from: a decode may wrap what an allocator raised."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        yield found
        seen.append(found)
        found = found.__cause__ or found.__context__


def _says_so(error: BaseException) -> bool:
    """Whether it is an allocator's refusal, by its kind or by its words."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, (RuntimeError, OSError)) or _may_be(error):
        return False
    try:
        exhaustion.parse(in_one_line(error))
    except RequestError:
        return False
    return True


def _may_be(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and exhaustion.AMBIGUOUS.search(str(error)) is not None


def _read(error: BaseException) -> Exhaustion:
    """The refusal with its figures and frames, as a log of this very exception would be read."""
    alone = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    alone.__cause__ = alone.__context__ = None
    text = "".join(alone.format())
    try:
        return exhaustion.parse(text)
    except RequestError:  # a kind that needs no words, as a bare torch.OutOfMemoryError
        return msgspec.structs.replace(exhaustion.parse(f"{text}MemoryError"), message=in_one_line(error))


# ---------------------------------------------------------------- the plan that fits


class Plans:
    """The plans of a suite, to find among them the nearest that fits. Keeps what it predicted."""

    def __init__(self, suite: Suite | None, models: dict[str, Model], device: str):
        self.suite, self.models, self.device = suite, models, device
        self._peaks: dict[tuple[Any, ...], int | str] = {}

    def peak(self, model: str, shape: tuple[int, ...], plan: DecodePlan) -> int | str:
        """The peak in bytes that shapes alone predict for latents of this shape, or why there is none: allocated, and
        on CUDA, where that is what runs out, reserved."""
        if encodes(plan):
            return "not predicted: it is the encoder's memory"
        foreign = [name for name in plan.options if not _is_own(name)]
        if foreign:  # its code may do anything, and is not asked to where nothing is judged
            return f"not predicted: {foreign[0]} is a plug-in's option"
        kind = self.device.partition(":")[0]
        if kind == "cpu" and plan.offload not in ("none", "disk"):
            plan = msgspec.structs.replace(plan, offload="none")  # nothing moves
        about = self.models[model]
        shaping = {name: value for name, value in about.config.items() if name not in UNITS}
        key = (about.family.name, msgspec.json.encode(shaping, order="deterministic"), shape, plan.id)
        if key not in self._peaks:
            try:
                found = predict.of_shape(about, shape, plan, kind)
                self._peaks[key] = found.reserved_peak_bytes or found.allocated_peak_bytes
            except Exception as error:  # a model's code may raise anything on shapes alone
                self._peaks[key] = f"not predicted: {in_one_line(error)}"
        return self._peaks[key]

    def room(self, case: Case) -> tuple[int | None, str]:
        """Bytes that a decode of the case may have, None where nobody knows, and what that is in words."""
        if case.memory_limit is not None:
            return case.memory_limit, "the limit"
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()  # what the allocator keeps is free for the next decode
        return available_bytes(self.device), "what is free"

    def fitting(self, case: Case, room: int | None, where: str) -> tuple[str | None, int | None, str | None]:
        """The plan nearest to the case's whose predicted peak is at most `room` bytes, that peak, or why there is none.

        Nearest: the fewest settings changed, then the least estimated time, then the least peak. Only plans that the
        suite judges on the same latents and expects to pass. `where` says in words what the room is.
        """
        if self.suite is None:
            return None, None, "there is no suite to take another plan from"
        if room is None:
            return None, None, "nobody knows how much memory there was, so no plan can be said to fit"
        shape = self.suite.shapes[case.model, case.latents]
        least: tuple[int, str] | None = None
        for group in _by_distance(self._others(case), case, self.suite):
            peaks = [(peak, plan.id) for plan in group if isinstance(peak := self.peak(case.model, shape, plan), int)]
            if not peaks:
                continue
            peak, name = min(peaks)
            if peak <= room:
                return name, peak, None
            least = min(least, (peak, name)) if least is not None else (peak, name)
        if least is None:
            return None, None, "this suite has no other plan for these latents whose peak can be predicted"
        needs = f"the least, {least[1]}, needs {in_units(least[0])}, predicted"
        return None, None, f"no plan of this suite fits {where}: {needs}"

    def _others(self, case: Case) -> list[DecodePlan]:
        assert self.suite is not None
        return [
            each.plan
            for each in self.suite.judged
            if (each.model, each.latents, each.check) == (case.model, case.latents, None)
            and each.expected.verdict == "pass" and each.plan != case.plan and not encodes(each.plan)
            and not is_emulated(each.plan, self.device)
        ]  # fmt: skip


def _by_distance(plans: list[DecodePlan], case: Case, suite: Suite) -> Iterator[list[DecodePlan]]:
    """Plans that are as near and as fast as one another, the nearest first."""
    groups: dict[tuple[int, float], list[DecodePlan]] = {}
    for plan in plans:
        key = (changes(case.plan, plan), seconds(suite, msgspec.structs.replace(case, plan=plan)))
        groups.setdefault(key, []).append(plan)
    for key in sorted(groups):
        yield groups[key]


def _is_own(name: str) -> bool:
    function: Any = getattr(OPTIMIZATIONS.get(name), "function", None)
    return getattr(function, "__module__", "").partition(".")[0] == __package__


def changes(one: DecodePlan, other: DecodePlan) -> int:
    """In how many settings two plans differ."""
    first, second = one.settings, other.settings
    return sum(first.get(name) != second.get(name) for name in {*first, *second})


# ---------------------------------------------------------------- as records


def completed(found: Exhausted, fits: tuple[str | None, int | None, str | None]) -> Exhausted:
    """The record with the plan that fits, or with why there is none."""
    plan, peak, why = fits
    said = "; ".join(each for each in (found.reason, why) if each)
    return msgspec.structs.replace(found, fits=plan, fits_bytes=peak, reason=said or None)


def trace(error: BaseException, found: Exhausted) -> MemoryTrace:
    """The trace of the decode up to where memory ran out: no figure of the whole decode, which never was."""
    seen = _seen(error)
    so_far = seen.trace if seen is not None else MemoryTrace()
    return msgspec.structs.replace(so_far, allocated_peak_bytes=None, reason="memory ran out", exhausted=found)


def reason(found: Exhausted) -> Reason:
    """One line: where, what was asked for and what there was, and what would have fitted."""
    stage = stages.STAGES.get(found.stage, found.stage)  # type: ignore[call-overload]
    where = "" if found.stage == UNKNOWN else f" while {stage}" + (f" ({found.module})" if found.module else "")
    figures = [
        f"{in_units(size)} {said}"
        for size, said in (
            (found.requested_bytes, "more were asked for"),
            (found.alive_bytes, "were alive"),
            (found.limit_bytes, "beyond the loaded model are allowed"),
        )
        if size is not None
    ]
    told = [", ".join(figures)] if figures else []
    if found.fits is not None:
        needs = f"needs {in_units(found.fits_bytes or 0)}, predicted"
        told.append(f"nearest plan of this suite that fits: {found.fits} {needs}")
    told += [found.reason] if found.reason is not None else []
    told += [found.message] if found.requested_bytes is None else []
    return Reason("memory", f"memory ran out{where}: {'; '.join(told)}", diagnosis=("crash", "memory"))
