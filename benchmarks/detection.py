"""The smallest seam that is caught, beside the gates that people use, and how often a seamless decode alarms.

    nice python benchmarks/detection.py [--only pictures|videos] [--clean 400] [--scored 28] [--write]

Calibrates on clean decodes (bf16 and emulated fp16 noise of the reference model), then injects seams of rising
amplitude into decodes that calibration did not see. No alarm in 381 clean decodes is what proves that at most 1 % do
(Wilson's upper bound). `--write` renews the tables in docs/design/seam-detectors.md with their plot, and those in
docs/design/temporal-detectors.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from decodes import CONTENTS, Decode, decodes, films  # noqa: E402
from detection_page import plot, render, wilson, write  # noqa: E402

from fidelity.detectors.seams import FAMILY  # noqa: E402
from fidelity.records import DecodePlan, TileGrid  # noqa: E402
from fidelity.registry import DETECTORS, METRICS, load_plugins  # noqa: E402
from tests.doctored import pictures as doctored  # noqa: E402

ALARM = 0.3
"""Grey levels: a value above this is an alarm."""
LADDER = tuple(round(0.1 * 1.25**step, 3) for step in range(26))
COARSE = tuple(round(0.5 * 1.25**step, 2) for step in range(29))
NOISES = ("none", "fp16", "bf16")
CALIBRATION, SCORING = 1, 2
"""Seeds: what is scored was not calibrated on."""

Injection = Callable[[torch.Tensor, TileGrid, float], torch.Tensor]


def middle(tiles: TileGrid) -> tuple[int, int]:
    return min(1, len(tiles.rows.starts) - 1), min(1, len(tiles.cols.starts) - 1)


def gain(picture: torch.Tensor, tiles: TileGrid, amplitude: float) -> torch.Tensor:
    """A gain of one tile that moves one standard deviation of its tones by `amplitude` levels."""
    weight = doctored.tile_weight(tiles, *middle(tiles))
    spread = float(picture[..., weight > 0.5].std()) * 127.5
    return doctored.gain(picture, tiles, 1 + amplitude / max(spread, 1.0), middle(tiles))


def wrong_tile(picture: torch.Tensor, tiles: TileGrid, amplitude: float) -> torch.Tensor:
    """One tile with a share of another part of the picture, `amplitude` levels RMS in the tile."""
    weight = doctored.tile_weight(tiles, *middle(tiles))
    other = picture.roll((picture.shape[-2] // 2, picture.shape[-1] // 2), (-2, -1)).flip(-1) - picture
    size = float(other[..., weight > 0.5].square().mean().sqrt()) * 127.5
    return picture + other * weight * (amplitude / max(size, 1.0))


INJECTIONS: dict[str, tuple[float, Injection]] = {
    "1-px line at a border": (0.0, lambda x, t, a: doctored.line(x, a, t.cols.edges[0])),
    "hard tile offset": (0.0, lambda x, t, a: doctored.offset(x, t, a, middle(t))),
    "offset blended over 8 px": (1 / 16, lambda x, t, a: doctored.offset(x, t, a, middle(t))),
    "offset blended over 32 px": (0.25, lambda x, t, a: doctored.offset(x, t, a, middle(t))),
    "offset blended over 64 px": (0.5, lambda x, t, a: doctored.offset(x, t, a, middle(t))),
    "gain of one tile": (0.25, gain),
    "hue offset of one tile": (0.0, lambda x, t, a: doctored.hue(x, t, a, middle(t))),
    "one wrong tile": (0.25, wrong_tile),
    "one corner": (0.25, doctored.corner),
}


def alarms(candidate: torch.Tensor, golden: torch.Tensor, overlap: float) -> dict[str, float]:
    """The family's values on the grid of that overlap (not measured: infinite)."""
    tiles = doctored.grid(overlap, golden.shape[-2:])
    found = {name: doctored.measure(name, candidate, golden, tiles) for name in FAMILY}
    return {name: each.value for name, each in found.items() if each.value is not None}


# ---------------------------------------------------------------- the gates that people use


