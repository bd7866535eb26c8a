"""The sweep: its settings meet every edge, its paint passes honest classes, and each fault of geometry is seen."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import AutoencoderKL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fidelity import checks, coverage, registry, sweep
from fidelity.checks import sweeps
from fidelity.errors import EvaluationError
from fidelity.evaluator import Evaluator
from fidelity.records import Case, DecodePlan, Geometry, Temporal, Tiling
from fidelity.registry import CHECKS
from fidelity.stub import Stub, frame_at
from fidelity.sweep import Setting
from tests.faults.tiling import both_sides, height_only
from tests.faults.upstream import Rows, Tiler, tiler

registry.load_plugins()
HONEST = ("reference-kl", "reference-video", "small-wan", "small-dc")
PLAIN = DecodePlan()
QUARTER = Tiling(4, 0.25)
_STUBS: dict[str, Stub] = {}


def stub_of(name: str) -> Stub:
    if name not in _STUBS:
        model = registry.MODELS.get(name)
        _STUBS[name] = Stub(model, model.load())
    return _STUBS[name]


def find(setting: Setting, name: str = "reference-kl", plan: DecodePlan = PLAIN) -> coverage.Fault | None:
    stub = stub_of(name)
    with stub.in_place():
        return coverage.find(stub, setting, plan)


# ---------------------------------------------------------------- which settings


@pytest.mark.parametrize("name", HONEST)
def test_every_edge_is_among_the_settings_smallest_first_and_all_are_legal(name):
    model = registry.MODELS.get(name)
    found = sweep.settings(model)
    assert found == sorted(set(found), key=lambda each: each.effort)
    assert found == sweep.settings(model)
    assert all(sweep.is_legal(model, each) for each in found)
    assert {each.batch for each in found} == {1, 2, 3}
    for overlap in sweep.OVERLAPS:
        held = [each for each in found if each.tiling and each.tiling.overlap == overlap]
        tile = min(each.tiling.tile for each in held)
        held = [each for each in held if each.tiling.tile == tile]
        stride = sweep.stride_of(Tiling(tile, overlap))
        sizes = {(each.height, each.width) for each in held}
        for side in (2 * stride - 1, 2 * stride, 2 * stride + 1, tile, tile + 1):
            assert side in {height for height, _ in sizes}
            assert side in {width for _, width in sizes}
        assert any(height < width for height, width in sizes)
        assert any(height > width for height, width in sizes)
        assert any(height <= tile < width for height, width in sizes), "a single row of tiles"
        assert any(max(size) <= tile for size in sizes), "a tile that holds the picture"
        assert any(side % stride == 1 % stride for size in sizes for side in size), "a last tile of one latent pixel"
    if model.geometry.video:
        assert {each.frames for each in found if each.tiling is None} >= set(range(1, 10))


def test_chunks_are_swept_where_the_class_cuts_videos():
    found = [each for each in sweep.settings(registry.MODELS.get("reference-video")) if each.temporal]
    assert {each.temporal.overlap for each in found} == {0.0, 0.25, 0.5}
    assert any(each.tiling for each in found)
    assert not [each for each in sweep.settings(registry.MODELS.get("small-wan")) if each.temporal]


def test_edges_are_about_every_multiple():
    assert sweep.edges(4, 3) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert {7, 8, 9, 15, 16, 17, 23, 24, 25} <= set(sweep.edges(8, 8))


def test_a_setting_is_said_in_words():
    assert str(Setting(5, 9)) == "latents 5×9"
    told = str(Setting(5, 9, 2, 3, QUARTER, Temporal(2, 0.5)))
    assert told == "latents 5×9, tile 4, overlap 0.25, batch 2, 3 latent frames, chunks of 2 frames, overlap 0.5"


def test_shrinking_ends_at_the_smallest_that_fails():
    def fails(each: Setting) -> str | None:
        return str(each) if each.height >= 5 and each.width > each.height and each.tiling else None

    start = Setting(17, 40, 3, 4, QUARTER, Temporal(2, 0.5))
    smallest, found = sweep.shrink(start, fails, "start")
    assert smallest == Setting(5, 6, tiling=QUARTER)
    assert found == str(smallest)
    assert sweep.shrink(start, lambda each: None, "start") == (start, "start")


@pytest.mark.parametrize(
    ("law", "frames", "starts"),
    [("causal", 4, [0, 1, 5, 9, 13]), ("every", 3, [0, 4, 8, 12]), ("odd", 3, [0, 1, 5, 9]), ("odd", 2, [0, 4, 8])],
)
def test_where_a_latent_frame_begins(law, frames, starts):
    geometry = Geometry(8, 4, temporal=4, video=True, frames=law)
    assert [frame_at(geometry, frames, latent) for latent in range(frames + 1)] == starts


# ---------------------------------------------------------------- honest classes


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_honest_class_shows_every_pixel_once_at_any_size(name, data):
    model = registry.MODELS.get(name)
    overlap = data.draw(st.sampled_from(sweep.OVERLAPS))
    tile = data.draw(st.sampled_from(registry_tiles(name, overlap)))
    side = st.integers(1, 2 * tile + 3)
    frames = data.draw(st.integers(1, 4)) if model.geometry.video else 1
    setting = Setting(data.draw(side), data.draw(side), data.draw(st.integers(1, 3)), frames, Tiling(tile, overlap))
    plan = DecodePlan(slicing=data.draw(st.booleans()) and setting.batch > 1)
    fault = find(setting, name, plan)
    assert fault is None, f"{setting}: {fault.words}"


def registry_tiles(name: str, overlap: float) -> list[int]:
    model = registry.MODELS.get(name)
    return [tiling.tile for tiling in sweep.tilings(model, each=2) if tiling.overlap == overlap]


@pytest.mark.parametrize("temporal", [Temporal(2, 0.0), Temporal(2, 0.5), Temporal(4, 0.25)], ids=str)
@pytest.mark.parametrize("frames", [1, 2, 3, 5])
def test_chunks_show_each_frame_at_its_time(temporal, frames):
    assert find(Setting(2, 3, frames=frames, temporal=temporal), "reference-video") is None


def test_a_stub_leaves_the_decoder_as_it_was():
    stub = stub_of("reference-kl")
    decoder = stub.model.family.decoder(stub.module)
    find(Setting(5, 6, tiling=QUARTER))
    assert "forward" not in vars(decoder)
    assert stub.module.use_tiling is False


# ---------------------------------------------------------------- faults


class Drifts(Tiler):
    """Shows one pixel more of each tile than the next one is away."""

    def limit(self) -> int:
        return super().limit() + 1


class LastMoved(Tiler):
    """The last column is cut one latent pixel too far left."""

    def cut(self, z: Any, i: int, j: int) -> Any:
        size, top, left = self.vae.tile_latent_min_size, self.starts(z.shape[2])[i], self.starts(z.shape[3])[j]
        wide = min(size, z.shape[3] - left)
        left -= j == len(self.starts(z.shape[3])) - 1 and j > 0
        return z[:, :, top : top + size, left : left + wide]


class Doubled(Tiler):
    """Blends with weights that do not sum to one."""

    def blend_h(self, a: Any, b: Any, blend_extent: int) -> Any:
        return super().blend_h(a, b, blend_extent) + 0.01


class Repeats(Tiler):
    """Shows the row above again in the place of the second row of tiles."""

    def join(self, rows: Rows) -> Any:
        return super().join([rows[0], rows[0], *rows[2:]] if len(rows) > 2 else rows)


class Gap(Tiler):
    """Leaves the second column of tiles at zero."""

    def mix(self, rows: Rows, i: int, j: int) -> Any:
        return super().mix(rows, i, j) * (j != 1)


class Swaps(Tiler):
    """Gives the items of the batch in the wrong order."""

    def join(self, rows: Rows) -> Any:
        return super().join(rows).flip(0)


SEEN = [
    (Drifts, Setting(4, 7, tiling=QUARTER), "the sample is 1×3×33×58, the full decode's 1×3×32×56"),
    (LastMoved, Setting(3, 8, tiling=QUARTER), "shows what belongs to item 0, y"),
    (Doubled, Setting(3, 8, tiling=QUARTER), "weights sum to 1.01 at"),
    (Repeats, Setting(7, 3, tiling=QUARTER), "shows what belongs to item 0, y"),
    (Gap, Setting(3, 8, tiling=QUARTER), "weights sum to 0 at item 0, y 0, x 24, expected 1"),
    (Swaps, Setting(3, 8, batch=2, tiling=QUARTER), "shows what belongs to item"),
]


@pytest.mark.parametrize(("fault", "setting", "words"), SEEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_of_geometry_is_seen_and_said(fault, setting, words):
    assert find(setting) is None
    with tiler(fault)():
        found = find(setting)
    assert found is not None
    assert words in found.words
    assert found.came.shape != found.expected.shape or float((found.came - found.expected).abs().max()) > 0.005


def test_a_place_that_is_shown_elsewhere_is_named_by_its_coordinates():
    with tiler(LastMoved)():
        found = find(Setting(2, 6, tiling=QUARTER))
    assert found is not None
    at, shown = (int(words.rsplit("x ", 1)[1]) for words in found.words.split(" shows what belongs to "))
    assert at - shown == 8


def test_a_class_that_tiles_otherwise_than_its_grid_is_seen_though_every_pixel_is_right():
    cases = {height_only: Setting(3, 7, tiling=QUARTER), both_sides: Setting(7, 3, tiling=QUARTER)}
    for fault, setting in cases.items():
        with fault():
            found = find(setting)
        assert found is not None
        assert "is not in the grid" in found.words


def test_a_tile_that_hides_its_neighbour_is_seen_by_the_tiles_own_values():
    """The tile before shows on beyond the band, where it still has content: each pixel is in its place."""

    class Greedy(Tiler):
        def blend_h(self, a: Any, b: Any, blend_extent: int) -> Any:
            whole = self.vae.tile_sample_min_size - self.step() * 8
            b[..., :whole] = a[..., -whole:] if a.shape[-1] > whole and b.shape[-1] > whole else b[..., :whole]
            return b

    setting = Setting(3, 5, tiling=QUARTER)
    with tiler(Greedy)():
        assert find(setting) is None, "within the band it may show"
    with tiler(Greedy)(), patch.object(sweep, "stride_of", sweep.stride_of):
        grid = registry.MODELS.get("reference-kl").family.tile_grid
        narrow = lambda *args: _narrower(grid(*args))  # noqa: E731
        with patch.object(
            type(registry.MODELS.get("reference-kl").family), "tile_grid", lambda _, *args: narrow(*args)
        ):
            found = find(setting)
    assert found is not None
    assert "shows the tile at latent row 0, column 0, the grid says another" in found.words


def _narrower(grid: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(grid, cols=msgspec.structs.replace(grid.cols, band=2))


def test_a_frame_at_another_time_is_seen():
    from diffusers import AutoencoderKLHunyuanVideo

    honest = AutoencoderKLHunyuanVideo._temporal_tiled_decode

    def late(self: Any, z: Any, return_dict: bool = True) -> Any:
        out = honest(self, z, return_dict)
        out.sample = torch.cat([out.sample[:, :, :1], out.sample[:, :, :-1]], dim=2)
        return out

    with patch.object(AutoencoderKLHunyuanVideo, "_temporal_tiled_decode", late):
        found = find(Setting(2, 2, frames=4, temporal=Temporal(2, 0.0)), "reference-video")
    assert found is not None
    assert "shows what belongs to item 0, frame" in found.words


def test_latents_that_reach_the_decoder_changed_are_no_verdict():
    class Scaled(Tiler):
        def decode(self, tile: Any) -> Any:
            return super().decode(tile * 1.5)

    with tiler(Scaled)(), pytest.raises(EvaluationError, match="no part of those to decode"):
        find(Setting(3, 7, tiling=QUARTER))


# ---------------------------------------------------------------- as checks


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    models = {"reference-kl": registry.MODELS.get("reference-kl")}
    found = Evaluator(models, {}, tmp_path_factory.mktemp("none"))
    found.make_latents = lambda model, latents: torch.zeros(1, 4, 6, 9)
    return found


def judge(bench, name: str, plan: DecodePlan = PLAIN):
    check = CHECKS.get(name)
    case = Case("reference-kl", "drawn", plan, limits={checks.NAME: checks.limit(check)}, check=name)
    return bench.case(case)


@pytest.fixture
def few(monkeypatch):
    """A sweep of a few settings: what the check does with them is tested here."""
    some = [
        Setting(3, 5),
        Setting(3, 8, tiling=QUARTER),
        Setting(9, 13, 2, tiling=QUARTER),
        Setting(13, 4, tiling=QUARTER),
    ]
    monkeypatch.setattr(sweep, "settings", lambda model: sorted(some, key=lambda each: each.effort))


@pytest.mark.slow
def test_the_whole_sweep_passes_on_an_honest_class(bench):
    result = judge(bench, "tile_geometry")
    assert result.verdict == "pass", result.reasons


@pytest.mark.parametrize("plan", [PLAIN, DecodePlan(slicing=True)], ids=lambda plan: plan.id)
def test_the_smallest_counterexample_stands_in_the_reason(bench, few, monkeypatch, plan):
    monkeypatch.setattr(bench, "make_latents", lambda model, latents: torch.zeros(2, 4, 6, 9))
    bench._latents = None
    with tiler(Drifts)():
        result = judge(bench, "tile_geometry", plan)
    assert (result.verdict, result.diagnosis) == ("fail", ("geometry",))
    (reason,) = result.reasons
    assert reason.message.startswith(
        "latents 1×5, tile 4, overlap 0.25: the sample is 1×3×8×41, the full decode's 1×3×8×40 "
        "(the smallest of 3 wrong of 4 settings)"
    )
    assert result.receipts["state"]["restored"]
    bench._latents = None


def test_a_decode_that_raises_is_a_crash_with_its_setting(bench, few):
    class Raises(Tiler):
        def join(self, rows: Rows) -> Any:
            if len(rows) > 2:
                raise IndexError("no such row")
            return super().join(rows)

    with tiler(Raises)():
        result = judge(bench, "tile_geometry")
    assert (result.verdict, result.diagnosis) == ("error", ("crash",))
    assert "2 of 4 settings raise, the smallest with latents 13×4, tile 4, overlap 0.25: IndexError: no such row" in (
        result.reasons[0].message
    )
    assert judge(bench, "tile_geometry").verdict == "pass"


@pytest.mark.parametrize("plan", [DecodePlan(dtype="bf16"), DecodePlan(temporal=Temporal(2, 0.0))])
def test_what_paint_cannot_judge_is_no_pass(bench, plan):
    with pytest.raises(EvaluationError, match="leave both out"):
        sweeps.tile_geometry(checks.Subject(bench.runner("reference-kl")), torch.zeros(1), plan)


def test_illegal_settings_of_a_class_that_accepts_them_fail_with_what_comes_out(bench):
    result = judge(bench, "illegal_tiling")
    assert (result.verdict, result.diagnosis) == ("fail", ("geometry",))
    said = result.reasons[0].message
    assert "4 of 4 settings are accepted and wrong: " in said
    assert "tile_latent_min_size=5" in said
    assert "the sample is 1×3×106×166, the full decode's 1×3×88×136" in said
    assert result.receipts["state"]["restored"]


def test_a_class_that_refuses_them_passes(bench, monkeypatch):
    def refuses(self: Any, use_tiling: bool = True) -> None:
        raise ValueError("a tile must be a multiple of 4")

    monkeypatch.setattr(AutoencoderKL, "enable_tiling", refuses)
    assert judge(bench, "illegal_tiling").verdict == "pass"


def test_a_class_that_rounds_them_to_legal_ones_passes(bench, monkeypatch):
    class Rounds(Tiler):
        def extent(self) -> int:
            return self.vae.tile_sample_min_size - self.step() * 8

        def limit(self) -> int:
            return self.step() * 8

    with tiler(Rounds)():
        assert judge(bench, "illegal_tiling").verdict == "pass"


@pytest.mark.parametrize("name", ["small-wan", "small-dc"])
def test_strided_classes_are_asked_for_what_they_cannot_represent(name):
    model = registry.MODELS.get(name)
    f = model.geometry.spatial
    asked = sweeps.illegal(model)
    strides = [(each.given["tile_sample_min_height"], each.given["tile_sample_stride_height"]) for each in asked]
    assert all(each.called for each in asked)
    assert any(stride > tile for tile, stride in strides)
    assert any(stride % f for _, stride in strides)
    assert any(tile % f for tile, _ in strides)
    assert CHECKS.get("illegal_tiling").reason(PLAIN, (1, 4, 8, 8), model) is None


def test_a_class_without_tiles_has_nothing_to_get_wrong():
    reason = CHECKS.get("illegal_tiling").reason(PLAIN, (1, 4, 8, 8), registry.MODELS.get("small-vq"))
    assert reason == "VQModel has no tile and stride or overlap to get wrong"
