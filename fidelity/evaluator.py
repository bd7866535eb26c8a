"""A Case is evaluated and yields a CaseResult: decode, compare with the golden, measure, gate.

Cells that share their pixels (offload moves none) share their measurements: they are pure functions, kept by the digest
of the candidate.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fidelity import checks, gates, images, oracles, overflow, response, shortage, snippet, why
from fidelity import latents as latents_
from fidelity.certificate import approved_values
from fidelity.environment import environment_class
from fidelity.errors import EvaluationError
from fidelity.golden import Golden
from fidelity.measuring import blame, measure
from fidelity.memory import allocator
from fidelity.records import (
    Case,
    CaseResult,
    Decoded,
    DecodePlan,
    Exhausted,
    Measurement,
    MemoryTrace,
    Model,
    Reason,
)
from fidelity.references import References
from fidelity.registry import CHECKS, Check
from fidelity.verdicts import crash, result_of

if TYPE_CHECKING:
    from torch import Tensor

    from fidelity.records import LatentSource
    from fidelity.runner import Decode, Runner
    from fidelity.suite import Suite

UNTRACED = "a check compares decodes; it measures no memory"


class Evaluator(References):
    """Judges cases of one golden after another.

    `models` and `sources` are the suite's; `root` is the folder of its goldens; pictures go to `folder` if given. Of
    the plans of `suite` one is named where memory ran out.
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
        suite: Suite | None = None,
    ):
        super().__init__(models, sources, root, device=device, suite_path=suite_path)
        self.folder = folder
        self.request = request or f"fidelity run {suite_path}"
        self.gate_regressions = gate_regressions
        self.plans = shortage.Plans(suite, models, device)
        self._oracle: tuple[str, Tensor] | None = None
        self._latents: tuple[tuple[str, str], Tensor] | None = None
        self._overflowed: dict[tuple[str, str], list[Reason]] = {}
        self._measured: dict[tuple[str, ...], tuple[dict[str, Measurement], dict[str, tuple[str, ...]]]] = {}

    def forget(self) -> None:
        super().forget()
        self._oracle = None
        self._overflowed.clear()
        self._measured.clear()

    def case(self, case: Case, *, decode: Decode | None = None, held: bool = False) -> CaseResult:
        """Decode and judge one case. What a decode raises becomes an `error` with `crash`; GoldenError passes.

        `held`: the reference was decoded again and held, so that no fault of the full decode is to be looked for.
        """
        if case.not_applicable:
            return result_of(case, "not_applicable", (Reason("not_applicable", case.not_applicable),))
        if case.check is not None:
            return self._check(case, CHECKS.get(case.check))
        runner, stored = self.subject(case.model, case.latents, case.plan)
        try:
            decoded = runner.decode(stored.latents, case.plan, decode=decode, memory_limit=case.memory_limit)
        except Exception as error:  # a decode may raise anything; its kind and words are the evidence
            return self._crashed(case, runner, stored, error, decode)
        decoded = self._predicted(case.plan, stored, decoded)
        return self.judge(case, stored, decoded, decode=decode, held=held)

    def _crashed(
        self, case: Case, runner: Runner, stored: Golden, error: Exception, decode: Decode | None
    ) -> CaseResult:
        """The error of a decode that raised: out of memory with all that is known of it, or a crash."""
        found = shortage.of_error(error, case.memory_limit, lambda: runner.passes_afresh(stored.latents, case.plan))
        if found is None:
            ours = decode is None and not isinstance(error, EvaluationError)
            again = why.crashed(runner, case.plan, stored) if ours else []
            return self._finish(case, "error", (crash(error), *again))
        traceback.clear_frames(error.__traceback__)  # what the decode held must not count as taken
        found = self.fitting(case, found) if decode is None else found
        result = self._finish(case, "error", (shortage.reason(found),))
        return msgspec.structs.replace(result, memory=shortage.trace(error, found))

    def fitting(self, case: Case, found: Exhausted) -> Exhausted:
        """The record of memory that ran out, with the nearest plan of the suite that fits."""
        return shortage.completed(found, self.plans.fitting(case, *self.plans.room(case)))

    def _predicted(self, plan: DecodePlan, stored: Golden, decoded: Decoded) -> Decoded:
        """The decode with what shapes alone say of its memory, where nothing was measured."""
        memory = decoded.memory
        if memory.allocated_peak_bytes is not None:
            return decoded
        peak = self.plans.peak(stored.certificate.model, tuple(stored.latents.shape), plan)
        if isinstance(peak, str):
            said = "; ".join(each for each in (memory.reason, peak) if each)
            return dataclasses.replace(decoded, memory=msgspec.structs.replace(memory, reason=said))
        return dataclasses.replace(decoded, memory=msgspec.structs.replace(memory, predicted_peak_bytes=peak))

    def _check(self, case: Case, check: Check) -> CaseResult:
        """Judge a case by its metamorphic check, on latents made anew: no golden has a part in it."""
        runner = self.runner(case.model)
        subject, start = checks.Subject(runner), time.perf_counter()
        try:
            candidate, expected = check.function(subject, self._fresh_latents(case), case.plan)
        except Exception as error:  # a check decodes, and a decode may raise anything
            runner.reload()
            exhausted = shortage.of_error(error, None, lambda: False)
            if exhausted is not None:
                reason = shortage.reason(exhausted)
            else:
                reason = Reason("check", str(error)) if isinstance(error, EvaluationError) else crash(error)
            return self._finish(case, "error", (reason,))
        receipts = {**subject.receipts, "state": runner.restore()}
        decoded = Decoded(candidate, {"check": time.perf_counter() - start}, receipts, MemoryTrace(reason=UNTRACED))
        reasons = list(gates.receipt_reasons(receipts, case.plan.settings))
        unlike = checks.shape_reason(check, candidate, expected)
        if unlike is not None:
            return self._finish(case, "fail", (*reasons, *checks.told([unlike], subject.words)), decoded)
        data_range = self.models[case.model].data_range
        found = checks.measure(check, candidate, expected, data_range)
        over = gates.judge(found, case.limits, instruments={checks.NAME: check.diagnosis})
        reasons += checks.told(over, subject.words)
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
        if not by_somebody_else and oracles.has_one(case.plan, self.models[case.model]):
            found = self._against_oracle(case.plan, stored, decoded)
            unlike = oracles.shape_reason(decoded.sample, self._oracle[1]) if self._oracle else None
            if unlike is not None:  # as long as the golden, and yet not what the class should give
                reasons.append(unlike)
            else:
                measurements = {**measurements, oracles.NAME: found}
                limits.setdefault(oracles.NAME, oracles.LIMIT)
                case = msgspec.structs.replace(case, limits=limits)
        relative = any(limit.times_plain is not None for limit in limits.values())
        plain = self.plain(case.model, case.latents, case.plan)
        costs = plain.costs(case.plan, limits, decoded.seconds) if relative else {}
        over = gates.judge(measurements, limits, instruments=blame(), plain=costs)
        approved = approved_values(
            stored.approved, environment_class(self.device), case.plan, gate=self.gate_regressions
        )
        if approved is not None and approved.gated:
            over += gates.regressions(measurements, approved.values, approved.floors)
        reasons += over
        if not by_somebody_else:
            reasons += plain.peak_reasons(case.plan, decoded.memory.allocated_peak_bytes)
            reasons += shortage.caught(decoded.memory)
        if reasons:
            blamed = gates.diagnosis(tuple(reasons))
            strange = not by_somebody_else and gates.surprise(case, gates.verdict(tuple(reasons)), blamed)
            expected = self._oracle[1] if self._oracle and "not_as_specified" in blamed else None
            pixels = not _honest(case, measurements, over=bool(over), held=held)
            runner, _ = self.subject(case.model, case.latents, case.plan)
            shown = why.reasons(
                runner, case.plan, stored, decoded, measurements, expected, pixels=pixels, again=strange
            )
            reasons += self._overflow(case.plan, stored, decoded, decode)
            reasons += [each for each in shown if not set(each.diagnosis) <= set(blamed)]
        result = self._finish(case, gates.verdict(tuple(reasons)), tuple(reasons), decoded, measurements, pictures)
        return msgspec.structs.replace(result, approved=approved)

    def _measure(self, case: Case, stored: Golden, decoded: Decoded) -> tuple[Any, Any]:
        data_range, receipts = self.models[case.model].data_range, decoded.receipts
        cuts = (str(receipt["grid"]) for receipt in receipts.values() if receipt.get("grid"))
        key = (latents_.digest(decoded.sample), str(case.plan.tiling), str(case.plan.temporal), *cuts)
        known, pictures = self._measured.get(key, (None, None))
        measurements = measure(decoded.sample, stored.sample, case.plan, receipts, data_range, known=known)
        if pictures is None:
            pictures = images.save(decoded.sample, stored.sample, data_range, self.folder) if self.folder else {}
        self._measured[key] = (measurements, pictures)
        return self._measured[key]

    def _overflow(self, plan: DecodePlan, stored: Golden, decoded: Decoded, decode: Decode | None) -> list[Reason]:
        """The module that gave the first value that is not finite; offload moves no values, so it is asked once."""
        key = (latents_.digest(decoded.sample), msgspec.structs.replace(plan, offload="none").id)
        if key not in self._overflowed:
            runner, _ = self.subject(stored.certificate.model, stored.certificate.latents, plan)
            self._overflowed[key] = overflow.reasons(runner, stored.latents, plan, decoded.sample, decode)
        return self._overflowed[key]

    def _against_oracle(self, plan: DecodePlan, stored: Golden, decoded: Decoded) -> Measurement:
        shared = oracles.shared(plan).id
        if self._oracle is None or self._oracle[0] != shared:
            start = time.perf_counter()
            runner, _ = self.subject(stored.certificate.model, stored.certificate.latents, plan)
            self._oracle = (shared, runner.expected(stored.latents, plan))
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
        source, model = self.sources.get(case.latents), self.models[case.model]
        if verdict in ("fail", "error") and source is not None:
            code = snippet.of_case(case, model, source.shape(model.geometry))
            result = msgspec.structs.replace(result, code=code)
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
            notes=(*result.notes, *response.findings(decoded.memory), *allocator.findings(decoded.memory)),
        )


def _honest(case: Case, measurements: dict[str, Measurement], *, over: bool, held: bool) -> bool:
    """Whether what the pixels show is the option's own price and no fault: the decode equals its oracle, and either no
    limit is passed (`over`), or it is cut into tiles or chunks and the full decode held."""
    found = measurements.get(oracles.NAME)
    if found is None or gates.judge({oracles.NAME: found}, {oracles.NAME: oracles.LIMIT}, instruments=blame()):
        return False
    return not over or (held and (case.plan.tiling is not None or case.plan.temporal is not None))
