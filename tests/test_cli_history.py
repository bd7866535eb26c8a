"""`fidelity history`: what is said where the file is busy or holds nothing of what is asked for."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from fidelity import cli, runs
from fidelity.history import database, schema
from fidelity.records import RunResult
from tests.history.test_database import a_run
from tests.suites import write_suite


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return end.value.code, out, err


@pytest.fixture
def held(tmp_path, monkeypatch) -> Iterator[Path]:
    """A history that another run holds for itself, and nobody who waits for it."""
    path = tmp_path / "h.db"
    database.append(path, a_run(1))
    monkeypatch.setattr(schema, "WAIT_SECONDS", 0.0)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    yield path
    other.close()


def test_a_history_in_use_is_not_called_something_else(capsys, held):
    code, out, err = call(capsys, "history", held)
    assert (code, out) == (2, "")
    assert err == f"fidelity: history {held}: another run is writing to it (database is locked): try again\n"


def test_a_run_decodes_though_its_history_is_in_use(capsys, held, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_suite(tmp_path, 'dtype = ["fp32"]')
    ran: list[int] = []

    def execute(*_: object, **__: object) -> RunResult:
        ran.append(1)
        return a_run(2)

    monkeypatch.setattr(runs, "execute", execute)
    code, _, err = call(capsys, "run", "small.toml", "--history", held, "-q")
    assert (code, ran) == (3, [1]), err
    assert "the run was not added" in err
    assert "--add" in err


def test_a_folder_is_called_a_folder(capsys, tmp_path):
    for options in ([], ["--add", tmp_path]):
        code, out, err = call(capsys, "history", tmp_path, *options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"history {tmp_path} is a folder: name a file" in err


def test_suites_without_a_match_are_not_shown(capsys, tmp_path):
    path = tmp_path / "h.db"
    database.append(path, a_run(1))
    database.append(path, a_run(2, suite={"name": "other"}, cases=()))
    code, out, _ = call(capsys, "history", path, "--measurement", "rmse")
    assert code == 0
    assert "2026-11-01" in out
    assert "other" not in out
    code, out, _ = call(capsys, "history", path, "--json")
    assert list(json.loads(out)) == ["s"]


def test_no_match_names_what_there_is(capsys, tmp_path):
    path = tmp_path / "h.db"
    database.append(path, a_run(1))
    case = "m/l/fp32-upcast0-slice0-t0-none"
    for options, known in ((["--measurement", "rmes"], "rmse"), (["--case", "x*"], f"rmse, ssim of {case}")):
        code, out, err = call(capsys, "history", path, *options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"holds nothing for {' '.join(options)}; it holds " in err
        assert known in err
