"""The TOML of a suite, read into checked records: every error says where in the file, and what is known there.

The grammar (schema `fidelity.suite/1`) is data without code; CONTRACT's example in the README shows all of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Struct
from packaging.requirements import InvalidRequirement, Requirement

from fidelity import checks, oracles, plans, rules
from fidelity.errors import RequestError, SuiteError, UnknownName
from fidelity.records import DIAGNOSES, Expectation, Limit
from fidelity.registry import FRAMES, unknown
from fidelity.wording import parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = "fidelity.suite/1"
DERIVED = {"tile_seam": "lower", oracles.NAME: "lower", checks.NAME: "lower"}
"""Measurements that no single instrument makes, and which direction is better."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class _Head(Struct, frozen=True):
    name: str
    golden: str


class _UserModel(Struct, frozen=True):
    path: str


class UserLatents(Struct, frozen=True):
    """Latents from a file: `scaled` says whether the denoiser's scaling still has to be undone."""

    file: str
    scaled: bool
    tensor: str | None = None


class _Memory(Struct, frozen=True):
    limit: int | str | None = None
    where: tuple[dict[str, Any], ...] = ()


class _MemoryRule(Struct, frozen=True):
    match: dict[str, Any]
    limit: int | str


class _Expect(Struct, frozen=True):
    match: dict[str, Any]
    verdict: str
    reason: str
    diagnosis: tuple[str, ...] = ()
    versions: str | None = None


class _Exclude(Struct, frozen=True):
    match: dict[str, Any]
    reason: str


@dataclass(frozen=True)
class Block:
    """One [[matrix]] or [[check]]: a full cross product of models, latents, checks and the values of each axis."""

    models: tuple[str, ...]
    latents: tuple[str, ...]
    axes: dict[str, tuple[Any, ...]]
    checks: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class Document:
    """A whole suite as written, names and ranges checked, nothing expanded."""

    name: str
    path: Path
    golden: Path
    digest: str
    models: dict[str, Path]
    latents: dict[str, UserLatents]
    blocks: tuple[Block, ...]
    rules: rules.Rules


def read(path: Path, registry: ModuleType) -> Document:
    """Read and check a suite. Raises SuiteError or UnknownName: one line with the file and the place in it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        why = error.strerror or error
        raise SuiteError(f"{path}: the suite cannot be read ({why}): fidelity ls suites lists what there is") from error
    try:
        try:
            table = tomllib.loads(data.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SuiteError(f"not TOML: {error}") from error
        return _document(path, hashlib.sha256(data).hexdigest(), table, registry)
    except RequestError as error:
        raise type(error)(f"{path}: {error}") from error


def _document(path: Path, digest: str, table: dict[str, Any], registry: ModuleType) -> Document:
    if table.get("schema") != SCHEMA:
        raise SuiteError(f"schema is {table.get('schema')!r}: write schema = {SCHEMA!r} in the first line")
    _only(table, ("schema", "suite", "matrix", "check", "limits", "expect", "exclude", "models", "latents", "memory"),
          "")  # fmt: skip
    head = _struct(_Head, table.get("suite"), "suite")
    if not _NAME.fullmatch(head.name):
        raise SuiteError(f"suite.name is {head.name!r}: it names a folder, so write letters, digits, '-', '_' and '.'")
    models = _own(table, "models", _UserModel, registry.MODELS)
    latents = _own(table, "latents", UserLatents, registry.LATENTS)
    names = {"models": (*registry.MODELS, *models), "latents": (*registry.LATENTS, *latents)}
    blocks = [_block(raw, f"matrix[{i}]", names, registry) for i, raw in enumerate(_list(table, "matrix"))]
    for i, raw in enumerate(_list(table, "check")):
        blocks.append(_block(raw, f"check[{i}]", {**names, "checks": tuple(registry.CHECKS)}, registry))
    if not blocks:
        raise SuiteError("nothing to judge: there is neither a [[matrix]] nor a [[check]]")
    for name in _table(table.get("limits", {}), "limits"):
        kind = "check" if name == checks.NAME else "matrix"
        if name != "where" and not _list(table, kind):
            raise SuiteError(f"limits: the limit on {name} would hold for nothing: there is no [[{kind}]]")
    if "memory" in table and not _list(table, "matrix"):
        raise SuiteError("memory: the limit would hold for nothing: there is no [[matrix]]")
    return Document(
        name=head.name,
        path=path,
        golden=(path.parent / head.golden).resolve(),
        digest=digest,
        models={name: path.parent / model.path for name, model in models.items()},
        latents={name: msgspec.structs.replace(own, file=str(path.parent / own.file)) for name, own in latents.items()},
        blocks=tuple(blocks),
        rules=_rules(table, registry),
    )


# ---------------------------------------------------------------- matrix


def _block(raw: Any, where: str, names: dict[str, tuple[str, ...]], registry: ModuleType) -> Block:
    axes = plans.axes(registry)
    _only(raw, (*names, *axes), where, kind="axis")
    named = {kind: _named(raw, kind, known, where) for kind, known in names.items()}
    chosen: dict[str, tuple[Any, ...]] = {}
    for axis in (axis for axis in axes if axis in raw):
        values = []
        for i, each in enumerate(_values(raw, axis, where)):
            try:
                values.append(plans.value(axis, each))
            except RequestError as error:
                raise type(error)(f"{where}.{axis}[{i}]: {error}") from None
        chosen[axis] = tuple(values)
    return Block(named["models"], named["latents"], chosen, named.get("checks", (None,)))


def _named(raw: dict[str, Any], kind: str, known: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The names of a list, `small-*` standing for all that match, each once. Raises UnknownName."""
    found: dict[str, None] = {}
    for i, name in enumerate(_values(raw, kind, where)):
        matching = [each for each in known if each == name or ("*" in str(name) and fnmatchcase(each, name))]
        if not matching:
            singular = kind if kind == "latents" else kind.removesuffix("s")
            raise UnknownName(f"{where}.{kind}[{i}]: {unknown(singular, name, known)}")
        found.update(dict.fromkeys(matching))
    return tuple(found)


