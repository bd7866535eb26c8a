"""Every instrument on one pair of samples, and what a case is blamed on by each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fidelity import oracles
from fidelity.detectors import seam_family
from fidelity.errors import EvaluationError, in_one_line
from fidelity.records import DecodePlan, Measurement, Receipts
from fidelity.registry import DETECTORS, METRICS, Instrument

if TYPE_CHECKING:
    from torch import Tensor


def blame() -> dict[str, tuple[str, ...]]:
    """What a case is blamed on when an instrument is over its limit, by instrument."""
    named = {name: instrument.diagnosis for name, instrument in [*METRICS.items(), *DETECTORS.items()]}
    return {**named, oracles.NAME: ("not_as_specified",)}


def measure(
    candidate: Tensor,
    reference: Tensor,
    plan: DecodePlan,
    receipts: Receipts,
    data_range: tuple[float, float],
    *,
    known: Mapping[str, Measurement] | None = None,
) -> dict[str, Measurement]:
    """Every metric, every detector that plan and sample have something for, and the worst of the seam family.

    `known`: what was measured of the same pixels, tiles and chunks. The project's own instruments look at nothing else
    and are not asked again. Raises EvaluationError if an instrument may not be trusted or raises.
    """
    context = {"plan": plan, "receipts": receipts, "data_range": data_range}
    found: dict[str, Measurement] = {}
    for name, instrument in [*METRICS.items(), *DETECTORS.items()]:
        if instrument.looks_at(plan, video=candidate.ndim == 5):
            if known is not None and name in known and instrument.is_own:
                found[name] = known[name]
            else:
                found[name] = _apply(instrument, candidate, reference, context)
    worst = seam_family(found)
    return found if worst is None else {**found, worst.name: worst}


def _apply(instrument: Instrument, candidate: Tensor, reference: Tensor, context: dict[str, Any]) -> Measurement:
    try:
        return instrument(candidate, reference, **context)
    except EvaluationError:
        raise
    except Exception as error:
        raise EvaluationError(f"{instrument.name} raised {in_one_line(error)}") from error
