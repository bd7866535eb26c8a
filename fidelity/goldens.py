"""The life of goldens over a whole suite: record what is missing, verify, approve with a reason, prune."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import defaultdict
from pathlib import Path

from fidelity import golden, noise
from fidelity.errors import EvaluationError, GoldenError, WorkerDied
from fidelity.pool import Pool
from fidelity.records import Reference, RunResult
from fidelity.runs import Options, Progress, execute, silent
from fidelity.suite import Suite, load_all
from fidelity.worker import Floored, Floors, Held, Hold, Refused, Reply, Task

Key = tuple[str, str]


def keys(suite: Suite) -> list[Key]:
    """Model and latents of every golden that the judged cases of `suite` need."""
    judged = (case for case in suite.cases if not case.not_applicable and case.check is None)
    return list(dict.fromkeys((case.model, case.latents) for case in judged))


def record(suite: Suite, options: Options) -> list[Key]:
    """Record the goldens that do not exist; returns them. Raises GoldenError if they all do."""
    missing = [key for key in keys(suite) if not golden.exists(suite.golden, *key)]
    if not missing:
        raise GoldenError(
            f"nothing to record: all {len(keys(suite))} goldens of {suite.name} exist; "
            f"fidelity golden approve {suite.path} --reason … replaces those that moved"
        )
    ask(suite, options, [Hold(*key, record=True) for key in missing])
    return missing


def verify(suite: Suite, options: Options, *, filtered: bool = False) -> tuple[list[Reference], list[Key]]:
    """Decode every reference again; returns them, and the goldens that nobody uses (unless `filtered`)."""
    for key in keys(suite):
        golden.check(suite.golden, *key, suite=str(suite.path))
    replies = ask(suite, options, [Hold(*key) for key in keys(suite)])
    return [reply.reference for reply in replies if isinstance(reply, Held)], [] if filtered else unused(suite)


def unused(suite: Suite) -> list[Key]:
    """Goldens that neither the suite nor any suite beside it uses; those of a model that none names (--model) are
    somebody's own."""
    neighbours = [other for other in load_all(suite.path.parent, suite) if other.golden == suite.golden]
    suites = [suite, *neighbours]
    models = {model for other in suites for model in other.models}
    wanted = {key for other in suites for key in keys(other)}
    return [key for key in golden.unused(suite.golden, wanted) if key[0] in models]


def prune(suite: Suite) -> list[Key]:
    """Remove the unused goldens; returns them."""
    doomed = unused(suite)
    for key in doomed:
        golden.remove(suite.golden, *key)
    return doomed


def approve(suite: Suite, options: Options, *, reason: str, progress: Progress = silent) -> tuple[RunResult, list[Key]]:
    """Record anew the goldens whose reference moved, run the suite, and store what it measured as approved.

    Returns the run and the goldens that were recorded anew.
    """
    if not reason.strip():
        raise GoldenError("--reason is empty: say why these measurements are right; nothing was changed")
    needed = keys(suite)
    held = ask(suite, options, [Hold(*key, renew=True) for key in needed])
    renewed = [key for key, reply in zip(needed, held) if isinstance(reply, Held) and reply.reference.recorded]
    floors = _floors(suite, options, needed)
    with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
        result = execute(suite, Path(folder), dataclasses.replace(options, gate_regressions=False), progress=progress)
    _store(suite, result, floors, reason)
    return result, renewed


def _floors(suite: Suite, options: Options, needed: list[Key]) -> dict[Key, dict[str, dict[str, float]]]:
    tasks = [Floors(*key) for key in needed]
    replies = [reply for reply in ask(suite, options, tasks) if isinstance(reply, Floored)]
    return {(task.model, task.latents): noise.floors(reply.noise) for task, reply in zip(tasks, replies, strict=True)}


def _store(suite: Suite, result: RunResult, floors: dict[Key, dict[str, dict[str, float]]], reason: str) -> None:
    measured: dict[Key, dict[str, dict[str, float]]] = defaultdict(dict)
    for case in result.cases:
        if case.verdict in ("pass", "fail") and case.check is None:
            values = {name: one.value for name, one in case.measurements.items() if one.value is not None}
            measured[case.model, case.latents][case.plan.id] = values
    for key, cases in measured.items():
        golden.approve(suite.golden, *key, cases=cases, floors=floors[key],
                       environment_class=result.environment["class"], reason=reason)  # fmt: skip


def ask(suite: Suite, options: Options, tasks: list[Hold] | list[Floors]) -> list[Reply]:
    """All replies, in the order of the tasks. Raises what a worker refuses, and WorkerDied."""
    answers: dict[int, Reply] = {}

    def on_reply(task: Task, reply: Reply) -> None:
        if isinstance(reply, Refused):
            raise (GoldenError if reply.wrong_request else EvaluationError)(reply.message)
        answers[id(task)] = reply

    def on_death(task: Task, error: WorkerDied) -> list[Task]:
        raise error

    if tasks:
        with (
            tempfile.TemporaryDirectory(prefix="fidelity-") as logs,
            Pool(options.setup(suite), 1, Path(logs), threads=1) as pool,
        ):
            pool.run(tasks, on_reply, on_death)
    return [answers[id(task)] for task in tasks]
