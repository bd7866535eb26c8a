"""report.html: one self-contained file that people decide from; it works from disk, without a network.

Python prepares data and the parts that must be readable without scripts; `templates/*.js` draw the rest in the browser.
Each picture is embedded once, by the digest of its bytes, and each case's details are parsed when it is opened.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from fidelity import standings
from fidelity.records import MEMORY_KINDS, CaseResult, RunResult
from fidelity.report import evidence, files, glossary, memory, trend, words
from fidelity.report.album import Album

NAME = "report.html"
PAGE_BUDGET = 24_000_000
"""Characters of one report. What is left beside the text is for pictures; those beyond are named in their place,
passing cases first."""
MOST_SURPRISES = 50
STYLES = ("base.css", "page.css", "case.css", "memory.css")
SCRIPTS = ("words.js", "chart.js", "table.js", "decision.js", "effects.js", "evidence.js", "pictures.js", "overlay.js",
           "viewer.js", "toolbar.js", "frames.js", "profiles.js", "figures.js", "timeline.js", "memory.js",
           "response.js", "detail.js", "trend.js", "main.js")  # fmt: skip


def render(run: RunResult, folder: Path) -> str:
    """The page for `run`, with the pictures found in `folder`. A picture that is not there is named in its place."""
    ordered = words.worst_first(run.cases)
    summaries = standings.summarize(run)
    outlooks = evidence.outlooks(run)
    choices = {model: standings.choices(found) for model, found in summaries.items()}
    style = "\n".join(map(_asset, STYLES))
    vendor = _vendor("chart.umd.min.js")
    app = "\n".join(['"use strict";', "(() => {", *(_asset(name) for name in SCRIPTS), "})();"])
    compact = memory.Compact()
    told = [_detail(case, compact) for case in ordered]
    data = _data({"cases": [_row(case) for case in ordered], "models": _models(summaries, choices), "main": words.MAIN,
                  "kinds": _kinds(), "glossary": glossary.DIAGNOSES, "yardsticks": _yardsticks(run),
                  "axes": _axes(run), "attribution": run.attribution, "trend": run.trend,
                  "outlooks": [each.meetings for each in outlooks],
                  "memory_kinds": MEMORY_KINDS, "after": compact.after})  # fmt: skip
    album, details = _details(ordered, told, folder, PAGE_BUDGET - sum(map(len, (style, vendor, app, data))))
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            run=run,
            words=words,
            trend=trend,
            counts=words.counts(run),
            total=len(run.cases),
            references=run.reference,
            surprises=[case for case in ordered if case.surprise],
            most_surprises=MOST_SURPRISES,
            policy=_policy(style, vendor, app),
            style=Markup(style),
            vendor=Markup(vendor),
            app=Markup(app),
            data=data,
            details=details,
            pictures=album.embedded,
            summaries=summaries,
            choices=choices,
            alike=standings.ALIKE,
            outlooks=outlooks,
            rooms=evidence.rooms(run),
            laws=memory.laws(run),
        )
    )


def write(run: RunResult, folder: Path) -> Path:
    return files.write(folder / NAME, render(run, folder))


def fill(template: str, styles: tuple[str, ...] = (), **about: Any) -> str:
    """A page without scripts from a template of this package, in these style sheets besides the report's own."""
    style = "\n".join(map(_asset, (*STYLES, *styles)))
    return _environment().get_template(template).render(style=Markup(style), policy=_policy(style), **about)


def _details(
    cases: list[CaseResult], told: list[dict[str, Any]], folder: Path, budget: int
) -> tuple[Album, list[Markup]]:
    """The pictures, and everything about each case as JSON; what the text leaves of `budget` is for the pictures."""
    album = Album(folder, max(0, budget - sum(len(_data(detail)) for detail in told)))
    return album, [_data({**detail, "images": _pictures(case, album)}) for case, detail in zip(cases, told)]


def _detail(case: CaseResult, compact: memory.Compact) -> dict[str, Any]:
    """Everything about a case but its pictures; figures that are None are left out."""
    built = msgspec.to_builtins(case) | {"memory": compact.of(case.memory)}
    return _lean(built) | {
        "receipts": built["receipts"],
        "limit_words": {name: words.limit(bound) for name, bound in case.limits.items()},
        "approve": words.approve(case),
    }


def _lean(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _lean(item) for name, item in node.items() if item is not None}
    return [_lean(item) for item in node] if isinstance(node, (list, tuple)) else node


