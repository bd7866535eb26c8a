"""The folder of a run: made beside its place, and put there at once when the run has ended."""

from __future__ import annotations

import contextlib
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
        """Choose the place. A partial run does not replace a run of more cases: it goes beside it, as NAME.partial."""
        if result.partial and not resumed and _is_run(self.folder):
            self.folder = self.folder.with_name(f"{self.folder.name}.partial")
            refuse_foreign(self.folder)
        return self.folder


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
    cases = tuple(case for case in earlier.cases if case.id in wanted)
    return msgspec.structs.replace(earlier, cases=cases)


__all__ = ["Stage", "refuse_foreign", "resumable", "staged"]
