"""The ramp tiler: its known answers, an assembly written otherwise, its proof, and detectors that look at its grid."""

from __future__ import annotations

import msgspec
import pytest
import torch

from fidelity import optimizations, oracles
from fidelity.detectors.grid import Layout, layout
from fidelity.errors import EvaluationError, SuiteError
from fidelity.optimizations import apply_plan, inapplicable, observe
from fidelity.optimizations.ramp_tiling import parse, ramp_decode, ramp_grid
from fidelity.records import DecodePlan, Tiling
from fidelity.registry import DETECTORS, cuts
from fidelity.runner import Runner
from tests.optimizations.small import MODEL, latents, model_with

RAMP = DecodePlan(options={"ramp_tiling": "t8o3"})


# ---------------------------------------------------------------- the law


@pytest.fixture(scope="module")
def published():
    """The autoencoder, latents and full decode of the known answers, made in their order from one seed."""
    import diffusers

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        module = diffusers.AutoencoderKL(
            block_out_channels=(32, 64, 64), latent_channels=4, norm_num_groups=8, sample_size=64,
            down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        ).eval()  # fmt: skip
        z = module.encode(torch.randn(1, 3, 96, 96)).latent_dist.sample()
        return module, z, module.decode(z).sample


@pytest.mark.parametrize(
    ("tile", "overlap", "tiles", "mean", "largest"),
    [(12, 4, 9, 0.1134, 1.2141), (12, 0, 4, 0.1366, 2.0797), (16, 8, 4, 0.0485, 1.1155)],
)
def test_known_answers(published, tile, overlap, tiles, mean, largest):
    module, z, full = published
    grid = ramp_grid(tile, overlap, (24, 24), 4)
    with torch.no_grad():
        error = (ramp_decode(lambda part: module.decode(part).sample, z, grid, 4) - full).abs()
    assert grid.count == tiles
    assert float(error.mean()) == pytest.approx(mean, abs=5e-5)
    assert float(error.max()) == pytest.approx(largest, abs=5e-5)


def test_known_sizes(published):
    module, z, full = published
    sizes = {}
    hooks = [
        part.register_forward_hook(lambda _, given, gave, name=name: sizes.update({name: gave}))
        for name, part in module.decoder.named_modules()
        if not list(part.children())
    ]
    with torch.no_grad():
        module.decode(z)
    for hook in hooks:
        hook.remove()
    assert z.shape == (1, 4, 24, 24)
    assert full.numel() / z.numel() == 12
    largest = max(sizes.values(), key=torch.numel)
    assert sizes["up_blocks.1.upsamplers.0.conv"].shape == (1, 64, 96, 96)
    assert largest.numel() == sizes["up_blocks.1.upsamplers.0.conv"].numel() == 256 * z.numel()


def pixel_by_pixel(decode, z, tile, overlap, f):
    """The same law written from its words, for each pixel alone: a dictionary of weighted values and no slices."""
    height, width = z.shape[-2:]

    def starts(size):
        return [s for s in range(0, size, tile - overlap) if s < size - overlap or s == 0]

    def weight(pixel, start):
        into = pixel - start * f
        if start == 0 or into >= overlap * f:
            return 1.0
        return into / (overlap * f - 1) if overlap * f > 1 else 0.0

    tiles = {
        (y, x): decode(z[..., y : min(y + tile, height), x : min(x + tile, width)])
        for y in starts(height)
        for x in starts(width)
    }
    first = tiles[0, 0]
    out = torch.empty(*first.shape[:-2], height * f, width * f)
    for py in range(height * f):
        for px in range(width * f):
            total, weights = 0.0, 0.0
            for (y, x), sample in tiles.items():
                iy, ix = py - y * f, px - x * f
                if 0 <= iy < sample.shape[-2] and 0 <= ix < sample.shape[-1]:
                    w = weight(py, y) * weight(px, x)
                    total, weights = total + w * sample[..., iy, ix].double(), weights + w
            out[..., py, px] = total / weights
    return out


