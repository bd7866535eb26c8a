"""Offload: FAULTS.md 31, 33, 34."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import OffloadedWeightsLoader
from diffusers import AutoencoderKL
from diffusers.hooks.group_offloading import ModuleGroup

from tests.faults.record import Fault
from tests.faults.upstream import method

GROUPS = ("fp32,group_block", "fp32,group_leaf", "bf16,tile=16,overlap=0.25,group_block")


@contextmanager
def decode_unhooked() -> Iterator[None]:
    """#2285: `decode` is not `forward`, and nothing makes it fire the hook."""
    with patch.object(AutoencoderKL, "decode", AutoencoderKL.decode.__wrapped__):
        yield


@contextmanager
def forward_bypassed() -> Iterator[None]:
    """A wrapper that calls the class's forward past the instance's, on which accelerate put its own."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return type(module).forward(module, *args, **kwargs)

    with patch.object(torch.nn.Module, "__call__", call):
        yield


@method("enable_group_offload")
def groups_on_forward(original: Any, vae: Any, *args: Any, **kwargs: Any) -> None:
    """#12692: the group hangs on the model's `forward`, which decode never calls."""
    whole = torch.nn.Module()
    whole.encoder = vae.encoder
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(whole, *args, **kwargs)


@method("onload_", ModuleGroup)
def onload_forgotten(original: Any, group: Any, *args: Any, **kwargs: Any) -> None:
    """The group is told to onload and does not."""


@contextmanager
def shared_file() -> Iterator[None]:
    """Two groups share one file: a weight reads what another of its shape wrote last."""
    original = OffloadedWeightsLoader.__getitem__

    def read(loader: Any, key: str) -> Any:
        if "decoder.up_blocks.1.resnets" in key and "conv1.weight" in key:
            other = key.replace("conv1", "conv2")
            found = original(loader, other) if other in loader.all_keys else None
            if found is not None and found.shape == original(loader, key).shape:
                return found
        return original(loader, key)

    with patch.object(OffloadedWeightsLoader, "__getitem__", read):
        yield


@method("pre_forward", AlignDevicesHook)
def rounded_on_disk(original: Any, hook: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Weights come back from disk or memory rounded to half precision."""
    result = original(hook, module, *args, **kwargs)
    for weight in module.parameters(recurse=False):
        if hook.offload and weight.device.type != "meta":
            weight.data = weight.data.to(torch.bfloat16).to(weight.dtype)
    return result


@method("pre_forward", AlignDevicesHook)
def stale_norm(original: Any, hook: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """A bias is not brought back: it stays zero."""
    result = original(hook, module, *args, **kwargs)
    if hook.offload and isinstance(module, torch.nn.GroupNorm):
        module.bias.data = torch.zeros_like(module.bias.data)
    return result


FAULTS = (
    Fault(
        "decode bypasses the hooks",
        "31",
        decode_unhooked,
        ("not_engaged",),
        ("fp32,model", "bf16,slicing,model"),
        ("pair",),
    ),
    Fault(
        "forward bypasses the hooks",
        "31+",
        forward_bypassed,
        ("not_engaged", "crash"),
        ("fp32,sequential", "fp32,disk"),
    ),
    Fault("groups on a forward that is not called", "33", groups_on_forward, ("not_engaged",), GROUPS),
    Fault(
        "onload forgotten",
        "33+",
        onload_forgotten,
        ("not_engaged",),
        GROUPS[:2],
        hidden={"": "on a CPU nothing moves: a group that does not onload is the same as one that does"},
    ),
    Fault(
        "weights of another group",
        "34",
        shared_file,
        ("not_as_specified",),
        ("fp32,disk", "fp32,tile=16,overlap=0.25,disk", "bf16,disk"),
    ),
    Fault(
        "weights rounded on their way",
        "34+",
        rounded_on_disk,
        ("not_as_specified", "dtype"),
        ("fp32,disk", "fp32,sequential", "fp32,tile=16,overlap=0.25,sequential"),
    ),
    Fault("a bias stays away", "34+", stale_norm, ("not_as_specified",), ("fp32,disk", "fp32,sequential")),
)
