"""Judges injected faults and honest decodes as a run would: same evaluator, same limits, goldens made beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import torch

from fidelity import registry
from fidelity import suite as suites
from fidelity.evaluator import Evaluator
from fidelity.latents import digest
from fidelity.optimizations import inapplicable
from fidelity.records import (
    Case,
    CaseResult,
    DecodePlan,
    Geometry,
    Latents,
    LatentSource,
    Limit,
    Model,
    Reference,
    Tiling,
)
from tests.faults.record import Variant

SUITES = Path(__file__).resolve().parents[2] / "suites"
VIDEOS = {"reference-video": "photo-pan", "small-wan": "temporal-step"}
"""Models of videos, and the latents of the video suite whose limits hold for them."""
Crop = tuple[str, int, int, int, int]
"""File of skimage.data, top, left, height, width in pixels."""


def photograph(name: str, *crops: Crop) -> LatentSource:
    """Encoded crops of skimage's photographs."""

    def shape(geometry: Geometry) -> tuple[int, ...]:
        _, _, _, height, width = crops[0]
        return len(crops), geometry.latent_channels, height // geometry.spatial, width // geometry.spatial

    def make(model: Model, module: torch.nn.Module) -> Latents:
        from PIL import Image

        found = []
        for file, top, left, height, width in crops:
            picture = Image.open(_folder() / file).convert("RGB").crop((left, top, left + width, top + height))
            pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
            with torch.no_grad():
                found.append(model.family.encode(module, pixels))
        made = torch.cat(found).contiguous()
        return Latents(name, made, digest(made))

    return LatentSource(name, f"{len(crops)} crops", shape, make)


def normal(name: str, seed: int, batch: int, height: int, width: int) -> LatentSource:
    """Seeded normal latents, in decoder units."""

    def shape(geometry: Geometry) -> tuple[int, ...]:
        return batch, geometry.latent_channels, height, width

    def make(model: Model, module: torch.nn.Module) -> Latents:
        made = torch.randn(shape(model.geometry), generator=torch.Generator().manual_seed(seed))
        made /= model.scaling.factor or 1.0
        return Latents(name, made, digest(made))

    return LatentSource(name, f"seed {seed}", shape, make)


def pan(name: str, frames: int, *films: tuple[Crop, int, int]) -> LatentSource:
    """Encoded videos of `frames` latent frames: crops that move by so many pixels down and right a frame."""

    def shape(geometry: Geometry) -> tuple[int, ...]:
        _, _, _, height, width = films[0][0]
        return len(films), geometry.latent_channels, frames, height // geometry.spatial, width // geometry.spatial

    def make(model: Model, module: torch.nn.Module) -> Latents:
        from PIL import Image

        found = []
        for (file, top, left, height, width), down, right in films:
            picture = np.asarray(Image.open(_folder() / file).convert("RGB"))
            places = [(top + down * t, left + right * t) for t in range(model.geometry.sample_frames(frames))]
            film = np.stack([picture[y : y + height, x : x + width] for y, x in places])
            pixels = torch.from_numpy(film).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
            with torch.no_grad():
                found.append(model.family.encode(module, pixels))
        made = torch.cat(found).contiguous()
        return Latents(name, made, digest(made))

    return LatentSource(name, f"{len(films)} films", shape, make)


def film(name: str, seed: int, batch: int, frames: int, height: int, width: int) -> LatentSource:
    """Seeded normal latents of videos, in decoder units."""

    def shape(geometry: Geometry) -> tuple[int, ...]:
        return batch, geometry.latent_channels, frames, height, width

    def make(model: Model, module: torch.nn.Module) -> Latents:
        made = torch.randn(shape(model.geometry), generator=torch.Generator().manual_seed(seed))
        return Latents(name, made, digest(made))

    return LatentSource(name, f"seed {seed}", shape, make)


@cache
def _folder() -> Path:
    import skimage

    return Path(skimage.__file__).parent / "data"


