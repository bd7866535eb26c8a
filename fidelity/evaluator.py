"""A Case is evaluated and yields a CaseResult: decode, compare with the golden, measure, gate.

An Evaluator holds one loaded model and one golden at a time, never the matrix. Cells that share their pixels (offload
moves none) share their measurements: they are pure functions, kept by the digest of the candidate.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fidelity import checks, gates, golden, images, naming, oracles, overflow, reach
from fidelity import latents as latents_
from fidelity.certificate import approved_values
from fidelity.environment import environment_class
from fidelity.errors import EvaluationError, GoldenError
from fidelity.golden import Golden
from fidelity.lazy import torch
from fidelity.measuring import blame, measure
from fidelity.optimizations import activations, state, witness
from fidelity.plain import Plain
from fidelity.records import (
    Case,
    CaseResult,
    Decoded,
    DecodePlan,
    Measurement,
    MemoryTrace,
    Model,
    ModelReach,
    Reason,
    Reference,
    Tiling,
)
from fidelity.registry import CHECKS, METRICS, Check
from fidelity.runner import Runner
from fidelity.verdicts import crash, first_line, result_of

if TYPE_CHECKING:
    from torch import Tensor

    from fidelity.records import LatentSource
    from fidelity.runner import Decode

REFERENCE_PLAN = DecodePlan()
UNTRACED = "a check compares decodes; it measures no memory"
DRIFT_LIMIT_SAME = 1e-3
"""Grey levels RMSE, fp32, in the golden's own environment class: a repeated decode gives the same bits there, and
another thread count moves it by 2e-4."""
DRIFT_LIMIT_OTHER = 0.1
"""Grey levels RMSE, fp32, in another environment class (EVIDENCE: other kernels move an fp32 decode by 2e-5 of 2)."""


class Evaluator:
    """Judges cases of one golden after another.

    `models` and `sources` are the suite's; `root` is the folder of its goldens; pictures go to `folder` if given.
    """

    def __init__(
        self,
        models: dict[str, Model],
        sources: dict[str, LatentSource],
        root: Path,
        *,
        device: str = "cpu",
        folder: Path | None = None,
        suite_path: str = "SUITE",
        request: str = "",
        gate_regressions: bool = True,
    ):
        self.models, self.sources, self.root = models, sources, root
        self.device, self.folder, self.suite_path = device, folder, suite_path
        self.request = request or f"fidelity run {suite_path}"
        self.gate_regressions = gate_regressions
        self._runners: dict[str, Runner] = {}
        self._golden: tuple[tuple[str, str], Golden] | None = None
        self._oracle: tuple[str, Tensor] | None = None
        self._latents: tuple[tuple[str, str], Tensor] | None = None
        self._plain: Plain | None = None
        self._overflowed: dict[tuple[str, str], list[Reason]] = {}
        self._measured: dict[tuple[str, ...], tuple[dict[str, Measurement], dict[str, tuple[str, ...]]]] = {}

    # ------------------------------------------------------------ what a case needs

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
            self._golden = self._oracle = None  # one at a time
            self._measured.clear()
            self._overflowed.clear()
            self._plain = None
            digest = self.weights_digest(model)
            loaded = golden.load(self.root, model, latents, weights_digest=digest, suite=self.suite_path)
            self._refuse_other(loaded)
            self._golden = ((model, latents), loaded)
        return self._golden[1]

    def _refuse_other(self, loaded: Golden) -> None:
        """Raise GoldenError if the certificate is of another reference plan or range than the model's."""
        certificate = loaded.certificate
        model = self.models[certificate.model]
        wanted = {"plan": REFERENCE_PLAN.id, "data_range": model.data_range, "reference": model.reference}
        for name, value in wanted.items():
            seen = getattr(certificate, name)
            if seen != value:
                what = f"golden {certificate.model}/{certificate.latents}: its {name} is {seen}, the model's {value}"
                raise GoldenError(f"{what}: fidelity golden approve {self.suite_path} --reason … records it anew")

    def plain(self, model: str, latents: str) -> Plain:
        """What the plain full decodes of these latents cost; one a golden."""
        stored = self.golden(model, latents)
        if self._plain is None:
            self._plain = Plain(self.runner(model), stored.latents, stored.sample)
        return self._plain

    def make_latents(self, model: str, latents: str) -> Tensor:
        """The latents made anew. Raises LatentsError if they are not what the model takes."""
        made = self.sources[latents].make(self.models[model], self.runner(model).module)
        latents_.check(made.tensor, self.models[model], latents)
        return made.tensor

    # ------------------------------------------------------------ the reference

    def record(self, model: str, latents: str, *, replace: bool = False) -> None:
        """Decode the reference plan and store it as the golden. Raises GoldenError if there is one already."""
        tensor = self.make_latents(model, latents)
        decoded = self.runner(model).decode(tensor, REFERENCE_PLAN, trace=False)
        self._golden = None
        golden.record(
            self.root,
            self.models[model],
            latents,
            sample=decoded.sample,
            latents_tensor=tensor,
            weights_digest=self.weights_digest(model),
            plan_id=REFERENCE_PLAN.id,
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
        decoded = self.runner(model).decode(stored.latents, REFERENCE_PLAN, trace=False, watch=True)
        about["headroom"] = activations.headroom(decoded.activations, self.models[model].force_upcast)
        about["seconds"] = decoded.seconds["decode"]
        measured = METRICS.get("rmse")(
            decoded.sample, stored.sample, plan=REFERENCE_PLAN, receipts={}, data_range=self.models[model].data_range
        )
        drift = measured.value
        ok = drift is not None and drift <= limit
        where = "its own environment class" if same else f"{here}, recorded in {stored.certificate.environment_class}"
        seen = f"{drift:.4g} grey levels RMSE" if drift is not None else str(measured.reason)
        if ok:
            return Reference(drift=drift, ok=True, recorded=recorded, **about)
        why = overflow.reasons(self.runner(model), stored.latents, REFERENCE_PLAN, decoded.sample)
        why += self._why(REFERENCE_PLAN, stored, decoded, {}, None)
        reason = "; ".join([f"reference drifted: {seen}, limit {limit:g} in {where}", *(each.message for each in why)])
        return Reference(
            drift=drift, ok=False, reason=reason, recorded=recorded, diagnosis=gates.diagnosis(why), **about
        )

    def probe(self, model: str, latents: str, tilings: tuple[tuple[str, Tiling], ...]) -> ModelReach:
        """How far the model looks, on a golden's latents; predicts each tiling on the latents named with it."""
        geometry, stored = self.models[model].geometry, self.golden(model, latents)
        wanted = [(name, self.sources[name].shape(geometry), tiling) for name, tiling in tilings]
        return reach.measure(self.runner(model), model, latents, stored.latents, wanted)

    # ------------------------------------------------------------ a case

    def case(self, case: Case, *, decode: Decode | None = None, held: bool = False) -> CaseResult:
        """Decode and judge one case. What a decode raises becomes an `error` with `crash`; GoldenError passes.

        `held`: the reference was decoded again and held, so that no fault of the full decode is to be looked for.
        """
        if case.not_applicable:
            return result_of(case, "not_applicable", (Reason("not_applicable", case.not_applicable),))
        if case.check is not None:
            return self._check(case, CHECKS.get(case.check))
        stored = self.golden(case.model, case.latents)
        try:
            decoded = self.runner(case.model).decode(stored.latents, case.plan, decode=decode)
        except Exception as error:  # a decode may raise anything; its kind and words are the evidence
            return self._finish(case, "error", (crash(error),))
        return self.judge(case, stored, decoded, decode=decode, held=held)

    def _check(self, case: Case, check: Check) -> CaseResult:
        """Judge a case by its metamorphic check, on latents made anew: no golden has a part in it."""
        runner = self.runner(case.model)
        subject, start = checks.Subject(runner), time.perf_counter()
        try:
            candidate, expected = check.function(subject, self._fresh_latents(case), case.plan)
        except Exception as error:  # a check decodes, and a decode may raise anything
            runner.reload()
            reason = Reason("check", str(error)) if isinstance(error, EvaluationError) else crash(error)
            return self._finish(case, "error", (reason,))
        receipts = {**subject.receipts, "state": runner.restore()}
        decoded = Decoded(candidate, {"check": time.perf_counter() - start}, receipts, MemoryTrace(reason=UNTRACED))
        reasons = list(gates.receipt_reasons(receipts, case.plan.settings))
        unlike = checks.shape_reason(check, candidate, expected)
        if unlike is not None:
            return self._finish(case, "fail", (*reasons, unlike), decoded)
        data_range = self.models[case.model].data_range
        found = checks.measure(check, candidate, expected, data_range)
        reasons += gates.judge(found, case.limits, instruments={checks.NAME: check.diagnosis})
        pictures = {}
        if self.folder and checks.in_grey_levels(check) and not found[checks.NAME].exact:
            pictures = images.save(candidate, expected, data_range, self.folder)
        return self._finish(case, gates.verdict(reasons), tuple(reasons), decoded, found, pictures)

    def _fresh_latents(self, case: Case) -> Tensor:
        key = (case.model, case.latents)
        if self._latents is None or self._latents[0] != key:
            self._latents = (key, self.make_latents(*key))
        return self._latents[1]

    def judge(
        self, case: Case, stored: Golden, decoded: Decoded, *, decode: Decode | None = None, held: bool = False
    ) -> CaseResult:
        """Measure a decode against its golden, and against its oracle if it is the model's own; gate it.

        `decode` made it, if it is somebody's own; `held` as for `case`.
        """
        by_somebody_else = decode is not None
        reasons = list(gates.receipt_reasons(decoded.receipts, case.plan.settings, repeat_exact=decoded.repeat_exact))
        if decoded.sample.shape != stored.sample.shape:
            seen, want = ("×".join(map(str, tensor.shape)) for tensor in (decoded.sample, stored.sample))
            message = f"the sample is {seen}, the golden {want}: nothing was resized, nothing compared"
            reasons.append(Reason("shape", message, diagnosis=("geometry",)))
            return self._finish(case, gates.verdict(tuple(reasons)), tuple(reasons), decoded)
        try:
            start = time.perf_counter()
            measurements, pictures = self._measure(case, stored, decoded)
            decoded.seconds["measure"] = time.perf_counter() - start
        except EvaluationError as error:  # an instrument that may not gate: never a pass, never a skip
            return self._finish(case, "error", (*reasons, Reason("instrument", str(error))), decoded)
        limits = dict(case.limits)
        if not by_somebody_else and oracles.has_one(case.plan):
            measurements = {**measurements, oracles.NAME: self._against_oracle(case.plan, stored, decoded)}
            limits.setdefault(oracles.NAME, oracles.LIMIT)
            case = msgspec.structs.replace(case, limits=limits)
        held = any(limit.times_plain is not None for limit in limits.values())
        plain = self.plain(case.model, case.latents)
        costs = plain.costs(case.plan, limits, decoded.seconds) if held else {}
        over = gates.judge(measurements, limits, instruments=blame(), plain=costs)
        approved = approved_values(
            stored.approved, environment_class(self.device), case.plan, gate=self.gate_regressions
        )
        if approved is not None and approved.gated:
            over += gates.regressions(measurements, approved.values, approved.floors)
        reasons += over
        if not by_somebody_else:
            reasons += plain.peak_reasons(case.plan, decoded.memory.allocated_peak_bytes)
        if reasons:
            blamed = gates.diagnosis(tuple(reasons))
            strange = not by_somebody_else and gates.surprise(case, gates.verdict(tuple(reasons)), blamed)
            expected = self._oracle[1] if self._oracle and "not_as_specified" in blamed else None
            pixels = not _honest(case, measurements, over=bool(over), held=held)
            why = self._why(case.plan, stored, decoded, measurements, expected, pixels=pixels, again=strange)
            reasons += self._overflow(case.plan, stored, decoded, decode)
            reasons += [each for each in why if not set(each.diagnosis) <= set(blamed)]
        result = self._finish(case, gates.verdict(tuple(reasons)), tuple(reasons), decoded, measurements, pictures)
        return msgspec.structs.replace(result, approved=approved)

    def _measure(self, case: Case, stored: Golden, decoded: Decoded) -> tuple[Any, Any]:
        key = (latents_.digest(decoded.sample), str(case.plan.tiling), str(case.plan.temporal))
        if key not in self._measured:
            data_range = self.models[case.model].data_range
            measurements = measure(decoded.sample, stored.sample, case.plan, decoded.receipts, data_range)
            pictures = images.save(decoded.sample, stored.sample, data_range, self.folder) if self.folder else {}
            self._measured[key] = (measurements, pictures)
        return self._measured[key]

    def _why(
        self,
        plan: DecodePlan,
        stored: Golden,
        decoded: Decoded,
        measurements: dict[str, Measurement],
        expected: Tensor | None,
        *,
        pixels: bool = True,
        again: bool = True,
    ) -> list[Reason]:
        """What a red decode shows in its `pixels`, and in a second decode if `again`: the dtypes of its operators, and
        whether it repeats where that is not known."""
        data_range = self.models[stored.certificate.model].data_range
        found: list[Reason] = []
        if pixels:
            found = naming.reasons(
                decoded.sample,
                stored.sample,
                expected,
                plan=plan,
                receipts=decoded.receipts,
                data_range=data_range,
                measurements=measurements,
            )
        return found + (self._second_look(plan, stored, decoded) if again else [])

    def _overflow(self, plan: DecodePlan, stored: Golden, decoded: Decoded, decode: Decode | None) -> list[Reason]:
        """The module that gave the first value that is not finite; offload moves no values, so it is asked once."""
        key = (latents_.digest(decoded.sample), msgspec.structs.replace(plan, offload="none").id)
        if key not in self._overflowed:
            runner = self.runner(stored.certificate.model)
            self._overflowed[key] = overflow.reasons(runner, stored.latents, plan, decoded.sample, decode)
        return self._overflowed[key]

    def _second_look(self, plan: DecodePlan, stored: Golden, decoded: Decoded) -> list[Reason]:
        runner = self.runner(stored.certificate.model)
        try:
            with runner.applied(plan) as decode, witness.dtypes() as seen:
                sample, _ = decode(stored.latents)
        except Exception as error:  # it went well a moment ago
            runner.reload()
            said = f"a second decode raised {type(error).__name__}: {first_line(error)}"
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

    def _against_oracle(self, plan: DecodePlan, stored: Golden, decoded: Decoded) -> Measurement:
        shared = oracles.shared(plan).id
        if self._oracle is None or self._oracle[0] != shared:
            start = time.perf_counter()
            self._oracle = (shared, self.runner(stored.certificate.model).expected(stored.latents, plan))
            decoded.seconds["oracle"] = time.perf_counter() - start
        data_range = self.models[stored.certificate.model].data_range
        return oracles.compare(decoded.sample, self._oracle[1], data_range=data_range)

    def _finish(
        self,
        case: Case,
        verdict: Any,
        reasons: tuple[Reason, ...],
        decoded: Decoded | None = None,
        measurements: dict[str, Measurement] | None = None,
        pictures: dict[str, tuple[str, ...]] | None = None,
    ) -> CaseResult:
        result = result_of(case, verdict, reasons, self.request)
        if decoded is None:
            return result
        return msgspec.structs.replace(
            result,
            receipts=decoded.receipts,
            measurements=measurements or {},
            memory=decoded.memory,
            seconds=decoded.seconds,
            images=pictures or {},
            frames=decoded.sample.shape[2] if decoded.sample.ndim == 5 else 1,
            data_range=self.models[case.model].data_range,
        )


def _honest(case: Case, measurements: dict[str, Measurement], *, over: bool, held: bool) -> bool:
    """Whether what the pixels show is the option's own price and no fault: the decode equals its oracle, and either no
    limit is passed (`over`), or it is cut into tiles or chunks and the full decode held."""
    found = measurements.get(oracles.NAME)
    if found is None or gates.judge({oracles.NAME: found}, {oracles.NAME: oracles.LIMIT}, instruments=blame()):
        return False
    return not over or (held and (case.plan.tiling is not None or case.plan.temporal is not None))
