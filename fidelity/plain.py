"""What the plain full decodes of one golden's latents cost: the yardstick of the upper rule and of every saving."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from fidelity import gates, naming, noise
from fidelity.errors import in_one_line
from fidelity.measuring import measure
from fidelity.records import DecodePlan, Limit, Measurement, Model, Reason
from fidelity.runner import Runner

if TYPE_CHECKING:
    from torch import Tensor


SAVED = 0.001
"""Share of a peak below which a difference is none: an instance's first decode needs some bytes more (16 of 3 MB)."""


def plainly(plan: DecodePlan, model: Model) -> DecodePlan:
    """The plan without its options: the reference in the same dtype and upcast."""
    return msgspec.structs.replace(model.reference_plan, dtype=plan.dtype, force_upcast=plan.force_upcast)


class Plain:
    """Plain decodes of one golden, each made once and only when asked for.

    `latents` and `golden` (B, C, [T,] H, W) are fp32, as stored.
    """

    def __init__(self, runner: Runner, latents: Tensor, golden: Tensor):
        self.runner, self.latents, self.golden = runner, latents, golden
        self._costs: dict[DecodePlan, dict[str, gates.Plain]] = {}
        self._peaks: dict[DecodePlan, int | None] = {}

    def noise(self, plans: tuple[DecodePlan, ...], conditions: tuple[str, ...]) -> tuple[noise.Noise, ...]:
        """How far each plain plan moves when only rounding changes, by condition. Raises what a decode raises."""
        data_range = self.runner.model.data_range

        def measured(candidate: Tensor, reference: Tensor, plan: DecodePlan) -> dict[str, Measurement]:
            return measure(candidate, reference, plan, {}, data_range)

        return tuple(noise.measure_noise(self.runner, self.latents, self.golden, plans, conditions, measured))

    def costs(self, plan: DecodePlan, limits: dict[str, Limit], seconds: dict[str, float]) -> dict[str, gates.Plain]:
        """What the plan's plain decode measures, with its noise floor; the time it took goes to `seconds`."""
        plain = plainly(plan, self.runner.model)
        if plain not in self._costs:
            start = time.perf_counter()
            try:
                found = self.noise((plain,), (noise.PLAIN, noise.THREADS))
            except Exception as error:  # a decode may raise anything; without it nothing can be held to its cost
                said = in_one_line(error)
                costs = {name: gates.Plain(None, None, said) for name in limits}
            else:
                moved = noise.floors(found)[plain.dtype]
                costs = {name: gates.Plain(value, moved.get(name)) for name, value in found[0].moved.items()}
            self._costs[plain] = costs
            seconds["plain"] = time.perf_counter() - start
        return self._costs[plain]

    def peak_reasons(self, plan: DecodePlan, peak: int | None) -> list[Reason]:
        """A peak of `peak` bytes that tiles or slices did not lower is a finding, whatever the picture looks like."""
        plain = plainly(plan, self.runner.model)
        if plan == plain:
            self._peaks.setdefault(plain, peak)
            return []
        if peak is None or plan.offload != "none" or not naming.saves_memory(plan, tuple(self.latents.shape)):
            return []
        if plain not in self._peaks:
            self._peaks[plain] = self.runner.peak_bytes(self.latents, plain)
        limit = self._peaks[plain]
        if limit is None or peak < limit * (1 - SAVED):
            return []
        said = (
            f"the peak is {peak / 2**20:.1f} MiB, without tiles and slices {limit / 2**20:.1f} MiB: nothing was saved"
        )
        return [Reason("memory", said, peak, limit, "bytes", ("memory",))]
