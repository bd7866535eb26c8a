"""summary.md: the run as a pull-request comment or a CI step summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fidelity import standings
from fidelity.records import CaseResult, Effect, RunResult
from fidelity.report import evidence_markdown, files, memory, words
from fidelity.report.comment import COMMENT, bounded, code, table, text

NAME = "summary.md"
MOST_SURPRISES = 25
MOST_ROWS = 80
MOST_REASONS = 4
MOST_ALIKE = 3
EFFECTS = ("rmse", "lpips_alex", "tile_seam", "allocated_peak_bytes")


def render(run: RunResult) -> str:
    """Markdown: verdict, surprises worst first, what plans cost, what could not apply; bounded whatever it holds."""
    sections = [
        _verdict(run),
        _surprises(run),
        memory.section(run),
        _recommended(run),
        _costs(run),
        _checks(run),
        _effects(run),
        evidence_markdown.section(run),
        _inapplicable(run),
        _references(run),
        _notes(run),
        _environment(run),
    ]
    return bounded(sections, "report.html")


def write(run: RunResult, folder: Path) -> Path:
    return files.write(folder / NAME, render(run))


def _verdict(run: RunResult) -> list[str]:
    tally = words.counts(run)
    bad = run.exit_status != 0 or not words.judged(run)
    mark = "❌" if bad else "⚠️" if run.partial or any(not r.ok for r in run.reference) else "✅"
    parts = [
        f"**{tally[kind]}** {words.TITLES[kind]}"
        for kind in ("pass", "expected", "surprise", "error", "not_applicable")
    ]
    return [
        f"## {mark} {text(words.suite_name(run), 120)}: {words.headline(run)}",
        "",
        f"{' · '.join(parts)}, of {words.plural(len(run.cases), 'case')} {words.took(run)}",
    ]


def _surprises(run: RunResult) -> list[str]:
    found = [case for case in words.worst_first(run.cases) if case.surprise]
    if not found:
        return []
    lines = ["### Surprises, worst first", ""]
    told = 0
    for cases in list(_alike(found).values())[:MOST_SURPRISES]:
        more = _surprise(cases)
        if sum(map(len, [*lines, *more])) > COMMENT // 2:  # names and messages of absurd length
            break
        lines += more
        told += len(cases)
    if len(found) > told:
        lines += ["", f"… and {len(found) - told} more in `report.html`."]
    return lines


def _alike(cases: Iterable[CaseResult]) -> dict[tuple[object, ...], list[CaseResult]]:
    """Cases of one model that went wrong in the very same words, as those do that differ in offload alone."""
    groups: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        said = tuple(reason.message for reason in case.reasons)
        key = (case.model, case.verdict, case.diagnosis, case.expected, case.expected_diagnosis, said)
        groups.setdefault(key, []).append(case)
    return groups


def _surprise(cases: Sequence[CaseResult]) -> list[str]:
    case = cases[0]
    blame = f", diagnosis {text(', '.join(case.diagnosis), 120)}" if case.diagnosis else ""
    wanted = f" ({text(', '.join(case.expected_diagnosis), 120)})" if case.expected_diagnosis else ""
    mark = "emulated, " if words.emulated(case) else ""
    lines = [f"- {code(case.id)}: {mark}**{case.verdict}**{blame}; expected {case.expected}{wanted}"]
    lines += [f"  - {text(reason.message, 600)}" for reason in case.reasons[:MOST_REASONS]]
    if len(case.reasons) > MOST_REASONS:
        lines.append(f"  - … and {len(case.reasons) - MOST_REASONS} more reasons")
    if len(cases) > 1:
        others = ", ".join(code(other.id, 120) for other in cases[1 : MOST_ALIKE + 1])
        rest = f" and {len(cases) - 1 - MOST_ALIKE} more" if len(cases) - 1 > MOST_ALIKE else ""
        lines.append(f"  - just so: {others}{rest}")
    if case.reproduce:
        lines.append(f"  - again: {code(case.reproduce, 1000)}")
    return lines


def _recommended(run: RunResult) -> list[str]:
    rows = []
    for model, found in standings.summarize(run).items():
        best = next(iter(standings.recommend(found)), None)
        passing = sum(plan.passes for plan in found)
        said = "none passes everywhere with a measured peak" if best is None else text(words.plan(best.plan))
        saved = "–" if best is None or best.saved is None else f"{best.saved:.0%}"
        rows.append(
            [code(model), f"{passing} of {len(found)}", said, words.size(best.peak_bytes if best else None), saved]
        )
    if not rows:
        return []
    return [
        "### Least memory with every gate passed",
        "",
        *table(["model", "plans that pass", "plan", "peak", "saved"], rows[:20], right=2),
        *([f"… and {len(rows) - 20} more models"] if len(rows) > 20 else []),
    ]


def _checks(run: RunResult) -> list[str]:
    """Metamorphic checks by name: how many held, and the worst difference of each."""
    found = [case for case in words.judged(run) if case.check is not None]
    rows = []
    for name in dict.fromkeys(case.check for case in found if case.check is not None):
        mine = [case for case in found if case.check == name]
        held = sum(case.verdict == "pass" for case in mine)
        measured = [m for case in mine if (m := case.measurements.get("check_max_abs")) is not None]
        unit = text(measured[0].unit, 40) if measured else ""
        rows.append([code(name, 60), f"{held} of {len(mine)}", f"{_worst(mine, 'check_max_abs')} {unit}".strip()])
    if not rows:
        return []
    return [
        "### Checks that need no golden",
        "",
        *table(["check", "held", "worst difference"], rows[:MOST_ROWS], right=2),
    ]


def _effects(run: RunResult) -> list[str]:
    """What each setting does by itself, and the alarms; interactions are in the report."""
    stored = run.attribution
    if stored is None or not stored.effects:
        return []
    lines = ["### What each setting does by itself", ""]
    lines += [f"- ❌ {text(alarm)}" for alarm in stored.alarms[:10]]
    if len(stored.alarms) > 10:
        lines.append(f"- … and {len(stored.alarms) - 10} more alarms in `results.json`")
    if stored.alarms:
        lines.append("")
    rows: dict[tuple[str, str, str], dict[str, Effect]] = {}
    for each in stored.effects:
        rows.setdefault((each.model, each.axis, each.value), {})[each.measurement] = each
    shown = [
        [
            code(model, 60),
            text(axis if value == "on" else f"{axis} {value}", 80),
            *(_effect(found.get(name)) for name in EFFECTS),
        ]
        for (model, axis, value), found in rows.items()
    ]
    lines += table(["model", "setting", "RMSE", "LPIPS", "seam", "peak"], shown[:MOST_ROWS], right=4)
    if len(shown) > MOST_ROWS:
        lines += ["", f"… and {len(shown) - MOST_ROWS} more in `report.html`."]
    return [*lines, "", "Mean over all pairs that differ in this setting alone. Interactions: `report.html`."]


def _effect(effect: Effect | None) -> str:
    if effect is None:
        return "–"
    amount = abs(effect.mean)
    shown = words.size(round(amount)) if effect.unit == "bytes" else words.number(amount)
    return f"{'−' if effect.mean < 0 else '+'}{shown}"


def _costs(run: RunResult) -> list[str]:
    judged = words.against_golden(words.judged(run))
    if not judged:
        return []
    groups = _groups(judged, per_latents=True)
    per_latents = len(groups) <= MOST_ROWS
    if not per_latents:
        groups = _groups(judged, per_latents=False)
    header = ["model", "latents", "plan", "cases", "verdict", "RMSE", "LPIPS", "seam", "peak", "seconds"]
    rows = [_row(group, per_latents) for group in groups[:MOST_ROWS]]
    lines = [
        "### What each plan costs",
        "",
        "Worst of each group; slicing and offload folded"
        + ("" if per_latents else ", all latents folded")
        + ". RMSE and seam in grey levels. ᴱ: fp16 emulated, no memory of its own.",
        "",
        *table(header, rows, right=5),
    ]
    if len(groups) > MOST_ROWS:
        lines += ["", f"… and {len(groups) - MOST_ROWS} more groups in `report.html`."]
    return lines


def _groups(cases: Iterable[CaseResult], *, per_latents: bool) -> list[list[CaseResult]]:
    """Cases that differ only in slicing and offload (and latents, where those are folded too), in the run's order."""
    found: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        plan = case.plan
        options = tuple(sorted((name, str(setting)) for name, setting in plan.options.items() if setting))
        key = (case.model, case.latents if per_latents else None, plan.dtype, plan.force_upcast, str(plan.tiling),
               str(plan.temporal), options)  # fmt: skip
        found.setdefault(key, []).append(case)
    return list(found.values())


