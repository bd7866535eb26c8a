"""Models loaded, latents made, goldens checked, and references decoded again and held against them.

One loaded model and one golden at a time, never the matrix.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelity import gates, golden, overflow, reach, why
from fidelity import latents as latents_
from fidelity.encoding import RoundTrip
from fidelity.environment import environment_class
from fidelity.errors import EvaluationError, GoldenError
from fidelity.golden import Golden
from fidelity.lazy import torch
from fidelity.optimizations import activations, state
from fidelity.optimizations.encode import encodes
from fidelity.plain import Plain
from fidelity.records import DecodePlan, Model, ModelReach, Reference, Tiling
from fidelity.registry import METRICS
from fidelity.runner import Runner

if TYPE_CHECKING:
    from torch import Tensor

    from fidelity.records import LatentSource

DRIFT_LIMIT_SAME = 1e-3
"""Grey levels RMSE, fp32, in the golden's own environment class: a repeated decode gives the same bits there, and
another thread count moves it by 2e-4."""
DRIFT_LIMIT_OTHER = 0.1
"""Grey levels RMSE, fp32, in another environment class (EVIDENCE: other kernels move an fp32 decode by 2e-5 of 2)."""


class References:
    """What the cases of a suite are judged with.

    `models` and `sources` are the suite's; `root` is the folder of its goldens; `suite_path` stands in messages.
    """

    def __init__(
        self,
        models: dict[str, Model],
        sources: dict[str, LatentSource],
        root: Path,
        *,
        device: str = "cpu",
        suite_path: str = "SUITE",
    ):
        self.models, self.sources, self.root = models, sources, root
        self.device, self.suite_path = device, suite_path
        self._runners: dict[str, Runner] = {}
        self._trips: dict[str, RoundTrip] = {}
        self._golden: tuple[tuple[str, str], Golden] | None = None
        self._pictured: Golden | None = None
        self._plain: dict[bool, Plain] = {}

    def forget(self) -> None:
        """Another golden is coming: what leaned on the one before goes."""
        self._golden = self._pictured = None
        self._plain.clear()

    def runner(self, model: str) -> Runner:
        """The loaded model; each is loaded once."""
        if model not in self._runners:
            self._runners[model] = Runner(self.models[model], self.device)
        return self._runners[model]

    def weights_digest(self, model: str) -> str:
        return self.runner(model).fingerprint[state.WEIGHTS]

    def golden(self, model: str, latents: str) -> Golden:
        """The golden of these latents, checked against the loaded weights. Raises GoldenError."""
        if self._golden is None or self._golden[0] != (model, latents):
            self.forget()
            digest = self.weights_digest(model)
            loaded = golden.load(self.root, model, latents, weights_digest=digest, suite=self.suite_path)
            self._refuse_other(loaded)
            self._golden = ((model, latents), loaded)
        return self._golden[1]

    def _refuse_other(self, loaded: Golden) -> None:
        """Raise GoldenError if the certificate is of another reference plan or range than the model's."""
        certificate = loaded.certificate
        model = self.models[certificate.model]
        wanted = {"plan": model.reference_plan.id, "data_range": model.data_range, "reference": model.reference}
        for name, value in wanted.items():
            seen = getattr(certificate, name)
            if seen != value:
                what = f"golden {certificate.model}/{certificate.latents}: its {name} is {seen}, the model's {value}"
                raise GoldenError(f"{what}: fidelity golden approve {self.suite_path} --reason … records it anew")

    def subject(self, model: str, latents: str, plan: DecodePlan) -> tuple[Runner, Golden]:
        """What decodes this plan, and the golden with what it is given: its latents; or, where the plan is the
        encoder's, a round trip and the picture behind them. Raises GoldenError, and EvaluationError without a picture.
        """
        stored = self.golden(model, latents)
        if not encodes(plan):
            return self.runner(model), stored
        if model not in self._trips:
            self._trips[model] = RoundTrip(self.runner(model))
        if self._pictured is None:
            picture = self.sources[latents].make(self.models[model], self.runner(model).module).image
            if picture is None:
                raise EvaluationError(f"encode: latents {latents!r} have no picture behind them")
            self._pictured = replace(stored, latents=picture)
        return self._trips[model], self._pictured

    def plain(self, model: str, latents: str, plan: DecodePlan = DecodePlan()) -> Plain:  # noqa: B008 - frozen
        """What plain full decodes of these latents cost, or plain round trips of their picture; one a golden."""
        runner, stored = self.subject(model, latents, plan)
        key = encodes(plan)
        if key not in self._plain:
            self._plain[key] = Plain(runner, stored.latents, stored.sample)
        return self._plain[key]

    def make_latents(self, model: str, latents: str) -> Tensor:
        """The latents made anew. Raises LatentsError if they are not what the model takes."""
        made = self.sources[latents].make(self.models[model], self.runner(model).module)
        latents_.check(made.tensor, self.models[model], latents)
        return made.tensor

    # ------------------------------------------------------------ the reference

    def record(self, model: str, latents: str, *, replace: bool = False) -> None:
        """Decode the reference plan and store it as the golden. Raises GoldenError if there is one already."""
        tensor = self.make_latents(model, latents)
        plan = self.models[model].reference_plan
        decoded = self.runner(model).decode(tensor, plan, trace=False)
        self.forget()
        golden.record(
            self.root,
            self.models[model],
            latents,
            sample=decoded.sample,
            latents_tensor=tensor,
            weights_digest=self.weights_digest(model),
            plan_id=plan.id,
            environment_class=environment_class(self.device),
            replace=replace,
        )

    def renewed(self, model: str, latents: str) -> Reference:
        """The reference held against its golden; one that does not hold is recorded anew, for `golden approve`."""
        try:
            held = self.reference(model, latents)
        except GoldenError:  # damaged, or of other weights: what approving is for
            held = None
        if held is not None and held.ok:
            return held
        self.record(model, latents, replace=True)
        return self.reference(model, latents, recorded=True)

    def reference(self, model: str, latents: str, *, recorded: bool = False) -> Reference:
        """Decode the reference again and hold it against its golden: nothing that leans on it passes if it moved."""
        stored = self.golden(model, latents)
        here = environment_class(self.device)
        same = stored.certificate.environment_class == here
        limit = DRIFT_LIMIT_SAME if same else DRIFT_LIMIT_OTHER
        about: dict[str, Any] = {"model": model, "latents": latents, "limit": limit, "same_environment": same}
        about["approved"] = here in stored.approved
        about["digests"] = stored.certificate.digests
        made = self.make_latents(model, latents)
        if made.shape != stored.latents.shape or not torch.allclose(made, stored.latents, rtol=1e-3, atol=1e-3):
            moved = f"the latents {latents!r} made now differ from the golden's: fidelity golden approve records anew"
            return Reference(drift=None, ok=False, reason=moved, recorded=recorded, **about)
        plan = self.models[model].reference_plan
        decoded = self.runner(model).decode(stored.latents, plan, trace=False, watch=True)
        about["headroom"] = activations.headroom(decoded.activations, self.models[model].force_upcast)
        about["seconds"] = decoded.seconds["decode"]
        measured = METRICS.get("rmse")(
            decoded.sample, stored.sample, plan=plan, receipts={}, data_range=self.models[model].data_range
        )
        drift = measured.value
        ok = drift is not None and drift <= limit
        where = "its own environment class" if same else f"{here}, recorded in {stored.certificate.environment_class}"
        seen = f"{drift:.4g} grey levels RMSE" if drift is not None else str(measured.reason)
        if ok:
            return Reference(drift=drift, ok=True, recorded=recorded, **about)
        shown = overflow.reasons(self.runner(model), stored.latents, plan, decoded.sample)
        shown += why.reasons(self.runner(model), plan, stored, decoded, {})
        reason = "; ".join(
            [f"reference drifted: {seen}, limit {limit:g} in {where}", *(each.message for each in shown)]
        )
        return Reference(
            drift=drift, ok=False, reason=reason, recorded=recorded, diagnosis=gates.diagnosis(shown), **about
        )

    def probe(self, model: str, latents: str, tilings: tuple[tuple[str, Tiling], ...]) -> ModelReach:
        """How far the model looks, on a golden's latents; predicts each tiling on the latents named with it."""
        geometry, stored = self.models[model].geometry, self.golden(model, latents)
        wanted = [(name, self.sources[name].shape(geometry), tiling) for name, tiling in tilings]
        return reach.measure(self.runner(model), model, latents, stored.latents, wanted)
