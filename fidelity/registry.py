"""One Registry for every extension point: refuses duplicates, says "did you mean", lists.

    from fidelity import detector, Measurement

    @detector("my_seam", unit="grey levels", better="lower", needs="tiling")
    def my_seam(candidate, golden, *, plan, receipts, data_range) -> Measurement:
        "The largest line that …"                       # the first line of the docstring is what `fidelity ls` prints
        return Measurement(per_image=(0.5,), where={"image": 0, "x": 3, "y": 7})

Third parties register through the entry-point group `fidelity.plugins`, or `--plugin MODULE`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, TypeVar

import msgspec

from fidelity.errors import FidelityError, PluginError, UnknownName
from fidelity.records import (
    Better,
    Chunk,
    DecodePlan,
    Family,
    LatentSource,
    Measurement,
    Model,
    Optimization,
    Proof,
    TileGrid,
)

T = TypeVar("T")

FRAMES = "frames"
"""What an instrument needs that has nothing to look at in a picture, whatever the plan: a sample with frames."""

AXES = ("model", "models", "latents", "dtype", "upcast", "check", "state")
"""What suites, filters and receipts call something else: an option of such a name would stand in its place."""


class Registry(Generic[T]):
    """Named things of one kind, in the order of their registration."""

    def __init__(self, kind: str, reserved: Sequence[str] = ()):
        self.kind = kind
        self.reserved = reserved
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T, *, replace: bool = False) -> T:
        """Register `entry`. Raises PluginError if the name is taken, or means something else beside its kind."""
        if name in self.reserved:
            raise PluginError(f"{self.kind} {name!r} is a word of suites and reports already: choose another name")
        if name in self._entries and not replace:
            raise PluginError(f"{self.kind} {name!r} is registered twice: choose another name")
        self._entries[name] = entry
        return entry

    def get(self, name: str) -> T:
        """The entry called `name`. Raises UnknownName with the closest name and the known ones."""
        if name in self._entries:
            return self._entries[name]
        raise UnknownName(unknown(self.kind, name, self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[str, T]]:
        return list(self._entries.items())


def unknown(kind: str, name: str, known: Any) -> str:
    """One line: what is unknown, the closest known name, and all of them."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {kind} {name!r}: {hint}known: {', '.join(names) or 'none'}"


@dataclass(frozen=True)
class Instrument:
    """A metric or a detector: called alike, told apart by nobody who gates or reports."""

    name: str
    unit: str
    better: Better
    summary: str
    function: Callable[..., Measurement]
    is_detector: bool
    needs: str | None = None
    """What there must be to look for: a setting (`tiling`, `temporal`), or FRAMES, a video; None: always."""
    diagnosis: tuple[str, ...] = ()
    """What a case is blamed on when this measurement is over its limit."""

    @property
    def is_own(self) -> bool:
        """Whether it is the project's: a plug-in's may look at anything in plan and receipts."""
        return self.function.__module__.partition(".")[0] == __package__

    def looks_at(self, plan: DecodePlan, *, video: bool) -> bool:
        """Whether a decode of this plan has what the instrument needs; `video`: samples are (B, C, T, H, W)."""
        return self.needs is None or (video if self.needs == FRAMES else self.needs in cuts(plan) | set(plan.settings))

    def __call__(self, candidate: Any, golden: Any, *, plan: DecodePlan, receipts: Any, data_range: Any) -> Measurement:
        """Measure candidate against golden, both (B, C, [T,] H, W) fp32. Value: the worst image's."""
        context = {"plan": plan, "receipts": receipts} if self.is_detector else {}
        raw = self.function(candidate, golden, data_range=data_range, **context)
        per_image = tuple(_finite(each) for each in raw.per_image)
        _, value = Measurement.worst(per_image, self.better) if per_image else (0, _finite(raw.value))
        reason = raw.reason if raw.reason or raw.exact or value is not None else "the value is not a finite number"
        return msgspec.structs.replace(
            raw, name=self.name, unit=self.unit, better=self.better, value=value, per_image=per_image, reason=reason
        )


@dataclass(frozen=True)
class Check:
    """A metamorphic check: two decodes that must give the same, so that no golden is needed."""

    name: str
    summary: str
    function: Callable[..., tuple[Any, Any]]
    """`f(runner, latents, plan) -> (candidate, expected)`: fp32 samples of the same shape."""
    diagnosis: tuple[str, ...]
    unit: str = "grey levels"
    needs: str | None = None
    """A setting that the plan must have: what the check holds against its absence."""
    sets: str | None = None
    """A setting that the check makes itself, so that the plan must not."""
    inapplicable: Callable[[tuple[int, ...]], str | None] | None = None
    """Why latents of this shape have nothing to check, or None."""
    lacks: Callable[[Model], str | None] | None = None
    """Why the model's class has nothing to check, or None."""
    code: Callable[[Model, DecodePlan, tuple[int, ...]], str] | None = None
    """A program in plain diffusers that shows what the check looks at; None: one that decodes the plan."""

    def reason(self, plan: DecodePlan, shape: tuple[int, ...], model: Model | None = None) -> str | None:
        """Why this check cannot apply to this plan, to latents of this shape and to this model, or None. Imports no
        torch."""
        if self.needs is not None and self.needs not in plan.settings:
            return f"{self.name}: the plan has no {self.needs}, so there is nothing to hold against its absence"
        if self.sets is not None and self.sets in plan.settings:
            return f"{self.name} sets {self.sets} itself: leave it out of the plan"
        why = self.inapplicable(shape) if self.inapplicable else None
        return why or (self.lacks(model) if self.lacks is not None and model is not None else None)


