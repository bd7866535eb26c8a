"""A run: a suite's cases over worker processes, their references held first, the results in one folder.

Nothing is written to the folder before the run has ended: it is made beside it and takes its place at once.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fidelity import golden, shortage
from fidelity.attribution import attribute
from fidelity.errors import EvaluationError, GoldenError, RequestError, WorkerDied
from fidelity.pool import Pool, default_jobs
from fidelity.records import Case, CaseResult, Exhausted, MemoryTrace, ModelReach, Reason, Reference, RunResult, Tiling
from fidelity.suite import Suite, on
from fidelity.verdicts import result_of
from fidelity.worker import Fit, Fitted, Held, Hold, Judge, Judged, Prepare, Probe, Probed, Refused, Reply, Setup, Task


@dataclass(frozen=True)
class Options:
    """How to run: not what."""

    device: str = "cpu"
    jobs: int | None = None
    plugins: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    substitute: tuple[str, str] | None = None
    record_missing: bool = False
    gate_regressions: bool = True
    memory_limit: int | None = None
    """Bytes that each decode was allowed by the request, in place of what the suite says; the cases have it already."""
    request: str = ""
    """The command line that reproduces a case, up to its --case; by default that of the suite."""
    private_goldens: bool = False
    """Record the goldens in a temporary folder instead of the suite's own: for a plan asked for by itself."""

    def setup(self, suite: Suite, folder: Path | None = None) -> Setup:
        """What a worker needs to know of this run."""
        return Setup(
            suite=str(suite.path),
            golden=str(suite.golden),
            device=self.device,
            threads=1,
            plugins=self.plugins,
            path=self.path,
            substitute=self.substitute,
            folder=str(folder) if folder else None,
            gate_regressions=self.gate_regressions,
            request=self.request,
        )

    def about(self) -> dict[str, Any]:
        """What of the request decides on the results, as JSON has it."""
        substitute = list(self.substitute) if self.substitute else None
        about = {"device": self.device, "plugins": list(self.plugins), "model": substitute}
        return about if self.memory_limit is None else {**about, "memory_limit": self.memory_limit}

    def reproducing(self, suite: Suite) -> str:
        """The command line up to --case."""
        return self.request or f"fidelity run {suite.path}"


Progress = Callable[[CaseResult], None]
"""Called with each case that has ended, those of an earlier run that were kept too."""


def silent(_: object) -> None:
    """A progress, or a phase, that says nothing."""


def execute(
    suite: Suite,
    folder: Path | None,
    options: Options,
    *,
    kept: RunResult | None = None,
    progress: Progress = silent,
    phase: Callable[[str], None] = silent,
) -> RunResult:
    """Judge every case of `suite`; pictures go to `folder`. `kept` is an earlier run of it, to be completed; `phase` is
    told what goes on before the first case.

    Raises RequestError, before anything is decoded, if a golden is missing or the request is wrong. An interrupt gives
    a partial result.
    """
    with tempfile.TemporaryDirectory(prefix="fidelity-") as scratch:
        if options.private_goldens:
            suite = dataclasses.replace(suite, golden=Path(scratch) / "golden")
        suite = on(suite, options.device)
        missing = _missing_goldens(suite, options)
        jobs = default_jobs(options.device) if options.jobs is None else options.jobs
        with Pool(options.setup(suite, folder), jobs, Path(scratch)) as pool:
            return Run(suite, pool, missing, options, kept, progress, phase).result(probe=True)