def nearest(z):
    """A decoder whose tile's sample depends on the tile: twice the size, less the tile's own mean."""
    return (z - z.mean((-2, -1), keepdim=True)).repeat_interleave(2, -1).repeat_interleave(2, -2)


@pytest.mark.parametrize(
    ("size", "tile", "overlap"),
    [
        ((9, 13), 5, 2),
        ((9, 13), 5, 4),  # up to five tiles over one pixel
        ((10, 10), 5, 0),  # no ramp: hard edges
        ((11, 6), 5, 1),  # a last tile of no more than overlap + 1
        ((4, 12), 5, 2),  # one row
        ((12, 3), 5, 4),  # narrower than the overlap
        ((6, 6), 6, 3),  # one tile
    ],
    ids=str,
)
@pytest.mark.parametrize("frames", [(), (2,)], ids=["image", "video"])
def test_it_is_the_law_pixel_by_pixel(size, tile, overlap, frames):
    z = torch.randn(1, 2, *frames, *size, generator=torch.Generator().manual_seed(5))
    got = ramp_decode(nearest, z, ramp_grid(tile, overlap, size, 2), 2)
    assert torch.allclose(got, pixel_by_pixel(nearest, z, tile, overlap, 2), atol=1e-5)


def test_tiles_that_agree_give_the_whole():
    """Weights sum to one everywhere: a decoder without context gives the full decode."""
    z = torch.randn(1, 2, 23, 17, generator=torch.Generator().manual_seed(6))

    def pointwise(part):
        return part.repeat_interleave(4, -1).repeat_interleave(4, -2)

    got = ramp_decode(pointwise, z, ramp_grid(7, 3, (23, 17), 4), 4)
    assert torch.allclose(got, pointwise(z), rtol=1e-6, atol=0)


def test_a_tile_of_another_size_is_refused():
    with pytest.raises(EvaluationError, match=r"latent row 0, column 0 gave 5×5 pixels, expected 10×10"):
        ramp_decode(lambda part: part, torch.zeros(1, 1, 9, 9), ramp_grid(5, 2, (9, 9), 2), 2)


# ---------------------------------------------------------------- its values


def test_values():
    assert parse("t16o4") == (16, 4)
    assert parse("t1o0") == (1, 0)


@pytest.mark.parametrize("value", [True, 16, "t16", "16o4", "t16o0.25", "t16o-1", "t16o4 "])
def test_a_value_that_is_none_is_refused(value):
    with pytest.raises(SuiteError, match="whole latent pixels, like 't16o4'"):
        parse(value)


@pytest.mark.parametrize(("value", "legal"), [("t4o4", "t4o3"), ("t4o9", "t4o3"), ("t0o0", "t1o0")])
def test_an_overlap_that_leaves_no_stride_is_refused(value, legal):
    with pytest.raises(SuiteError, match=f"nearest legal: '{legal}'"):
        parse(value)


def test_not_applicable():
    assert inapplicable(RAMP, MODEL, (1, 4, 8, 9)) is None
    assert "not smaller than the latents 8×8" in inapplicable(RAMP, MODEL, (1, 4, 8, 8))
    both = DecodePlan(tiling=Tiling(8, 0.25), options={"ramp_tiling": "t4o2"})
    assert "tiling cuts the latents already" in inapplicable(both, MODEL, (1, 4, 12, 16))


# ---------------------------------------------------------------- applied to a module


@torch.no_grad()
def decode(module, plan, z, model=MODEL):
    with apply_plan(module, plan, model=model, device="cpu") as proofs, observe(module, model) as seen:
        seen.batch, seen.grid = z.shape[0], optimizations.tile_grid(plan, model, tuple(z.shape))
        sample = model.family.decode(module, z)
        return sample, {name: prove(seen) for name, prove in proofs.items()}


