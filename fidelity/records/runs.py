"""A whole run: its cases, its references, and what was learnt of its models and settings."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from fidelity.records.cases import CaseResult
from fidelity.trend import Trend


class Layer(Struct, frozen=True):
    """One module of the decoder in one decode: the largest |activation| that it gave."""

    name: str
    kind: str
    """Its class."""
    max_abs: float | None
    """None where it gave a value that is not finite."""
    headroom: float | None
    """65504 / max_abs: below 1 it overflows in fp16."""


class Headroom(Struct, frozen=True):
    """How far the fp32 reference decode stays below 65504, the largest fp16 number."""

    layers: tuple[Layer, ...] = ()
    """The tightest, tightest first; a module that only passes on what another gave is not counted."""
    watched: int = 0
    """Modules that gave something."""
    force_upcast: bool = False
    """What the model's config declares."""
    reason: str | None = None
    """Why there is none."""

    @property
    def tightest(self) -> float | None:
        """The least headroom of any layer; 0 where one was not finite, None where nothing was measured."""
        return (self.layers[0].headroom or 0.0) if self.layers else None

    @property
    def over(self) -> tuple[Layer, ...]:
        """The layers, of those listed, that overflow in fp16."""
        return tuple(layer for layer in self.layers if (layer.headroom or 0.0) < 1)

    @property
    def agrees(self) -> bool | None:
        """Whether the config declares force_upcast where it is needed; None where nothing was measured."""
        return None if self.tightest is None else self.force_upcast or self.tightest >= 1

    @property
    def words(self) -> str:
        """What follows for fp16, in a few words, held against what the config declares."""
        if self.tightest is None:
            return f"not measured: {self.reason}"
        if self.tightest < 1:
            which = f"needs force_upcast: {self.layers[0].name} passes 65504"
            return f"{which}, and it is declared" if self.force_upcast else f"{which}, and it is not declared"
        room = f"65504 is {self.tightest:.3g} times the largest activation"
        return f"{room}, though force_upcast is declared" if self.force_upcast else f"{room}: no force_upcast needed"


class Reference(Struct, frozen=True):
    """The reference plan decoded again in this run, against its golden."""

    model: str
    latents: str
    drift: float | None
    """RMSE in grey levels; None where it could not be decoded, and `reason` says why."""
    limit: float
    ok: bool
    same_environment: bool
    approved: bool = False
    """Whether measurements were approved in this environment class, so that regressions are gated."""
    reason: str | None = None
    recorded: bool = False
    """Whether this run recorded the golden (--record-missing)."""
    seconds: float = 0.0
    diagnosis: tuple[str, ...] = ()
    """What the drifted decode shows, beside the drift."""
    headroom: Headroom | None = None
    """None in a run of before it was measured."""
    digests: dict[str, str] = {}
    """Of the golden that was leaned on: `weights`, `latents`, `sample`. Empty in a run of before they were kept."""


class Reach(Struct, frozen=True):
    """How far a decoder looks, in latent pixels; profiles start at distance 0 and are in grey levels."""

    pixel: tuple[float, ...]
    """Largest change of the sample at each distance from one latent pixel that moved by one standard deviation."""
    edge: tuple[float, ...]
    """RMS error of a decode that was cut off, at each distance from the cut, beyond `tone`: lost context."""
    tone: tuple[float, ...]
    """RMS error far from any cut, of crops of each of `sizes`: other statistics; the same everywhere in a crop."""
    sizes: tuple[int, ...]
    """Sides of the crops, latent pixels, the larger first."""
    is_global: bool
    """Whether one pixel moves the whole picture (statistics or attention over all of it): tiling is never exact."""
    before: tuple[float, ...] = ()
    """Largest change at each distance in latent frames before the one that moved; the first is its own frame."""
    after: tuple[float, ...] = ()
    """The same for the frames after it."""
    frames_reason: str | None = None
    """Why nothing is known of frames: pictures have none."""


class Prediction(Struct, frozen=True):
    """What a tiling will cost on one set of latents, from the reach alone, before it was decoded."""

    latents: str
    tile: int
    overlap: float
    rmse: float
    """Grey levels over the whole picture."""


class ModelReach(Struct, frozen=True):
    """The reach of one model, measured once in a run on some of its latents, and what follows from it."""

    model: str
    latents: str
    """Those that it was measured on."""
    reach: Reach | None
    predictions: tuple[Prediction, ...] = ()
    reason: str | None = None
    """Why there is none."""


class Effect(Struct, frozen=True):
    """What one setting does by itself: its case minus the case that differs in nothing else, over all such pairs."""

    model: str
    measurement: str
    unit: str
    axis: str
    value: str
    against: str
    """The axis's reference value."""
    mean: float
    least: float
    most: float
    n: int
    """Complete pairs."""


class Interaction(Struct, frozen=True):
    """What two settings do together beyond the sum of what each does alone: a difference of differences."""

    model: str
    measurement: str
    unit: str
    axes: tuple[str, str]
    values: tuple[str, str]
    mean: float
    least: float
    most: float
    n: int
    """Complete quadruples."""


class Attribution(Struct, frozen=True):
    """Main effects and pairwise interactions over the cross product, and those where there should be none."""

    effects: tuple[Effect, ...] = ()
    interactions: tuple[Interaction, ...] = ()
    alarms: tuple[str, ...] = ()


class RunResult(Struct, frozen=True):
    """A whole run, as stored in results.json (schema fidelity.results/1)."""

    suite: dict[str, Any]
    environment: dict[str, Any]
    reference: tuple[Reference, ...] = ()
    cases: tuple[CaseResult, ...] = ()
    notes: tuple[str, ...] = ()
    partial: bool = False
    attribution: Attribution | None = None
    """None in a run of before there was any."""
    reach: tuple[ModelReach, ...] = ()
    """Of each model that the run tiled."""
    commit: str | None = None
    """Of the checkout that was run in, `-dirty` behind it where tracked files were edited; None where none is known."""
    recorded: str | None = None
    """When the run began: UTC, ISO 8601."""
    trend: Trend | None = None
    """Earlier runs of the history that this one was added to; None where it was added to none."""
    schema: Literal["fidelity.results/1"] = "fidelity.results/1"

    @property
    def exit_status(self) -> int:
        """0 as expected · 1 a surprise that was judged · 3 a case that could not be judged (3 wins)."""
        surprises = [case for case in self.cases if case.surprise]
        if any(case.verdict == "error" for case in surprises):
            return 3
        return 1 if surprises else 0