FACE: Crop = ("astronaut.png", 8, 96, 192, 256)
CUP: Crop = ("coffee.png", 130, 180, 192, 256)
CAT: Crop = ("chelsea.png", 40, 90, 192, 256)
SOURCES = {
    source.name: source
    for source in (
        photograph("face", FACE),
        photograph("cat", CAT),
        photograph("pair", FACE, CUP),
        photograph("trio", CAT, FACE, ("rocket.jpg", 60, 200, 192, 256)),
        photograph("face-short", ("astronaut.png", 8, 96, 192, 208)),
        photograph("cat-short", ("chelsea.png", 40, 90, 200, 208)),
        photograph("wide", ("chelsea.png", 60, 90, 128, 256)),
        photograph("tall", ("chelsea.png", 10, 120, 256, 128)),
        photograph("eye-odd", ("retina.jpg", 500, 500, 200, 264)),
        photograph("small", ("chelsea.png", 60, 120, 112, 128)),
        # The healthy matrix's own: no crop, size or seed of the reference suite. No size leaves a last tile of one
        # latent: that costs tens of grey levels there, by honest tiling, and is in the catalogue.
        photograph("cat-left", ("chelsea.png", 90, 10, 192, 288)),
        photograph("cat-ear", ("chelsea.png", 0, 200, 160, 240)),
        photograph("rocket", ("rocket.jpg", 100, 240, 256, 192)),
        photograph("launch", ("rocket.jpg", 200, 40, 208, 304)),
        photograph("motorcycle", ("motorcycle_left.png", 100, 200, 256, 320)),
        photograph("galaxies", ("hubble_deep_field.jpg", 40, 40, 192, 224)),
        photograph("two-cats", ("chelsea.png", 20, 60, 184, 272), ("chelsea.png", 100, 170, 184, 272)),
        photograph("mixed", ("motorcycle_left.png", 20, 20, 208, 256), ("coffee.png", 20, 20, 208, 256),
                   ("retina.jpg", 500, 500, 208, 256)),
        pan("cat-pan", 6, (("chelsea.png", 60, 120, 56, 72), 0, 1), (("rocket.jpg", 100, 260, 56, 72), 1, 0)),
        pan("cat-pan-5", 5, (("chelsea.png", 60, 120, 56, 72), 0, 1), (("rocket.jpg", 100, 260, 56, 72), 1, 0)),
        film("film", 4, 2, 4, 8, 9),
        # The healthy videos.
        pan("ear-pan", 7, (("chelsea.png", 10, 210, 64, 72), 1, 1)),
        pan("wheel-pan", 6, (("motorcycle_left.png", 150, 250, 56, 80), 0, 2)),
        film("film-2", 5, 2, 5, 9, 7),
        normal("normal-1", 1, 1, 24, 32),
        normal("normal-2", 2, 2, 21, 28),
        normal("normal-3", 3, 1, 33, 24),
    )
}  # fmt: skip
HEALTHY_LATENTS = ("cat-left", "cat-ear", "rocket", "launch", "motorcycle", "galaxies", "two-cats", "mixed",
                   "normal-1", "normal-2", "normal-3")  # fmt: skip
HEALTHY_PLANS = ("fp32", "bf16", "fp16", "fp32,slicing", "bf16,slicing", "fp16,upcast", "tile=16,overlap=0.25",
                 "tile=16,overlap=0.5", "bf16,tile=16,overlap=0.25", "fp16,tile=16,overlap=0.25",
                 "slicing,tile=16,overlap=0.5", "fp32,model", "bf16,sequential", "fp32,group_block",
                 "fp32,group_leaf", "tile=16,overlap=0.25,disk")  # fmt: skip
HEALTHY_VIDEOS = {
    "ear-pan": (
        "reference-video",
        (
            "fp32",
            "bf16",
            "temporal_tile=4,temporal_overlap=0.5",
            "fp32,sequential",
            "bf16,temporal_tile=4,temporal_overlap=0.25",
        ),
    ),
    "wheel-pan": (
        "reference-video",
        (
            "temporal_tile=4,temporal_overlap=0.25",
            "temporal_tile=3,temporal_overlap=0.0",
            "tile=8,overlap=0.25,temporal_tile=4,temporal_overlap=0.25",
        ),
    ),
    "film-2": (
        "small-wan",
        (
            "fp32",
            "bf16",
            "fp16",
            "bf16,slicing",
            "bf16,slicing,tile=8,overlap=0.25",
            "fp32,group_leaf",
            "bf16,group_block",
            "fp32,disk",
        ),
    ),
}
"""Not what the suites expect to fail: chunks of two frames jump, and slices of a small fp32 video save no memory."""
QUICK_VIDEOS = {
    "wheel-pan": ("reference-video", ("temporal_tile=4,temporal_overlap=0.25",)),
    "film-2": ("small-wan", ("bf16,slicing,tile=8,overlap=0.25", "fp32,group_leaf")),
}
QUICK = {"launch": ("fp32", "tile=16,overlap=0.25"), "two-cats": ("bf16,slicing", "bf16,tile=16,overlap=0.5,disk"),
         "normal-2": ("fp16",)}  # fmt: skip


@cache
def _suite(name: str) -> suites.Suite:
    registry.load_plugins()
    return suites.load(SUITES / name, registry)


