"""A realistic RunResult with pictures, made without decoding anything: for tests of the report, and for looking at it.

python -m tests.report.sample FOLDER [1000 | film | out]      # writes a whole report there
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image

from fidelity.attribution import attribute
from fidelity.records import (
    ApprovedValues,
    CaseResult,
    DecodePlan,
    Limit,
    Measurement,
    MemoryTrace,
    Reason,
    Reference,
    RunResult,
    Stage,
    Tiling,
)
from tests.report import memories

MODEL, HOT = "reference-kl", "reference-kl-hot"
LIMITS = {
    "rmse": Limit(max=4.0, origin="visible: 4 grey levels RMSE are seen side by side"),
    "ssim": Limit(min=0.95, origin="calibrated 2026-01-12 on 300 clean decodes"),
    "lpips_alex": Limit(max=0.05, origin="visible: Zhang et al. 2018"),
    "tile_seam": Limit(max=1.0, origin="visible: a line of one grey level on a sky"),
}
MIB = 2**20


def photographs(size: int = 128) -> list[np.ndarray]:
    """Two crops of scikit-image's astronaut, (size, size, 3) uint8."""
    from skimage import data

    picture = data.astronaut()
    return [picture[0 : 2 * size : 2, 100 : 100 + 2 * size : 2], picture[250 : 250 + size, 60 : 60 + size]]


def build(folder: Path, *, models: tuple[str, ...] = (MODEL, HOT), latents: tuple[str, ...] = ("photo-pair",),
          offloads: tuple[str, ...] = ("none", "disk"), size: int = 128) -> RunResult:  # fmt: skip
    """A run of dtype × upcast × slicing × tiling × offload on each of `latents`, its pictures in `folder`."""
    pictures = _Pictures(folder, size)
    tilings = (None, Tiling(8, 0.0), Tiling(8, 0.25))
    cells = itertools.product(
        models, latents, ("fp32", "bf16", "fp16"), (False, True), (False, True), tilings, offloads
    )
    cases = tuple(
        _case(model, name, DecodePlan(dtype, upcast, slicing, tiling, None, offload), pictures)  # type: ignore[arg-type]
        for model, name, dtype, upcast, slicing, tiling, offload in cells
    )
    reference = tuple(Reference(model, name, 0.0, 1e-3, True, True) for model in models for name in latents)
    return RunResult(
        suite={"name": "reference", "path": "suites/reference.toml", "digest": "9f0c", "seconds": 221.0,
               "excluded": [{"id": "m/l/fp32-upcast0-slice0-t9o0-none", "reason": "strides <i>not</i> whole"}],
               "notes": ["a note of the suite"]},
        environment={"class": "cpu-avx512", "python": "3.11.8", "torch": "2.14.1", "diffusers": "0.42.1",
                     "device": {"name": "cpu", "threads": 2}},
        reference=reference,
        cases=cases,
        notes=("fp16 runs emulated on this CPU: each operator in fp32, its result rounded to fp16.",),
        attribution=attribute(cases),
    )  # fmt: skip


def thousand(folder: Path) -> RunResult:
    """Over a thousand cases, for what has to stay quick."""
    names = tuple(f"photo-{letter}" for letter in "abcdef")
    return build(folder, latents=names, offloads=("none", "model", "sequential", "disk"))


def out_of_memory(folder: Path) -> RunResult:
    """The sample, one of its cases out of memory, another as runs stored it before there were timelines by kind."""
    run = build(folder)
    cases = list(run.cases)
    for place, case in enumerate(cases):
        if case.model == MODEL and case.plan.id == "fp32-upcast0-slice1-t8o0.25-none":
            crash = Reason(
                "decode", "RuntimeError at hooks.py:12: can't allocate memory", diagnosis=("crash", "memory")
            )
            cases[place] = msgspec.structs.replace(
                case, verdict="error", surprise=True, reasons=(crash,), diagnosis=("crash", "memory"), images={},
                measurements={}, memory=memories.ran_out(),
            )  # fmt: skip
        elif case.model == MODEL and case.plan.id == "fp32-upcast0-slice0-t8o0.25-none" and case.memory:
            peak, line = case.memory.allocated_peak_bytes, case.memory.timeline
            old = MemoryTrace(peak, method="allocator events", stages=(Stage("decode", peak),), timeline=line)
            cases[place] = msgspec.structs.replace(case, memory=old)
    return msgspec.structs.replace(run, cases=tuple(cases))