def _row(cases: list[CaseResult], per_latents: bool) -> list[str]:
    first = cases[0]
    bare = type(first.plan)(
        dtype=first.plan.dtype, force_upcast=first.plan.force_upcast, tiling=first.plan.tiling,
        temporal=first.plan.temporal, options=first.plan.options,
    )  # fmt: skip
    latents = list(dict.fromkeys(case.latents for case in cases))
    tally = {kind: sum(words.kind(case) == kind for case in cases) for kind in words.KINDS}
    verdicts = [
        f"{words.MARKS[kind]} {'' if tally[kind] == len(cases) else f'{tally[kind]} '}{words.TITLES[kind]}"
        for kind in words.KINDS
        if tally[kind]
    ]
    peaks = [peak for case in cases if (peak := words.peak(case)) is not None]
    times = [span for case in cases if (span := words.seconds(case)) is not None]
    return [
        code(first.model, 60),
        code(latents[0], 60) if per_latents else f"{len(latents)}",
        text(words.plan(bare), 120) + (" ᴱ" if any(words.emulated(case) for case in cases) else ""),
        f"{len(cases)}",
        ", ".join(verdicts),
        *(_worst(cases, name) for name in words.MAIN),
        _range([words.size(peak) for peak in (min(peaks), max(peaks))]) if peaks else "–",
        _range([f"{span:.2f}" for span in (min(times), max(times))]) if times else "–",
    ]


