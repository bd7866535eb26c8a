"""Where a run goes: a selection takes the place of no larger run."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from fidelity import cli, folders, registry, runs
from fidelity.records import RunResult, to_json
from fidelity.suite import Suite
from fidelity.verdicts import result_of
from tests.suites import write_suite

ONE = "*/fp32-*"


def at_once(suite: Suite, folder: Path, options: runs.Options, **_: object) -> RunResult:
    about = {**suite.about(), "request": options.about()}
    return RunResult(about, {}, cases=tuple(result_of(case, "pass", ()) for case in suite.cases))


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with a suite of two cases, where a run judges at once what it is asked for."""
    registry.load_plugins()
    write_suite(tmp_path, 'dtype = ["fp32", "bf16"]')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "execute", at_once)
    return tmp_path


def run(capsys, *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "small.toml", "-q", *map(str, arguments)])
    return end.value.code, capsys.readouterr().err


def count(folder: Path) -> int:
    return folders._holds(folder)


def test_the_reproduce_command_leaves_the_run_alone(place, capsys):
    assert run(capsys) == (0, "")
    assert run(capsys, "--case", ONE) == (0, "")
    assert run(capsys, "--case", ONE) == (0, "")
    assert {path.name: count(path) for path in (place / "runs").iterdir()} == {"small": 2, "small.case": 1}
    assert run(capsys) == (0, "")
    assert count(place / "runs/small") == 2


def test_a_selection_goes_where_no_run_is_or_one_of_as_many(place, capsys):
    for glob in (ONE, "*/bf16-*", "*"):
        assert run(capsys, "--case", glob) == (0, "")
    assert {path.name: count(path) for path in (place / "runs").iterdir()} == {"small": 2}


def test_a_named_folder_of_a_larger_run_is_refused(place, capsys):
    run(capsys, "--out", "out")
    before = (place / "out/results.json").read_bytes()
    code, err = run(capsys, "--out", "out", "--case", ONE)
    assert code == 2
    assert err == "fidelity: out holds a run that judged 2 cases, --case selects 1: name another --out for them\n"
    assert (place / "out/results.json").read_bytes() == before
    assert run(capsys, "--out", "out", "--case", "*") == (0, "")


def test_resume_drops_no_case_that_it_was_not_asked_for(place, capsys):
    run(capsys, "--out", "out")
    code, err = run(capsys, "--out", "out", "--case", ONE, "--resume")
    assert code == 2
    assert "holds judged cases (1) beyond those asked for: leave out --case" in err
    assert count(place / "out") == 2
    run(capsys, "--out", "few", "--case", ONE)
    assert run(capsys, "--out", "few", "--resume") == (0, "")
    assert count(place / "few") == 2, "the other way round it grows"


def test_a_damaged_run_is_not_taken_for_a_small_one(place, capsys):
    run(capsys, "--out", "out")
    stored = place / "out/results.json"
    stored.write_bytes(to_json(structs.replace(RunResult({}, {}), notes=("x",))).replace(b'"cases": []', b'"cases": 1'))
    code, err = run(capsys, "--out", "out", "--case", ONE)
    assert (code, "that this version cannot read" in err) == (2, True)