def _values(raw: dict[str, Any], key: str, where: str) -> list[Any]:
    values = raw.get(key)
    if not isinstance(values, list) or not values:
        found = "missing" if key not in raw else "empty" if values == [] else f"{values!r}"
        raise SuiteError(f"{where}.{key} is {found}: write a list with at least one value")
    return values


# ---------------------------------------------------------------- rules


def _rules(table: dict[str, Any], registry: ModuleType) -> rules.Rules:
    limits = dict(_table(table.get("limits", {}), "limits"))
    where = _list(limits, "where", "limits.where")
    limits.pop("where", None)
    return rules.Rules(
        limits=_limits(limits, "limits", registry),
        where=tuple(_limit_rule(raw, f"limits.where[{i}]", registry) for i, raw in enumerate(where)),
        expect=tuple(_expect(raw, f"expect[{i}]", registry) for i, raw in enumerate(_list(table, "expect"))),
        exclude=tuple(_exclude(raw, f"exclude[{i}]", registry) for i, raw in enumerate(_list(table, "exclude"))),
        **_memory(table, registry),
    )


def _memory(table: dict[str, Any], registry: ModuleType) -> dict[str, Any]:
    if "memory" not in table:
        return {}
    found = _struct(_Memory, table["memory"], "memory")
    where = []
    for i, raw in enumerate(found.where):
        one, place = _struct(_MemoryRule, raw, f"memory.where[{i}]"), f"memory.where[{i}]"
        if "check" in one.match:
            raise SuiteError(f"{place}.match: a check decodes as often as it likes: it has no memory limit")
        match = rules.match(one.match, f"{place}.match", registry)
        where.append(rules.MemoryRule(match, parse_bytes(one.limit, f"{place}.limit")))
    if found.limit is None and not where:
        raise SuiteError('memory sets no limit: write limit = "64MiB", or [[memory.where]]')
    limit = None if found.limit is None else parse_bytes(found.limit, "memory.limit")
    return {"memory": limit, "memory_where": tuple(where)}


def _limits(table: dict[str, Any], where: str, registry: ModuleType) -> dict[str, Limit]:
    better = {name: each.better for name, each in (*registry.METRICS.items(), *registry.DETECTORS.items())}
    better |= DERIVED
    limits: dict[str, Limit] = {}
    for name, raw in table.items():
        if name not in better:
            raise UnknownName(f"{where}: {unknown('measurement', name, better)}")
        limits[name] = _limit(_struct(Limit, raw, f"{where}.{name}"), better[name], f"{where}.{name}", name)
        if limits[name].times_plain is not None:
            _upper_rule(name, limits[name].times_plain, better[name], f"{where}.{name}", registry)
    return limits


def _upper_rule(name: str, times: float | None, better: str, where: str, registry: ModuleType) -> None:
    """Refuse a `times_plain` that nothing could be held to, or that the plain decode itself could not meet."""
    instrument = {**dict(registry.METRICS.items()), **dict(registry.DETECTORS.items())}.get(name)
    if better != "lower":
        raise SuiteError(f"{where}: times_plain multiplies a cost, and of {name} more is better: leave it out")
    if instrument is None or instrument.needs not in (None, FRAMES):
        raise SuiteError(f"{where}: times_plain: a plain decode has no {name}, so there is nothing to multiply")
    if times is None or not math.isfinite(times) or times < 1:
        raise SuiteError(f"{where}: times_plain is {times}: write a finite number from 1 on, which plain decodes meet")