class Run:
    """The state of one run while it goes on."""

    def __init__(
        self,
        suite: Suite,
        pool: Pool,
        missing: set[tuple[str, str]],
        options: Options,
        kept: RunResult | None = None,
        progress: Progress = silent,
        phase: Callable[[str], None] = silent,
    ):
        self.suite, self.pool, self.missing, self.progress, self.phase = suite, pool, missing, progress, phase
        self.options, self.request, self.kept = options, options.reproducing(suite), kept
        self.results: dict[str, CaseResult] = {}
        self.references: dict[tuple[str, str], Reference] = {}
        """Held once each; a caller who judges case by case hands in those that it has."""
        self.reach: dict[str, ModelReach] = {}
        self.notes: list[str] = []

    def result(self, *, probe: bool = False) -> RunResult:
        """Hold the references, judge the cases, and put together what came of it. `probe`: how far models look too."""
        start = time.monotonic()
        for case in self.suite.cases:
            if case.not_applicable and case.id not in self.results:
                reason = Reason("not_applicable", case.not_applicable)
                self.results[case.id] = result_of(case, "not_applicable", (reason,), self.request)
        partial = False
        try:
            self._hold_references()
            if probe:
                self._probe_models()
            self._keep_earlier()
            self._judge_cases()
            self._refuse_to_lose()
        except KeyboardInterrupt:
            partial = True
            self._keep_earlier()
            self.notes.append("interrupted: go on with --resume")
        self._note()
        cases = tuple(self.results[case.id] for case in self.suite.cases if case.id in self.results)
        return RunResult(
            suite={**self.suite.about(), "seconds": time.monotonic() - start, "request": self.options.about()},
            environment=self._environment,
            reference=tuple(self.references.values()),
            cases=cases,
            notes=tuple(self.notes),
            partial=partial,
            attribution=attribute(cases),
            reach=tuple(self.reach.values()),
        )

    @property
    def _environment(self) -> dict[str, Any]:
        """Where this runs; before a worker said so, where the earlier run did that it only hands on."""
        return self.pool.environment or (self.kept.environment if self.kept is not None else {})

    def _note(self) -> None:
        """Say what a reader of the results would not guess."""
        if self.missing:
            names = ", ".join("/".join(key) for key in sorted(self.missing))
            self.notes.append(f"the goldens {names} were recorded in this very run and judged against")
        ungated = [f"{one.model}/{one.latents}" for one in self.references.values() if not one.approved]
        if ungated:
            here = self._environment.get("class")
            self.notes.append(
                f"nothing is approved in {here} for {', '.join(ungated)}: regressions are not gated there"
            )
        if self.options.memory_limit is not None and any(case.check is not None for case in self.suite.cases):
            self.notes.append("the memory limit holds for what a golden judges: checks decode without one")
        if self._environment.get("native_bf16") is False and any(c.plan.dtype == "bf16" for c in self.suite.cases):
            self.notes.append("no bf16 instructions here: bf16 decodes are right, and slow")

    def _open_cases(self) -> list[Case]:
        return [case for case in self.suite.cases if case.id not in self.results]

    def _keep(self, result: CaseResult) -> None:
        self.results[result.id] = result
        self.progress(result)

    def _keep_exhausted(self, case: Case, found: Exhausted) -> None:
        """The error of a case whose worker died of memory."""
        result = result_of(case, "error", (shortage.reason(found),), self.request)
        memory = MemoryTrace(reason=shortage.DEATH, exhausted=found)
        self._keep(msgspec.structs.replace(result, memory=memory))

    def _hold_references(self) -> None:
        needed = dict.fromkeys((case.model, case.latents) for case in self._open_cases() if case.check is None)
        keys = [key for key in needed if key not in self.references]
        if keys:
            self.phase(f"holding {len(keys)} reference{'s' if len(keys) > 1 else ''}")
        self._prepare_missing()

        def on_reply(task: Task, reply: Reply) -> None:
            if isinstance(reply, Refused):
                raise (GoldenError if reply.wrong_request else EvaluationError)(reply.message)
            assert isinstance(task, Hold)
            assert isinstance(reply, Held)
            self.references[task.model, task.latents] = reply.reference

        def on_death(task: Task, error: WorkerDied) -> list[Task]:
            assert isinstance(task, Hold)
            self.references[task.model, task.latents] = Reference(
                task.model, task.latents, drift=None, limit=0.0, ok=False, same_environment=False, reason=str(error)
            )
            return []

        self.pool.run([Hold(*key, record=key in self.missing) for key in keys], on_reply, on_death)

    def _probe_models(self) -> None:
        """How far each model looks that is tiled, on the first of its latents whose reference holds."""
        wanted: dict[str, dict[tuple[str, Tiling], None]] = defaultdict(dict)
        for case in self.suite.cases:
            decodes = case.check is None and not case.plan.options.get("encode")
            if case.plan.tiling is not None and not case.not_applicable and decodes:
                wanted[case.model][case.latents, case.plan.tiling] = None
        held = [(one.model, one.latents) for one in self.references.values() if one.ok]
        tasks = []
        for model, tilings in wanted.items():
            first = next((name for name, _ in tilings if (model, name) in held), None)
            self.reach[model] = ModelReach(model, first or "", None, reason="no reference of this model holds")
            tasks += [Probe(model, first, tuple(tilings))] if first else []
        if tasks:
            self.phase(f"probing how far {', '.join(task.model for task in tasks)} looks")

        def on_reply(task: Task, reply: Reply) -> None:
            assert isinstance(task, Probe)
            if isinstance(reply, Probed):
                self.reach[task.model] = reply.reach
            elif isinstance(reply, Refused):
                self.reach[task.model] = ModelReach(task.model, task.latents, None, reason=reply.message)

        def on_death(task: Task, error: WorkerDied) -> list[Task]:
            assert isinstance(task, Probe)
            self.reach[task.model] = ModelReach(task.model, task.latents, None, reason=str(error))
            return []

        self.pool.run(tasks, on_reply, on_death)

    def _prepare_missing(self) -> None:
        """Make the latents of every golden to be recorded before the first is: a wrong request writes nothing."""

        def on_reply(task: Task, reply: Reply) -> None:
            if isinstance(reply, Refused):
                raise (RequestError if reply.wrong_request else EvaluationError)(reply.message)

        def on_death(task: Task, error: WorkerDied) -> list[Task]:
            raise error

        self.pool.run([Prepare(*key) for key in sorted(self.missing)], on_reply, on_death)

    def _keep_earlier(self) -> None:
        """Take over the earlier run's judged cases if it ran where this one runs, and what they lean on.

        Also after an interrupt, however early: what was judged once is never lost to a run that goes on with it.
        """
        if self.kept is None:
            return
        for name in ("class", "versions"):
            if self.kept.environment.get(name) != self._environment.get(name):
                note = f"--resume kept nothing: the earlier run was made with another {name}"
                self.notes += [note] if note not in self.notes else []
                return
        for reference in self.kept.reference:
            self.references.setdefault((reference.model, reference.latents), reference)
        for reach in self.kept.reach:
            self.reach.setdefault(reach.model, reach)
        moved = {(one.model, one.latents) for one in self.references.values() if not one.ok}
        for result in self.kept.cases:
            fits = result.verdict in ("pass", "fail") and (result.model, result.latents) not in moved
            if fits and result.id not in self.results:
                self._keep(result)

    def _refuse_to_lose(self) -> None:
        """A case without a result is an error, whatever lost it."""
        for case in self._open_cases():
            reason = Reason("lost", "no worker gave a result for this case: run it again", diagnosis=("crash",))
            self._keep(result_of(case, "error", (reason,), self.request))

    def _judge_cases(self) -> None:
        for case in (case for case in self._open_cases() if case.check is None):
            reference = self.references[case.model, case.latents]
            if not reference.ok:
                reason = Reason("reference", reference.reason or "drifted", reference.drift, reference.limit,
                                "grey levels", diagnosis=("drift", *reference.diagnosis))  # fmt: skip
                self._keep(result_of(case, "error", (reason,), self.request))

        def on_reply(task: Task, reply: Reply) -> None:
            assert isinstance(task, (Judge, Fit))
            if isinstance(task, Fit):
                self._keep_exhausted(task.case, reply.found if isinstance(reply, Fitted) else task.found)
            elif isinstance(reply, Judged):
                self._keep(reply.result)
            elif isinstance(reply, Refused):  # its golden vanished or changed while the run went on
                for case in task.cases:
                    if case.id not in self.results:
                        self._keep(result_of(case, "error", (Reason("golden", reply.message),), self.request))

        def on_death(task: Task, error: WorkerDied) -> list[Task]:
            assert isinstance(task, (Judge, Fit))
            if isinstance(task, Fit):  # twice: what is known is kept
                self._keep_exhausted(task.case, task.found)
                return []
            left = [case for case in task.cases if case.id not in self.results]
            if not left:  # it died after its last reply: nothing is lost
                return []
            first, *others = left
            tasks: list[Task] = [Judge(tuple(others))] if others else []
            if error.of_memory:
                return [Fit(first, shortage.of_death(str(error), first.memory_limit)), *tasks]
            lost = Reason("worker", str(error), diagnosis=("crash",))
            self._keep(result_of(first, "error", (lost,), self.request))
            return tasks

        self.pool.run(_tasks(self._open_cases()), on_reply, on_death)


