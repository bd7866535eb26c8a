"""The history file: what is appended is all there or not at all, and what is not a history is left alone."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec import structs

from fidelity.errors import OutputError, RequestError
from fidelity.history import commit as commit_
from fidelity.history import database, schema
from fidelity.records import ApprovedValues, CaseResult, Limit, Measurement, MemoryTrace, Reference, RunResult
from tests.report import sample

GOLDEN = {"weights": "w", "latents": "l", "sample": "s"}


def a_run(day: int, rmse: float = 0.5, **about: object) -> RunResult:
    case = sample.judged(
        measurements={"rmse": Measurement("rmse", rmse, "grey levels"),
                      "ssim": Measurement("ssim", None, better="higher", reason="x")},
        limits={"rmse": Limit("test", max=4.0)},
        approved=ApprovedValues("cpu", True, {}, {"rmse": 0.1}),
    )  # fmt: skip
    return RunResult(**{
        "suite": {"name": "s", "digest": "d"}, "environment": {"class": "cpu", "versions": {"torch": "2.14.1"}},
        "reference": (Reference("m", "l", 0.0, 1e-3, True, True, digests=GOLDEN),), "cases": (case,),
        "recorded": f"2026-11-{day:02d}T00:00:00.000+00:00", "commit": f"{day:040x}", **about,
    })  # type: ignore[arg-type]  # fmt: skip


def values(trend, name="rmse"):
    return next(one.values for one in trend.series if one.name == name)


# ---------------------------------------------------------------- append and read


def test_a_run_is_kept_whole_and_found_in_its_trend(tmp_path):
    path = tmp_path / "h.db"
    database.append(path, a_run(1, 0.5))
    trend = database.append(path, a_run(2, 0.25))
    assert [run.commit for run in trend.runs] == [f"{1:040x}", f"{2:040x}"]
    assert trend.runs[1].versions == {"torch": "2.14.1"}
    assert values(trend) == (0.5, 0.25)
    assert values(trend, "ssim") == (None, None)
    assert values(trend, "allocated_peak_bytes") == (100 * sample.MIB,) * 2
    assert values(trend, "decode_seconds") == (1.0, 1.0)
    rmse = trend.series[0]
    assert (rmse.name, rmse.unit, rmse.better, rmse.floor, rmse.limit) == ("rmse", "grey levels", "lower", 0.1, 4.0)
    assert database.read(path) == {"s": trend}
    assert [file.name for file in tmp_path.iterdir()] == ["h.db"], "one file, nothing beside it"


def test_a_run_is_never_added_twice(tmp_path):
    first = database.append(tmp_path / "h.db", a_run(1))
    again = structs.replace(a_run(1), trend=first, notes=("said elsewhere",))
    assert len(database.append(tmp_path / "h.db", again).runs) == 1
    assert len(database.append(tmp_path / "h.db", a_run(1, 0.51)).runs) == 2


def test_runs_stand_in_the_order_in_which_they_began(tmp_path):
    path = tmp_path / "h.db"
    for day in (3, 1, 2):
        trend = database.append(path, a_run(day, float(day)))
    assert values(trend) == (1.0, 2.0), "the trend of a run ends with it"
    assert values(database.read(path)["s"]) == (1.0, 2.0, 3.0)


def test_suites_have_trends_of_their_own(tmp_path):
    path = tmp_path / "h.db"
    database.append(path, a_run(1))
    database.append(path, a_run(2, suite={"name": "other"}))
    assert {name: len(trend.runs) for name, trend in database.read(path).items()} == {"other": 1, "s": 1}


def test_only_runs_of_one_class_and_golden_are_held_against_each_other(tmp_path):
    elsewhere = {"environment": {"class": "other"}}
    regolded = {"reference": (Reference("m", "l", 0.0, 1e-3, True, True, digests={**GOLDEN, "sample": "t"}),)}
    nameless = {"reference": (Reference("m", "l", 0.0, 1e-3, True, True),)}
    for number, (about, drifts) in enumerate([({}, 1), (elsewhere, 0), (regolded, 0), (nameless, 0)]):
        path = tmp_path / f"{number}.db"
        for day in (1, 2, 3):
            database.append(path, a_run(day, 0.5, **about))
        trend = database.append(path, a_run(4, 0.75))
        assert len(trend.drifts) == drifts
        assert values(trend) == (0.5, 0.5, 0.5, 0.75), "all of them are shown"
    own = tmp_path / "own.db"
    for day in (1, 2, 3, 4):
        trend = database.append(own, a_run(day, 0.5 if day < 4 else 0.75, **nameless))
    assert trend.drifts == (), "two goldens that nobody named are not the same"


def test_an_interlude_elsewhere_hides_no_drift(tmp_path):
    for day, level in enumerate((0.5, 0.56, 0.62, 0.68, 0.74), 1):
        database.append(tmp_path / "h.db", a_run(2 * day, level))
        trend = database.append(tmp_path / "h.db", a_run(2 * day + 1, level, environment={"class": "other"}))
    assert [one.kind for one in trend.drifts] == ["creep"]
    assert trend.drifts[0].runs == 5


@pytest.mark.parametrize("about", [{"partial": True}, {"recorded": None}])
def test_what_has_no_place_is_refused(tmp_path, about):
    with pytest.raises(RequestError):
        database.append(tmp_path / "h.db", a_run(1, **about))
    assert not (tmp_path / "h.db").exists()


def test_a_trend_is_bounded(tmp_path, monkeypatch):
    names = [f"m{place:03}" for place in range(230)]

    def wide(day):
        found = {"tile_seam": 1.0, **dict.fromkeys(names, 1.0 if day < 4 else 1.5), "rmse": 1.0}
        case = sample.judged(measurements={name: Measurement(name, value) for name, value in found.items()})
        return a_run(day, cases=(case,))

    monkeypatch.setattr(database, "MOST_POINTS", 1000)
    for day in range(1, 24):
        trend = database.append(tmp_path / "h.db", wide(day))
        if day == 5:
            drifting = trend
    assert len(drifting.drifts) == 200
    assert drifting.drifting == 230
    assert len(trend.runs) == database.MOST_RUNS
    assert sum(len(one.values) for one in trend.series) <= 1000
    assert trend.left_out == 234 - len(trend.series)
    assert [one.name for one in trend.series[:4]] == ["rmse", "tile_seam", "allocated_peak_bytes", "decode_seconds"]


# ---------------------------------------------------------------- what is refused


def test_foreign_newer_and_damaged_files_are_refused_and_left_alone(tmp_path):
    newer, foreign, text, torn = (tmp_path / name for name in ("newer", "foreign", "text", "torn"))
    database.append(newer, a_run(1))
    torn.write_bytes(newer.read_bytes()[:5000])
    with sqlite3.connect(newer) as connection:
        connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE holidays (day)")
    text.write_text("not a database, but long enough to have a header of some sort" * 9)
    for path, says in ((newer, "upgrade fidelity"), (foreign, "something else"), (text, "not a database"), (torn, "")):
        before = path.read_bytes()
        for act in (schema.refuse, database.read, lambda each: database.append(each, a_run(2))):
            with pytest.raises((RequestError, sqlite3.DatabaseError)) as caught:
                act(path)
            assert says in str(caught.value)
            assert "\n" not in str(caught.value)
        with pytest.raises(RequestError):
            schema.refuse(path)
        assert path.read_bytes() == before
    with pytest.raises(RequestError, match="is missing"):
        database.read(tmp_path / "absent")
    with pytest.raises(OutputError, match="not a writable folder"):
        schema.refuse(tmp_path / "no" / "folder" / "h.db")
    with pytest.raises(RequestError):
        schema.refuse(tmp_path)


def test_an_empty_or_absent_file_may_become_a_history(tmp_path):
    (tmp_path / "empty.db").touch()
    schema.refuse(tmp_path / "empty.db")
    schema.refuse(tmp_path / "absent.db")
    assert not (tmp_path / "absent.db").exists()
    assert len(database.append(tmp_path / "empty.db", a_run(1)).runs) == 1


# ---------------------------------------------------------------- versions of the schema

VERSION_1 = """
CREATE TABLE runs (id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, recorded TEXT NOT NULL, suite TEXT NOT NULL, suite_digest TEXT, commit_id TEXT, environment TEXT NOT NULL, versions TEXT NOT NULL, exit_status INTEGER NOT NULL);
CREATE TABLE cases (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE series (id INTEGER PRIMARY KEY, case_id INTEGER NOT NULL REFERENCES cases, name TEXT NOT NULL, unit TEXT NOT NULL, better TEXT NOT NULL, UNIQUE (case_id, name));
CREATE TABLE outcomes (run INTEGER NOT NULL REFERENCES runs, case_id INTEGER NOT NULL REFERENCES cases, verdict TEXT NOT NULL, surprise INTEGER NOT NULL, PRIMARY KEY (run, case_id)) WITHOUT ROWID;
CREATE TABLE points (run INTEGER NOT NULL REFERENCES runs, series INTEGER NOT NULL REFERENCES series, value REAL, PRIMARY KEY (run, series)) WITHOUT ROWID;
CREATE INDEX runs_in_order ON runs (suite, recorded, id);
INSERT INTO runs VALUES (1, 'u', '2026-11-01T00:00:00.000+00:00', 's', 'd', 'abc', 'cpu', '{"torch": "2.13.0"}', 0);
INSERT INTO cases VALUES (7, 'm/l/fp32-upcast0-slice0-t0-none');
INSERT INTO series VALUES (9, 7, 'rmse', 'grey levels', 'lower');
INSERT INTO outcomes VALUES (1, 7, 'pass', 0);
INSERT INTO points VALUES (1, 9, 0.4);
PRAGMA application_id = 1178881108;
PRAGMA user_version = 1;
"""  # noqa: E501 - as version 1 wrote it, to the letter


@pytest.fixture
def old(tmp_path) -> Path:
    with sqlite3.connect(tmp_path / "old.db") as connection:
        connection.executescript(VERSION_1)
    connection.close()
    return tmp_path / "old.db"


def columns(connection: sqlite3.Connection) -> dict[str, list[tuple]]:
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: connection.execute(f"PRAGMA table_info({name})").fetchall() for name in sorted(tables)}


def test_a_file_of_version_1_is_read_without_being_touched(old):
    before = old.read_bytes()
    schema.refuse(old)
    trend = database.read(old)["s"]
    assert values(trend) == (0.4,)
    assert trend.runs[0].versions == {"torch": "2.13.0"}
    assert old.read_bytes() == before


def test_a_file_of_version_1_is_migrated_when_it_is_appended_to(old, tmp_path):
    trend = database.append(old, a_run(2))
    assert values(trend) == (0.4, 0.5)
    assert trend.runs[0].commit == "abc"
    database.append(tmp_path / "new.db", a_run(2))
    with sqlite3.connect(old) as migrated, sqlite3.connect(tmp_path / "new.db") as made:
        assert columns(migrated) == columns(made), "migrated and made anew are the same"
        assert migrated.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
        assert migrated.execute("PRAGMA foreign_key_check").fetchall() == []
        assert migrated.execute("SELECT value, floor, bound FROM points ORDER BY run").fetchone() == (0.4, None, None)
    for day in (3, 4):
        trend = database.append(old, a_run(day))
    assert trend.drifts == (), "0.4 was measured against a golden that version 1 did not name"


def test_a_migration_that_fails_leaves_the_file_as_it_was(old, monkeypatch):
    before = old.read_bytes()
    monkeypatch.setattr(schema, "MIGRATIONS", (schema.MIGRATIONS[0], (*schema.MIGRATIONS[1], "CREATE NONSENSE")))
    with pytest.raises(sqlite3.OperationalError):
        database.append(old, a_run(2))
    assert old.read_bytes() == before


# ---------------------------------------------------------------- several writers, and a sudden end

WRITER = """
import sys
from pathlib import Path
from fidelity.history import database
from tests.history.test_database import many
print("ready", flush=True)
sys.stdin.readline()
for turn in range(int(sys.argv[3])):
    database.append(Path(sys.argv[1]), many(int(sys.argv[2]), turn))
    print("done", turn, flush=True)
"""
SERIES = 40 * 5 + 40 * 2


def many(writer: int, turn: int) -> RunResult:
    """A run of forty cases."""
    cases = tuple(
        sample.judged(latents=f"l{place}", memory=MemoryTrace(2**20, method="events"),
                      measurements={name: Measurement(name, float(turn)) for name in "abcde"})
        for place in range(40)
    )  # fmt: skip
    return a_run(1 + writer % 28, float(turn), cases=cases, commit=f"{writer:020x}{turn:020x}")


def writers(path: Path, count: int, turns: int) -> list[subprocess.Popen[str]]:
    started = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number), str(turns)], text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        for number in range(count)
    ]  # fmt: skip
    for one in started:
        assert one.stdout.readline() == "ready\n"
    for one in started:
        one.stdin.write("go\n")
        one.stdin.flush()
    return started


def kept(path: Path) -> dict[str, int]:
    """Points of each run in the file, by commit; the file must be sound."""
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        query = "SELECT r.commit_id, count(p.series) FROM runs AS r LEFT JOIN points AS p ON p.run = r.id GROUP BY r.id"
        return dict(connection.execute(query).fetchall())


@pytest.mark.slow
def test_runs_that_end_at_once_are_all_kept(tmp_path):
    path = tmp_path / "h.db"
    for one in writers(path, 3, 8):
        _, _ = one.communicate(timeout=60)
        assert one.returncode == 0
    assert kept(path) == {f"{writer:020x}{turn:020x}": SERIES for writer in range(3) for turn in range(8)}


@pytest.mark.slow
def test_a_writer_that_is_killed_costs_nothing_that_was_kept(tmp_path):
    path = tmp_path / "h.db"
    confirmed = set()
    for round_ in range(3):
        one, other = writers(path, 2, 50)
        for _ in range(3):
            other.stdout.readline()
        time.sleep(0.004 * round_)
        os.kill(one.pid, signal.SIGKILL)
        os.kill(other.pid, signal.SIGKILL)
        for number, each in enumerate((one, other)):
            said = each.communicate(timeout=60)[0].splitlines()
            confirmed |= {f"{number:020x}{int(line.split()[1]):020x}" for line in said if line.startswith("done ")}
        found = kept(path)
        assert confirmed <= set(found)
        assert set(found.values()) == {SERIES}, "a run is there whole or not at all"
    assert confirmed


# ---------------------------------------------------------------- which commit


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_gits_own_and_says_when_files_were_edited(tmp_path, monkeypatch):
    monkeypatch.delenv("GITHUB_SHA", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_.commit(tmp_path) is None
    git(tmp_path, "init")
    assert commit_.commit(tmp_path) is None, "nothing was committed"
    (tmp_path / "a").write_text("a")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "a")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit_.commit(tmp_path) == head
    (tmp_path / "a").write_text("b")
    assert commit_.commit(tmp_path) == f"{head}-dirty"
    monkeypatch.setenv("GITHUB_SHA", "0" * 40)
    assert commit_.commit(tmp_path) == "0" * 40
    monkeypatch.setenv("GITHUB_SHA", "main; rm -rf")
    assert commit_.commit(tmp_path) == f"{head}-dirty"
    monkeypatch.delenv("GITHUB_SHA")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_.commit(tmp_path) is None


def test_identity_is_of_what_was_measured():
    case: CaseResult = a_run(1).cases[0]
    assert database.identity(a_run(1)) == database.identity(structs.replace(a_run(1), notes=("n",)))
    slower = structs.replace(case, seconds={"decode": 1.0000001})
    assert database.identity(a_run(1)) != database.identity(a_run(1, cases=(slower,)))
