"""What a decode returned, whatever it wraps its sample in: diffusers' output, a tuple, or the tensor alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def sample_of(output: Any) -> Tensor:
    """The sample in whatever a decode returned: a DecoderOutput, a tuple or a tensor. Raises TypeError otherwise."""
    sample = getattr(output, "sample", output[0] if isinstance(output, tuple) and output else output)
    if not isinstance(sample, torch.Tensor):
        raise TypeError(f"a decode must return a tensor or an output with .sample, not {type(output).__name__}")
    return sample


def with_sample(output: Any, sample: Tensor) -> Any:
    """The same kind of output around another sample. Raises TypeError for a kind that `sample_of` does not know."""
    sample_of(output)
    if isinstance(output, torch.Tensor):
        return sample
    return (sample, *output[1:]) if isinstance(output, tuple) else type(output)(sample=sample)


def output_of(sample: Tensor, return_dict: bool) -> Any:
    """What a diffusers class returns around a sample: its DecoderOutput, or a tuple where that is asked for."""
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample) if return_dict else (sample,)