def _pictures(case: CaseResult, album: Album) -> dict[str, list[dict[str, str]]]:
    """References to its pictures, the difference only where it cannot be computed from the other two."""
    found = {"golden": [album.add(path) for path in case.images.get("golden", ())]}
    bases = chain(found["golden"], repeat(None))
    found["candidate"] = [album.add(path, base) for path, base in zip(case.images.get("candidate", ()), bases)]
    whole = all(found.get(name) and all("digest" in ref for ref in found[name]) for name in ("golden", "candidate"))
    if not whole and "difference" in case.images:
        found["difference"] = [album.add(path) for path in case.images["difference"]]
    return found


def _settings(case: CaseResult) -> dict[str, str]:
    """Every axis of a case with its setting in words, as the filters offer them."""
    plan = case.plan
    return {
        "model": case.model,
        "latents": case.latents,
        "dtype": plan.dtype,
        "upcast": "on" if plan.force_upcast else "off",
        "slicing": "on" if plan.slicing else "off",
        "tiling": "off" if plan.tiling is None else f"tile {plan.tiling.tile}, overlap {plan.tiling.overlap:g}",
        "temporal": "off" if plan.temporal is None else f"tile {plan.temporal.tile}, overlap {plan.temporal.overlap:g}",
        "offload": plan.offload,
        **({"check": case.check} if case.check else {}),
        **{name: "off" if not setting else "on" if setting is True else str(setting)
           for name, setting in plan.options.items()},
    }  # fmt: skip


def _axes(run: RunResult) -> dict[str, list[str]]:
    """All settings of every axis, in the order of the run; a case that does not name an axis has it off."""
    rows = [_settings(case) for case in run.cases]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: list(dict.fromkeys(row.get(name, "off") for row in rows)) for name in names}


def _row(case: CaseResult) -> dict[str, Any]:
    """What the table, the filters and the scatter need to know of a case."""
    figures = {name: m.value for name, m in case.measurements.items()}
    return {
        "id": case.id,
        "plan": case.plan.id,
        "words": words.case(case),
        "check": case.check,
        "axes": _settings(case),
        "kind": words.kind(case),
        "verdict": case.verdict,
        "diagnosis": case.diagnosis,
        "values": {**figures, "peak": words.peak(case), "seconds": words.seconds(case)},
        "units": {name: m.unit for name, m in case.measurements.items()},
        "higher": [name for name, m in case.measurements.items() if m.better == "higher"],
        "exact": [name for name, m in case.measurements.items() if m.exact],
        "emulated": words.emulated(case),
    }


def _models(
    summaries: dict[str, list[standings.PlanSummary]], choices: dict[str, list[standings.Choice]]
) -> list[dict[str, Any]]:
    """Of each model, as they stand in the page, its plans, and which of them (by place) to take under each budget."""
    return [
        {
            "plans": [_plan(plan) for plan in found],
            "choices": [
                {"budget": choice.budget, "recommended": found.index(choice.recommended),
                 "closest": found.index(choice.closest)}
                for choice in choices[model]
            ],
        }
        for model, found in summaries.items()
    ]  # fmt: skip


def _plan(plan: standings.PlanSummary) -> dict[str, Any]:
    return {
        "words": words.plan(plan.plan),
        "figures": words.figures(plan),
        "case": plan.case,
        "passes": plan.passes,
        "everywhere": plan.everywhere,
        "passed": len(plan.passed),
        "missing": len(plan.missing),
        "peak": plan.peak_bytes,
        "saved": plan.saved,
        "seconds": plan.seconds,
        "rmse": plan.rmse,
        "emulated": plan.emulated,
    }


def _yardsticks(run: RunResult) -> dict[str, str | None]:
    models = dict.fromkeys(case.model for case in run.cases)
    return {model: standings.yardstick([case for case in run.cases if case.model == model]) for model in models}


def _kinds() -> dict[str, dict[str, str]]:
    return {kind: {"title": words.TITLES[kind], "mark": words.MARKS[kind]} for kind in words.KINDS}


def _data(node: Any) -> Markup:
    """JSON that cannot end its script element or open a comment, whatever its strings say."""
    text = json.dumps(msgspec.to_builtins(node), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _policy(style: str, *scripts: str) -> str:
    """A content security policy under which only these very scripts run and nothing is fetched."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    allowed = " ".join(map(digest, scripts))
    rules = ("default-src 'none'", f"script-src {allowed}", f"style-src {digest(style)}", "img-src data:",
             "base-uri 'none'", "form-action 'none'")  # fmt: skip
    return "; ".join(rules)


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


def _asset(name: str) -> str:
    return (resources.files("fidelity.report") / "templates" / name).read_text(encoding="utf-8")


def _vendor(name: str) -> str:
    """A vendored script without its source-map comment, which would name a file that is not there."""
    text = (resources.files("fidelity.report") / "vendor" / name).read_text(encoding="utf-8")
    return "\n".join(line for line in text.split("\n") if not line.startswith("//# sourceMappingURL="))
