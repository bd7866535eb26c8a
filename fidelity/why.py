"""Why a decode is red, by looking again: at its pixels, and at a second decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fidelity import naming
from fidelity.errors import in_one_line
from fidelity.lazy import torch
from fidelity.optimizations import witness
from fidelity.records import Decoded, DecodePlan, Measurement, Reason

if TYPE_CHECKING:
    from torch import Tensor

    from fidelity.golden import Golden
    from fidelity.runner import Runner


def reasons(
    runner: Runner,
    plan: DecodePlan,
    stored: Golden,
    decoded: Decoded,
    measurements: dict[str, Measurement],
    expected: Tensor | None = None,
    *,
    pixels: bool = True,
    again: bool = True,
) -> list[Reason]:
    """What a red decode shows in its `pixels`, and in a second decode if `again`: the dtypes of its operators, and
    whether it repeats where that is not known. `expected`: the oracle's sample, if the decode left it."""
    found: list[Reason] = []
    if pixels:
        found = naming.reasons(
            decoded.sample,
            stored.sample,
            expected,
            plan=plan,
            receipts=decoded.receipts,
            data_range=runner.model.data_range,
            measurements=measurements,
        )
    return found + (_second_look(runner, plan, stored, decoded) if again else [])


def crashed(runner: Runner, plan: DecodePlan, stored: Golden) -> list[Reason]:
    """Whether a decode that raised passes on a fresh instance: then an earlier decode left something behind."""
    if not runner.passes_afresh(stored.latents, plan):
        return []
    said = "the same decode passes on an instance that decoded nothing before: an earlier decode left something behind"
    return [Reason("state", said, diagnosis=("state_leak",))]


def _second_look(runner: Runner, plan: DecodePlan, stored: Golden, decoded: Decoded) -> list[Reason]:
    try:
        with runner.applied(plan) as decode, witness.dtypes() as seen:
            sample, _ = decode(stored.latents)
    except Exception as error:  # it went well a moment ago
        runner.reload()
        said = f"a second decode raised {in_one_line(error)}"
        return [Reason("repeat", said, diagnosis=("nondeterministic",))]
    runner.restore()
    found = [
        Reason("dtype", f"{operator} computed in {name}, which the plan does not ask for", diagnosis=("dtype",))
        for name, operator in witness.unasked(seen, plan).items()
    ]
    same = torch.equal(torch.nan_to_num(sample), torch.nan_to_num(decoded.sample))
    if decoded.repeat_exact is None and not same:
        found.append(Reason("repeat", "a second decode gave different bits", diagnosis=("nondeterministic",)))
    return found
