"""What an optimization could leave behind in a module, and the difference between two such states in words.

A fingerprint maps names to short descriptions: `weight decoder.conv_in.weight` to its shape, dtype, device, object and
SHA-256, `attribute use_tiling` to `False`, `hook decoder._hf_hook` to its class. It is made within one process, and
holds identities of objects, but for the entry `WEIGHTS`, which is the digest of all weights and the same everywhere.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch
from fidelity.optimizations.observe import dtype_name
from fidelity.optimizations.weights import named_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fidelity.records import Family

WEIGHTS = "weights"
"""The fingerprint's entry with the digest of names, shapes, dtypes and bits of all weights, 16 hexadecimal digits."""

ABSENT = "absent"
_TORCH_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_OFFLOAD_HOOKS = ("_hf_hook", "_old_forward", "_diffusers_hook", "forward", "decode", "encode")
_BOOKKEEPING = frozenset(
    (*_TORCH_HOOKS, *_OFFLOAD_HOOKS, "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
     "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
     "_is_full_backward_hook", "_compiled_call_impl", "_internal_dict")
)  # fmt: skip
_IDENTITY = re.compile(r" #[0-9a-f]+")
_DEPTH = 4  # caches of video decoders are lists of tensors in lists


def fingerprint(module: nn.Module, family: Family) -> dict[str, str]:
    """Describe flags, tile attributes, dtypes, devices, hooks, caches and weights of a module. Changes nothing."""
    found: dict[str, str] = {}
    for name in family.tiling_attributes():
        found[f"attribute {name}"] = _describe(getattr(module, name, ABSENT))
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        found[f"module {path or type(module).__name__}"] = f"{type(part).__name__} #{id(part):x}"
        for kind, name, value in _of_one_module(part, family.scratch):
            found[f"{kind} {prefix}{name}"] = value
    digests: dict[str, str] = {}
    for name, tensor in named_tensors(module):
        digest = digest_of(tensor)
        digests[name] = f"{name} {list(tensor.shape)} {dtype_name(tensor.dtype)} {digest};"
        found[f"dtype {name}"] = dtype_name(tensor.dtype)
        found[f"device {name}"] = str(tensor.device)
        found[f"object {name}"] = f"{type(tensor).__name__} #{id(tensor):x}"
        found[f"value {name}"] = f"{list(tensor.shape)} {digest}"
    found[WEIGHTS] = hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()[:16]
    return found


def leaks(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Every difference in words, alike ones of several tensors or modules in one line; empty if nothing stuck."""
    alike: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for key in [*before, *(key for key in after if key not in before)]:
        was, now = before.get(key, ABSENT), after.get(key, ABSENT)
        if was == now or key == WEIGHTS:
            continue
        kind, name = key.split(" ", 1)
        moved = any(before.get(f"{other} {name}") != after.get(f"{other} {name}") for other in ("dtype", "device"))
        if kind == "value" and moved:
            continue  # said already: of course its bits differ
        identities = kind in ("value", "object", "module")
        alike[(kind, "", "") if identities else (kind, _without_identity(was), _without_identity(now))].append(name)
    lines = [_sentence(kind, names, before, after) for (kind, _, _), names in alike.items()]
    if not lines and before.get(WEIGHTS) != after.get(WEIGHTS):
        lines = [f"weights: {before.get(WEIGHTS)} → {after.get(WEIGHTS)}"]
    return lines


def digest_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bits, 16 hexadecimal digits; `no data` on the meta device."""
    if tensor.device.type == "meta":
        return "no data"
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()[:16]


def _of_one_module(part: nn.Module, scratch: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    held = part.__dict__
    for name in _TORCH_HOOKS:
        if held.get(name):
            yield "hook", name, f"{len(held[name])} of {', '.join(_callable(hook) for hook in held[name].values())}"
    for name in _OFFLOAD_HOOKS:
        if name in held:
            yield "hook", name, _callable(held[name])
    for name, value in held.items():
        if name not in _BOOKKEEPING and name not in scratch:
            yield "attribute", name, _describe(value)


def _callable(hook: Any) -> str:
    """A hook by its class or name, and those inside one that holds several."""
    inner = getattr(hook, "hooks", ())
    inside = [_callable(one) for one in (inner.values() if isinstance(inner, dict) else inner)]
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return f"{name}({', '.join(inside)}) #{id(hook):x}" if inside else f"{name} #{id(hook):x}"


def _describe(value: Any, depth: int = _DEPTH) -> str:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)} {dtype_name(value.dtype)} {value.device} {digest_of(value)}"
    if isinstance(value, (list, tuple, set, frozenset)) and depth:
        parts = [_describe(part, depth - 1) for part in value]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, (set, frozenset)) else parts)})"
    if isinstance(value, dict) and depth:
        return f"{{{', '.join(f'{key}: {_describe(part, depth - 1)}' for key, part in value.items())}}}"
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return f"{getattr(value, '__qualname__', type(value).__name__)} #{id(value):x}"


def _sentence(kind: str, names: list[str], before: dict[str, str], after: dict[str, str]) -> str:
    what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    first = f"{kind} {names[0]}"
    was, now = (_without_identity(side.get(first, ABSENT)) for side in (before, after))
    if kind == "object" or (kind == "module" and was == now):
        return f"{kind} {what}: replaced by another object ({was} → {now})"
    return f"{kind} {what}: {was} → {now}"


def _without_identity(text: str) -> str:
    return _IDENTITY.sub("", text)
