"""Cases, what a suite asks of them, and how they ended."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from fidelity.records.measured import Measurement
from fidelity.records.memory import MemoryTrace
from fidelity.records.observed import Receipts
from fidelity.records.plans import DecodePlan

VerdictName = Literal["pass", "fail", "error", "not_applicable"]
DIAGNOSES: tuple[str, ...] = (
    "seam", "band", "corner", "chroma", "tone_drift", "periodic", "geometry", "not_engaged", "non_finite", "scale",
    "shift", "double_normalised", "clipping", "truncation", "order", "misaligned", "temporal_seam", "ghost", "dtype",
    "nondeterministic", "state_leak", "memory", "not_as_specified", "regressed", "blur", "crash", "drift",
)  # fmt: skip
"""The closed list of what a red case can be blamed on (CONTRACT)."""


class Limit(Struct, frozen=True, forbid_unknown_fields=True):
    """A bound on one measurement and where it comes from. Met when equal."""

    origin: str
    max: float | None = None
    min: float | None = None
    times_plain: float | None = None
    """Beside `max`: also at most this many times what the plain full decode of the same dtype and upcast costs on the
    same latents, plus the noise floor."""


class Expectation(Struct, frozen=True):
    """How a case should end. An expected failure must have exactly these diagnoses."""

    verdict: Literal["pass", "fail", "error"] = "pass"
    diagnosis: tuple[str, ...] = ()
    reason: str = ""


class Case(Struct, frozen=True):
    """One cell: model × latents × plan, with its limits and what the suite expects of it."""

    model: str
    latents: str
    plan: DecodePlan
    limits: dict[str, Limit] = {}
    expected: Expectation = Expectation()
    not_applicable: str | None = None
    """The reason why this cell cannot apply, known before anything is decoded."""
    check: str | None = None
    """The metamorphic check that judges it, without a golden; None: judged against the golden."""
    memory_limit: int | None = None
    """Bytes that the decode may need beyond what its process holds when the model is loaded; None: no limit."""

    @property
    def id(self) -> str:
        return f"{self.model}/{self.latents}/{self.plan.id}{f'~{self.check}' if self.check else ''}"


class Reason(Struct, frozen=True):
    """Why a case is not green: one line for people, the figures for machines."""

    name: str
    message: str
    measured: float | None = None
    limit: float | None = None
    unit: str = ""
    diagnosis: tuple[str, ...] = ()


class ApprovedValues(Struct, frozen=True):
    """What was approved for a case, to stand beside what it measured."""

    environment_class: str
    gated: bool
    """Whether this run held the case to it: only in the class in which it was approved."""
    values: dict[str, float]
    floors: dict[str, float] = {}
    """Noise floors of the case's dtype."""


class CaseResult(Struct, frozen=True):
    """Case, receipts, measurements and verdict: the only thing that is stored and rendered."""

    id: str
    model: str
    latents: str
    plan: DecodePlan
    verdict: VerdictName
    expected: Literal["pass", "fail", "error"] = "pass"
    expected_reason: str = ""
    expected_diagnosis: tuple[str, ...] = ()
    surprise: bool = False
    reasons: tuple[Reason, ...] = ()
    diagnosis: tuple[str, ...] = ()
    receipts: Receipts = {}
    measurements: dict[str, Measurement] = {}
    limits: dict[str, Limit] = {}
    memory: MemoryTrace | None = None
    seconds: dict[str, float] = {}
    images: dict[str, tuple[str, ...]] = {}
    """`golden`, `candidate`, `difference`: one PNG a batch item, of a video one a frame, item after item (frame t of
    item b stands at b · frames + t). Paths relative to the run's folder."""
    frames: int = 1
    """Frames of each batch item; 1 for images."""
    data_range: tuple[float, float] = (-1.0, 1.0)
    reproduce: str = ""
    """The command that judges this case again."""
    code: str = ""
    """The same in plain diffusers, of a case that is not green: a short program; empty where there is none."""
    notes: tuple[str, ...] = ()
    memory_limit: int | None = None
    """Bytes that its decode was allowed; None: no limit."""
    check: str | None = None
    """The metamorphic check that judged it; None: judged against the golden."""
    approved: ApprovedValues | None = None
    """What was approved for this very case, gated or only shown; None where nothing was, in any class."""
