"""python -m tests.faults: run the catalogue and the healthy matrix, print the score, fail if a target is missed."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from fidelity.environment import make_deterministic
from tests.faults.bench import (
    HEALTHY_LATENTS,
    HEALTHY_PLANS,
    HEALTHY_VIDEOS,
    QUICK,
    QUICK_VIDEOS,
    Bench,
    Outcome,
    false_alarms,
)  # fmt: skip
from tests.faults.catalogue import FAULTS, NOT_APPLICABLE
from tests.faults.record import Fault, Variant

NAMED_TARGET = 0.9


def sample() -> list[Variant]:
    """One variant a number of FAULTS.md, and one of its further kinds: the first that calibration may use."""
    firsts: dict[str, Fault] = {}
    for fault in FAULTS:
        firsts.setdefault(fault.number, fault)
    return [
        next((each for each in fault.variants if not each.scoring_only), fault.variants[0]) for fault in firsts.values()
    ]


def score(outcomes: Sequence[Outcome]) -> tuple[int, int, int, int]:
    """Variants that can be caught, caught, named; and hidden ones."""
    seen = [outcome for outcome in outcomes if not outcome.hidden]
    return len(seen), sum(o.caught for o in seen), sum(o.named for o in seen), len(outcomes) - len(seen)


def meets(outcomes: Sequence[Outcome], share: float = NAMED_TARGET) -> bool:
    """All caught, and this share of them named."""
    count, caught, named, _ = score(outcomes)
    return caught == count and named >= share * count


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a kind, and below it what was missed, misnamed or hidden."""
    lines = [f"{'nr':>4} {'fault':<42} {'variants':>8} {'caught':>6} {'named':>6}  named as"]
    for fault in FAULTS:
        mine = [outcome for outcome in outcomes if outcome.variant.fault is fault]
        if not mine:
            continue
        caught, named = sum(o.caught for o in mine), sum(o.named for o in mine)
        counts = f"{len(mine):>8} {caught:>6} {named:>6}"
        lines.append(f"{fault.number:>4} {fault.name:<42} {counts}  {', '.join(fault.named)}")
        lines += [_missed(outcome) for outcome in mine if not outcome.named]
    lines += [f"{each.number:>4} {each.name:<42} not_applicable: {each.reason}" for each in NOT_APPLICABLE]
    return "\n".join(lines)


def _missed(outcome: Outcome) -> str:
    what = outcome.variant.name.split("/", 1)[1]
    if outcome.hidden:
        return f"       hidden    {what}: {outcome.hidden}"
    if not outcome.caught:
        return f"       MISSED    {what}"
    named = ", ".join(outcome.result.diagnosis) or "nothing"
    return f"       misnamed  {what}: {named} (by the {outcome.by})"


def scores(outcomes: Sequence[Outcome]) -> str:
    lines = []
    for words, kept in (("tuning set", False), ("kept for scoring", True)):
        mine = [outcome for outcome in outcomes if outcome.variant.scoring_only is kept]
        if mine:
            count, caught, named, hidden = score(mine)
            beside = f", {hidden} below the detection limit" if hidden else ""
            share = f"{named / max(1, count):.1%}"
            lines.append(f"{words}: {count} variants, caught {caught}, named {named} ({share}){beside}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one variant a kind, and a small healthy matrix")
    parser.add_argument("--fault", default="*", metavar="GLOB", help="only variants of this name")
    parser.add_argument("--healthy", action="store_true", help="only the healthy matrix")
    parser.add_argument("--verbose", action="store_true", help="say each judgement and its reasons")
    chosen = parser.parse_args(arguments)
    make_deterministic(1)

    def say(line: str) -> None:
        if chosen.verbose:
            print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="fidelity-faults-") as folder:
        return _score(Bench(Path(folder)), chosen, say)


def _score(bench: Bench, chosen: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Judge the chosen variants and the healthy matrix, print the table; 1 if a target is missed."""
    variants = sample() if chosen.quick else [each for fault in FAULTS for each in fault.variants]
    variants = [] if chosen.healthy else [each for each in variants if fnmatchcase(each.name, chosen.fault)]
    if not variants and not chosen.healthy:
        print(f"--fault {chosen.fault!r} matches no variant; the faults: {', '.join(each.name for each in FAULTS)}",
              file=sys.stderr)  # fmt: skip
        return 2
    outcomes = []
    for variant in variants:
        outcome = bench.judge(variant)
        outcomes.append(outcome)
        mark = "named " if outcome.named else "caught" if outcome.caught else "MISSED"
        say(f"{mark} {variant.name}: {', '.join(outcome.result.diagnosis)}")
        if not outcome.named:
            for reason in outcome.result.reasons:
                say(f"         {reason.name}: {reason.message}")
    whole = dict.fromkeys(HEALTHY_LATENTS, HEALTHY_PLANS)
    judged, alarms = 0, []
    if chosen.healthy or chosen.fault == "*":
        pictures, videos = (QUICK, QUICK_VIDEOS) if chosen.quick else (whole, HEALTHY_VIDEOS)
        judged, alarms = false_alarms(bench, pictures, videos, say)

    print(table(outcomes))
    print(scores(outcomes))
    print(f"healthy matrix: {judged} honest decodes, {len(alarms)} false alarms")
    for alarm in alarms:
        print(f"       alarm     {alarm.id}: " + "; ".join(reason.message for reason in alarm.reasons))
    # the sample has no room: each of its variants is named today, so that one that is not is a score that fell
    return 0 if meets(outcomes, 1.0 if chosen.quick else NAMED_TARGET) and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
