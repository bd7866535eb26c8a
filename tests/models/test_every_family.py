"""Every autoencoder class by its small instance: geometry, options engaged, oracle, state and dtype, in one table.

What the suite `families` expects to fail must fail here as well, and nothing else may.
"""

from __future__ import annotations

import inspect
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fidelity import gates, grammar, oracles, registry
from fidelity.errors import FidelityError, IllegalTiling
from fidelity.models import configs
from fidelity.optimizations import frame_chunks, inapplicable, tile_grid
from fidelity.records import DecodePlan, Family, Model, Temporal, Tiling
from fidelity.registry import FAMILIES, LATENTS, MODELS
from fidelity.runner import Runner

registry.load_plugins()

SUITE = Path(__file__).parents[2] / "suites" / "families.toml"
SMALL = tuple(name for name in MODELS if name.startswith("small-"))
LATENTS_OF = ((3, 5, 1), (4, 2, 2), (2, 3, 3), (2, 2, 4))
"""Height, width, and frames of a video, in latent pixels; a class that decodes one size alone has its own."""
AT_LEAST = {"small-minimax-h3": 3, "small-vidtok-noncausal": 4}
"""Latent frames of a video below which a class decodes nothing and raises."""
T, F = Tiling(4, 0.25), Temporal(2, 0.5)
PLANS = (
    DecodePlan(dtype="bf16"),
    DecodePlan(tiling=T),
    DecodePlan(dtype="bf16", slicing=True),
    DecodePlan(dtype="bf16", slicing=True, tiling=Tiling(4, 0.5)),
    DecodePlan(temporal=F),
    DecodePlan(dtype="bf16", temporal=Temporal(2, 0.0), tiling=T),
    *(DecodePlan(offload=offload) for offload in ("sequential", "group_block", "group_leaf")),
)


@cache
def runner(name: str) -> Runner:
    """One instance for all tests of a model: whatever they do, it must be as it was."""
    return Runner(MODELS.get(name))


@cache
def latents(name: str) -> torch.Tensor:
    return LATENTS.get("small").make(MODELS.get(name), runner(name).module).tensor


@cache
def rules() -> Any:
    return grammar.read(SUITE, registry).rules


def only_if_installed(name: str) -> Model:
    """The model, or the published configuration, of that name; skips where diffusers is older than its class."""
    import diffusers

    model = MODELS.get(name) if name in MODELS else configs.from_name(name)
    if not hasattr(diffusers, model.family.name):
        pytest.skip(f"this diffusers has no {model.family.name}")
    return model


# ---------------------------------------------------------------- what is known without decoding


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_the_protocol(name: str) -> None:
    family = FAMILIES.get(name)
    for entry, declared in vars(Family).items():
        if inspect.isfunction(declared) and not entry.startswith("_"):
            own = [*inspect.signature(getattr(family, entry)).parameters]
            assert own == [*inspect.signature(declared).parameters][1:], entry
    for entry in Family.__annotations__:
        assert hasattr(family, entry)
    assert family.summary
    assert bool(family.tiling_attributes()) == ("tiling" not in family.lacks) == (family.tile_controls != "none")


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_the_constructor(name: str) -> None:
    import diffusers

    if not hasattr(diffusers, name):
        pytest.skip(f"this diffusers has no {name}")
    known = inspect.signature(getattr(diffusers, name).__init__).parameters

    def plain(value: Any) -> Any:
        return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value

    defaults = FAMILIES.get(name).defaults
    wrong = {key: known[key].default for key in defaults if plain(known[key].default) != plain(defaults[key])}
    assert not wrong


@pytest.mark.parametrize("name", [*configs.known(), *SMALL])
def test_landmarks_are_weights_of_that_config(name: str) -> None:
    model = only_if_installed(name)
    with torch.device("meta"):
        state = model.family.build(model.config).state_dict()
    marks = model.family.landmarks(model.config)
    assert marks
    assert {key: tuple(state[key].shape) for key in marks} == marks


# ---------------------------------------------------------------- what the module does