def limits(plan: DecodePlan, latents: str, model: str = "reference-kl") -> dict[str, Limit]:
    """The reference suite's limits for this plan, by its own matching.

    Other tiles than 16 are held to those of 16: larger tiles see more context and are nearer to the full decode.
    """
    if model in VIDEOS:
        suite, like, tile = "video.toml", VIDEOS[model], 8
    else:
        suite, like, tile = "reference.toml", "normal" if latents.startswith("normal") else "photo-pair", 16
    if plan.tiling is not None:
        plan = msgspec.structs.replace(plan, tiling=Tiling(tile, plan.tiling.overlap))
    cases = suites.with_plan(_suite(suite), msgspec.structs.replace(plan, slicing=False)).cases
    return next(case.limits for case in cases if (case.model, case.latents) == (model, like))


@dataclass(frozen=True)
class Outcome:
    """How one variant ended."""

    variant: Variant
    result: CaseResult
    by: str = "case"
    """`case`, or `reference` where only the drift of the reference gave it away."""

    @property
    def caught(self) -> bool:
        """A crash catches only a fault that is one: an injection that itself breaks has injected nothing."""
        if self.result.verdict == "error" and "crash" in self.result.diagnosis:
            return "crash" in self.variant.fault.named
        return self.result.verdict in ("fail", "error")

    @property
    def named(self) -> bool:
        return self.caught and bool(set(self.result.diagnosis) & set(self.variant.fault.named))

    @property
    def hidden(self) -> str | None:
        return None if self.caught else self.variant.fault.why_hidden(self.variant)


class Bench:
    """Goldens made once by honest decodes; each judgement loads the model anew, under the fault."""

    def __init__(self, folder: Path):
        registry.load_plugins()
        self.root = folder
        self.models = {name: registry.MODELS.get(name) for name in ("reference-kl", "reference-kl-hot", *VIDEOS)}
        self.honest = self._evaluator()
        self._recorded: set[tuple[str, str]] = set()

    def _evaluator(self) -> Evaluator:
        return Evaluator(self.models, SOURCES, self.root)

    def case(self, plan: str, latents: str, model: str = "reference-kl") -> Case:
        parsed = suites.parse_plan(plan, registry)
        return Case(model, latents, parsed, limits=limits(parsed, latents, model))

    def record(self, model: str, latents: str) -> None:
        if (model, latents) not in self._recorded:
            self.honest.record(model, latents)
            self._recorded.add((model, latents))

    def judge(self, variant: Variant) -> Outcome:
        """Inject and judge, as a run does: the reference first, which a fault of the full decode moves."""
        case = self.case(variant.plan, variant.latents, variant.fault.model)
        self.record(case.model, case.latents)
        torch.manual_seed(0)
        with variant.inject():
            evaluator = self._evaluator()
            reference = _reference(evaluator, case)
            result = evaluator.case(case, held=reference.ok)
        if reference.ok or result.verdict != "pass":
            return Outcome(variant, result)
        drifted = msgspec.structs.replace(result, verdict="error", diagnosis=("drift", *reference.diagnosis))
        return Outcome(variant, drifted, "reference")

    def healthy(self, plan: str, latents: str, model: str = "reference-kl") -> CaseResult | None:
        """Judge an honest decode; None where the plan does not apply to these latents."""
        case = self.case(plan, latents, model)
        chosen = self.models[case.model]
        if inapplicable(case.plan, chosen, SOURCES[latents].shape(chosen.geometry)):
            return None
        self.record(case.model, latents)
        return self.honest.case(case, held=True)


def _reference(evaluator: Evaluator, case: Case) -> Reference:
    """The reference held against its golden; one that cannot even be decoded does not hold."""
    try:
        return evaluator.reference(case.model, case.latents)
    except Exception as error:  # a faulty decode may raise anything
        said = f"{type(error).__name__}: {error}"
        return Reference(case.model, case.latents, None, 0.0, False, True, reason=said, diagnosis=("crash",))


def false_alarms(
    bench: Bench,
    matrix: dict[str, tuple[str, ...]],
    videos: dict[str, tuple[str, tuple[str, ...]]],
    say: Callable[[str], None] = lambda line: None,
) -> tuple[int, list[CaseResult]]:
    """The number of honest cells judged, and those that were not passed."""
    judged, alarms = 0, []
    cells = [("reference-kl", latents, plans) for latents, plans in matrix.items()]
    cells += [(model, latents, plans) for latents, (model, plans) in videos.items()]
    for model, latents, plans in cells:
        for plan in plans:
            result = bench.healthy(plan, latents, model)
            if result is None:
                continue
            judged += 1
            say(f"healthy {result.id}: {result.verdict} {', '.join(result.diagnosis)}")
            if result.verdict != "pass" or result.diagnosis:
                alarms.append(result)
    return judged, alarms
