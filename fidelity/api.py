"""fidelity in a notebook or a test: `evaluate` a suite, `check` a decode of your own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelity import registry, runs
from fidelity import suite as suite_
from fidelity.errors import RequestError
from fidelity.records import Case, CaseResult, DecodePlan, Limit, RunResult

if TYPE_CHECKING:
    from fidelity.evaluator import Evaluator
    from fidelity.runner import Decode


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
    loaded = suite_.select(loaded, case) if case else loaded
    options = runs.Options(device=device, jobs=jobs, plugins=plugins, record_missing=record_missing)
    if out is None:
        return runs.execute(loaded, None, options)
    from fidelity import report

    with runs.staged(Path(out)) as staging:
        result = runs.execute(loaded, staging, options)
        report.write_all(result, staging)
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
    (the most, or the least where higher is better) or {"max": …} / {"min": …}. `plan` tells what the decode claims to
    do, as in `--plan`, so that seams are looked for where they must be. `golden` is a folder of stored goldens; without
    it the reference is decoded here, once a process.

    Raises AssertionError with the reasons if it does not pass, RequestError if the request is wrong.
    """
    registry.load_plugins()
    claimed = suite_.parse_plan(plan, registry) if isinstance(plan, str) else plan or DecodePlan()
    bench = _bench(model, latents, device, None if golden is None else str(golden))
    case = Case(model=model, latents=latents, plan=claimed, limits=_limits(limits))
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
        if name not in known and name != "tile_seam":
            raise RequestError(registry.unknown("measurement", name, [*known, "tile_seam"]))
        if isinstance(bound, Mapping):
            found[name] = Limit(**{"origin": "check()", **bound})
        else:
            side = "min" if name in known and known[name].better == "higher" else "max"
            found[name] = Limit(origin="check()", **{side: float(bound)})
    return found


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