def _worst(cases: list[CaseResult], name: str) -> str:
    measured = [case.measurements[name] for case in cases if name in case.measurements]
    if not measured:
        return "–"
    if any(m.value is None for m in measured):
        return "not measured"
    pick = max if measured[0].better == "lower" else min
    return words.number(pick(m.value for m in measured if m.value is not None))


def _range(ends: Sequence[str]) -> str:
    return ends[0] if ends[0] == ends[-1] else f"{ends[0]} – {ends[-1]}"


def _inapplicable(run: RunResult) -> list[str]:
    reasons, excluded = words.not_applicable(run), words.excluded(run)
    if not reasons and not excluded:
        return []
    lines = ["<details><summary>Not applicable and excluded, by reason</summary>", ""]
    lines += [f"- {count} × {text(reason)}" for reason, count in reasons[:20]]
    if len(reasons) > 20:
        lines.append(f"- … and {len(reasons) - 20} more reasons")
    lines += [f"- {count} × excluded by the suite: {text(reason)}" for reason, count in excluded[:20]]
    return [*lines, "", "</details>"]


def _references(run: RunResult) -> list[str]:
    wrong = [reference for reference in run.reference if not reference.ok]
    new = [reference for reference in run.reference if reference.recorded]
    foreign = sum(not reference.same_environment for reference in run.reference)
    lines = []
    if run.reference and not wrong:
        lines.append(
            f"The reference decode agrees with its golden for all {len(run.reference)} model and latents pairs."
        )
    for item in wrong[:20]:
        why = (
            text(item.reason) if item.reason else f"drift {words.number(item.drift)} grey levels, limit {item.limit:g}"
        )
        lines.append(f"- ❌ reference {code(f'{item.model}/{item.latents}')}: {why}")
    if new:
        lines.append(f"- {words.plural(len(new), 'golden')} recorded by this very run: nothing vouches for them yet.")
    if foreign:
        lines.append(
            f"- {foreign} of {len(run.reference)} goldens come from another environment class: "
            "approved values are shown, not gated."
        )
    return ["### Reference", "", *lines] if lines else []


def _notes(run: RunResult) -> list[str]:
    emulated = sum(words.emulated(case) for case in words.judged(run))
    notes = words.notes(run)
    if emulated:
        cases = words.plural(emulated, "case")
        notes.append(f"{cases} ran fp16 emulated (each operator in fp32, its result rounded): no memory of their own.")
    lines = [f"- {text(note, 600)}" for note in notes[:20]]
    if len(notes) > 20:
        lines.append(f"- … and {len(notes) - 20} more notes")
    return ["### Notes", "", *lines] if lines else []


def _environment(run: RunResult) -> list[str]:
    pairs = words.facts(run.environment)
    if not pairs:
        return []
    shown = [f"{text(name, 60)} {code(value, 160)}" for name, value in pairs[:40]]
    return ["<details><summary>Environment</summary>", "", "<br>\n".join(shown), "", "</details>"]
