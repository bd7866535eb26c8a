"""A suite: its TOML expanded into cases, each with its limits, its expectation and why it may not apply.

Everything is checked before anything is decoded, and without torch: names, ranges, tile geometry, dead rules.

    suite = load(Path("suites/reference.toml"), registry)
    suite = select(suite, "*-disk")                                        # or
    suite = with_plan(suite, parse_plan("bf16,tile=16,overlap=0.25", registry))
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from fidelity import checks, grammar, oracles
from fidelity.errors import IllegalTiling, RequestError, SuiteError
from fidelity.estimate import time_estimate
from fidelity.memory import limit as memory_limit
from fidelity.optimizations.encode import encodes
from fidelity.optimizations.precision import is_emulated
from fidelity.plans import axes, parse_plan
from fidelity.plans import plan as make_plan
from fidelity.records import Case, DecodePlan, LatentSource, Limit, Model
from fidelity.registry import Check, cuts
from fidelity.rules import Cell
from fidelity.wording import in_units

EMULATED = "memory limit: emulated fp16 has fp32 temporaries, so a limit says nothing of what fp16 needs"


@dataclass(frozen=True)
class Suite:
    """Cases to judge, in a stable order, and what they need: models and latents by name, the folder of goldens.

    `excluded`: id and reason of each cell left out. `shapes`: latents' shape by (model, latents), as the decoder takes
    them. `digest`: SHA-256 of the TOML. `notes`: expectations that are not in force with the installed versions.
    """

    name: str
    path: Path
    golden: Path
    digest: str
    cases: tuple[Case, ...]
    excluded: tuple[tuple[str, str], ...]
    models: dict[str, Model]
    latents: dict[str, LatentSource]
    shapes: dict[tuple[str, str], tuple[int, ...]]
    notes: tuple[str, ...] = ()
    document: Any = field(default=None, repr=False)
    """The grammar.Document that it was made of."""
    registry: ModuleType | None = field(default=None, repr=False)

    @property
    def judged(self) -> tuple[Case, ...]:
        """The cases that will be decoded."""
        return tuple(case for case in self.cases if case.not_applicable is None)

    def about(self) -> dict[str, Any]:
        """What results.json says of the suite."""
        return {
            "name": self.name,
            "path": str(self.path),
            "digest": self.digest,
            "cases": len(self.cases),
            "judged": len(self.judged),
            "excluded": [{"id": name, "reason": reason} for name, reason in self.excluded],
            "notes": list(self.notes),
        }


def load(path: Path, registry: ModuleType, *, substitute: Model | None = None) -> Suite:
    """Read, check and expand a suite. `registry` holds what is registered; `substitute` is a model of the user's own.

    The substitute takes the place of the suite's model of its name, or of all of the suite's models.
    Raises RequestError (SuiteError, UnknownName, ModelError, LatentsError …), one line with the file and the place.
    """
    path = Path(path)
    document = grammar.read(path, registry)
    try:
        cells = _expand(document, registry)
        document.rules.refuse_dead(list(cells.values()))
        if substitute is not None:
            cells = _substituted(cells, substitute.name)
        known = {} if substitute is None else {substitute.name: substitute}
        return _suite(document, registry, cells.values(), known)
    except RequestError as error:
        raise type(error)(f"{path}: {error}") from error


def select(suite: Suite, glob: str) -> Suite:
    """The cases whose whole id matches `glob` (fnmatchcase). Raises SuiteError, with the nearest ids, if none does."""
    cases = tuple(case for case in suite.cases if fnmatchcase(case.id, glob))
    excluded = tuple((name, reason) for name, reason in suite.excluded if fnmatchcase(name, glob))
    if not cases:
        if excluded:
            raise SuiteError(f"--case {glob!r}: {excluded[0][0]} is excluded by the suite: {excluded[0][1]}")
        near = difflib.get_close_matches(glob.replace("*", ""), [case.id for case in suite.cases], n=3, cutoff=0.0)
        raise SuiteError(f"--case {glob!r} matches none of {len(suite.cases)} cases; the nearest: {', '.join(near)}")
    return _judging(replace(suite, cases=cases, excluded=excluded), f"--case {glob!r}")


def with_plan(suite: Suite, plan: DecodePlan) -> Suite:
    """The suite's models and latents under one plan, judged under its limits and expectations."""
    registry = _registry(suite)
    found = dict.fromkeys((case.model, case.latents, case.check) for case in suite.cases)
    only_excluded = [(*key, None) for key in suite.shapes if key not in {each[:2] for each in found}]
    cells = [(model, latents, plan, check) for model, latents, check in (*found, *only_excluded)]
    return _suite(suite.document, registry, cells, suite.models)