class Bench:
    """Judges cases of a suite one by one with one worker, for callers who choose the order: pytest."""

    def __init__(self, suite: Suite, options: Options):
        self.suite, self.options = on(suite, options.device), options
        self._scratch = tempfile.TemporaryDirectory(prefix="fidelity-")
        self._pool = Pool(options.setup(suite), 1, Path(self._scratch.name), threads=1)
        self._references: dict[tuple[str, str], Reference] = {}

    def judge(self, case: Case) -> CaseResult:
        """The result of a case; an `error` if its reference drifted or the worker died. Raises GoldenError."""
        alone = dataclasses.replace(self.suite, cases=(case,))
        run = Run(alone, self._pool, _missing_goldens(alone, self.options), self.options)
        run.references = self._references
        return run.result().cases[0]

    def close(self) -> None:
        """End the worker."""
        self._pool.__exit__()
        self._scratch.cleanup()


def _tasks(cases: list[Case]) -> Iterator[Judge]:
    """Cases that share all but the offload go to one worker together: their pixels are measured once."""
    groups: dict[tuple[str, str, str | None, str], list[Case]] = defaultdict(list)
    for case in cases:
        plan = msgspec.structs.replace(case.plan, offload="none")
        groups[case.model, case.latents, case.check, plan.id].append(case)
    return (Judge(tuple(group)) for group in groups.values())


def _missing_goldens(suite: Suite, options: Options) -> set[tuple[str, str]]:
    """Goldens to record first. Raises GoldenError if there are any and --record-missing was not given."""
    judged = (case for case in suite.cases if not case.not_applicable and case.check is None)
    needed = dict.fromkeys((case.model, case.latents) for case in judged)
    if options.record_missing or options.private_goldens:
        return {key for key in needed if not golden.exists(suite.golden, *key)}
    for key in needed:
        golden.check(suite.golden, *key, suite=str(suite.path))
    return set()


__all__ = ["Bench", "Options", "execute", "silent"]
