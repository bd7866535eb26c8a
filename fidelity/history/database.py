"""Append a run to a history, and read the trend in which it stands."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import structs

from fidelity.attribution import BYTES
from fidelity.errors import RequestError
from fidelity.history.schema import reading, writing
from fidelity.records import CaseResult, Limit, RunResult, to_json
from fidelity.trend import Drift, Series, Trend, TrendRun, drift

SECONDS = "decode_seconds"
FIRST = ("rmse", "lpips_alex", "tile_seam", BYTES, SECONDS)
"""What a trend keeps first where not all of it fits."""
MOST_RUNS = 20
MOST_POINTS = 40_000
"""Values that one trend may hold; a results.json stays readable."""
MOST_DRIFTS = 200
PEAK_FLOOR = 0.01
"""Share by which an allocated peak may differ before it counts as another one."""

Wanted = Callable[[str, str], bool]
"""Whether a series, by case and measurement, is to be read."""


def append(path: Path, run: RunResult) -> Trend:
    """Add `run` to the history at `path`, all of it or nothing, and return its trend. A run is never added twice.

    Raises RequestError if the file is no history, if `run` is partial or does not say when it began, and sqlite3.Error
    if it cannot be written.
    """
    if run.partial:
        raise RequestError(f"history {path}: a partial run is not added; complete it with --resume")
    if run.recorded is None:
        raise RequestError(f"history {path}: the run does not say when it began, so it has no place in the order")
    uid = identity(run)
    with writing(path) as connection:
        known = connection.execute("SELECT id FROM runs WHERE uid = ?", (uid,)).fetchone()
        number = known[0] if known else _insert(connection, run, uid)
    with reading(path) as connection:  # other writers need not wait for this
        return trend_of(connection, number)


def read(path: Path, wanted: Wanted = lambda case, name: True) -> dict[str, Trend]:
    """The trend of the newest run of each suite, by suite. Raises RequestError if there is no such history."""
    newest = "SELECT suite, id FROM runs AS r WHERE id = (SELECT id FROM runs WHERE suite = r.suite " \
             "ORDER BY recorded DESC, id DESC LIMIT 1) ORDER BY suite"  # fmt: skip
    with reading(path) as connection:
        found = connection.execute(newest).fetchall()
        return {suite: trend_of(connection, number, wanted) for suite, number in found}


def identity(run: RunResult) -> str:
    """What tells this run from every other: a digest of all that it measured, and when."""
    bare = structs.replace(run, trend=None, notes=())
    return hashlib.blake2b(to_json(bare), digest_size=16).hexdigest()


# ---------------------------------------------------------------- writing


def _insert(connection: sqlite3.Connection, run: RunResult, uid: str) -> int:
    about = (
        uid,
        run.recorded,
        str(run.suite.get("name") or "fidelity"),
        run.suite.get("digest"),
        run.commit,
        str(run.environment.get("class") or "unknown"),
        json.dumps(run.environment.get("versions") or {}, sort_keys=True),
        run.exit_status,
    )
    columns = "uid, recorded, suite, suite_digest, commit_id, environment, versions, exit_status"
    number = connection.execute(f"INSERT INTO runs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", about).lastrowid
    assert number is not None
    goldens = {(one.model, one.latents): _golden(one.digests) for one in run.reference}
    judged = [case for case in run.cases if case.verdict != "not_applicable"]
    connection.executemany("INSERT OR IGNORE INTO cases (name) VALUES (?)", [(case.id,) for case in judged])
    cases = dict(connection.execute("SELECT name, id FROM cases").fetchall())
    connection.executemany(
        "INSERT INTO outcomes (run, case_id, verdict, surprise, golden) VALUES (?, ?, ?, ?, ?)",
        [(number, cases[case.id], case.verdict, case.surprise,
          "none" if case.check else goldens.get((case.model, case.latents))) for case in judged],
    )  # fmt: skip
    rows = [(cases[case.id], *row) for case in judged for row in _figures(case)]
    connection.executemany(
        "INSERT OR IGNORE INTO series (case_id, name, unit, better) VALUES (?, ?, ?, ?)", [row[:4] for row in rows]
    )
    series = {(case, name): one for one, case, name in connection.execute("SELECT id, case_id, name FROM series")}
    connection.executemany(
        "INSERT INTO points (run, series, value, floor, bound) VALUES (?, ?, ?, ?, ?)",
        [(number, series[case, name], *rest) for case, name, _, _, *rest in rows],
    )
    return number


def _golden(digests: dict[str, str]) -> str | None:
    return ":".join(digests[name] for name in sorted(digests)) or None


def _figures(case: CaseResult) -> Iterator[tuple[str, str, str, float | None, float | None, float | None]]:
    """Name, unit, direction, value, noise floor and limit of everything that was measured of a case."""
    floors = case.approved.floors if case.approved else {}
    for name, found in case.measurements.items():
        bound = _bound(case.limits.get(name), found.better)
        yield name, found.unit, found.better, found.value, floors.get(name), bound
    peak = case.memory.allocated_peak_bytes if case.memory else None
    if peak is not None:
        yield BYTES, "bytes", "lower", float(peak), PEAK_FLOOR * peak, None
    if "decode" in case.seconds:
        yield SECONDS, "s", "lower", case.seconds["decode"], None, None


def _bound(limit: Limit | None, better: str) -> float | None:
    return None if limit is None else limit.max if better == "lower" else limit.min


# ---------------------------------------------------------------- reading


def trend_of(connection: sqlite3.Connection, number: int, wanted: Wanted = lambda case, name: True) -> Trend:
    """The trend that ends with run `number`: the runs of its suite before it, and the series of its cases."""
    runs = _runs(connection, number)
    marks = ",".join("?" * len(runs))
    classes = {key: run.environment for key, run in runs.items()}
    order = {key: place for place, key in enumerate(runs)}
    query = f"""SELECT c.name, s.name, s.unit, s.better, p.run, p.value, p.floor, p.bound, o.golden
        FROM points AS p JOIN series AS s ON s.id = p.series JOIN cases AS c ON c.id = s.case_id
        JOIN outcomes AS o ON o.run = p.run AND o.case_id = c.id
        WHERE p.run IN ({marks}) AND c.id IN (SELECT case_id FROM outcomes WHERE run = ?)
        ORDER BY c.id, s.id"""
    found: dict[tuple[str, str], _Rows] = {}
    for case, name, unit, better, run, *point in connection.execute(query, (*runs, number)):
        key = (case, name)
        if key not in found:
            if not wanted(case, name):
                continue
            found[key] = _Rows(unit, better)
        found[key].add(order[run], classes[run], *point)
    drifts, untested, kept = [], 0, []
    for (case, name), rows in found.items():
        kept.append(rows.series(case, name, len(runs)))
        if name != SECONDS:  # a decode's own time is too noisy for this test
            masked = rows.series(case, name, len(runs), comparable=True)
            shown = drift(masked)
            drifts += [shown] if shown is not None else []
            untested += masked.known < 3
    return _bounded(tuple(runs.values()), kept, drifts, untested)


def _runs(connection: sqlite3.Connection, number: int) -> dict[int, TrendRun]:
    """The last runs of the suite of run `number` up to it, oldest first, by their number."""
    query = """SELECT r.id, r.recorded, r.suite, r.commit_id, r.environment, r.versions, r.exit_status
        FROM runs AS r JOIN runs AS me ON me.id = ? AND r.suite = me.suite
        WHERE (r.recorded, r.id) <= (me.recorded, me.id) ORDER BY r.recorded DESC, r.id DESC LIMIT ?"""
    rows = connection.execute(query, (number, MOST_RUNS)).fetchall()
    return {
        key: TrendRun(recorded, suite, commit, environment, json.loads(versions), status)
        for key, recorded, suite, commit, environment, versions, status in reversed(rows)
    }


class _Rows:
    """The points of one series while it is read."""

    def __init__(self, unit: str, better: str):
        self.unit, self.better = unit, better
        self.values: dict[int, float | None] = {}
        self.groups: dict[int, tuple[str, str | None]] = {}
        """Environment class and golden of each run: what must be the same for two values to be comparable."""
        self.newest = -1
        self.floor: float | None = None
        self.bound: float | None = None

    def add(
        self, place: int, environment: str, value: float | None, floor: float | None, bound: float | None,
        golden: str | None,
    ) -> None:  # fmt: skip
        self.values[place], self.groups[place] = value, (environment, golden)
        if place > self.newest:
            self.newest, self.floor, self.bound = place, floor, bound

    def series(self, case: str, name: str, runs: int, *, comparable: bool = False) -> Series:
        """As a Series; if `comparable`, only of runs in the newest one's class and on its golden, which is known."""
        values = self.values
        if comparable:
            group = self.groups.get(runs - 1)
            known = group is not None and group[1] is not None
            values = {place: value for place, value in values.items() if known and self.groups[place] == group}
        every = tuple(map(values.get, range(runs)))
        return Series(case, name, self.unit, self.better, every, self.floor, self.bound)  # type: ignore[arg-type]


def _bounded(runs: tuple[TrendRun, ...], series: Iterable[Series], drifts: list[Drift], untested: int) -> Trend:
    """The trend within its size: drifting series first, then the main measurements, then the others by name."""
    drifts.sort(key=lambda one: (-one.rise / one.floor if one.floor else 0.0, one.case, one.name))
    moved = {(one.case, one.name) for one in drifts[:MOST_DRIFTS]}

    def rank(one: Series) -> tuple[bool, int, str]:
        main = FIRST.index(one.name) if one.name in FIRST else len(FIRST)
        return ((one.case, one.name) not in moved, main, one.name if main == len(FIRST) else "")

    ordered = sorted(series, key=rank)
    room = MOST_POINTS // max(1, len(runs))
    return Trend(runs, tuple(ordered[:room]), tuple(drifts[:MOST_DRIFTS]), max(0, len(ordered) - room), untested,
                 len(drifts))  # fmt: skip


__all__ = ["FIRST", "MOST_POINTS", "MOST_RUNS", "SECONDS", "append", "identity", "read", "trend_of"]
