"""A decoder that is no diffusers class, under every option, and what is refused of it in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fidelity
from fidelity import DecodePlan, Geometry, RequestError, Scaling, Tiling, decoder, registry, weights
from fidelity.api import _bench
from fidelity.errors import IllegalTiling, LatentsError, ModelError, PluginError
from fidelity.evaluator import Evaluator
from fidelity.models import from_path
from fidelity.predict import predict
from fidelity.records import Case, Limit
from fidelity.runner import Runner

F2C4 = Geometry(spatial=2, latent_channels=4)
PLANS = (
    DecodePlan(),
    DecodePlan(slicing=True),
    DecodePlan(tiling=Tiling(16, 0.25)),
    DecodePlan(tiling=Tiling(16, 0.0)),
    DecodePlan(tiling=Tiling(12, 0.5), slicing=True),
    DecodePlan(dtype="bf16", tiling=Tiling(16, 0.25)),
    DecodePlan(dtype="fp16", tiling=Tiling(16, 0.25)),
    DecodePlan(dtype="fp16", force_upcast=True),
    *(DecodePlan(offload=mode) for mode in ("model", "sequential", "group_block", "group_leaf", "disk")),
)


class Net(nn.Sequential):
    """A decoder with statistics, so that tiles differ from the whole."""

    def __init__(self, scale: int = 2):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(
                nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.SiLU(), nn.Upsample(scale_factor=scale),
                nn.Conv2d(16, 3, 3, padding=1),
            )  # fmt: skip


class Auto(nn.Module):
    """An autoencoder whose decoding is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def decode(self, latents: torch.Tensor) -> Any:
        return (self.inner(latents),)

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        return torch.cat([image, image[:, :1]], dim=1)[..., ::2, ::2]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Register a decoder for one test: `own(load, **declared)` gives its Model."""
    registry.load_plugins()
    monkeypatch.setattr(registry.MODELS, "_entries", dict(registry.MODELS.items()))

    def declare(load: Any, name: str = "own", **about: Any) -> Any:
        decoder(name, **{"geometry": F2C4, **about})(load)
        return registry.MODELS.get(name)

    yield declare
    _bench.cache_clear()


def latents(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 4, 24, 32, generator=torch.Generator().manual_seed(1))


def bound() -> Any:
    return Auto().decode


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("load", [Net, bound], ids=["module", "bound method"])
def test_every_option_engages_and_gives_what_its_oracle_gives(own, load):
    runner = Runner(own(load))
    for plan in PLANS:
        decoded = runner.decode(latents(), plan, trace=False)
        assert {name: receipt["reason"] for name, receipt in decoded.receipts.items() if not receipt["engaged"]} == {}
        assert decoded.receipts["state"]["leaks"] == []
        assert torch.equal(decoded.sample, runner.expected(latents(), plan)), plan.id


def test_tiles_change_the_sample_and_are_counted(own):
    runner = Runner(own(Net))
    whole = runner.decode(latents(), DecodePlan(), trace=False).sample
    tiled = runner.decode(latents(), DecodePlan(tiling=Tiling(16, 0.25)), trace=False)
    assert tiled.receipts["tiling"]["calls"] == 6
    assert tiled.receipts["tiling"]["grid"]["cols"]["starts"] == (0, 24, 48)
    assert tiled.sample.shape == whole.shape
    assert 1e-4 < float((tiled.sample - whole).abs().max()) < 1


def test_an_illegal_stride_is_refused_with_the_nearest_legal(own):
    model = own(Net)
    with pytest.raises(IllegalTiling, match=r"own cannot cut latent pixels by 16 with overlap 0\.3.*nearest legal"):
        model.family.tile_grid(model.geometry, (32, 32), Tiling(16, 0.3))
    with pytest.raises(IllegalTiling, match="not whole"):
        model.family.set_tiling(model.load(), model.geometry, Tiling(16, 0.3))


def test_a_callable_without_weights_proves_what_can_be_seen_of_it(own):
    net = Net()
    runner = Runner(own(lambda: lambda z: net(z.float())))
    sliced = runner.decode(latents(), DecodePlan(slicing=True, tiling=Tiling(16, 0.25)), trace=False)
    assert all(receipt["engaged"] for receipt in sliced.receipts.values())
    half = runner.decode(latents(), DecodePlan(dtype="bf16"), trace=False).receipts["precision"]
    assert half["engaged"] is False
    for mode in ("model", "sequential", "group_leaf", "disk"):
        offload = runner.decode(latents(), DecodePlan(offload=mode), trace=False).receipts["offload"]
        assert offload["engaged"] is False
        assert "own shows no weights" in offload["reason"]


def test_a_sample_unlike_the_declared_geometry_is_refused_at_loading(own):
    with pytest.raises(ModelError, match=r"'own': latents \[1, 4, 8, 8\] gave \[1, 3, 32, 32\], .*\[1, 3, 16, 16\]"):
        Runner(own(lambda: Net(scale=4)))


# ---------------------------------------------------------------- pictures, goldens, checks


def test_pictures_need_an_encoder(own):
    model = own(Net)
    with pytest.raises(LatentsError, match="'own' has no encoder"):
        registry.LATENTS.get("photo-pair").make(model, model.load())
    model = own(bound, "both", encoder=lambda: Auto().encode)
    made = registry.LATENTS.get("photo-pair").make(model, model.load())
    assert made.tensor.shape[1] == 4


def test_a_golden_is_recorded_and_judged_against(own, tmp_path):
    model = own(Net)
    bench = Evaluator({"own": model}, {"normal": registry.LATENTS.get("normal")}, tmp_path)
    bench.record("own", "normal")
    limits = {"rmse": Limit(max=1e-4, origin="test")}
    whole = bench.case(Case("own", "normal", DecodePlan(slicing=True), limits=limits))
    assert whole.verdict == "pass", whole.reasons
    tiled = bench.case(Case("own", "normal", DecodePlan(tiling=Tiling(16, 0.25)), limits=limits))
    assert tiled.verdict == "fail"
    assert [reason.name for reason in tiled.reasons if reason.limit == 1e-4] == ["rmse"]
    assert tiled.measurements["oracle_max_abs"].exact


def test_check_judges_a_decode_of_its_own(own):
    own(Net)
    fidelity.check(lambda module, z: module.decode(z), model="own", latents="normal", limits={"rmse": 0.0})
    with pytest.raises(AssertionError, match="rmse is"):
        fidelity.check(lambda module, z: module.decode(z) + 1, model="own", latents="normal", limits={"rmse": 1.0})


def test_the_declared_range_scales_grey_levels(own, tmp_path):
    plan, found = DecodePlan(tiling=Tiling(16, 0.25)), []
    for name, data_range in (("wide", (-1.0, 1.0)), ("unit", (0.0, 1.0))):
        bench = Evaluator(
            {name: own(Net, name, data_range=data_range)}, {"ramp": registry.LATENTS.get("ramp")}, tmp_path
        )
        bench.record(name, "ramp")
        found.append(bench.case(Case(name, "ramp", plan)).measurements["rmse"].value)
    assert found[1] == pytest.approx(2 * found[0])


# ---------------------------------------------------------------- a tiler of its own


def halves(decode: Any, z: torch.Tensor, tile: int, overlap: float) -> torch.Tensor:
    """Columns of `tile` latent pixels, side by side, a visible line apart."""
    parts = [decode(z[..., at : at + tile]) + 0.2 * (at > 0) for at in range(0, z.shape[-1], tile)]
    return torch.cat(parts, dim=-1)


def columns(size: int, tile: int, overlap: float) -> tuple[tuple[int, ...], int]:
    return tuple(range(0, size, tile)), 0


def test_a_declared_grid_is_proved_and_looked_at(own, tmp_path):
    model = own(Net, tile=halves, grid=columns)
    plan = DecodePlan(tiling=Tiling(24, 0.0))
    bench = Evaluator({"own": model}, {"normal": registry.LATENTS.get("normal")}, tmp_path)
    bench.record("own", "normal")
    result = bench.case(Case("own", "normal", plan, limits={"tile_step": Limit(max=2.0, origin="test")}))
    assert result.receipts["tiling"]["engaged"] is True
    assert "oracle_max_abs" not in result.measurements
    assert result.diagnosis == ("seam",)
    assert result.measurements["tile_step"].where["position"] == 48


def test_a_declared_grid_that_the_calls_belie_is_not_engaged(own):
    runner = Runner(own(Net, tile=halves, grid=lambda size, tile, overlap: (tuple(range(0, size, tile // 2)), 0)))
    receipt = runner.decode(latents(), DecodePlan(tiling=Tiling(16, 0.0)), trace=False).receipts["tiling"]
    assert receipt["engaged"] is False
    assert re.match("expected .* decoder calls, saw 2", receipt["reason"])


def test_hidden_tiles_are_proved_by_their_calls_and_looked_for_blind(own, tmp_path):
    model = own(Net, tile=halves)
    assert model.family.hides_tiles
    with pytest.raises(IllegalTiling, match="looked for blind"):
        model.family.tile_grid(model.geometry, (24, 32), Tiling(8, 0.0))
    receipt = Runner(model).decode(latents(), DecodePlan(tiling=Tiling(8, 0.0)), trace=False).receipts["tiling"]
    assert receipt["engaged"] is False  # columns of 8 × 24: not tiles of 8
    assert "saw 4 calls of up to 24" in receipt["reason"]
    receipt = Runner(model).decode(latents(), DecodePlan(tiling=Tiling(24, 0.0)), trace=False).receipts["tiling"]
    assert receipt["engaged"] is True
    assert receipt["grid"] is None


def test_a_suite_asks_hidden_tiles_for_a_grid_that_is_found(own, tmp_path):
    own(Net, tile=halves)
    path = tmp_path / "suite.toml"
    path.write_text(
        'schema = "fidelity.suite/1"\n[suite]\nname = "hidden"\ngolden = "golden"\n'
        '[[matrix]]\nmodels = ["own"]\nlatents = ["normal"]\ntiling = [{ tile = 24, overlap = 0.0 }]\n'
        '[limits]\nrmse = { max = 99.0, origin = "t" }\ntile_step = { max = 2.0, origin = "a line" }\n'
        'tile_tone = { max = 2.0, origin = "t" }\noracle_max_abs = { max = 0.0, origin = "t" }\n'
    )
    case = fidelity.suite.load(path, registry).cases[0]
    assert {name: limit.max for name, limit in case.limits.items()} == {"rmse": 99.0, "periodic": 2.0}


def test_a_tiler_that_passes_its_decoder_by_proves_nothing(own):
    net = Net()
    runner = Runner(own(lambda: net, tile=lambda decode, z, tile, overlap: net.forward(z) * 1.01, grid=columns))
    receipts = runner.decode(latents(), DecodePlan(tiling=Tiling(16, 0.0)), trace=False).receipts
    assert receipts["tiling"]["engaged"] is None
    assert "goes past the decoder" in receipts["tiling"]["reason"]


def test_check_looks_for_hidden_tiles_by_itself(own):
    def lined(decode: Any, z: torch.Tensor, tile: int, overlap: float) -> torch.Tensor:
        sample = decode(z)
        sample[..., 2 * tile :: 2 * tile] += 0.2
        return sample

    own(Net, tile=lined)
    with pytest.raises(AssertionError, match="periodic is"):
        fidelity.check(
            lambda module, z: lined(module.decode, z, 12, 0.0),
            model="own", latents="normal", plan="tile=12,overlap=0", limits={"rmse": 99.0},
        )  # fmt: skip


# ---------------------------------------------------------------- memory on shapes


def test_memory_is_predicted_from_the_same_load(own):
    model = own(Net)
    whole = predict(model, (128, 128))
    tiled = predict(model, (128, 128), DecodePlan(tiling=Tiling(32, 0.25)))
    assert whole.sample == (1, 3, 128, 128)
    assert whole.weights_bytes == 4 * sum(weight.numel() for weight in Net().parameters())
    assert tiled.allocated_peak_bytes < whole.allocated_peak_bytes


def test_a_callable_that_hides_its_weights_cannot_be_predicted(own):
    net = Net()
    with pytest.raises(RequestError, match=r"own: it cannot run on shapes alone: \w+: ") as caught:
        predict(own(lambda: lambda z: net(z)), (64, 64))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- paths and weights


def test_a_load_function_gets_the_path_of_the_model_option(own, tmp_path):
    def load(path: str) -> nn.Module:
        net = Net()
        net.load_state_dict(weights(path))
        return net

    model = own(load)
    with pytest.raises(ModelError, match="say where its weights are: --model own=PATH"):
        model.load()
    twice = {key: 2 * value for key, value in Net().state_dict().items()}
    save_file(twice, tmp_path / "w.safetensors")
    loaded = from_path("own", tmp_path / "w.safetensors")
    assert loaded.source == str(tmp_path / "w.safetensors")
    assert torch.equal(loaded.load().decoder[0].weight, 2 * Net()[0].weight)
    assert from_path("own", "") is model
    with pytest.raises(ModelError, match="takes no path"):
        own(lambda: Net(), "fixed").family.at(registry.MODELS.get("fixed"), "x")


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.bin"])
def test_weights_of_a_file(tmp_path, name):
    state = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.float16)}
    save_file(state, tmp_path / name) if name.endswith("safetensors") else torch.save(state, tmp_path / name)
    found = weights(tmp_path / name)
    assert set(found) == {"a", "b"}
    assert torch.equal(found["a"], state["a"])


def test_weights_of_a_folder_in_diffusers_layout(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "diffusion_pytorch_model.safetensors")
    assert set(weights(tmp_path)) == {"a"}


class Harmful:
    """What a pickle may do when it is read."""

    def __reduce__(self) -> Any:
        return print, ("this code ran",)


def test_wrong_weights_are_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "text.safetensors").write_text("no weights")
    torch.save({"a": Harmful()}, tmp_path / "code.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    save_file({"a": torch.tensor([1.0, float("nan")])}, tmp_path / "nan.safetensors")
    for name, said in (
        ("absent.safetensors", "does not exist"),
        ("", "none in"),
        ("text.safetensors", "cannot be read"),
        ("code.pt", "it holds more than plain tensors, perhaps code, and nothing of it was run"),
        ("list.pt", "no table of tensors"),
        ("nan.safetensors", "'a' of .* has 1 of 2 values that are NaN or inf"),
    ):
        with pytest.raises(ModelError, match=said) as caught:
            weights(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert "this code ran" not in capsys.readouterr().out


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"name": "a/b"}, "use letters"),
        ({"geometry": 8}, "write Geometry"),
        ({"data_range": (1, 0)}, r"data_range is \(1, 0\)"),
        ({"scaling": Scaling(mean=(0.0,))}, "has 1 values, the latents have 4 channels"),
        ({"grid": columns}, "give tile= as well"),
        ({"name": "reference-kl"}, "registered twice"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(own, about, said):
    with pytest.raises(PluginError, match=said):
        own(Net, **about)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda: None, "gave NoneType: return an nn.Module"),
        (lambda: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda: Net().load_state_dict({}), "raised RuntimeError: .*Missing key"),
    ],
)
def test_a_load_function_that_fails_is_named_in_one_line(own, load, said):
    with pytest.raises(ModelError, match=said) as caught:
        own(load).load()
    assert "\n" not in str(caught.value)


def test_a_grid_that_cannot_be_is_refused(own):
    model = own(Net, tile=halves, grid=lambda size, tile, overlap: ((4, 2), 0))
    with pytest.raises(IllegalTiling, match=r"gave starts \[4, 2\] and band 0: expected 0, ascending"):
        model.family.tile_grid(model.geometry, (32, 32), Tiling(8, 0.0))


@pytest.mark.parametrize("grid", [lambda *_: (range(0, 8, 0), 3), lambda *_: "x"], ids=["raises", "nonsense"])
def test_a_grid_that_raises_is_named_in_one_line(own, grid):
    model = own(Net, tile=halves, grid=grid)
    with pytest.raises(IllegalTiling, match=r"grid\(32, 8, 0\) raised ValueError: .*it has to give \(starts, band\)"):
        model.family.tile_grid(model.geometry, (32, 32), Tiling(8, 0.0))