def _limit(limit: Limit, better: str, where: str, name: str) -> Limit:
    right, wrong = ("max", "min") if better == "lower" else ("min", "max")
    if getattr(limit, wrong) is not None:
        raise SuiteError(f"{where}: {wrong} would let a worse {name} pass ({better} is better): write {right}")
    bound = getattr(limit, right)
    if bound is None or not math.isfinite(bound):
        raise SuiteError(f"{where}: {right} is {'missing' if bound is None else bound}: write a finite number")
    if not limit.origin.strip():
        raise SuiteError(f"{where}: origin is empty: say where the limit comes from")
    return limit


def _limit_rule(raw: Any, where: str, registry: ModuleType) -> rules.LimitRule:
    table = dict(_table(raw, where))
    match = rules.match(table.pop("match", None), f"{where}.match", registry)
    if not table:
        raise SuiteError(f"{where} sets no limit: write for example rmse = {{ max = 4.0, origin = '…' }}")
    for name in table:
        if ("check" in match.table) != (name == checks.NAME):
            which = (
                "a check has no other limit" if "check" in match.table else "only checks have it: match = { check = … }"
            )
            raise SuiteError(f"{where}: the limit on {name} would hold for nothing: {which}")
    return rules.LimitRule(match, _limits(table, where, registry))


def _expect(raw: Any, where: str, registry: ModuleType) -> rules.ExpectRule:
    found = _struct(_Expect, raw, where)
    if found.verdict not in ("pass", "fail", "error"):
        raise UnknownName(f"{where}: {unknown('verdict', found.verdict, ('pass', 'fail', 'error'))}")
    for word in found.diagnosis:
        if word not in DIAGNOSES:
            raise UnknownName(f"{where}: {unknown('diagnosis', word, DIAGNOSES)}")
    if found.verdict == "fail" and not found.diagnosis:
        raise SuiteError(f"{where}: diagnosis is missing: an expected failure says what it must be blamed on")
    if found.verdict == "pass" and found.diagnosis:
        raise SuiteError(f"{where}: diagnosis is {list(found.diagnosis)}: what passes is blamed on nothing")
    if not found.reason.strip():
        raise SuiteError(f"{where}: reason is empty: say why")
    match = rules.match(found.match, f"{where}.match", registry)
    expectation = Expectation(found.verdict, found.diagnosis, found.reason)  # type: ignore[arg-type]
    return rules.ExpectRule(match, expectation, _out_of_force(found.versions, where), found.versions)


def _exclude(raw: Any, where: str, registry: ModuleType) -> rules.ExcludeRule:
    found = _struct(_Exclude, raw, where)
    if not found.reason.strip():
        raise SuiteError(f"{where}: reason is empty: the report prints it")
    return rules.ExcludeRule(rules.match(found.match, f"{where}.match", registry), found.reason)


def _out_of_force(versions: str | None, where: str) -> str | None:
    """Why the installed versions are not those for which an expectation is known to hold, or None."""
    if versions is None:
        return None
    try:
        wanted = Requirement(versions)
    except InvalidRequirement as error:
        said = str(error).split("\n")[0]
        raise SuiteError(f"{where}.versions is {versions!r}: {said}: write for example 'diffusers>=0.42'") from None
    try:
        installed = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        raise SuiteError(f"{where}.versions is {versions!r}: {wanted.name} is not installed") from None
    if wanted.specifier.contains(installed, prereleases=True):
        return None
    return f"{where} is not in force: {wanted.name} {installed} is installed, it holds for {versions}"


# ---------------------------------------------------------------- shapes of tables


def _table(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise SuiteError(f"{where} is {'missing' if raw is None else repr(raw)}: write a table")
    return raw


def _list(table: dict[str, Any], key: str, where: str | None = None) -> list[Any]:
    found = table.get(key, [])
    if not isinstance(found, list):
        raise SuiteError(f"{where or key} is one table: write [[{where or key}]]")
    return found


def _only(raw: Any, known: tuple[str, ...], where: str, kind: str = "key") -> None:
    for key in _table(raw, where):
        if key not in known:
            raise SuiteError(f"{where + ': ' if where else ''}{unknown(kind, key, known)}")


def _struct(kind: type[Any], raw: Any, where: str) -> Any:
    """A strict record of a table: unknown keys get a hint, wrong types and missing keys their place."""
    _only(raw, kind.__struct_fields__, where)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$")
        raise SuiteError(f"{where}{place.rstrip('`')}: {said[0].lower()}{said[1:]}") from None


def _own(table: dict[str, Any], key: str, kind: type[Any], registered: Any) -> dict[str, Any]:
    found = {}
    for name, raw in _table(table.get(key, {}), key).items():
        if name in registered:
            raise SuiteError(f"{key}.{name}: {name!r} is registered already: choose another name")
        if not _NAME.fullmatch(name):
            raise SuiteError(f"{key}: {name!r} becomes part of ids: write letters, digits, '-', '_' and '.'")
        found[name] = _struct(kind, raw, f"{key}.{name}")
    return found
