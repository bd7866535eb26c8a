"""`fidelity compare` and `fidelity history`: exit statuses, options, and nothing written when the request is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fidelity import cli
from fidelity.cli.compare import rise
from fidelity.comparison import Rise
from fidelity.errors import RequestError
from fidelity.history import database
from fidelity.records import Measurement, MemoryTrace, RunResult
from fidelity.report import json as stored
from tests.history.test_database import a_run
from tests.report import sample


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return end.value.code, out, err


def a_case(rmse: float, peak: int, seconds: float, latents: str):
    return sample.judged(latents=latents, measurements={"rmse": Measurement("rmse", rmse, "grey levels")},
                         memory=MemoryTrace(peak, method="events"), seconds={"decode": seconds})  # fmt: skip


def store(folder: Path, *, rmse: float = 0.5, peak: int = 1000, seconds: float = 1.0, count: int = 6, **about) -> Path:
    folder.mkdir()
    cases = tuple(a_case(rmse, peak, seconds, f"l{place}") for place in range(count))
    stored.write(RunResult(**{"suite": {"name": "s"}, "environment": {"class": "c"}, "cases": cases, **about}), folder)
    return folder


@pytest.fixture
def base(tmp_path) -> Path:
    return store(tmp_path / "base")


@pytest.mark.parametrize(
    ("head", "options", "status"),
    [
        ({}, [], 0),
        ({"rmse": 0.6}, [], 1),
        ({"rmse": 0.6}, ["--max-rmse-rise", "0.2"], 0),
        ({"rmse": 0.6}, ["--max-rmse-rise", "19%"], 1),
        ({"rmse": 0.6}, ["--max-rise", "rmse=21%"], 0),
        ({"rmse": 0.4}, [], 0),
        ({"peak": 1050}, [], 0),
        ({"peak": 1051}, [], 1),
        ({"peak": 1051}, ["--max-memory-rise", "6%"], 0),
        ({"peak": 9999}, ["--max-memory-rise", "off"], 0),
        ({"seconds": 9.0}, [], 0),
        ({"seconds": 1.25}, ["--max-time-rise", "25%"], 0),
        ({"seconds": 1.26}, ["--max-time-rise", "25%"], 1),
        ({"count": 5}, [], 1),
        ({"count": 5}, ["--allow", "vanished"], 0),
        ({"count": 7}, [], 0),
    ],
)
def test_exit_status(capsys, tmp_path, base, head, options, status):
    head = store(tmp_path / "head", **head)
    code, out, err = call(capsys, "compare", base, head, *options)
    assert (code, err) == (status, "")
    assert out.splitlines()[-1].startswith("Nothing got worse" if status == 0 else ("6 cases", "1 case", "decoding"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-rise", "rmes=1"], "did you mean 'rmse'"),
        (["--max-rise", "rmse"], "write NAME=AMOUNT"),
        (["--max-rise", "rmse=x"], "--max-rise rmse 'x'"),
        (["--max-rise", "rmse=-1"], "--max-rise rmse '-1'"),
        (["--max-rise", "rmse=1", "--max-rmse-rise", "2"], "given twice"),
        (["--max-memory-rise", "5"], "a share like 5%"),
        (["--max-time-rise", "nan%"], "--max-time-rise 'nan%'"),
        (["--allow", "anything"], "'anything' is not one of"),
        (["--out", "thesis"], "something other than a comparison"),
    ],
)
def test_wrong_requests(capsys, tmp_path, base, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/a").write_text("")
    code, out, err = call(capsys, "compare", base, base, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "thesis"]


def test_a_folder_without_a_run_is_a_wrong_request(capsys, tmp_path, base):
    code, _, err = call(capsys, "compare", base, tmp_path / "nowhere", "--out", tmp_path / "out")
    assert code == 2
    assert "nowhere" in err
    assert not (tmp_path / "out").exists()
    other = store(tmp_path / "other", environment={"class": "elsewhere"})
    code, _, err = call(capsys, "compare", base, other, "--max-time-rise", "25%")
    assert code == 2
    assert "leave out --max-time-rise" in err


def test_files_and_github(capsys, tmp_path, base, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    head = store(tmp_path / "head", rmse=0.6)
    code, out, _ = call(capsys, "compare", base, head, "--out", tmp_path / "out", "-q")
    assert code == 1
    assert len(out.splitlines()) == 7
    assert out.startswith("::error title=m/l0/")
    assert out.splitlines()[-1].endswith("out/comparison.html")
    assert (tmp_path / "summary").read_text().strip() == (tmp_path / "out/comparison.md").read_text().strip()


def test_rises_are_read_as_people_write_them():
    assert rise("0.1", "o") == Rise(0.1)
    assert rise(" 5 %", "o") == Rise(0.05, True)
    assert rise("0", "o") == Rise(0.0)
    for text in ("", "%", "five", "inf", "nan", "-0.1", "5%%x"):
        with pytest.raises(RequestError):
            rise(text, "o")


# ---------------------------------------------------------------- history


def test_history_prints_the_trend_and_the_drift(capsys, tmp_path):
    path = tmp_path / "h.db"
    for day in (1, 2, 3, 4):
        database.append(path, a_run(day, 0.5 if day < 3 else 0.75))
    code, out, err = call(capsys, "history", path)
    assert (code, err) == (0, "")
    assert "▁▁██" in out
    assert (
        "rmse of m/l/fp32-upcast0-slice0-t0-none stepped from 0.500 to 0.750 grey levels over 4 comparable runs" in out
    )
    assert "(noise floor 0.100, limit 4.00), since 0000000 of 2026-11-03 00:00" in out
    code, out, _ = call(capsys, "history", path, "--measurement", "ssim")
    assert "····" in out
    assert "rmse" not in out
    code, out, _ = call(capsys, "history", path, "--json", "--case", "m/*")
    (drift,) = json.loads(out)["s"]["drifts"]
    assert (drift["name"], drift["kind"], drift["since"]) == ("rmse", "step", 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--case", "x*"], "holds nothing for --case x*"),
        (["--measurement", "rmes"], "holds nothing for --measurement rmes"),
    ],
)
def test_a_history_without_what_is_asked_for(capsys, tmp_path, options, says):
    database.append(tmp_path / "h.db", a_run(1))
    code, out, err = call(capsys, "history", tmp_path / "h.db", *options)
    assert (code, out) == (2, "")
    assert says in err
    code, _, err = call(capsys, "history", tmp_path / "absent.db")
    assert code == 2
    assert "is missing" in err


def test_a_stored_run_can_be_added_later(capsys, tmp_path):
    (tmp_path / "run").mkdir()
    stored.write(a_run(1), tmp_path / "run")
    for _ in range(2):
        code, out, _ = call(capsys, "history", tmp_path / "h.db", "--add", tmp_path / "run")
        assert code == 0
        assert out.count("2026-11-01") == 1
    (tmp_path / "old").mkdir()
    stored.write(a_run(2, recorded=None), tmp_path / "old")
    code, _, err = call(capsys, "history", tmp_path / "h.db", "--add", tmp_path / "old")
    assert code == 2
    assert "does not say when it began" in err


def test_a_run_is_refused_before_anything_is_decoded(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("foreign").write_text("x" * 5000)
    for name, says in (("foreign", "not a database"), ("no/folder/h.db", "not a writable folder")):
        code, out, err = call(capsys, "run", "--plan", "bf16", "--history", name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert says in err
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]
    code, _, err = call(capsys, "run", "--plan", "bf16", "-q", "-v")
    assert code == 2
    assert "opposite" in err
