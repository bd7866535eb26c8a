"""The nouns of fidelity as frozen records, and their lossless JSON.

Data (`Struct`) goes to `results.json` and back unchanged; the few records that hold code or tensors
(`Model`, `Latents`, `Decoded`) are plain dataclasses and never leave the process that made them.

Tensors are (B, C, H, W) or (B, C, T, H, W), fp32. "Grey levels" are 255ths of the declared range.
"""

from fidelity.records.cases import (
    DIAGNOSES,
    ApprovedValues,
    Case,
    CaseResult,
    Expectation,
    Limit,
    Reason,
    VerdictName,
)
from fidelity.records.measured import (
    Better,
    Decoded,
    Measurement,
)
from fidelity.records.memory import (
    MEMORY_KINDS,
    Exhausted,
    Holding,
    MemoryKind,
    MemoryTrace,
    Peak,
    Span,
    Stage,
    StageName,
    Transfers,
)
from fidelity.records.models import (
    Chunk,
    Family,
    FrameLaw,
    Geometry,
    Latents,
    LatentSource,
    Model,
    ReferencePolicy,
    Scaling,
    TileAxis,
    TileGrid,
)
from fidelity.records.observed import (
    Observation,
    Optimization,
    Proof,
    Receipts,
)
from fidelity.records.plans import (
    DTYPES,
    OFFLOADS,
    STREAM,
    DecodePlan,
    DTypeName,
    OffloadName,
    Temporal,
    Tiling,
)
from fidelity.records.reading import (
    from_json,
    to_json,
)
from fidelity.records.runs import (
    Attribution,
    Effect,
    Headroom,
    Interaction,
    Layer,
    ModelReach,
    Prediction,
    Reach,
    Reference,
    RunResult,
)

__all__ = [
    "DIAGNOSES",
    "DTYPES",
    "MEMORY_KINDS",
    "OFFLOADS",
    "STREAM",
    "ApprovedValues",
    "Attribution",
    "Better",
    "Case",
    "CaseResult",
    "Chunk",
    "DTypeName",
    "DecodePlan",
    "Decoded",
    "Effect",
    "Exhausted",
    "Expectation",
    "Family",
    "FrameLaw",
    "Geometry",
    "Headroom",
    "Holding",
    "Interaction",
    "LatentSource",
    "Latents",
    "Layer",
    "Limit",
    "Measurement",
    "MemoryKind",
    "MemoryTrace",
    "Model",
    "ModelReach",
    "Observation",
    "OffloadName",
    "Optimization",
    "Peak",
    "Prediction",
    "Proof",
    "Reach",
    "Reason",
    "Receipts",
    "Reference",
    "ReferencePolicy",
    "RunResult",
    "Scaling",
    "Span",
    "Stage",
    "StageName",
    "Temporal",
    "TileAxis",
    "TileGrid",
    "Tiling",
    "Transfers",
    "VerdictName",
    "from_json",
    "to_json",
]