def with_memory_limit(suite: Suite, limit: int) -> Suite:
    """The suite with every decode that a golden judges held to `limit` bytes. Raises SuiteError if there is none."""
    cases = tuple(case if case.check is not None else msgspec.structs.replace(case, memory_limit=limit)
                  for case in suite.cases)  # fmt: skip
    if cases == suite.cases and all(case.memory_limit is None for case in cases):
        raise SuiteError(f"{suite.name}: a memory limit would hold for nothing: all of its cases are checks")
    return replace(suite, cases=cases)


def on(suite: Suite, device: str) -> Suite:
    """The suite as it can be judged on a device: what cannot be there is not applicable, with its reason.

    Raises SuiteError where a memory limit cannot be held to there, or where nothing is left to judge.
    """
    for case in suite.judged:
        why = None if case.memory_limit is None else memory_limit.refusal(case.memory_limit, device)
        if why is not None:
            raise SuiteError(f"{suite.path}: {case.id}: memory limit {in_units(case.memory_limit or 0)}: {why}")
    reasons = {case.id: _unfit(case, device, _registry(suite)) for case in suite.judged}
    if not any(reasons.values()):
        return suite
    cases = tuple(msgspec.structs.replace(case, not_applicable=case.not_applicable or reasons.get(case.id))
                  for case in suite.cases)  # fmt: skip
    return _judging(replace(suite, cases=cases), f"{suite.name} on {device}")


def _unfit(case: Case, device: str, registry: ModuleType) -> str | None:
    """Why a case cannot be judged on a device, or None.

    A decode whose fp16 is emulated has fp32 temporaries: a limit on it would say nothing of fp16.
    """
    if case.memory_limit is not None and is_emulated(case.plan, device):
        return EMULATED
    if not device.startswith("cpu"):
        return None
    settings = [registry.OPTIMIZATIONS.get(name) for name in case.plan.settings]
    return next((f"{one.name}: {one.accelerator}" for one in settings if getattr(one, "accelerator", None)), None)


def load_all(folder: Path, beside: Suite) -> list[Suite]:
    """The other suites in `folder`: those beside a suite may need the same goldens. Raises if one cannot be read."""
    found = [
        path for path in sorted(folder.glob("*.toml")) if _is_suite(path) and path.resolve() != beside.path.resolve()
    ]
    return [load(path, _registry(beside)) for path in found]


def listing(folder: Path, registry: ModuleType) -> list[tuple[str, str]]:
    """Path and one line on each suite in `folder`; a suite that cannot be read says why."""
    return [(str(path), _line(path, registry)) for path in sorted(folder.glob("*.toml")) if _is_suite(path)]


def _line(path: Path, registry: ModuleType) -> str:
    try:
        suite = load(path, registry)
    except RequestError as error:
        return f"unreadable: {error}"
    return f"{suite.name}: {len(suite.cases)} cases, {len(suite.judged)} judged, of {', '.join(suite.models)}"


def _is_suite(path: Path) -> bool:
    """Whether a TOML file claims to be a suite: other tools' files may lie in the same folder."""
    return path.is_file() and b"fidelity.suite/" in path.read_bytes()


