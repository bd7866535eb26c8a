"""What a signal may cost: nothing that was judged, in this run or in the one that it resumes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fidelity import folders, registry, runs
from fidelity import suite as suite_
from fidelity.records import CaseResult, Reason, Reference, RunResult, from_json, to_json
from fidelity.verdicts import result_of
from tests.suites import write_suite

HERE = {"class": "cpu-a", "versions": {"torch": "2"}}


@pytest.fixture
def suite(tmp_path) -> suite_.Suite:
    registry.load_plugins()
    return suite_.load(write_suite(tmp_path, 'dtype = ["fp32", "bf16", "fp16"]'), registry)


def judged(suite: suite_.Suite, count: int = 2) -> tuple[CaseResult, ...]:
    return tuple(result_of(case, "pass", ()) for case in suite.judged[:count])


def earlier(suite: suite_.Suite, **about: object) -> RunResult:
    held = Reference("reference-kl", "ramp", drift=0.0, limit=0.1, ok=True, same_environment=True)
    return RunResult(suite.about(), {**HERE, **about}, reference=(held,), cases=judged(suite), partial=True)


def interrupted(suite: suite_.Suite, kept: RunResult | None, environment: dict[str, object]) -> RunResult:
    """A run whose workers are interrupted while they do their first task."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    pool = SimpleNamespace(environment=environment, run=stop)
    return runs.Run(suite, pool, set(), runs.Options(), kept).result(probe=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("environment", [{}, HERE], ids=["before a worker is ready", "while references are held"])
def test_an_early_interrupt_hands_on_what_an_earlier_run_judged(suite, environment):
    kept = earlier(suite)
    run = interrupted(suite, kept, environment)
    assert run.partial
    assert run.cases == kept.cases
    assert run.reference == kept.reference
    assert run.environment == kept.environment


def test_a_run_says_what_it_does_before_its_first_case(suite):
    def stop(*_: object) -> None:
        if said:
            raise KeyboardInterrupt

    said: list[str] = []
    pool = SimpleNamespace(environment=HERE, run=stop)
    runs.Run(suite, pool, set(), runs.Options(), phase=said.append).result()  # type: ignore[arg-type]
    assert said == ["holding 1 reference"]


def test_an_interrupt_elsewhere_keeps_nothing_and_replaces_nothing(suite, tmp_path):
    kept = earlier(suite)
    run = interrupted(suite, kept, {**HERE, "class": "cpu-b"})
    assert run.cases == ()
    assert [note for note in run.notes if "kept nothing" in note] == [
        "--resume kept nothing: the earlier run was made with another class"
    ]
    put(kept, tmp_path / "out")
    assert put(run, tmp_path / "out", resumed=True) == tmp_path / "out.partial"
    assert (tmp_path / "out/results.json").read_bytes() == to_json(kept)


def put(run: RunResult, folder: Path, *, resumed: bool = False) -> Path:
    with folders.staged(folder) as stage:
        (stage.path / "results.json").write_bytes(to_json(run))
        return stage.settle(run, resumed=resumed)


@pytest.mark.parametrize(("count", "place"), [(1, "out.partial"), (2, "out"), (3, "out")])
def test_a_resumed_run_replaces_one_of_no_more_judged_cases(suite, tmp_path, count, place):
    put(earlier(suite), tmp_path / "out")
    resumed = RunResult(suite.about(), HERE, cases=judged(suite, count), partial=True)
    assert put(resumed, tmp_path / "out", resumed=True) == tmp_path / place


def test_a_partial_run_replaces_no_partial_run_of_more(suite, tmp_path):
    few, more = (RunResult(suite.about(), HERE, cases=judged(suite, count), partial=True) for count in (1, 2))
    lost = RunResult(suite.about(), HERE, partial=True, cases=tuple(
        result_of(case, "error", (Reason("lost", "lost"),)) for case in suite.judged))  # fmt: skip
    places = [put(run, tmp_path / "out").name for run in (more, more, few, more, lost)]
    assert places == ["out", "out.partial", "out.partial-2", "out.partial", "out.partial-3"]


def test_a_run_that_cannot_be_read_is_not_replaced_by_a_partial_one(suite, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/results.json").write_text('{"schema": "fidelity.results/1", "cases": 7}')
    assert put(earlier(suite), tmp_path / "out", resumed=True) == tmp_path / "out.partial"


SIGNALLED = """
import os, signal, sys, time
from fidelity import cli, report, runs
from fidelity.records import RunResult
from fidelity.verdicts import result_of

def send(*_):
    for _ in range(int(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)

def execute(suite, folder, options, **_):
    partial = sys.argv[2] == "judging"
    try:
        if partial:
            send()
    except KeyboardInterrupt:
        pass
    return RunResult(suite.about(), {}, partial=partial, cases=tuple(result_of(one, "pass", ()) for one in suite.cases))

runs.execute = execute
write_all = report.write_all
report.write_all = lambda *given: (send(), write_all(*given), send())[1]
cli.main(["run", "small.toml", "--out", "out", "-q"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("when", "status"), [("judging", 130), ("writing", 0)])
def test_signals_in_quick_succession_lose_nothing(suite, tmp_path, when, status):
    """`timeout` sends two, an impatient person more; from the first on, and while reports are written, none counts."""
    command = [sys.executable, "-c", SIGNALLED, "3", when]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    assert ("fidelity: stopping, writing what was judged\n" in done.stderr) == (when == "judging")
    assert "Traceback" not in done.stderr
    stored = from_json((tmp_path / "out/results.json").read_bytes(), RunResult)
    assert (len(stored.cases), stored.partial) == (3, when == "judging")
    assert stored.suite.get("resume") == ("fidelity run small.toml --out out --resume" if stored.partial else None)
    assert ('name="run"' in (tmp_path / "out/junit.xml").read_text()) == stored.partial
    assert (tmp_path / "out/report.html").is_file()
    assert [path.name for path in tmp_path.glob(".out*")] == []