def measured(name: str, candidate: torch.Tensor, golden: torch.Tensor) -> float:
    found = METRICS.get(name)(candidate, golden, plan=DecodePlan(), receipts={}, data_range=(-1.0, 1.0))
    return math.inf if found.value is None else found.value


def pixelmatch(candidate: torch.Tensor, golden: torch.Tensor) -> bool:
    """Whether any pixel of the 8-bit pictures differs by more than pixelmatch's default threshold of 0.1 (in YIQ)."""
    own, other = (((side.clamp(-1, 1) + 1) * 127.5).round() for side in (candidate, golden))
    red, green, blue = (own - other).unbind(1)
    y = 0.29889531 * red + 0.58662247 * green + 0.11448223 * blue
    i = 0.59597799 * red - 0.27417610 * green - 0.32180189 * blue
    q = 0.21147017 * red - 0.52261711 * green + 0.31114694 * blue
    return bool((0.5053 * y**2 + 0.299 * i**2 + 0.1957 * q**2 > 35215 * 0.1**2).any())


GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], bool]] = {
    "PSNR ≥ 30": lambda c, g: measured("psnr", c, g) < 30,
    "SSIM ≥ 0.97": lambda c, g: measured("ssim", c, g) < 0.97,
    "LPIPS ≤ 0.05": lambda c, g: measured("lpips_alex", c, g) > 0.05,
    "pixelmatch 0.1": pixelmatch,
    "max-abs ≤ 0.5 of 2": lambda c, g: measured("max_abs", c, g) > 63.75,
}


# ---------------------------------------------------------------- the measurement


def smallest(caught: Callable[[float], bool], ladder: Sequence[float]) -> float:
    """The first rung that is caught, taking it that higher ones are; infinite if the last is not."""
    low, high = 0, len(ladder)
    while low < high:
        half = (low + high) // 2
        if caught(ladder[half]):
            high = half
        else:
            low = half + 1
    return ladder[low] if low < len(ladder) else math.inf


def at_95(amplitudes: Sequence[float]) -> float:
    """The amplitude at which 95 % are caught; NaN of nothing."""
    known = sorted(amplitude for amplitude in amplitudes if not math.isnan(amplitude))
    return known[math.ceil(0.95 * len(known)) - 1] if known else math.nan


Values = Callable[[Decode], Iterable[tuple[str, str, bool]]]
"""Of a clean decode: detector, grid, and whether it alarms."""


def calibrate(clean: Iterable[Decode], values: Values) -> list[dict[str, object]]:
    """False alarms by detector and grid."""
    rows: dict[tuple[str, str], list[bool]] = {}
    for decode in clean:
        for name, grid, alarm in values(decode):
            rows.setdefault((name, grid), []).append(alarm)
    return [
        {
            "name": name,
            "overlap": grid,
            "count": len(hits),
            "alarms": sum(hits),
            "interval": wilson(sum(hits), len(hits)),
        }
        for (name, grid), hits in rows.items()
    ]


def pictures(decode: Decode) -> Iterable[tuple[str, str, bool]]:
    """The family on two grids, and the blind detector."""
    for overlap in (0.0, 0.25):
        values = alarms(decode.candidate, decode.golden, overlap)
        for name, value in values.items():
            yield name, f"{overlap:g}", value > ALARM
        yield "any of the family", f"{overlap:g}", max(values.values()) > ALARM
    blind = DETECTORS.get("periodic")(
        decode.candidate, decode.golden, plan=DecodePlan(), receipts={}, data_range=(-1.0, 1.0)
    )
    yield "periodic", "unknown", (blind.value or 0) > ALARM


@dataclass(frozen=True)
class Injury:
    """One kind of injection: `inject(picture, amplitude)`, and whether the family alarms at `candidate`, `golden`."""

    inject: Callable[[torch.Tensor, float], torch.Tensor]
    caught: Callable[[torch.Tensor, torch.Tensor], bool]


def injuries(decode: Decode) -> dict[str, Injury]:
    """Those of pictures of this size."""
    size = decode.golden.shape[-2:]
    return {kind: _injury(overlap, inject, size) for kind, (overlap, inject) in INJECTIONS.items()}