def judged(**changes: object) -> CaseResult:
    """One plain passing case without pictures, changed as asked."""
    about: dict[str, object] = {
        "model": "m",
        "latents": "l",
        "plan": DecodePlan(),
        "verdict": "pass",
        "measurements": {"rmse": Measurement("rmse", 0.5, "grey levels", "lower", (0.5,))},
        "memory": MemoryTrace(allocated_peak_bytes=100 * MIB, method="events"),
        "seconds": {"decode": 1.0},
        **changes,
    }
    about.setdefault("id", f"{about['model']}/{about['latents']}/{about['plan'].id}")  # type: ignore[attr-defined]
    return CaseResult(**about)  # type: ignore[arg-type]


class _Pictures:
    """PNGs named by content, as the harness stores them."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, size
        (folder / "images").mkdir(parents=True, exist_ok=True)
        self.golden = photographs(size)
        self._decoded: dict[tuple[int, str], np.ndarray] = {}

    def save(self, image: np.ndarray) -> str:
        digest = hashlib.blake2b(image.tobytes(), digest_size=8).hexdigest()
        path = self.folder / "images" / f"{digest}.png"
        if not path.exists():
            Image.fromarray(image).save(path)
        return f"images/{digest}.png"

    def decode(self, index: int, plan: DecodePlan) -> np.ndarray:
        """What such a plan might do: rounding noise by dtype; steps and tone per tile where it is tiled."""
        key = (index, f"{plan.dtype} {plan.force_upcast} {plan.tiling}")
        if key not in self._decoded:
            self._decoded[key] = self._invent(self.golden[index], plan)
        return self._decoded[key]

    def _invent(self, image: np.ndarray, plan: DecodePlan) -> np.ndarray:
        noise = {"fp32": 0.0, "bf16": 1.1, "fp16": 0.3}[plan.dtype] * (0.2 if plan.force_upcast else 1)
        out = image.astype(np.float64) + noise * np.random.default_rng(7).standard_normal(image.shape)
        if plan.tiling is not None:
            stride = round(plan.tiling.tile * (1 - plan.tiling.overlap)) * 8
            hard = 5.0 if plan.tiling.overlap == 0 else 1.2
            tone = np.zeros(image.shape[:2])
            for row, col in itertools.product(range(0, self.size, stride), repeat=2):
                tone[row : row + stride, col : col + stride] = hard * np.sin(3.0 * row + 5.0 * col + 1)
            if plan.tiling.overlap:
                tone = _blur(tone, 16)
            out += tone[..., None]
        return np.clip(np.rint(out), 0, 255).astype(np.uint8)


def _blur(field: np.ndarray, width: int) -> np.ndarray:
    box = np.ones(width) / width
    for axis in (0, 1):
        field = np.apply_along_axis(
            lambda line: np.convolve(np.pad(line, width, "edge"), box, "same")[width:-width], axis, field
        )
    return field


def _case(model: str, latents: str, plan: DecodePlan, pictures: _Pictures) -> CaseResult:
    base: dict[str, object] = {"id": f"{model}/{latents}/{plan.id}", "model": model, "latents": latents, "plan": plan}
    if plan.force_upcast and plan.dtype != "fp16":
        why = f"force_upcast changes nothing at {plan.dtype}: pipelines apply it to fp16 only"
        return CaseResult(**base, verdict="not_applicable", reasons=(Reason("not_applicable", why),))  # type: ignore[arg-type]
    emulated = plan.dtype == "fp16" and not plan.force_upcast
    base |= {
        "limits": LIMITS,
        "reproduce": f"fidelity run suites/reference.toml --case '{base['id']}'",
        "seconds": {
            "decode": 0.31 * (0.5 if emulated else 1) * (2 if plan.slicing else 1) * (1.4 if plan.tiling else 1),
            "measure": 0.2,
        },
        "receipts": _receipts(plan, emulated, pictures.size),
        "memory": _memory(plan, emulated, pictures.size),
        "notes": ("fp16 emulated",) if emulated else (),
    }
    hot = model == HOT and emulated
    seamed = plan.tiling is not None and plan.tiling.overlap == 0
    base["expected"] = "fail" if hot or seamed else "pass"
    if hot:
        base |= {"expected_reason": "activations beyond 65504", "expected_diagnosis": ("non_finite",)}
    elif seamed:
        base |= {"expected_reason": "no overlap leaves edges", "expected_diagnosis": ("seam",)}
    if hot:
        reason = Reason("rmse", "rmse was not measured: 100 % of the sample is not finite", diagnosis=("non_finite",))
        nothing = {"rmse": Measurement("rmse", None, "grey levels", reason="the sample is not finite")}
        return CaseResult(**base, verdict="fail", diagnosis=("non_finite",), reasons=(reason,), measurements=nothing)  # type: ignore[arg-type]
    if model == HOT and plan.id == "bf16-upcast0-slice1-t8o0.25-disk":
        crash = Reason("decode", "RuntimeError at hooks.py:12: a tensor <b>on meta</b>", diagnosis=("crash",))
        return CaseResult(**base, verdict="error", surprise=True, diagnosis=("crash",), reasons=(crash,))  # type: ignore[arg-type]
    images = pictures.golden
    decoded = [pictures.decode(index, plan) for index in range(len(images))]
    base |= {
        "images": {"golden": tuple(map(pictures.save, images)), "candidate": tuple(map(pictures.save, decoded))},
        "measurements": _measurements(images, decoded, plan, pictures.size),
    }
    known = {"rmse": 0.75, "ssim": 0.997}
    base["approved"] = (
        ApprovedValues("cpu-avx512", True, known)
        if plan == DecodePlan()
        else ApprovedValues("another-cpu", False, known)
    )
    return _gated(base, seamed)


def _gated(base: dict[str, object], seamed: bool) -> CaseResult:
    measurements: dict[str, Measurement] = base["measurements"]  # type: ignore[assignment]
    reasons = []
    for name, bound in LIMITS.items():
        measured = measurements[name].value if name in measurements else None
        if measured is None:
            continue
        if bound.max is not None and measured > bound.max:
            place = measurements[name].where or {}
            at = f"at x {place.get('x')}, y {place.get('y')}"
            text = f"{name} {measured:.3g} {measurements[name].unit}, limit {bound.max:g}, {at}"
            reasons.append(
                Reason(
                    name,
                    text,
                    measured,
                    bound.max,
                    measurements[name].unit,
                    ("seam",) if name == "tile_seam" else ("tone_drift",),
                )
            )
    diagnosis = tuple(dict.fromkeys(kind for reason in reasons for kind in reason.diagnosis))
    verdict = "fail" if reasons else "pass"
    surprise = verdict != base["expected"] or (seamed and "seam" not in diagnosis)
    return CaseResult(**base, verdict=verdict, surprise=surprise, reasons=tuple(reasons), diagnosis=diagnosis)  # type: ignore[arg-type]


def _measurements(
    golden: list[np.ndarray], decoded: list[np.ndarray], plan: DecodePlan, size: int
) -> dict[str, Measurement]:
    gaps = [b.astype(float) - a for a, b in zip(golden, decoded)]
    rmse = tuple(float(np.sqrt((gap**2).mean())) for gap in gaps)
    exact = max(rmse) == 0
    worst = int(np.argmax(rmse))
    y, x = np.unravel_index(np.abs(gaps[worst]).max(-1).argmax(), gaps[worst].shape[:2])
    place = {"image": worst, "x": int(x), "y": int(y)}
    psnr = None if exact else float(20 * np.log10(255 / max(rmse)))
    found = {
        "rmse": Measurement("rmse", max(rmse), "grey levels", "lower", rmse, {"image": worst}, exact=exact),
        "psnr": Measurement("psnr", psnr, "dB", "higher", exact=exact, reason="the decode is exact" if exact else None),
        "max_abs": Measurement(
            "max_abs", float(np.abs(gaps[worst]).max()), "grey levels", "lower", where=place, exact=exact
        ),
        "ssim": Measurement(
            "ssim", 1 - 0.004 * max(rmse), "", "higher", tuple(1 - 0.004 * r for r in rmse), exact=exact
        ),
        "lpips_alex": Measurement(
            "lpips_alex", 0.006 * max(rmse), "", "lower", tuple(0.006 * r for r in rmse), exact=exact
        ),
    }
    if plan.tiling is not None:
        edge = round(plan.tiling.tile * (1 - plan.tiling.overlap)) * 8
        steps = tuple(float(np.abs(gap[:, edge] - gap[:, edge - 1]).mean()) for gap in gaps)
        line = {"image": int(np.argmax(steps)), "x": edge, "y": size // 3, "axis": "cols", "edge": edge}
        found["tile_step"] = Measurement(
            "tile_step", max(steps), "grey levels", "lower", steps, line, detection_limit=0.4
        )
        count = len(range(0, size, edge)) ** 2
        tone = {"offsets": [round(float(np.sin(place)) * 2, 3) for place in range(count)], "kind": "offset"}
        found["tile_tone"] = Measurement(
            "tile_tone", 0.4, "grey levels", "lower", (0.4, 0.2), {**line, "tile": [0, 1]}, details=tone
        )
        found["tile_seam"] = Measurement(
            "tile_seam", max(steps), "grey levels", "lower", steps, {**line, "by": "tile_step"}
        )
    return found


def _receipts(plan: DecodePlan, emulated: bool, size: int) -> dict[str, dict[str, object]]:
    receipts: dict[str, dict[str, object]] = {
        "decoder": {"requested": True, "engaged": True, "reason": None, "calls": 1, "shapes": [[2, 4, 16, 16]]},
        "precision": {"requested": plan.dtype != "fp32", "engaged": True, "reason": None, "emulated": emulated},
        "state": {"requested": True, "engaged": True, "restored": True, "leaks": [], "reason": None},
    }
    if plan.tiling is not None:
        stride = round(plan.tiling.tile * (1 - plan.tiling.overlap)) * 8
        band = round(plan.tiling.tile * plan.tiling.overlap) * 8
        axis = {"starts": list(range(0, size, stride)), "band": band, "tile": plan.tiling.tile * 8, "size": size}
        receipts["tiling"] = {"requested": True, "engaged": True, "reason": None, "calls": len(axis["starts"]) ** 2,
                              "grid": {"rows": axis, "cols": axis}}  # fmt: skip
    if plan.offload != "none":
        receipts["offload"] = {"requested": True, "engaged": True, "reason": None, "hooks": 34, "moved_bytes": 0}
    return receipts


def _memory(plan: DecodePlan, emulated: bool, size: int) -> MemoryTrace:
    if emulated:
        return MemoryTrace(reason="emulated fp16 has no memory figure of its own: its temporaries are fp32")
    share = (0.55 if plan.dtype == "bf16" else 1) * (0.6 if plan.slicing else 1) * (0.45 if plan.tiling else 1)
    weights = {"none": 14, "disk": 2}.get(plan.offload, 6) * MIB
    total = int(180 * MIB * share) + weights
    return memories.trace(plan, total, weights, 2 * size * size)


if __name__ == "__main__":
    from fidelity.report import write_all
    from tests.report import film

    target = Path(sys.argv[1])
    write_all({"1000": thousand, "film": film.build, "out": out_of_memory}.get(sys.argv[-1], build)(target), target)
    print(target / "report.html")
