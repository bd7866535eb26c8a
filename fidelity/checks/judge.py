"""How the two samples of a check are compared, and what bounds their difference."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from fidelity import oracles
from fidelity.records import Limit, Measurement, Reason
from fidelity.registry import Check

if TYPE_CHECKING:
    from torch import Tensor

NAME = "check_max_abs"
LIMIT = Limit(
    max=0.01,
    origin="noise floor: both sides decode the same batch shapes in the same dtype, bit-equal where measured",
)
"""Grey levels. tests/test_checks.py holds honest decodes to the bit; a suite may set its own `check_max_abs`."""
COUNTED = Limit(max=0.0, origin="calls are counted, so nothing rounds")


def limit(check: Check) -> Limit:
    """The bound of a check that its suite says nothing about."""
    return LIMIT if in_grey_levels(check) else COUNTED


def in_grey_levels(check: Check) -> bool:
    """Whether the two samples are pictures; those of the others are counts."""
    return check.unit == "grey levels"


def measure(
    check: Check, candidate: Tensor, expected: Tensor, data_range: tuple[float, float]
) -> dict[str, Measurement]:
    """`check_max_abs`, the largest absolute difference in the check's unit with its place, and `nonfinite_share`.

    Two samples that are NaN in the same places are equal, but prove nothing: the share, of both together, fails them.
    """
    both = [candidate.flatten(), expected.flatten()]
    broken = sum(int((~side.isfinite()).sum()) for side in both)
    share = broken / max(1, sum(side.numel() for side in both))
    span = data_range if in_grey_levels(check) else (0.0, 255.0)
    apart = oracles.compare(candidate, expected, data_range=span)
    return {
        "nonfinite_share": Measurement("nonfinite_share", share, "share", "lower"),
        NAME: msgspec.structs.replace(apart, name=NAME, unit=check.unit),
    }


def told(reasons: Iterable[Reason], words: str | None) -> list[Reason]:
    """The reasons with what the check says of the difference, where it says something."""
    if words is None:
        return list(reasons)
    return [
        msgspec.structs.replace(each, message=f"{words}; {each.message}") if each.name in (NAME, "shape") else each
        for each in reasons
    ]


def shape_reason(check: Check, candidate: Tensor, expected: Tensor) -> Reason | None:
    """Why the two cannot be compared at all: they differ in shape, which is the check's to blame."""
    if candidate.shape == expected.shape:
        return None
    seen, want = ("×".join(map(str, tensor.shape)) for tensor in (candidate, expected))
    return Reason("shape", f"{check.name}: the sample is {seen}, expected {want}", diagnosis=check.diagnosis)