def _finite(value: Any) -> float | None:
    """A plain float, or None for what is no number: NaN never passes for one."""
    return float(value) if value is not None and math.isfinite(value) else None


def _summary(thing: Any) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]


MODELS: Registry[Model] = Registry("model")
FAMILIES: Registry[Family] = Registry("autoencoder class")
LATENTS: Registry[LatentSource] = Registry("latents")
OPTIMIZATIONS: Registry[Optimization] = Registry("optimization", AXES)
METRICS: Registry[Instrument] = Registry("metric")
DETECTORS: Registry[Instrument] = Registry("detector")
CHECKS: Registry[Check] = Registry("check")


def _instrument(registry: Registry[Instrument], is_detector: bool, name: str, **about: Any) -> Callable[[T], T]:
    def register(function: T) -> T:
        registry.add(name, Instrument(name=name, summary=_summary(function), function=function,  # type: ignore[arg-type]
                                      is_detector=is_detector, **about))  # fmt: skip
        return function

    return register


def metric(name: str, *, unit: str, better: Better, diagnosis: tuple[str, ...] = ()) -> Callable[[T], T]:
    """Register `f(candidate, golden, *, data_range) -> Measurement`."""
    return _instrument(METRICS, False, name, unit=unit, better=better, diagnosis=diagnosis)


def detector(
    name: str, *, unit: str, better: Better, needs: str | None = None, diagnosis: tuple[str, ...] = ()
) -> Callable[[T], T]:
    """Register `f(candidate, golden, *, plan, receipts, data_range) -> Measurement`."""
    return _instrument(DETECTORS, True, name, unit=unit, better=better, needs=needs, diagnosis=diagnosis)


def check(name: str, *, diagnosis: tuple[str, ...], **about: Any) -> Callable[[T], T]:
    """Register `f(runner, latents, plan) -> (candidate, expected)`: two fp32 samples that must be equal."""

    def register(function: T) -> T:
        CHECKS.add(name, Check(name, _summary(function), function, diagnosis, **about))  # type: ignore[arg-type]
        return function

    return register


@dataclass(frozen=True)
class FunctionOptimization:
    """An optimization made of one generator function: apply, yield the proof, restore."""

    name: str
    summary: str
    order: int
    function: Callable[..., AbstractContextManager[Proof]]
    reason: Callable[[Any, DecodePlan, Model, tuple[int, ...]], str | None] | None = None
    grid: Callable[[Any, Model, tuple[int, ...]], TileGrid] | None = None
    """Where its tiles lie in the sample of latents of this shape, if it cuts any."""
    chunks: Callable[[Any, Model, tuple[int, ...]], tuple[Chunk, ...]] | None = None
    """Into which chunks it cuts the frames of latents of this shape, if it cuts them."""
    exact: bool = False
    """Whether it changes nothing but rounding, so that it is held to the oracle of the plan without it."""
    accelerator: str | None = None
    """Why it needs a device other than the CPU, where its cases are not applicable; None: it runs anywhere."""

    def inapplicable(self, value: Any, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
        return self.reason(value, plan, model, shape) if self.reason else None

    def apply(
        self, module: Any, value: Any, *, plan: DecodePlan, model: Model, device: str
    ) -> AbstractContextManager[Proof]:
        return self.function(module, value, plan=plan, model=model, device=device)


def optimization(
    name: str, *, order: int = 50, inapplicable: Callable[..., str | None] | None = None, **about: Any
) -> Callable[[Callable[..., Iterator[Proof]]], Callable[..., Any]]:
    """Register a generator `f(module, value, *, plan, model, device)` that applies, yields its proof, and restores.

    The proof is called after the decode with the Observation and returns `{"engaged": bool, "reason": str | None, …}`.
    An option that cuts says where, by `grid` or `chunks`, both `f(value, model, shape)`, so that detectors look there
    (its receipt's own `grid`) and other proofs count its calls; one that changes nothing but rounding says `exact`; one
    that does not run on a CPU says why as `accelerator`.
    """

    def register(function: Callable[..., Iterator[Proof]]) -> Callable[..., Any]:
        wrapped = wraps(function)(contextmanager(function))
        OPTIMIZATIONS.add(name, FunctionOptimization(name, _summary(function), order, wrapped, inapplicable, **about))
        return wrapped

    return register


def cuts(plan: DecodePlan) -> frozenset[str]:
    """How a decode of this plan is cut, by whichever setting: `tiling` into tiles, `temporal` into chunks of frames."""
    found = [OPTIMIZATIONS.get(name) for name in plan.settings if name in OPTIMIZATIONS]
    kinds = {"tiling": "grid", "temporal": "chunks"}
    return frozenset(
        kind for kind, law in kinds.items() if kind in plan.settings or any(getattr(each, law, None) for each in found)
    )


BUILT_IN = ("fidelity.models", "fidelity.latents", "fidelity.optimizations", "fidelity.metrics", "fidelity.detectors",
            "fidelity.checks")  # fmt: skip


def load_plugins(modules: Sequence[str] = ()) -> None:
    """Register what is built in, what entry points offer, and `modules`. Raises PluginError if one does not import."""
    for name in BUILT_IN:
        importlib.import_module(name)
    offered = [(point.value, point.load) for point in importlib.metadata.entry_points(group="fidelity.plugins")]
    named = [(name, lambda name=name: importlib.import_module(name)) for name in modules]
    for name, load in [*offered, *named]:
        try:
            load()
        except FidelityError:
            raise
        except (Exception, SystemExit) as error:  # whatever a plugin raises stops the run, with its name
            raise PluginError(f"plugin {name!r} does not import: {type(error).__name__}: {error}") from error