@pytest.mark.parametrize("slicing", [False, True])
def test_it_is_proved_by_calls_and_sizes(module, slicing):
    z = latents()  # 2 items of 12×16: rows of 8 and 7, columns of 8, 8 and 6
    sample, receipts = decode(module, msgspec.structs.replace(RAMP, slicing=slicing), z)
    receipt = receipts["ramp_tiling"]
    batch, times = (1, 2) if slicing else (2, 1)
    assert receipt["engaged"] is True
    assert receipt["calls"] == 6 * times
    assert receipt["shapes"] == [
        [batch, 4, 8, 8, 2 * times], [batch, 4, 8, 6, times], [batch, 4, 7, 8, 2 * times], [batch, 4, 7, 6, times]
    ]  # fmt: skip
    assert receipt["grid"]["cols"] == {"starts": (0, 10, 20), "band": 6, "tile": 16, "size": 32}
    assert all(one["engaged"] for one in receipts.values())
    grid = ramp_grid(8, 3, (12, 16), 2)
    with torch.no_grad():
        expected = [ramp_decode(lambda part: module.decode(part).sample, item, grid, 2) for item in z.split(1)]
    assert torch.allclose(sample, torch.cat(expected), atol=1e-5)


def test_a_decode_that_goes_past_it_is_not_engaged(module):
    past = model_with(decode=lambda self, part, z: type(part).decode(part, z).sample)
    _, receipts = decode(module, RAMP, latents(), past)
    assert receipts["ramp_tiling"]["engaged"] is False
    assert receipts["ramp_tiling"]["reason"] == "expected 6 decoder calls, saw 1"


def test_tuples_and_outputs_come_back_as_they_were(module):
    with torch.no_grad(), apply_plan(module, RAMP, model=MODEL, device="cpu"):
        output, alone = module.decode(latents()), module.decode(latents(), return_dict=False)
    assert type(output).__name__ == "DecoderOutput"
    assert isinstance(alone, tuple)
    assert torch.equal(output.sample, alone[0])


def test_half_precision_stays_half(module):
    plan = msgspec.structs.replace(RAMP, dtype="bf16")
    with torch.no_grad(), apply_plan(module, plan, model=MODEL, device="cpu"):
        assert MODEL.family.decode(module, latents().bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("offload", ["sequential", "group_leaf", "model"])
def test_offload_and_slicing_change_nothing(offload):
    runner, z = Runner(MODEL), latents()
    plain = runner.decode(z, RAMP, trace=False)
    moved = runner.decode(z, msgspec.structs.replace(RAMP, offload=offload), trace=False)
    assert torch.equal(moved.sample, plain.sample)
    assert all(receipt["engaged"] for receipt in moved.receipts.values())


# ---------------------------------------------------------------- what looks at it


def test_detectors_look_where_its_tiles_meet():
    assert cuts(RAMP) == {"tiling"}
    assert DETECTORS.get("tile_step").looks_at(RAMP, video=False)
    assert not DETECTORS.get("tile_step").looks_at(DecodePlan(options={"ramp_tiling": False}), video=False)
    decoded = Runner(MODEL).decode(latents(), RAMP, trace=False)
    found = layout(decoded.sample, RAMP, decoded.receipts)
    assert isinstance(found, Layout)
    assert found.lines("x").positions == (10, 16, 20, 26)  # starts, and the far edges of the ramps
    assert found.period == 2


def test_no_oracle_is_known_for_it():
    assert not oracles.has_one(RAMP)


@pytest.mark.slow
def test_the_edge_that_its_law_leaves_is_found():
    """An honest decode: at the far edge of a ramp the earlier tile still counts half, and tile_step sees it there."""
    from fidelity import registry

    model = registry.MODELS.get("reference-kl")
    runner = Runner(model)
    z = registry.LATENTS.get("photo-pair").make(model, runner.module).tensor[:1]
    golden = runner.decode(z, DecodePlan(), trace=False).sample
    found = {}
    for plan in (DecodePlan(tiling=Tiling(16, 0.25)), DecodePlan(options={"ramp_tiling": "t16o4"})):
        decoded = runner.decode(z, plan, trace=False)
        about = {"plan": plan, "receipts": decoded.receipts, "data_range": model.data_range}
        found[plan] = DETECTORS.get("tile_step")(decoded.sample, golden, **about)
    blended, ramped = found.values()
    assert blended.value == 0
    assert ramped.value > 4
    assert ramped.where["position"] in (96 + 32, 192 + 32)
