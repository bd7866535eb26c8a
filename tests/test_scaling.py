"""Units of latents: each fault that shipped is found and named on a trained model, and nothing that ships alarms."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fidelity import checks, drawn, inspection, registry, scaling
from fidelity.checks import units
from fidelity.errors import EvaluationError
from fidelity.latents import unscale
from fidelity.records import DecodePlan, Headroom, Reach, Scaling
from fidelity.registry import CHECKS
from fidelity.runner import Runner

registry.load_plugins()
BASE = registry.MODELS.get("reference-kl")
EACH = Scaling(mean=(-0.88, -1.67, 0.10, 1.63), std=(2.59, 6.18, 2.07, 1.87))
SHIFTED = Scaling(factor=0.2447, shift=1.5)
FLUX = Scaling(factor=0.3611, shift=0.1159)


@pytest.fixture(scope="module")
def module():
    return BASE.load()


@pytest.fixture(scope="module")
def known(module):
    return scaling.expected(BASE, module, units.photographs())


def made(module, name: str = "photo-pair") -> torch.Tensor:
    return registry.LATENTS.get(name).make(BASE, module).tensor[:1]


# ---------------------------------------------------------------- units


@pytest.mark.parametrize("convention", [BASE.scaling, EACH, SHIFTED, FLUX, Scaling()], ids=str)
def test_scale_undoes_unscale(convention):
    latents = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(scaling.scale(unscale(latents, convention), convention), latents, atol=1e-5)


def test_spread_is_one_in_denoiser_units():
    latents = torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(1))
    for convention in (BASE.scaling, EACH, FLUX):
        assert scaling.spread(unscale(latents, convention), convention) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("gain", "fine"), [(0.24, False), (0.25, True), (2.5, True), (2.51, False)])
def test_a_spread_at_the_limit_is_inside(gain, fine):
    latents = torch.ones(1, 4, 8, 8, dtype=torch.float64)
    assert (scaling.outside(latents * gain, Scaling(factor=1.0)) is None) is fine


def test_latents_that_are_nan_are_in_no_unit():
    assert "nan" in scaling.outside(torch.full((1, 4, 8, 8), torch.nan), Scaling(factor=1.0))


# ---------------------------------------------------------------- faults, injected


def by_convention(convention: Scaling, latents: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the decoder would get of these latents (right ones, in decoder units) under each fault."""
    out = {
        "the denoiser's latents were never unscaled": scaling.scale(latents, convention),
        "the latents were unscaled twice": unscale(latents, convention),
    }
    if convention == BASE.scaling:
        out["the scaling_factor was SDXL's 0.13025"] = latents * 0.2447 / 0.13025
        out["the scaling_factor was Stable Diffusion 3's 1.5305"] = latents * 0.2447 / 1.5305
    return out


@pytest.mark.slow
@pytest.mark.parametrize("convention", [BASE.scaling, EACH], ids=["factor", "mean and std"])
def test_a_fault_is_found_and_named(module, known, convention):
    model, right = dataclasses.replace(BASE, scaling=convention), made(module)
    for words, wrong in by_convention(convention, right).items():
        found = scaling.explain(model, module, wrong, known)
        assert found is not None, words
        assert found.words.startswith(words)
        assert found.lost >= scaling.BETTER * found.undone
    assert scaling.explain(model, module, right, known) is None


@pytest.mark.slow
def test_a_shift_of_more_than_the_spread_that_was_forgotten_is_found(module, known):
    model = dataclasses.replace(BASE, scaling=Scaling(factor=0.2447, shift=6.0))
    found = scaling.explain(model, module, made(module) - 6.0, known)
    assert found is not None
    assert found.words == "shift_factor was forgotten"
    assert found.offset > 1


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.18215 / 0.18125])
def test_half_a_percent_is_below_what_latents_can_tell(module, known, gain):
    assert scaling.explain(BASE, module, made(module) * gain, known) is None
    assert scaling.outside(made(module) * gain, BASE.scaling) is None


# ---------------------------------------------------------------- nothing that ships alarms


@pytest.mark.slow
@pytest.mark.parametrize("name", ["photo-text", "photo-night", "normal", "contrast", "flat"])
def test_latents_that_ship_raise_nothing(module, known, name):
    latents = made(module, name)
    assert scaling.explain(BASE, module, latents, known) is None
    assert scaling.outside(latents, BASE.scaling) is None


# ---------------------------------------------------------------- as checks


