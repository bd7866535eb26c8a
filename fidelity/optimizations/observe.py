"""What the decoder really saw, by torch's own hooks on the decoder and on a layer in its middle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch
from fidelity.records import Model, Observation

if TYPE_CHECKING:
    from torch import nn


def dtype_name(dtype: Any) -> str:
    """`float16` for torch.float16, however it is spelled: torch's object, its name, or the plan's `fp16`."""
    name = str(dtype).removeprefix("torch.")
    return {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(name, name)


@contextmanager
def observe(module: nn.Module, model: Model) -> Iterator[Observation]:
    """Watch one decode. Yields the Observation that fills while the decoder runs; the hooks are gone afterwards.

    `batch`, `grid` and `output_dtype` (of the whole sample, after assembly) are the caller's to fill: a decoder's
    call knows nothing of them. Devices of weights are those at the decoder's call; what an offload hook brings in
    afterwards is in the offload's own receipt.
    """
    seen = Observation(started_ns=time.perf_counter_ns())
    decoder, middle = model.family.decoder(module), model.family.middle(module)

    def enter_decoder(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.calls += 1
        inputs = tensors((args, kwargs))
        if inputs:
            seen.shapes.append(model.family.call_shape(model.geometry, tuple(inputs[0].shape), kwargs))
        seen.call_dtypes |= _dtypes(inputs)
        weights = [*called.parameters(), *called.buffers()]
        seen.weight_devices |= {str(weight.device) for weight in weights}
        seen.weight_dtypes |= _dtypes(weights)

    def leave_middle(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.middle_dtypes |= _dtypes(tensors((args, kwargs, output)))

    # a block can take and give fp32 and yet compute in half: its convolutions and projections are asked as well
    layers = {part: None for part in middle.modules() if any(w.dim() > 1 for w in part.parameters(recurse=False))}
    handles = [
        decoder.register_forward_pre_hook(enter_decoder, with_kwargs=True),
        *(part.register_forward_hook(leave_middle, with_kwargs=True) for part in {middle: None, **layers}),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists and dictionaries, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [tensor for part in tree for tensor in tensors(part)] if isinstance(tree, (tuple, list)) else []


def _dtypes(found: list[Any]) -> set[str]:
    return {dtype_name(tensor.dtype) for tensor in found if tensor.is_floating_point()}
