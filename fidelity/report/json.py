"""results.json: the run as data, from which everything else is rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fidelity.errors import RequestError
from fidelity.records import RunResult, from_json, to_json
from fidelity.report import files

NAME = "results.json"
SCHEMA = "fidelity.results/1"


def write(run: RunResult, folder: Path) -> Path:
    """Store `run` as `folder`/results.json, atomically.

    Raises ValueError on NaN or infinity (a number that is none is null and has a reason), OutputError on a bad folder.
    """
    try:
        data = to_json(run)
    except UnicodeEncodeError:  # a path or message with bytes that are no text must not cost the whole run
        data = to_json(_encodable(msgspec.to_builtins(run)))
    return files.write(folder / NAME, data)


def folder_of(path: Path) -> Path:
    """The folder of a run that is named by its results.json; any other path as it is."""
    return path.parent if path.name == NAME and path.is_file() else path


def read(folder: Path) -> RunResult:
    """The run stored in `folder`, or in the results.json of that path. Raises RequestError, in one line, if there is
    none or it is not one."""
    folder = folder_of(folder)
    path = folder / NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        why = (
            "is missing"
            if isinstance(error, (FileNotFoundError, NotADirectoryError))
            else f"cannot be read ({error.strerror})"
        )
        raise RequestError(
            f"{path} {why}: no fidelity run is there; make one with `fidelity run SUITE --out {folder}`"
        ) from error
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not a fidelity run ({_line(error)}): run the suite again") from error
    if schema != SCHEMA:
        raise RequestError(
            f"{path} has schema {schema!r}, this version reads {SCHEMA!r}: render it with the version that wrote it"
        )
    try:
        return from_json(data, RunResult)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is damaged ({_line(error)}): run the suite again") from error


class _Header(msgspec.Struct):
    schema: str


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _encodable(node: Any) -> Any:
    if isinstance(node, str):
        return node.encode("utf-8", "replace").decode()
    if isinstance(node, dict):
        return {_encodable(key): _encodable(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_encodable(item) for item in node]
    return node
