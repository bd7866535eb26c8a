"""Rules of a suite: which cells a `match` table means, and what it says of them. The last rule that matches wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from fidelity import plans
from fidelity.errors import SuiteError, UnknownName
from fidelity.records import DTYPES, OFFLOADS, DecodePlan, Expectation, Limit, Temporal, Tiling
from fidelity.registry import unknown

Cell = tuple[str, str, DecodePlan, str | None]
"""Model, latents and plan, by name, and the check, None where the golden judges: a rule matches without geometry."""


@dataclass(frozen=True)
class Match:
    """The `match` table of a rule at `where` in the file. An empty table means every cell that a golden judges.

    Cells of checks are meant only by a table that names `check`: what is allowed or expected against a golden says
    nothing of them.
    """

    table: dict[str, Any] = field(default_factory=dict)
    where: str = "match"

    def __call__(self, cell: Cell) -> bool:
        """Whether the cell has every value that the table names."""
        if cell[3] is not None and "check" not in self.table:
            return False
        return all(_means(wanted, _seen(key, cell)) for key, wanted in self.table.items())

    @property
    def names_model(self) -> bool:
        return "model" in self.table


def _seen(key: str, cell: Cell) -> Any:
    model, latents, plan, check = cell
    if key in ("model", "latents", "check"):
        return {"model": model, "latents": latents, "check": check}[key]
    if key in plans.BUILT_IN_AXES:
        return getattr(plan, key)
    return plan.options.get(key, False)


def _means(wanted: Any, seen: Any) -> bool:
    if isinstance(wanted, list):
        return any(_means(each, seen) for each in wanted)
    if isinstance(seen, (Tiling, Temporal)):
        if isinstance(wanted, dict):
            return all(_means(part, getattr(seen, key)) for key, part in wanted.items())
        return wanted is True
    if seen is None:
        return wanted is False
    if isinstance(wanted, str) and isinstance(seen, str):
        return fnmatchcase(seen, wanted)
    return bool(isinstance(wanted, bool) == isinstance(seen, bool) and wanted == seen)


def match(table: Any, where: str, registry: ModuleType) -> Match:
    """A checked Match. Raises SuiteError for a key, a name or a value that no cell could ever have."""
    if not isinstance(table, dict):
        raise SuiteError(f"{where} is {table!r}: write a table like {{ dtype = 'bf16', latents = 'photo-*' }}")
    known = ("model", "latents", "check", *plans.axes(registry))
    for key, wanted in table.items():
        if key not in known:
            raise SuiteError(f"{where}: {unknown('key', key, known)}")
        for each in _each(wanted, f"{where}.{key}"):
            if key == "check":
                _check_name(each, f"{where}.{key}", tuple(registry.CHECKS))
            else:
                _check(key, each, f"{where}.{key}")
    return Match(table, where)


def _each(wanted: Any, where: str) -> Sequence[Any]:
    if isinstance(wanted, list):
        if not wanted:
            raise SuiteError(f"{where} is empty: it would match nothing")
        return wanted
    return [wanted]


def _check(key: str, wanted: Any, where: str) -> None:
    if key in ("model", "latents"):
        if not isinstance(wanted, str):
            raise SuiteError(f"{where} is {wanted!r}: write a name or a pattern")
    elif key in ("dtype", "offload"):
        known = DTYPES if key == "dtype" else OFFLOADS
        if not isinstance(wanted, str) or not any(fnmatchcase(name, wanted) for name in known):
            raise UnknownName(f"{where}: {unknown(key, wanted, known)}")
    elif key in ("tiling", "temporal") and isinstance(wanted, dict):
        for part, numbers in wanted.items():
            if part not in ("tile", "overlap"):
                raise SuiteError(f"{where}: {unknown('key', part, ('tile', 'overlap'))}")
            for number in _each(numbers, f"{where}.{part}"):
                _located(where, plans.tile_number, key, part, number)
    elif not (key in ("tiling", "temporal") and wanted is True):
        _located(where, plans.value, key, wanted)


def _check_name(wanted: Any, where: str, known: tuple[str, ...]) -> None:
    if not isinstance(wanted, str) or not any(fnmatchcase(name, wanted) for name in known):
        raise UnknownName(f"{where}: {unknown('check', wanted, known)}")


def _located(where: str, function: Any, *arguments: Any) -> None:
    try:
        function(*arguments)
    except (SuiteError, UnknownName) as error:
        raise type(error)(f"{where}: {error}") from None


# ---------------------------------------------------------------- what a rule says


@dataclass(frozen=True)
class LimitRule:
    """Limits for the cells that it matches; each replaces an earlier one on the same measurement as a whole."""

    match: Match
    limits: dict[str, Limit]


@dataclass(frozen=True)
class MemoryRule:
    """Bytes that the decode of the cells that it matches may need."""

    match: Match
    limit: int


@dataclass(frozen=True)
class ExpectRule:
    """How the cells that it matches should end. Not in force where its `versions` are not the installed ones."""

    match: Match
    expectation: Expectation
    out_of_force: str | None = None
    versions: str | None = None


@dataclass(frozen=True)
class ExcludeRule:
    """Cells that the suite leaves out, and why."""

    match: Match
    reason: str


@dataclass(frozen=True)
class Rules:
    """All rules of a suite, in the order of the file."""

    limits: dict[str, Limit]
    where: tuple[LimitRule, ...] = ()
    expect: tuple[ExpectRule, ...] = ()
    exclude: tuple[ExcludeRule, ...] = ()
    memory: int | None = None
    """Bytes that any decode may need that a golden judges; None: no limit."""
    memory_where: tuple[MemoryRule, ...] = ()

    def memory_limit_for(self, cell: Cell) -> int | None:
        """Bytes that the decode of a cell may need; a check, which decodes as often as it likes, has no limit."""
        found = [rule.limit for rule in self.memory_where if rule.match(cell)]
        return None if cell[3] is not None else found[-1] if found else self.memory

    def limits_for(self, cell: Cell) -> dict[str, Limit]:
        """The limits of a cell, by measurement."""
        limits = dict(self.limits)
        for rule in self.where:
            if rule.match(cell):
                limits.update(rule.limits)
        return limits

    def expectation_for(self, cell: Cell) -> Expectation:
        """How a cell should end: what the last matching rule in force says, else that it passes."""
        found = [rule.expectation for rule in self.expect if rule.out_of_force is None and rule.match(cell)]
        return found[-1] if found else Expectation()

    def exclusion_of(self, cell: Cell) -> str | None:
        """Why a cell is left out, or None."""
        found = [rule.reason for rule in self.exclude if rule.match(cell)]
        return found[-1] if found else None

    def refuse_dead(self, cells: Sequence[Cell]) -> None:
        """Raise SuiteError for a rule that matches no cell: a typo would otherwise pass in silence."""
        kept = [cell for cell in cells if self.exclusion_of(cell) is None]
        left = [*(rule.match for rule in self.where), *(rule.match for rule in self.memory_where)]
        left += [rule.match for rule in self.expect]
        for rule in self.exclude:
            _refuse_dead(rule.match, cells)
        for each in left:
            _refuse_dead(each, kept)


def _refuse_dead(match: Match, cells: Sequence[Cell]) -> None:
    if not any(match(cell) for cell in cells):
        raise SuiteError(f"{match.where} matches none of the {len(cells)} cells: correct or remove it")
