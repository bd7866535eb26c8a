"""The suite tested by real faults: all caught, nine in ten named, no false alarm. CI fails when the score falls."""

from __future__ import annotations

import pytest
import torch

from fidelity import registry
from fidelity.optimizations import apply_plan
from fidelity.records import DecodePlan, Tiling
from tests.faults.__main__ import main
from tests.faults.catalogue import FAULTS, NOT_APPLICABLE
from tests.faults.record import numbers
from tests.faults.upstream import Tiler, tiler

registry.load_plugins()


def test_every_fault_of_the_list_is_injected_or_says_why_not():
    assert numbers((*FAULTS, *NOT_APPLICABLE)) == set(range(1, 38))
    assert all(each.reason for each in NOT_APPLICABLE)


def test_variants_have_names_of_their_own_and_a_fifth_is_kept_for_scoring():
    variants = [variant for fault in FAULTS for variant in fault.variants]
    assert len({variant.name for variant in variants}) == len(variants)
    assert 0.15 < sum(variant.scoring_only for variant in variants) / len(variants) < 0.25


def test_faults_are_named_by_diagnoses_of_the_closed_list():
    from fidelity.records import DIAGNOSES

    assert not {name for fault in FAULTS for name in fault.named} - set(DIAGNOSES)


@pytest.mark.parametrize("size", [(20, 26), (24, 32), (17, 16)], ids=str)
def test_the_tiler_without_a_fault_is_diffusers_own(size):
    """Otherwise a fault would be caught for what the copy does wrong."""
    model = registry.MODELS.get("reference-kl")
    module = model.load()
    latents = torch.randn(1, 4, *size, generator=torch.Generator().manual_seed(1))
    plan = DecodePlan(tiling=Tiling(16, 0.25))
    with torch.no_grad(), apply_plan(module, plan, model=model, device="cpu"):
        own = model.family.decode(module, latents)
        with tiler(Tiler)():
            copied = model.family.decode(module, latents)
    assert torch.equal(own, copied)


@pytest.mark.slow
def test_a_sample_of_the_catalogue_meets_the_targets(capsys):
    status = main(["--quick"])
    assert status == 0, capsys.readouterr().out


@pytest.mark.campaign
def test_the_whole_catalogue_meets_the_targets(capsys):
    status = main([])
    assert status == 0, capsys.readouterr().out
