"""Make the guide's pictures from real runs: python docs/guide/make_pictures.py [RUNS]

The three runs take some ten minutes on one core. RUNS is a folder to keep them in; those that are there are not run
again. Needs Chromium (CHROMIUM names it) and playwright: pip install -e '.[test]'
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from fidelity.records import CaseResult, RunResult
from fidelity.report import json as stored

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MOST_BYTES = 150_000
SEAM = "reference-kl/photo-pair/fp32-upcast0-slice0-t16o0-none"
DRIFT = "reference-kl/photo-pair/fp32-upcast0-slice0-t24o0.25-none"
CHUNKS = "reference-video/photo-pan/fp32-upcast0-slice0-t0-f2o0-none"
RUNS = {
    "smoke": ["suites/smoke.toml"],
    "overlap": ["suites/overlap.toml"],
    "video": ["suites/video.toml", "--case", "reference-video/photo-pan/fp32-upcast0-slice0-t0*"],
}


def main(folder: Path) -> None:
    runs = {name: run(name, arguments, folder) for name, arguments in RUNS.items()}
    save(overlaps(stored.read(runs["overlap"]), runs["overlap"]), "overlaps")
    with browser() as start:
        save(decision(start, runs["smoke"]), "decision")
        save(opened(start, runs["smoke"], SEAM, jump=True), "seam")
        save(opened(start, runs["smoke"], DRIFT, grid=True), "drift")
        save(memory(start, runs["smoke"], SEAM), "memory")
        save(opened(start, runs["video"], CHUNKS, height=900), "chunks")


# ---------------------------------------------------------------- runs


def run(name: str, arguments: list[str], folder: Path) -> Path:
    """The folder of a run, judged now unless it is there."""
    out = folder / name
    if not (out / "results.json").is_file():
        workspace = folder / "workspace"
        shutil.copytree(ROOT / "suites", workspace / "suites", dirs_exist_ok=True)
        shutil.copytree(ROOT / "golden", workspace / "golden", dirs_exist_ok=True)
        (workspace / "suites/overlap.toml").write_text(suite_of(HERE / "tile-and-overlap.md"))
        done = subprocess.run(
            [sys.executable, "-m", "fidelity.cli", "run", *arguments, "--out", out], cwd=workspace, check=False
        )
        if done.returncode not in (0, 1):
            raise SystemExit(f"{name}: fidelity run ended with status {done.returncode}; no picture was made")
    return out


def suite_of(page: Path) -> str:
    """The suite that a page shows."""
    found = re.search(r"^```toml\n(# suites/.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    if not found:
        raise SystemExit(f"{page.name} shows no suite")
    return found[1]


# ---------------------------------------------------------------- pictures of a run's own


def overlaps(result: RunResult, folder: Path) -> Image.Image:
    """One corner under each tiling: the candidate above, its difference from the golden ×8 below."""
    cases = [case for case in result.cases if case.plan.tiling]
    size, gap, head = 96, 6, 34
    box = (80, 80, 80 + size, 80 + size)
    scale = 2
    step = size * scale + gap
    sheet = Image.new("RGB", (step * (len(cases) + 1) - gap, head + 2 * step - gap), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    golden = picture(folder, cases[0], "golden").crop(box).resize((size * scale,) * 2, Image.Resampling.NEAREST)
    sheet.paste(golden, (0, head))
    pen.text((2, 2), "golden: the full decode", "black", font)
    pen.text((2, head + step), "candidate − golden, ×8", "black", font)
    for place, case in enumerate(cases, 1):
        assert case.plan.tiling is not None
        tile, worst = case.plan.tiling, case.measurements
        pen.text((place * step + 2, 0), f"tile {tile.tile}, overlap {tile.overlap:g}", "black", font)
        said = f"RMSE {worst['rmse'].value:.3g}, line {worst['tile_step'].value:.3g}"
        pen.text((place * step + 2, 16), said, "black", font)
        for row, kind in enumerate(("candidate", "difference")):
            crop = picture(folder, case, kind).crop(box).resize((size * scale,) * 2, Image.Resampling.NEAREST)
            sheet.paste(crop, (place * step, head + row * step))
    return sheet


def picture(folder: Path, case: CaseResult, kind: str) -> Image.Image:
    return Image.open(folder / case.images[kind][0]).convert("RGB")


# ---------------------------------------------------------------- pictures of the report


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise SystemExit("chromium is not installed: apt-get install chromium, or name it in CHROMIUM")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])

        def page(run_folder: Path, width: int = 1180, height: int = 760) -> Any:
            opened = started.new_page(viewport={"width": width, "height": height})
            opened.set_default_timeout(120_000)
            opened.goto((run_folder / "report.html").as_uri())
            return opened

        yield page
        started.close()


def decision(start: Any, folder: Path) -> Image.Image:
    return shot(start(folder, height=700))


def opened(
    start: Any, folder: Path, case: str, *, jump: bool = False, grid: bool = False, height: int = 760
) -> Image.Image:
    """A case as it opens; `jump`: zoomed onto its worst seam; `grid`: with its tiles drawn."""
    page = visit(start, folder, case, height)
    if grid:
        page.get_by_label("Tile grid").check()
    if jump:
        page.click('[data-act="jump"]')
        page.wait_for_selector("circle.ring")
    return shot(page)


def memory(start: Any, folder: Path, case: str) -> Image.Image:
    """Memory over a case's decode, what it was, and the peak of each stage."""
    page = visit(start, folder, case, height=3200)  # all of the case at once, so that nothing scrolls
    first = page.locator("dialog .memory").bounding_box()
    last = page.locator("dialog .memory > .cols").first.bounding_box()
    height = last["y"] + last["height"] - first["y"]
    clip = {"x": first["x"] - 12, "y": first["y"], "width": first["width"] + 24, "height": height + 12}
    return Image.open(BytesIO(page.screenshot(clip=clip)))


def visit(start: Any, folder: Path, case: str, height: int = 760) -> Any:
    page = start(folder, height=height)
    page.evaluate("id => { location.hash = `case=${encodeURIComponent(id)}`; }", case)
    page.wait_for_selector(f'dialog .id:text-is("{case}")')
    page.wait_for_selector(".stage canvas")
    page.wait_for_timeout(1500)  # charts are drawn after the pictures
    return page


def shot(page: Any) -> Image.Image:
    return Image.open(BytesIO(page.screenshot()))


def save(image: Image.Image, name: str) -> None:
    """WebP of the best quality that stays under MOST_BYTES."""
    path = HERE / "images" / f"{name}.webp"
    path.parent.mkdir(exist_ok=True)
    for quality in (92, 85, 75, 60):
        image.convert("RGB").save(path, quality=quality, method=6)
        if path.stat().st_size <= MOST_BYTES:
            break
    else:
        raise SystemExit(
            f"{path.name} has {path.stat().st_size:,} bytes at the lowest quality, more than {MOST_BYTES:,}"
        )
    print(f"{path.relative_to(ROOT)}: {image.width}×{image.height}, {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