@pytest.fixture
def subject(module, known, monkeypatch):
    monkeypatch.setattr(units.scaling, "expected", lambda model, module, sources: known)
    runner = Runner(BASE)
    return checks.Subject(runner)


@pytest.mark.slow
def test_the_check_fails_on_latents_that_were_never_unscaled_and_says_so(subject, module):
    right = made(module)
    came, expected = units.latents_scale(subject, right, DecodePlan())
    assert torch.equal(came, expected)
    came, expected = units.latents_scale(subject, right * 0.2447, DecodePlan())
    assert came.flatten()[0] == pytest.approx(0.2447, rel=1e-3)
    assert subject.words.startswith("the denoiser's latents were never unscaled: decoded and encoded again")
    units.latents_scale(subject, torch.ones(1, 4, 8, 8) * 40, DecodePlan())
    assert "spread 9.79 in denoiser units, outside 0.25 to 2.5" in subject.words


@pytest.mark.slow
def test_latents_of_another_checkpoint_are_told_from_ones_of_this(subject, module):
    right = made(module)
    came, expected = units.latents_origin(subject, right, DecodePlan())
    assert torch.equal(came, expected)
    came, _ = units.latents_origin(subject, right[:, [1, 0, 3, 2]], DecodePlan())
    assert float(came) > 0
    assert "another checkpoint's" in subject.words


def test_options_and_models_without_units_are_not_judged(monkeypatch, subject):
    with pytest.raises(EvaluationError, match="leave every option out"):
        units.latents_scale(subject, torch.zeros(1, 4, 8, 8), DecodePlan(slicing=True))
    check, shape = CHECKS.get("latents_scale"), (1, 4, 8, 8)
    bare = dataclasses.replace(BASE, scaling=Scaling())
    assert "states no scaling" in check.reason(DecodePlan(), shape, bare)
    assert "takes no photographs" in check.reason(DecodePlan(), shape, registry.MODELS.get("reference-video"))
    assert check.reason(DecodePlan(), shape, BASE) is None


def test_an_encoder_that_does_not_belong_to_its_decoder_judges_nothing(subject, known, monkeypatch):
    import msgspec

    torn = msgspec.structs.replace(known, lost=0.6)
    monkeypatch.setattr(units.scaling, "expected", lambda model, module, sources: torn)
    with pytest.raises(EvaluationError, match="encoder and decoder do not belong together"):
        units.latents_scale(subject, torch.zeros(1, 4, 8, 8), DecodePlan())


# ---------------------------------------------------------------- what inspect says


def test_the_model_s_own_factor_is_held_against_photographs(known):
    import msgspec

    assert known.findings == ()
    assert 0.8 < known.spread < 1.2
    assert "spread        0.94 in denoiser units" in "\n".join(scaling.lines(known))
    wrong = msgspec.structs.replace(known, spread=known.spread * 0.18215 / 0.2447 / 4)
    assert "scaling wrong photographs have a spread of 0.175" in "\n".join(scaling.lines(wrong))
    assert scaling.lines(None) == ["latents       not measured: the model takes no photographs"]


def test_inspect_prints_the_ceiling_of_each_kind(known):
    reach = Reach((9.0, 1.0), (8.0,), (0.4, 0.8), (16, 8), is_global=True)
    found = inspection.Inspection(
        "m", "F", 8, 1, 4, 48.0, {}, False, "full", {}, 10, 40, {"photo-text": 20.0}, reach, {}, Headroom(reason="no"),
        ceiling={"photo-text": {"psnr": 20.0, "ssim": 0.5, "lpips_alex": 0.25},
                 "drawn-lines": {"psnr": 15.0, "ssim": None, "lpips_alex": 0.5}},
        latents=known,
    )  # fmt: skip
    said = "\n".join(inspection.lines(found))
    assert "round trip    photo-text: 20.00 dB · SSIM 0.500 · LPIPS 0.250" in said
    assert "round trip    drawn-lines: 15.00 dB · SSIM not measured · LPIPS 0.500" in said
    assert "round trip    loses at most" in said


@pytest.mark.parametrize("name", drawn.PICTURES)
def test_drawn_pictures_hold_what_they_are_named_for(name):
    picture = drawn.PICTURES[name]()
    assert picture.shape == (1, 3, drawn.SIDE, drawn.SIDE)
    assert 0 <= float(picture.min()) < float(picture.max()) <= 1
    steps = (picture[..., 1:] - picture[..., :-1]).abs().amax(1)
    edges = float((steps > 0.05).float().mean())
    assert edges > 0.02 if name == "drawn-lines" else edges < 0.02
