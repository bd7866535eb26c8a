"""fidelity in a notebook or a test: `evaluate` a suite, `check` a decode of your own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelity import registry, runs
from fidelity import suite as suite_
from fidelity.environment import check_device
from fidelity.errors import EvaluationError, RequestError
from fidelity.records import Case, CaseResult, DecodePlan, Limit, RunResult

if TYPE_CHECKING:
    from fidelity.evaluator import Evaluator
    from fidelity.runner import Decode


VISIBLE_LINE = Limit(max=2.0, origin="visible: a line of two grey levels on a plain")
"""What `check` holds a decode to that says that it tiles, unless it is given another limit on `tile_step` (of a model
that does not declare where its tiles lie, on `periodic`)."""


def evaluate(
    path: str | Path,
    *,
    case: str | None = None,
    out: str | Path | None = None,
    device: str = "cpu",
    jobs: int | None = None,
    plugins: tuple[str, ...] = (),
    record_missing: bool = False,
) -> RunResult:
    """Judge the cases of a suite whose id matches the glob `case`; with `out`, write the reports there too.

    Raises RequestError if the request is wrong: a bad suite, no such case, a missing golden.
    """
    registry.load_plugins(plugins)
    loaded = suite_.load(Path(path), registry)
    loaded = suite_.on(suite_.select(loaded, case) if case else loaded, device)
    options = runs.Options(device=device, jobs=jobs, plugins=plugins, record_missing=record_missing)
    if out is None:
        return runs.execute(loaded, None, options)
    from fidelity import folders, report

    with folders.staged(Path(out)) as stage:
        result = runs.execute(loaded, stage.path, options)
        failed = report.write_all(result, stage.path)
        stage.settle(result)
    if failed:
        raise EvaluationError("; ".join(failed))
    return result


def check(
    decode: Decode,
    *,
    model: str = "reference-kl",
    latents: str = "photo-pair",
    limits: Mapping[str, float | Mapping[str, Any]],
    plan: str | DecodePlan | None = None,
    golden: str | Path | None = None,
    device: str = "cpu",
) -> CaseResult:
    """Judge a decode of your own against the golden full decode of the same latents.

    `decode(module, latents)` gets latents (B, C, [T,] H, W) fp32 as the decoder takes them, and returns the sample in
    the model's declared range: a tensor or an output with `.sample`. `limits` bounds measurements by name: a number
    (the most, or the least where higher is better) or {"max": …} / {"min": …}. `plan` tells what the
    decode claims to do, as in `--plan`: what the decoder's calls say against it fails, and where it tiles a visible
    line fails too. `golden` is a folder of stored goldens; without it the reference is decoded here, once a process.

    Raises AssertionError with the reasons if it does not pass, RequestError if the request is wrong.
    """
    registry.load_plugins()
    __tracebackhide__ = True  # pytest shows the caller's line and the reasons, not ours
    claimed = suite_.parse_plan(plan, registry) if isinstance(plan, str) else plan or DecodePlan()
    check_device(device)
    if not isinstance(claimed, DecodePlan):
        raise RequestError(f"plan is {plan!r}: write it as in --plan, 'bf16,tile=16,overlap=0.25'")
    bench = _bench(model, latents, device, None if golden is None else str(golden))
    held = _limits(limits)
    if claimed.tiling is not None:
        hidden = registry.MODELS.get(model).family.hides_tiles
        held.setdefault("periodic" if hidden else "tile_step", VISIBLE_LINE)
    case = Case(model=model, latents=latents, plan=claimed, limits=held)
    result = bench.case(case, decode=decode)
    if result.verdict != "pass":
        raise AssertionError(explain(result))
    return result


def explain(result: CaseResult) -> str:
    """A result that is not green, in a few lines: the verdict, what it is blamed on, each reason, how to reproduce."""
    blamed = f" [{', '.join(result.diagnosis)}]" if result.diagnosis else ""
    lines = [f"{result.id}: {result.verdict}{blamed}"]
    if result.expected != "pass":
        named = f" [{', '.join(result.expected_diagnosis)}]" if result.expected_diagnosis else ""
        lines.append(f"  the suite expects: {result.expected}{named} ({result.expected_reason})")
    lines += [f"  {reason.name}: {reason.message}" for reason in result.reasons]
    return "\n".join(lines)


def _limits(limits: Mapping[str, float | Mapping[str, Any]]) -> dict[str, Limit]:
    if not limits:
        raise RequestError("no limits: nothing can pass that is held to nothing; give limits={'rmse': 1.0}")
    known = {**dict(registry.METRICS.items()), **dict(registry.DETECTORS.items())}
    found = {}
    for name, bound in limits.items():
        if not isinstance(bound, (int, float, Mapping)):
            raise RequestError(f"limits[{name!r}] is {bound!r}: give a number, or {{'max': …}} or {{'min': …}}")
        if name not in known and name != "tile_seam":
            raise RequestError(registry.unknown("measurement", name, [*known, "tile_seam"]))
        if isinstance(bound, Mapping):
            found[name] = _table(name, bound, known)
        else:
            side = "min" if name in known and known[name].better == "higher" else "max"
            found[name] = Limit(origin="check()", **{side: float(bound)})
    return found


def _table(name: str, bound: Mapping[str, Any], known: Mapping[str, registry.Instrument]) -> Limit:
    strange = [key for key in bound if key not in ("max", "min", "origin")]
    if strange or not {"max", "min"} & set(bound):
        raise RequestError(f"limits[{name!r}] is {dict(bound)!r}: give a number, or {{'max': …}} or {{'min': …}}")
    useless = "max" if name in known and known[name].better == "higher" else "min"
    if useless in bound:
        raise RequestError(f"limits[{name!r}]: a {useless} holds nothing, since the other way is worse")
    return Limit(**{"origin": "check()", **bound})


@lru_cache(maxsize=4)
def _bench(model: str, latents: str, device: str, root: str | None) -> Evaluator:
    """An evaluator with the golden of these latents, stored or decoded here; one a process for each."""
    import tempfile

    from fidelity.evaluator import Evaluator

    models, sources = {model: registry.MODELS.get(model)}, {latents: registry.LATENTS.get(latents)}
    bench = Evaluator(models, sources, Path(root or "."), device=device, suite_path="(fidelity.check)")
    if root is not None:
        bench.golden(model, latents)
        return bench
    with tempfile.TemporaryDirectory(prefix="fidelity-golden-") as folder:
        bench.root = Path(folder)
        bench.record(model, latents)
        bench.golden(model, latents)  # stays in memory
    return bench


__all__ = ["check", "evaluate", "explain"]
