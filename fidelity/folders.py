"""The folder of a run: made beside its place, and put there at once when the run has ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fidelity.errors import OutputError, RequestError
from fidelity.records import RunResult, from_json
from fidelity.runs import Options
from fidelity.suite import Suite

MARK = "results.json"
JUDGED = ("pass", "fail")
"""Verdicts that a resumed run keeps."""


def refuse_foreign(folder: Path) -> None:
    """Raise OutputError if `folder` exists and is not a fidelity run, or cannot be written."""
    if folder.exists():
        if not folder.is_dir():
            raise OutputError(f"{folder} is a file: name a folder with --out")
        if any(folder.iterdir()) and not _is_run(folder):
            raise OutputError(
                f"{folder} holds something other than a fidelity run, nothing replaced: name another --out"
            )
    anchor = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    if not anchor.is_dir() or not os.access(anchor, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} cannot be written: {anchor} is not a writable folder, choose another --out")


def for_selection(folder: Path, judged: int) -> Path:
    """Where a run of `judged` selected cases goes by default: `folder`, or beside a larger run in it, as NAME.case."""
    return beside(folder, "case", judged) if _holds(folder) > judged else folder


def refuse_larger(folder: Path, judged: int) -> None:
    """Raise OutputError if `folder` holds a run that judged more than the `judged` cases that --case selects."""
    held = _holds(folder)
    if held > judged:
        many = f"that judged {held} cases" if held < float("inf") else "that this version cannot read"
        raise OutputError(f"{folder} holds a run {many}, --case selects {judged}: name another --out for them")


def _is_run(folder: Path) -> bool:
    try:
        return b'"fidelity.results/' in (folder / MARK).read_bytes()
    except OSError:
        return False


@dataclass
class Stage:
    """A run's folder while the run goes on: `path` to write to, `folder` whose place it will take."""

    path: Path
    folder: Path

    def settle(self, result: RunResult, *, resumed: bool = False) -> Path:
        """Choose the place. A partial run replaces none but the one that it resumed, and that only if it judged no
        fewer cases: else it goes beside it, as NAME.partial."""
        judged = sum(case.verdict in JUDGED for case in result.cases)
        if result.partial and _is_run(self.folder) and not (resumed and _holds(self.folder) <= judged):
            self.folder = beside(self.folder, "partial", judged)
        return self.folder


class _Ended(msgspec.Struct):
    """As much of a case as it takes to count it."""

    verdict: str


class _Cases(msgspec.Struct):
    cases: tuple[_Ended, ...]


def _holds(folder: Path) -> float:
    """How many cases the run in `folder` judged; 0 if none is there, infinitely many if it cannot be read."""
    if not _is_run(folder):
        return 0
    try:
        return sum(case.verdict in JUDGED for case in from_json((folder / MARK).read_bytes(), _Cases).cases)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return float("inf")


def beside(folder: Path, suffix: str, judged: int) -> Path:
    """NAME.suffix, or the first of NAME.suffix-2, … that is free or holds a run of no more than `judged` cases."""
    for number in itertools.count(1):
        place = folder.with_name(f"{folder.name}.{suffix}{f'-{number}' if number > 1 else ''}")
        if not place.exists() or (_is_run(place) and _holds(place) <= judged):
            break
    return place


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    """A new folder that takes the place of `folder` when the block ends well, and vanishes when it does not.

    Raises OutputError if `folder` holds something else or cannot be written.
    """
    refuse_foreign(folder)
    folder = folder.absolute()
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise OutputError(f"{folder} cannot be written ({error.strerror}): choose another --out") from error
    stage = Stage(path, folder)
    try:
        yield stage
        _put(path, stage.folder)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        for parent in made if not folder.exists() else ():
            with contextlib.suppress(OSError):  # somebody else put something there meanwhile
                parent.rmdir()


def _put(path: Path, folder: Path) -> None:
    path.chmod(0o755)
    if not folder.exists():
        path.rename(folder)
        return
    retired = path.with_suffix(".old")
    folder.rename(retired)
    path.rename(folder)
    shutil.rmtree(retired)


def resumable(folder: Path, suite: Suite, options: Options) -> RunResult:
    """The earlier run of this very suite and request, to be completed. Raises RequestError."""
    try:
        earlier = from_json((folder / MARK).read_bytes(), RunResult)
    except (OSError, msgspec.MsgspecError) as error:
        raise RequestError(f"--resume: {folder / MARK} cannot be read ({error}): run without --resume") from error
    if earlier.suite.get("digest") != suite.digest:
        raise RequestError(f"--resume: {folder} holds a run of another suite or an edited one: run without --resume")
    if earlier.suite.get("request") != options.about():
        raise RequestError(f"--resume: {folder} was run with another model, plugin or device: run without --resume")
    wanted = {case.id for case in suite.cases}
    others = sum(case.verdict in JUDGED and case.id not in wanted for case in earlier.cases)
    if others:
        raise RequestError(
            f"--resume: {folder} holds judged cases ({others}) beyond those asked for: leave out --case (what is "
            f"judged is kept), or name another --out"
        )
    cases = tuple(case for case in earlier.cases if case.id in wanted)
    return msgspec.structs.replace(earlier, cases=cases)


__all__ = ["Stage", "for_selection", "refuse_foreign", "refuse_larger", "resumable", "staged"]
