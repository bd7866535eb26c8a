"""Small tensors that a model makes of plain numbers, computed for real beside the shapes.

A sampler's timesteps are such: the code asks which step it is at, and a tensor without data has no answer. What is made
of numbers in the source, and of nothing else, has the same values for every input, on every device: it is computed on
the CPU, and asked there. What depends on latents, weights or a random generator has no value, and is never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fidelity.lazy import torch

LARGEST = 4096
"""Values of a constant at most: beyond, it is no table of steps."""
MADE = frozenset(("arange", "linspace", "full", "zeros", "ones", "scalar_tensor"))


class Constants:
    """The values of the tensors that were made of numbers alone."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self._values: Any = WeakTensorKeyDictionary()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator gives on shapes; where that needs values, and they are known, what these give."""
        name = func.overloadpacket.__name__
        given = list(tensors((args, kwargs)))
        if getattr(kwargs.get("device"), "type", "cpu") != "cpu":
            for tensor in given:  # torch's own copy of a constant would be brought to a device that is not there
                if getattr(tensor, "constant", None) is not None:
                    tensor.constant = None
        if name == "device" or not all(self._value(tensor) is not None for tensor in given):
            return func(*args, **kwargs)
        if not given and name not in MADE:
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            return self._really(func, args, kwargs)
        if name == "nonzero":  # as many as there are
            real = self._really(func, args, kwargs)
            out = torch.empty(tuple(real.shape), dtype=real.dtype, device=args[0].device)
        else:
            out = func(*args, **kwargs)
            if any(tensor.numel() > LARGEST for tensor in tensors(out)):
                return out
            real = self._really(func, args, kwargs)
        for tensor, values in zip(tensors(out), tensors(real)):
            self._values[tensor] = values
        return out

    def _value(self, tensor: Any) -> Any:
        """A constant's values on the CPU; None of what is none."""
        from torch._subclasses.fake_tensor import FakeTensor

        if not isinstance(tensor, FakeTensor):  # a literal, on its way in
            return tensor if tensor.device.type == "cpu" and tensor.numel() <= LARGEST else None
        return self._values.get(tensor)

    def _really(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        def own(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._value(value)
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if isinstance(value, (list, tuple)):
                return type(value)(own(each) for each in value)
            return value

        with unset_fake_temporarily():
            return func(*own(args), **{key: own(each) for key, each in kwargs.items()})


def tensors(value: Any) -> Iterator[Any]:
    """Every tensor in nested tuples, lists and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
