"""The Runner: what it says of a model that does not decode what it declares, and what it measures of its loading."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from fidelity.errors import ModelError
from fidelity.records import DecodePlan
from fidelity.runner import Runner
from tests.optimizations.small import MODEL, latents, model_with


def test_channels_that_a_model_does_not_take_are_said_in_one_line():
    wrong = replace(MODEL, geometry=msgspec.structs.replace(MODEL.geometry, latent_channels=6))
    with pytest.raises(ModelError) as raised:
        Runner(wrong)
    said = str(raised.value)
    assert "\n" not in said
    assert "does not decode latents of 1×6×8×8" in said
    assert "to have 4 channels, but got 6" in said
    assert "check latent_channels" in said


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out_is_not_the_declarations_fault(error):
    def decode(self, part, z):
        raise error

    with pytest.raises(type(error)):
        Runner(model_with(decode=decode))


def test_only_the_first_decode_of_an_instance_says_something_of_the_declaration():
    broken = []

    def decode(self, part, z):
        if broken:
            raise RuntimeError("it is the machine")
        return type(MODEL.family).decode(self, part, z)

    runner = Runner(model_with(decode=decode))
    broken.append(True)
    with pytest.raises(RuntimeError, match="it is the machine"):
        runner.reload()


def test_loading_is_the_first_stage_of_each_trace():
    runner = Runner(MODEL)
    first = runner.decode(latents(1, 8, 8), DecodePlan()).memory
    second = runner.decode(latents(1, 8, 8), DecodePlan(offload="sequential")).memory
    assert first.stages[0] == second.stages[0] == runner.loading
    assert first.stages[0].name == "load"
    assert first.stages[0].peak_bytes >= sum(weight.nbytes for weight in runner.module.parameters())
    assert first.stages[0].seconds > 0
    assert first.transfers is None
    assert second.transfers.onloads > 0


def test_a_decode_that_raises_under_the_runner_tells_what_lived():
    from fidelity.memory.allocator import interrupted

    def decode(self, part, z):
        if z.shape[-1] > 8:
            z = torch.cat([z, z])
            part.decoder(z[:, :3])
        return type(MODEL.family).decode(self, part, z)

    runner = Runner(model_with(decode=decode))
    with pytest.raises(RuntimeError, match="channels") as raised:
        runner.decode(latents(1, 8, 16), DecodePlan())
    lived = interrupted(raised.value)
    assert lived.module == "decoder.conv_in"
    assert lived.alive_bytes - lived.trace.weights_bytes == 2 * 4 * 8 * 16 * 4
