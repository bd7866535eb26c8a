"""report.html: one self-contained file that people decide from; it works from disk, without a network.

Python prepares data and the parts that must be readable without scripts; `templates/*.js` draw the rest in the browser.
Each picture is embedded once, by the digest of its bytes, and each case's details are parsed when it is opened.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from fidelity.records import CaseResult, RunResult
from fidelity.report import files, plans, words

NAME = "report.html"
IMAGE_BUDGET = 20 * 2**20
"""Characters of base64 that one report embeds; what is beyond is named in its place, passing cases first."""
MOST_SURPRISES = 50
SCRIPTS = ("words.js", "chart.js", "table.js", "decision.js", "viewer.js", "detail.js", "effects.js", "main.js")
PNG = b"\x89PNG\r\n\x1a\n"


def render(run: RunResult, folder: Path) -> str:
    """The page for `run`, with the pictures found in `folder`. A picture that is not there is named in its place."""
    album = Album(folder)
    ordered = words.worst_first(run.cases)
    details = [_detail(case, album) for case in ordered]
    style = _asset("report.css")
    vendor = _vendor("chart.umd.min.js")
    app = "\n".join(['"use strict";', "(() => {", *(_asset(name) for name in SCRIPTS), "})();"])
    summaries = plans.summarize(run)
    page = _environment().get_template("report.html.j2").render(
        run=run,
        words=words,
        counts=words.counts(run),
        total=len(run.cases),
        references=run.reference,
        surprises=[case for case in ordered if case.surprise],
        most_surprises=MOST_SURPRISES,
        policy=_policy(style, vendor, app),
        style=Markup(style),
        vendor=Markup(vendor),
        app=Markup(app),
        data=_data({"cases": [_row(case) for case in ordered], "plans": _plans(summaries), "kinds": _kinds(),
                    "main": words.MAIN, "yardsticks": _yardsticks(run), "axes": _axes(run),
                    "attribution": run.attribution}),
        details=[_data(detail) for detail in details],
        pictures=album.embedded,
        summaries=summaries,
        recommended={model: next(iter(plans.recommend(found)), None) for model, found in summaries.items()},
    )  # fmt: skip
    return page


def write(run: RunResult, folder: Path) -> Path:
    return files.write(folder / NAME, render(run, folder))


class Album:
    """The run's pictures, each embedded once, until the budget is spent."""

    def __init__(self, folder: Path, budget: int | None = None):
        self.folder, self.left = folder.resolve(), IMAGE_BUDGET if budget is None else budget
        self.embedded: dict[str, str] = {}
        """Base64 of each distinct picture as lossless WebP, a fifth smaller than its PNG, by digest."""
        self._known: dict[str, dict[str, str]] = {}

    def add(self, name: str) -> dict[str, str]:
        """`{"digest": …}` of an embedded picture, or `{"missing": why}`; `name` is relative to the run's folder."""
        if name not in self._known:
            self._known[name] = self._load(name)
        return self._known[name]

    def _load(self, name: str) -> dict[str, str]:
        try:
            path = (self.folder / name).resolve()
            if not path.is_relative_to(self.folder):
                return {"missing": f"{name} lies outside the run's folder and was not embedded"}
            data = path.read_bytes()
        except (OSError, ValueError) as error:
            return {"missing": f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"}
        if not data.startswith(PNG):
            return {"missing": f"{name} is not a PNG"}
        digest = hashlib.blake2b(data, digest_size=12).hexdigest()
        if digest not in self.embedded:
            try:
                text = base64.b64encode(_webp(data)).decode()
            except (OSError, SyntaxError, ValueError) as error:  # what Pillow says of a damaged file
                return {"missing": f"{name} is damaged: {error}"}
            if len(text) > self.left:
                return {"missing": f"{name} was left out to keep this file small; it lies beside the report"}
            self.left -= len(text)
            self.embedded[digest] = text
        return {"digest": digest}


def _webp(png: bytes) -> bytes:
    from PIL import Image

    packed = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        picture.save(packed, "WEBP", lossless=True, method=2, quality=20)
    return packed.getvalue()


def _detail(case: CaseResult, album: Album) -> dict[str, Any]:
    """Everything about a case; of the pictures, the difference only where it cannot be computed from the other two."""
    found = {name: [album.add(path) for path in paths] for name, paths in case.images.items() if name != "difference"}
    whole = all(found.get(name) and all("digest" in ref for ref in found[name]) for name in ("golden", "candidate"))
    if not whole and "difference" in case.images:
        found["difference"] = [album.add(path) for path in case.images["difference"]]
    built = msgspec.to_builtins(case)
    return {**built, "images": found, "limit_words": {name: words.limit(bound) for name, bound in case.limits.items()}}


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


def _plans(summaries: dict[str, list[plans.PlanSummary]]) -> dict[str, list[dict[str, Any]]]:
    return {
        model: [
            {
                "words": words.plan(plan.plan),
                "plan": plan.plan.id,
                "case": plan.case,
                "passes": plan.passes,
                "everywhere": plan.everywhere,
                "passed": plan.passed,
                "missing": plan.missing,
                "peak": plan.peak_bytes,
                "saved": plan.saved,
                "seconds": plan.seconds,
                "rmse": plan.rmse,
                "emulated": plan.emulated,
            }
            for plan in found
        ]
        for model, found in summaries.items()
    }


def _yardsticks(run: RunResult) -> dict[str, str | None]:
    models = dict.fromkeys(case.model for case in run.cases)
    return {model: plans.yardstick([case for case in run.cases if case.model == model]) for model in models}


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