def _registry(suite: Suite) -> ModuleType:
    if suite.registry is None:
        raise ValueError(f"suite {suite.name!r} was not made by load()")
    return suite.registry


# ---------------------------------------------------------------- cells


def _expand(document: grammar.Document, registry: ModuleType) -> dict[str, Cell]:
    """Every cell of every block by id, the offload varying fastest; a cell of two blocks is one."""
    cells: dict[str, Cell] = {}
    for block in document.blocks:
        order = [axis for axis in axes(registry) if axis in block.axes]
        values = [block.axes[axis] for axis in order]
        for model, latents, check, *chosen in itertools.product(block.models, block.latents, block.checks, *values):
            cell = (model, latents, make_plan(dict(zip(order, chosen))), check)
            first = cells.setdefault(_id(cell), cell)
            if first != cell:
                raise SuiteError(f"two plans have the id {_id(cell)}: give an overlap or value fewer digits")
    return cells


def _id(cell: Cell) -> str:
    model, latents, plan, check = cell
    return Case(model, latents, plan, check=check).id


def _substituted(cells: dict[str, Cell], name: str) -> dict[str, Cell]:
    if any(cell[0] == name for cell in cells.values()):
        return cells
    renamed = [(name, latents, plan, check) for _, latents, plan, check in cells.values()]
    return {_id(cell): cell for cell in renamed}


# ---------------------------------------------------------------- cases


def _suite(
    document: grammar.Document,
    registry: ModuleType,
    cells: Iterable[Cell],
    models: Mapping[str, Model],
) -> Suite:
    """A suite of these cells; `models` are known already, by name, and others come from the document or registry."""
    cells, known = list(cells), dict(models)
    for name in dict.fromkeys(cell[0] for cell in cells):
        if name not in known:
            known[name] = _model(name, document, registry)
    sources = {name: _source(name, document, registry) for name in dict.fromkeys(cell[1] for cell in cells)}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    cases, excluded = [], []
    for model, latents, plan, check in cells:
        if (model, latents) not in shapes:
            shapes[model, latents] = tuple(sources[latents].shape(known[model].geometry))
        reason = document.rules.exclusion_of((model, latents, plan, check))
        if reason is not None:
            excluded.append((_id((model, latents, plan, check)), reason))
        else:
            shape = shapes[model, latents]
            cases.append(_case((model, latents, plan, check), known[model], shape, document, registry))
    return _judging(
        Suite(
            name=document.name,
            path=document.path,
            golden=document.golden,
            digest=document.digest,
            cases=tuple(cases),
            excluded=tuple(excluded),
            models={name: known[name] for name in dict.fromkeys(model for model, _ in shapes)},
            latents=sources,
            shapes=shapes,
            notes=tuple(rule.out_of_force for rule in document.rules.expect if rule.out_of_force),
            document=document,
            registry=registry,
        ),
        document.name,
    )


def _model(name: str, document: grammar.Document, registry: ModuleType) -> Model:
    if name not in document.models:
        return registry.MODELS.get(name)
    from fidelity.models.load import from_path

    return from_path(name, document.models[name])


def _source(name: str, document: grammar.Document, registry: ModuleType) -> LatentSource:
    if name not in document.latents:
        return registry.LATENTS.get(name)
    from fidelity.latents import from_file

    own = document.latents[name]
    return from_file(name, Path(own.file), tensor=own.tensor, scaled=own.scaled)