def _injury(overlap: float, inject: Injection, size: Sequence[int]) -> Injury:
    tiles = doctored.grid(overlap, (size[0], size[1]))
    return Injury(
        lambda picture, amplitude: inject(picture, tiles, amplitude),
        lambda candidate, golden: max(alarms(candidate, golden, overlap).values()) > ALARM,
    )


Injuries = Callable[[Decode], dict[str, Injury]]


def caught_at(injury: Injury, decode: Decode, noise: str) -> float:
    """The smallest amplitude at which some detector of the family alarms; NaN without that noise."""
    if noise not in ("none", decode.noise):
        return math.nan
    base = decode.golden if noise == "none" else decode.candidate
    return smallest(lambda amplitude: injury.caught(injury.inject(base, amplitude), decode.golden), LADDER)


def gated_at(injury: Injury, decode: Decode, gate: Callable[[torch.Tensor, torch.Tensor], bool]) -> float:
    """The smallest amplitude, without noise, at which a usual gate fails."""
    return smallest(lambda amplitude: gate(injury.inject(decode.golden, amplitude), decode.golden), COARSE)


def score(scored: Sequence[Decode], of: Injuries) -> list[dict[str, object]]:
    """The smallest amplitude caught at 95 %, by injection, under each noise and each kind of content."""
    table: list[dict[str, object]] = []
    each = [(decode, of(decode)) for decode in scored]
    for kind in of(scored[0]):
        rungs = {noise: [caught_at(injuries[kind], decode, noise) for decode, injuries in each] for noise in NOISES}
        row: dict[str, object] = {"kind": kind, **{noise: at_95(found) for noise, found in rungs.items()}}
        for content in CONTENTS:
            row[content] = at_95([rung for rung, decode in zip(rungs["bf16"], scored) if decode.content == content])
        for name, gate in GATES.items():
            row[name] = at_95([gated_at(injuries[kind], decode, gate) for decode, injuries in each[:8]])
        print(render([row], head=not table), end="", flush=True)
        table.append(row)
    return table


def bench(clean: Iterable[Decode], values: Values, scored: Sequence[Decode], of: Injuries) -> tuple[list, list]:
    """False alarms, and the smallest injuries that are caught; printed as they come."""
    start = time.perf_counter()
    rows = calibrate(clean, values)
    for row in rows:
        low, high = row["interval"]  # type: ignore[misc]
        print(f"{row['name']:18} overlap {row['overlap']:7} {row['alarms']:3} of {row['count']} alarm "
              f"(95 % interval {low:.2%} to {high:.2%})", flush=True)  # fmt: skip
    table = score(scored, of)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    return rows, table


SAID = (
    "An alarm is a value above {alarm}. Smallest amplitude, {unit}, that is caught in 95 % of {scored} decodes that "
    "calibration did not see (gates: of 8, without noise):"
)


def main() -> None:
    import detection_videos as videos

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("pictures", "videos"))
    parser.add_argument("--clean", type=int, default=400)
    parser.add_argument("--scored", type=int, default=28)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    load_plugins()
    pages = ROOT / "docs" / "design"
    if asked.only != "videos":
        clean, table = bench(
            decodes(asked.clean, CALIBRATION), pictures, list(decodes(asked.scored, SCORING)), injuries
        )
        if asked.write:
            said = SAID.format(alarm=f"{ALARM} grey levels", unit="in grey levels", scored=asked.scored)
            write(pages / "seam-detectors.md", clean, table, said, "![smallest amplitudes](detection.svg)\n")
            (pages / "detection.svg").write_text(plot(table))
    if asked.only != "pictures":
        clean, table = bench(
            films(asked.clean, CALIBRATION), videos.clean, list(films(asked.scored, SCORING)), videos.injuries
        )
        if asked.write:
            said = SAID.format(alarm=videos.ALARM_SAID, unit="in grey levels, ghosts in %", scored=asked.scored)
            write(pages / "temporal-detectors.md", clean, table, said, "")


if __name__ == "__main__":
    main()
