"""The temporal family in benchmarks/detection.py: what is injected into films, and when it alarms."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from decodes import Decode
from detection import Injury

from fidelity.records import TileAxis
from tests.doctored import videos as doctored

ALARMS = {"frame_step": 0.5, "frame_flicker": 1.0, "frame_ghost": 0.02}
"""Grey levels, and a share: a value above it is an alarm. Near black bf16 rounds to half a level, and flat dark frames
go up and down by that together: 13 of 400 clean decodes flicker by more than 0.3, by 0.9 at most."""
ALARM_SAID = "half a grey level, of `frame_flicker` one, of `frame_ghost` a share of 2 %"
HARD, BLENDED = doctored.axis(), doctored.axis(4)


def alarms(candidate: torch.Tensor, golden: torch.Tensor, chunks: TileAxis) -> dict[str, bool]:
    """Who alarms with chunks that lie so. What was not measured (a ghost in a still film) alarms nobody."""
    found = {name: doctored.measure(name, candidate, golden, chunks).value for name in ALARMS}
    return {name: value > ALARMS[name] for name, value in found.items() if value is not None}


def clean(decode: Decode) -> Iterator[tuple[str, str, bool]]:
    """The family with hard joints and with blended ones."""
    for words, chunks in (("hard", HARD), ("4 frames", BLENDED)):
        found = alarms(decode.candidate, decode.golden, chunks)
        for name, alarm in found.items():
            if name == "frame_step" or words == "hard":
                yield name, words if name == "frame_step" else "unknown", alarm
        yield "any of the family", words, any(found.values())


def rough(film: torch.Tensor, amplitude: float) -> torch.Tensor:
    return doctored.no_context(film, HARD, amplitude)


def injuries(decode: Decode) -> dict[str, Injury]:
    """Those of films; a ghost's amplitude is its share in %, of the golden's frames."""

    def family(chunks: TileAxis):
        return lambda candidate, golden: any(alarms(candidate, golden, chunks).values())

    hard, blended, golden = family(HARD), family(BLENDED), decode.golden
    return {
        "jump of one chunk": Injury(lambda film, a: doctored.jump(film, HARD, a), hard),
        "jump blended over 4 frames": Injury(lambda film, a: doctored.jump(film, BLENDED, a), blended),
        "rough first frames of chunks": Injury(rough, hard),
        "brightness at every 8th frame": Injury(doctored.beat, hard),
        "flicker in the last 4 frames": Injury(doctored.flicker, hard),
        "ghost of the frame before, %": Injury(lambda film, a: doctored.ghost(film, a / 100, of=golden), hard),
        "ghost of 3 frames later, %": Injury(lambda film, a: doctored.ghost(film, a / 100, 3, of=golden), hard),
    }