@pytest.mark.parametrize("name", SMALL)
def test_the_geometry_is_that_of_the_module(name: str) -> None:
    model = only_if_installed(name)
    geometry, family, module = model.geometry, model.family, runner(name).module
    for height, width, frames in LATENTS_OF if geometry.size is None else [(*geometry.size, 1)]:
        inner, outer = ((frames,), (geometry.sample_frames(frames),)) if geometry.video else ((), ())
        z = torch.randn(1, geometry.latent_channels, *inner, height, width, generator=torch.Generator().manual_seed(0))
        picture = (1, geometry.sample_channels, *outer, height * geometry.spatial, width * geometry.spatial)
        if frames < AT_LEAST.get(name, 1):
            with torch.no_grad(), pytest.raises((AssertionError, ValueError)):
                family.decode(module, z)
            continue
        with torch.no_grad():
            assert tuple(family.decode(module, z).shape) == picture
            if family.fits(frames):  # of others the decoder fills frames up, which the encoder does not take back
                assert tuple(family.encode(module, torch.zeros(picture)).shape) == tuple(z.shape)


@pytest.mark.parametrize("name", SMALL)
def test_the_sample_has_the_spread_of_a_picture(name: str) -> None:
    """One item: some classes cannot decode two at once."""
    model = only_if_installed(name)
    low, high = model.data_range
    with torch.no_grad():
        sample = model.family.decode(runner(name).module, latents(name)[:1])
    assert sample.isfinite().all()
    assert 0.05 <= sample.std().item() * 2 / (high - low) <= 1.5


@pytest.mark.parametrize("name", SMALL)
def test_what_a_class_lacks_it_refuses(name: str) -> None:
    model = only_if_installed(name)
    module, cpu = runner(name).module, torch.device("cpu")
    refusals = {
        "slicing": lambda: module.enable_slicing(),
        "tiling": lambda: module.enable_tiling(),
        "group_offload": lambda: module.enable_group_offload(onload_device=cpu, offload_type="leaf_level"),
    }
    assert model.family.lacks <= refusals.keys()
    for option in model.family.lacks:
        with pytest.raises((NotImplementedError, ValueError, AttributeError)):
            refusals[option]()


@pytest.mark.parametrize("name", SMALL)
def test_set_tiling_writes_the_declared_attributes_only(name: str) -> None:
    model = only_if_installed(name)
    if "tiling" in model.family.lacks:
        return
    module = copy(runner(name).module)  # its own attributes, the same parts
    before = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    model.family.set_tiling(module, model.geometry, Tiling(12, 0.5))
    after = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    written = {key for key in after if after[key] is not before.get(key) and after[key] != before.get(key)}
    assert "use_tiling" in written or before["use_tiling"] is True
    assert written <= {*model.family.tiling_attributes()} <= after.keys()


@pytest.mark.campaign  # suites/families.toml does this and more; here without goldens, for a class being written
@pytest.mark.parametrize("name", SMALL)
def test_every_option_runs_and_gives_what_it_should(name: str) -> None:
    model = only_if_installed(name)
    wrong = {}
    for plan in PLANS:
        if not applies(model, plan, tuple(latents(name).shape)):
            continue
        found = problems(name, plan)
        expected = rules().expectation_for((name, "small", plan, None))
        if bool(found) != (expected.verdict != "pass"):
            wrong[plan.id] = found or f"passes, though the suite expects: {expected.reason}"
    assert not wrong


def applies(model: Model, plan: DecodePlan, shape: tuple[int, ...]) -> bool:
    """Whether the class has what the plan asks for, and can represent it: the suites decode the others."""
    try:
        tile_grid(plan, model, shape)
        if model.geometry.video:
            frame_chunks(plan, model, shape)
    except IllegalTiling:
        return False
    return inapplicable(plan, model, shape) is None


def problems(name: str, plan: DecodePlan) -> list[str]:
    """What is wrong with one decode: receipts (engaged, dtype, state), shape, and its oracle."""
    try:
        decoded = runner(name).decode(latents(name), plan, trace=False)
    except FidelityError:
        raise  # the request is wrong, not the class
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    found = [reason.message for reason in gates.receipt_reasons(decoded.receipts, plan.settings)]
    against = oracles.compare(
        decoded.sample, runner(name).expected(latents(name), plan), data_range=MODELS.get(name).data_range
    )
    if against.value is None or against.value > (oracles.LIMIT.max or 0.0):
        found.append(against.reason or f"{against.value:g} grey levels from the oracle at {against.where}")
    return found
