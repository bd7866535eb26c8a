"""A real run that is kept in a history, told case by case, and interrupted."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from fidelity import runs
from fidelity.history import database, schema
from fidelity.records import RunResult, from_json
from tests.suites import fidelity, write_suite

pytestmark = pytest.mark.slow


def results(folder: Path) -> RunResult:
    return from_json((folder / "results.json").read_bytes(), RunResult)


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """A folder with a small suite, run twice into one history; the second run's output."""
    folder = tmp_path_factory.mktemp("twice")
    write_suite(folder, 'dtype = ["fp32", "bf16"]')
    fidelity("run", "small.toml", "--record-missing", "-q", "--history", "h.db", cwd=folder)
    return folder, fidelity("run", "small.toml", "-v", "--history", "h.db", cwd=folder)


def test_a_run_with_a_history_carries_its_trend(twice):
    folder, done = twice
    assert done.returncode == 0, done.stderr
    run = results(folder / "runs/small")
    assert len(run.trend.runs) == 2
    assert run.trend == database.read(folder / "h.db")["small"]
    rmse = {one.case: one for one in run.trend.series if one.name == "rmse"}
    bf16 = rmse["reference-kl/ramp/bf16-upcast0-slice0-t0-none"]
    assert bf16.values[0] == bf16.values[1] > 0, "the same decode, to the bit"
    assert run.trend.runs[-1].recorded == run.recorded
    assert run.reference[0].digests.keys() == {"weights", "latents", "sample"}
    assert '"trend":{"runs":' in (folder / "runs/small/report.html").read_text()


def test_verbose_tells_each_case_with_its_figures(twice):
    _, done = twice
    lines = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == 2
    pattern = (
        r"\[\d/2\] pass +reference-kl/ramp/\w+-upcast0-slice0-t0-none · rmse \S+ · lpips \S+ · peak \S+ MiB · \S+ s"
    )
    assert all(re.match(pattern, line) for line in lines), lines


def test_a_history_that_cannot_be_written_costs_no_result(twice, monkeypatch, capsys):
    folder, _ = twice
    from fidelity import cli

    def locked(*_):
        raise sqlite3.OperationalError("database is locked")

    measured = results(folder / "runs/small")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(database, "append", locked)
    monkeypatch.setattr(runs, "execute", lambda *_, **__: structs.replace(measured, trend=None))
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "small.toml", "--out", "again", "--history", "h.db", "-q"])
    out, err = capsys.readouterr()
    assert end.value.code == 3
    assert "fidelity history h.db --add again adds it" in err
    assert "2 passed" in out
    assert "database is locked" in results(folder / "again").notes[-1]
    monkeypatch.undo()
    assert len(database.read(folder / "h.db")["small"].runs) == 2
    fidelity("history", "h.db", "--add", "again", cwd=folder)
    with schema.reading(folder / "h.db") as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (3,)


def test_an_interrupted_run_says_the_command_that_goes_on(twice, tmp_path):
    folder, _ = twice
    offloads = '["none", "model", "sequential", "group_block", "group_leaf", "disk"]'
    write_suite(folder, f'dtype = ["fp32", "bf16"]\noffload = {offloads}', name="long")
    command = [sys.executable, "-m", "fidelity.cli", "run", "long.toml", "--out", "my out", "--history", "long.db",
               "--case", "*/ramp/*"]  # fmt: skip
    running = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    running.stderr.readline()  # the first progress line: some case has ended
    os.kill(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert re.search(r"interrupted after \d+ of 12 cases; go on with", said)
    again = next(line.strip() for line in said.splitlines() if line.startswith("  fidelity run"))
    words = shlex.split(again)
    assert words == ["fidelity", "run", "long.toml", "--case", "*/ramp/*", "--history", "long.db", "--out", "my out",
                     "--resume"]  # fmt: skip
    assert not (folder / "long.db").exists(), "a partial run is not added"
    done = fidelity(*words[1:], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert len(results(folder / "my out").trend.runs) == 1
