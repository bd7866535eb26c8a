"""What `fidelity inspect` measures of a decoder."""

from __future__ import annotations

import pytest
import torch

from fidelity import inspection, registry
from fidelity.inspection import Reach
from fidelity.runner import Runner

registry.load_plugins()


@pytest.mark.slow
def test_a_groupnorm_decoder_is_never_exact():
    model = registry.MODELS.get("reference-kl")
    latents = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(1)) * 4
    probe = inspection.reach(Runner(model), latents)
    assert probe.is_global
    assert probe.radius is None
    assert probe.pixel[0] > 10 * probe.pixel[-1] > 0
    assert probe.edge[0] > 3 * probe.edge[4]


class Convolutions:
    """A runner whose decoder is ×2 nearest upsampling and two 3×3 convolutions: one latent pixel reaches one more."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.kernels = [torch.randn(4, 4, 3, 3, generator=generator) / 6 for _ in range(2)]
        base = registry.MODELS.get("reference-kl")
        geometry = type(base.geometry)(spatial=2, latent_channels=4, sample_channels=4)
        self.model = type(base)(**{**vars(base), "geometry": geometry, "family": self})
        self.module, self.device = None, "cpu"

    def decode(self, module, latents):
        sample = latents.repeat_interleave(2, -1).repeat_interleave(2, -2)
        for kernel in self.kernels:
            sample = torch.nn.functional.conv2d(sample, kernel, padding=1)
        return sample


def test_a_convolutional_decoder_is_exact_beyond_its_receptive_field():
    latents = torch.randn(1, 4, 24, 24, generator=torch.Generator().manual_seed(1))
    probe = inspection.reach(Convolutions(), latents)
    assert not probe.is_global
    assert probe.radius == 2  # two 3×3 convolutions at twice the resolution: one latent pixel to either side
    assert probe.edge[0] > 1.0
    assert max(probe.edge[1:]) < 1e-3
    assert probe.overlap(0.1) == 2


def test_overlap_for_an_error():
    probe = Reach(pixel=(9.0, 1.0), edge=(8.0, 2.0, 0.4, 0.6, 0.2), is_global=True)
    assert probe.overlap(1.0) == 4
    assert probe.overlap(0.5) == 8
    assert probe.overlap(0.1) is None
