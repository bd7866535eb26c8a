"""A decode that is not finite is decoded once more, and the module that made it so is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fidelity import overflow, registry
from fidelity.evaluator import Evaluator
from fidelity.records import Case, DecodePlan, Limit
from fidelity.runner import Runner
from tests.optimizations.small import MODEL, latents

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
registry.load_plugins()


@pytest.fixture(scope="module")
def runner():
    return Runner(MODEL)


def test_a_finite_sample_is_not_decoded_again(runner):
    def never(*_):
        raise AssertionError("it was decoded again")

    assert overflow.reasons(runner, latents(), DecodePlan(), torch.zeros(2, 3, 8, 8), never) == []


def test_somebodys_own_decode_is_called_once_more_under_the_watcher(runner):
    calls = []

    def mine(module, z):
        calls.append(z.shape)
        return module.decode(z * 1e38).sample

    (reason,) = overflow.reasons(runner, latents(), DecodePlan(), torch.full((2, 3, 24, 32), torch.nan), mine)
    assert len(calls) == 1
    assert reason.diagnosis == ("non_finite",)
    assert "post_quant_conv" in reason.message


def test_a_decode_that_is_finite_the_second_time_does_not_repeat(runner):
    (reason,) = overflow.reasons(runner, latents(), DecodePlan(), torch.full((2, 3, 24, 32), torch.inf))
    assert reason.diagnosis == ("nondeterministic",)


def test_a_decode_that_raises_the_second_time_is_told(runner):
    def raises(module, z):
        raise ValueError("no more")

    (reason,) = overflow.reasons(runner, latents(), DecodePlan(), torch.full((2, 3, 24, 32), torch.inf), raises)
    assert reason.diagnosis == ("nondeterministic",)
    assert "ValueError: no more" in reason.message


@pytest.mark.slow
def test_the_hot_twin_fails_with_the_module_and_items_and_is_asked_once_for_all_offloads(monkeypatch):
    bench = Evaluator(dict(registry.MODELS.items()), dict(registry.LATENTS.items()), GOLDEN, gate_regressions=False)
    asked = []
    real = overflow.reasons
    monkeypatch.setattr(overflow, "reasons", lambda *given: asked.append(given[2].id) or real(*given))
    limits = {"nonfinite_share": Limit("a picture has none", max=0.0)}
    for offload in ("none", "model"):
        plan = DecodePlan(dtype="fp16", slicing=True, offload=offload)
        result = bench.case(Case("reference-kl-hot", "photo-pair", plan, limits=limits))
        assert result.verdict == "fail"
        assert result.diagnosis == ("non_finite",)
        (named,) = (reason for reason in result.reasons if reason.name == overflow.NAME)
        assert named.message.startswith("up_blocks.2.upsamplers.0.conv gave inf first, from inputs of at most ")
        assert named.message.endswith("items 0, 1 of the batch of 2 are not finite")
    assert asked == ["fp16-upcast0-slice1-t0-none"]


@pytest.mark.slow
def test_the_reference_keeps_its_headroom():
    bench = Evaluator(dict(registry.MODELS.items()), dict(registry.LATENTS.items()), GOLDEN)
    hot = bench.reference("reference-kl-hot", "photo-pair").headroom
    assert hot.over[0].name.startswith("up_blocks.3.resnets.")
    assert (hot.force_upcast, hot.agrees) == (True, True)
    cool = bench.reference("reference-kl", "ramp").headroom
    assert cool.over == ()
    assert len(cool.layers) == 10