def _case(cell: Cell, model: Model, shape: tuple[int, ...], document: grammar.Document, registry: ModuleType) -> Case:
    name, latents, plan, check = cell
    limits, why = document.rules.limits_for(cell), _inapplicable(plan, model, shape, registry)
    if check is not None:
        about = registry.CHECKS.get(check)
        limits = {checks.NAME: _bound_of(about, limits)}
        why = why or about.reason(plan, shape, model)
    else:
        limits = _needed(limits, plan, model, registry)
    expected = document.rules.expectation_for(cell)
    if encodes(plan):
        why = why or _unencodable(latents, check, document, registry)
    case = Case(
        name,
        latents,
        plan,
        limits=limits,
        expected=expected,
        not_applicable=why,
        check=check,
        memory_limit=document.rules.memory_limit_for(cell),
    )
    tiling = None if model.family.hides_tiles else plan.tiling
    if case.not_applicable is None and tiling is not None and case.expected.verdict == "pass":
        try:
            model.family.tile_grid(model.geometry, (shape[-2], shape[-1]), tiling)
        except IllegalTiling as error:
            raise IllegalTiling(f"{case.id}: {error} (or cover it by an [[expect]])") from error
    return case


def _unencodable(latents: str, check: str | None, document: grammar.Document, registry: ModuleType) -> str | None:
    """Why these latents cannot be encoded again: there is no picture behind them."""
    if check is not None:
        return f"encode: {check} decodes latents, and encodes no picture"
    pictured = _source(latents, document, registry).pictured
    return None if pictured else f"encode: latents {latents!r} have no picture behind them; name those of a photograph"


def _inapplicable(plan: DecodePlan, model: Model, shape: tuple[int, ...], registry: ModuleType) -> str | None:
    """Why the model cannot be built, or the first setting cannot apply: a function of plan, geometry and versions."""
    absent = model.family.absent()
    if absent is not None:
        return absent
    settings = [(registry.OPTIMIZATIONS.get(name), value) for name, value in plan.settings.items()]
    for optimization, value in sorted(settings, key=lambda pair: pair[0].order):
        reason = optimization.inapplicable(value, plan, model, shape)
        if reason is not None:
            return reason
    return None


def _bound_of(check: Check, limits: dict[str, Limit]) -> Limit:
    """What a check is held to: the suite's `check_max_abs`, which is in grey levels, or the check's own."""
    return limits[checks.NAME] if checks.NAME in limits and checks.in_grey_levels(check) else checks.limit(check)


def _needed(limits: dict[str, Limit], plan: DecodePlan, model: Model, registry: ModuleType) -> dict[str, Limit]:
    """The limits on what plan and model have: where there are no tiles there is no seam, in a picture no frame."""
    looks = {name: each.looks_at(plan, video=model.geometry.video) for name, each in registry.DETECTORS.items()}
    looks["tile_seam"] = "tiling" in cuts(plan)
    out = {name for name in limits if not looks.get(name, True)}
    out.add(checks.NAME)
    if not oracles.has_one(plan, model):
        out.add(oracles.NAME)
    if plan.tiling is not None and model.family.hides_tiles:
        return _blind(limits, out, registry)
    return {name: limit for name, limit in limits.items() if name not in out}


def _blind(limits: dict[str, Limit], out: set[str], registry: ModuleType) -> dict[str, Limit]:
    """The limits where nobody knows where the tiles lie: what is allowed of a line at a known grid is allowed of a line
    at one that is found."""
    by_grid = {name for name, each in registry.DETECTORS.items() if each.needs == "tiling"} | {"tile_seam"}
    kept = {name: limit for name, limit in limits.items() if name not in out | by_grid}
    line = limits.get("tile_step", limits.get("tile_seam"))
    return kept if line is None else {"periodic": line, **kept}


def _judging(suite: Suite, what: str) -> Suite:
    """The suite, if it judges anything. Raises SuiteError."""
    if suite.judged:
        return suite
    if suite.cases:
        case = suite.cases[0]
        raise SuiteError(f"{what}: nothing to judge: no case is applicable; {case.id}: {case.not_applicable}")
    first = f"; {suite.excluded[0][0]}: {suite.excluded[0][1]}" if suite.excluded else ""
    raise SuiteError(f"{what}: nothing to judge: every cell is excluded{first}")


__all__ = [
    "Suite",
    "listing",
    "load",
    "load_all",
    "on",
    "parse_plan",
    "select",
    "time_estimate",
    "with_memory_limit",
    "with_plan",
]
