"""Memory as every rendering says it, and the compact form in which the page holds it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec

from fidelity.records import CaseResult, DecodePlan, Holding, MemoryTrace, RunResult, Stage
from fidelity.report import words
from fidelity.report.comment import code, text
from fidelity.simulation import law

LEVELS = 36**2 - 1
"""What was alive over time is written with two digits of base 36 a share, the most alive being the largest: a picture
needs no more, and the exact figures stand in results.json."""
MOST_RAN_OUT = 10
MOST_BARS = 96
LEAST_SHARE = 1000
"""What was less than this part of the peak is counted, not listed."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def exhausted(case: CaseResult) -> str | None:
    """Where memory ran out, what there was and what fits: the line that is its reason; None where it did not."""
    found = case.memory.exhausted if case.memory else None
    if found is None:
        return None
    return next((reason.message for reason in case.reasons if reason.name == "memory"), found.message)


def section(run: RunResult) -> list[str]:
    """Of summary.md: where memory ran out as the suite expects; surprises say so themselves."""
    found = [(case, said) for case in run.cases if not case.surprise and (said := exhausted(case)) is not None]
    if not found:
        return []
    lines = [f"- {code(case.id)}: {text(said, 600)}" for case, said in found[:MOST_RAN_OUT]]
    rest = [f"- … and {len(found) - MOST_RAN_OUT} more in `report.html`"] if len(found) > MOST_RAN_OUT else []
    return ["### Out of memory, as expected", "", *lines, *rest]


def laws(run: RunResult) -> dict[str, str]:
    """How the peak of each model's plain fp32 decode grows, where it was measured at two sizes of latents or more."""
    peaks: dict[str, dict[tuple[int, int], int]] = {}
    for case in words.judged(run):
        peak, shape = words.peak(case), _latents(case)
        if case.plan == DecodePlan() and case.check is None and peak is not None and shape:
            rows, width = math.prod((shape[0], *shape[2:-1])), shape[-1]  # of all items and frames
            peaks.setdefault(case.model, {})[rows, width] = peak
    return {model: _law(found) for model, found in peaks.items() if len({math.prod(size) for size in found}) > 1}


def _law(peaks: dict[tuple[int, int], int]) -> str:
    found, count = law.fit(peaks), len({math.prod(size) for size in peaks})
    each = words.size(round(found.bytes_per_pixel))
    line = f"{words.size(found.constant_bytes)} and {each} for each latent pixel of a batch"
    return f"A plain fp32 decode peaks at {line}, by {count} sizes (off by {found.largest_error:.1%} at most)."


def _latents(case: CaseResult) -> list[int]:
    """The latents' shape, where one call of the decoder took them whole."""
    seen = case.receipts.get("decoder", {})
    shapes = seen.get("shapes") or []
    return shapes[0] if seen.get("calls") == 1 and len(shapes) == 1 else []


class Compact:
    """Traces as the page holds them. What a server does after the decode is the same for all cases of one sample, so
    that each such list is kept once, in `after`."""

    def __init__(self) -> None:
        self.after: list[Any] = []
        self._known: dict[bytes, int] = {}

    def of(self, trace: MemoryTrace | None) -> dict[str, Any] | None:
        """The trace's built form: its timeline, layers and resident weights as digits of `most`, its stages after the
        decode as a place in `after`."""
        if trace is None:
            return None
        built = msgspec.to_builtins(trace)
        del built["kept"]  # it is drawn in the timeline
        built["stages"] = [_stage(stage) for stage in trace.stages if not stage.is_after]
        after = [stage for stage in trace.stages if stage.is_after]
        if after:
            why = [reason for stage in after for reason in (stage.reason or "").split("; ") if reason]
            steps = [_after(stage, trace) for stage in after]
            built["after"] = self._keep({"steps": steps, "why": list(dict.fromkeys(why))})
        most = max(trace.timeline, default=0)
        built |= {"most": most, "timeline": _digits(trace.timeline, most)}
        built["layers"] = {kind: _digits(held, most) for kind, held in trace.layers.items() if any(held)}
        if trace.peak is not None:
            built["peak"] |= _held(trace.peak.held, trace.peak.bytes)
        if trace.exhausted is not None:
            built["exhausted"] |= _held(trace.exhausted.held, trace.exhausted.alive_bytes or 0)
        if trace.transfers is not None:
            built["transfers"]["resident"] = _digits(trace.transfers.resident, most)
        return built

    def _keep(self, after: dict[str, Any]) -> int:
        key = msgspec.json.encode(after)
        if key not in self._known:
            self._known[key] = len(self.after)
            self.after.append(after)
        return self._known[key]


def _held(held: tuple[Holding, ...], alive: int) -> dict[str, Any]:
    """Those that count, and how many do not."""
    shown = [one for one in held if one.bytes * LEAST_SHARE >= alive]
    return {"held": msgspec.to_builtins(shown), "smaller": len(held) - len(shown)}


def _stage(stage: Stage) -> dict[str, Any]:
    """As stored, but with at most `MOST_BARS` bars for its calls, each the largest of the calls that it stands for."""
    count = len(stage.each)
    borders = sorted({count * bar // MOST_BARS for bar in range(MOST_BARS + 1)})
    each = [max(stage.each[first:last]) for first, last in pairwise(borders)]
    return msgspec.to_builtins(msgspec.structs.replace(stage, each=tuple(each)))


def _after(stage: Stage, trace: MemoryTrace) -> dict[str, Any]:
    """What the page shows of such a stage; without what differs from offload to offload."""
    copies = sum(copy.bytes for copy in stage.held)
    rise, by = stage.resident_bytes, "resident"
    if stage.peak_bytes is not None:
        rise, by = max(0, stage.peak_bytes - (trace.weights_bytes or 0) - copies), "torch"
    elif rise is None and stage.traced_bytes is not None:  # Pillow's own pixels are in its result alone
        rise, by = max(stage.traced_bytes, stage.result_bytes or 0), "numpy and Python, at least"
    about = {
        "part": stage.part, "calls": stage.calls, "copies": copies, "rise": rise,
        "by": by if rise is not None else None,
        "leaves": stage.result_bytes, "seconds": None if stage.seconds is None else round(stage.seconds, 4),
        "held": [f"{copy.what} {words.size(copy.bytes)}" for copy in stage.held],
        "reason": stage.reason if rise is None else None,
    }  # fmt: skip
    return {name: value for name, value in about.items() if value is not None}


def _digits(held: tuple[int, ...], most: int) -> str:
    levels = (round(LEVELS * each / most) if most else 0 for each in held)
    return "".join(_DIGITS[level // 36] + _DIGITS[level % 36] for level in levels)
