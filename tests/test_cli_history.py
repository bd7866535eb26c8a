"""`fidelity history`: what is said where the file is busy or holds nothing of what is asked for."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from fidelity import cli, runs
from fidelity.history import database, schema
from fidelity.records import RunResult
from tests.suites import write_suite
from tests.test_cli_compare import a_run


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
