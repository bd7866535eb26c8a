"""A Model from a path: what is there, what it says of itself, and its weights, strictly.

Describing reads the config and the headers of the weight files, without torch; loading compares every name and shape
and every value.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fidelity.errors import ModelError, first_line, in_one_line
from fidelity.lazy import torch
from fidelity.models.base import FamilyBase
from fidelity.records import Model
from fidelity.registry import FAMILIES, MODELS, unknown
from fidelity.tensorfile import FLOATS, TensorInfo, read_header

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
STEM = "diffusion_pytorch_model"
CANDIDATES = (f"{STEM}.safetensors", f"{STEM}.safetensors.index.json", f"{STEM}.fp16.safetensors",
              f"{STEM}.safetensors.index.fp16.json", f"{STEM}.bin")  # fmt: skip
"""Weight files that diffusers writes, the first that is there is taken."""


def from_path(name: str, path: str | Path) -> Model:
    """The Model of a diffusers folder, of a pipeline's folder (its `vae/`), or of one `.safetensors` with its config
    beside it (`<stem>.json`, else `config.json`).

    A registered decoder of one's own (`models.own`) gets the path itself; without a path (`""`) NAME is what is
    registered. Raises ModelError, in one line, if anything is missing, unreadable, or of a class that is not known.
    """
    if name in MODELS:
        registered = MODELS.get(name)
        if not str(path):
            return registered
        if hasattr(registered.family, "at"):
            return registered.family.at(registered, path)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ModelError(f"model name {name!r}: use letters, digits, '.', '_' and '-' (it becomes a folder's name)")
    config_file, weights, source = _locate(name, Path(path))
    config = _read_json(config_file, f"model {name!r}")
    family = _family(name, config, config_file)
    files = _shards(name, weights)
    headers = _read_headers(name, family, files)
    model = family.describe(name, config, partial(load, name, family, config, files))
    if headers is not None:
        _check_landmarks(name, family, config, headers)
    return replace(model, summary=f"{family.name} from {source}", source=str(source))


def load(name: str, family: FamilyBase, config: Mapping[str, Any], files: tuple[Path, ...]) -> nn.Module:
    """A fresh fp32 instance on the CPU in eval mode, filled strictly. Raises ModelError."""
    try:
        module = family.build(config)
    except ModelError as error:
        raise ModelError(f"model {name!r}: {error}") from None
    except Exception as error:  # constructors raise whatever they like
        what = f"model {name!r}: diffusers cannot build {family.name} from its config"
        raise ModelError(f"{what}: {in_one_line(error)}") from error
    module.float()
    state = _merge(name, ((family.rename(key), value) for file in files for key, value in _read_tensors(name, file)
                          if not _is_ignored(family, key)))  # fmt: skip
    own = module.state_dict()
    kept = {key: value for key, value in own.items() if _is_ignored(family, key)}
    expected = {key: tuple(value.shape) for key, value in own.items() if key not in kept}
    problem = difference(expected, {key: tuple(value.shape) for key, value in state.items()})
    if problem:
        raise ModelError(f"model {name!r}: weights do not fit {family.name} of its config: {problem}{_hint(state)}")
    for key, value in state.items():
        if not value.is_floating_point():
            raise ModelError(f"model {name!r}: weight {key!r} is {value.dtype}, expected a floating-point dtype")
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            raise ModelError(f"model {name!r}: weight {key!r} has {bad} of {value.numel()} values that are NaN or inf")
    module.load_state_dict({**kept, **{key: value.float() for key, value in state.items()}}, strict=True)
    return module


def _is_ignored(family: FamilyBase, key: str) -> bool:
    return key.endswith(family.ignored)


def difference(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str | None:
    """What is missing, extra or of another shape, with counts and the first few names; None if nothing is."""
    missing = [key for key in expected if key not in found]
    extra = [key for key in found if key not in expected]
    wrong = [f"{key} {list(found[key])} instead of {list(shape)}" for key, shape in expected.items()
             if key in found and found[key] != shape]  # fmt: skip
    parts = [_some("missing", missing), _some("extra", extra), _some("of another shape", wrong)]
    return ", ".join(part for part in parts if part) or None


def _some(what: str, names: list[str], few: int = 3) -> str | None:
    return f"{len(names)} {what} ({', '.join(names[:few])}{', …' if len(names) > few else ''})" if names else None


def _hint(keys: Iterable[str]) -> str:
    original = ("first_stage_model.", "encoder.down.", "decoder.up.", "decoder.mid.")
    if any(key.startswith(original) for key in keys):
        return "; these are the original layout's names: convert with AutoencoderKL.from_single_file(…).save_pretrained"
    return ""


# ---------------------------------------------------------------- what lies at the path


def _locate(name: str, path: Path) -> tuple[Path, Path, Path]:
    """Config, weights (a file, or the index of several), and what to call the source."""
    path = path.expanduser()
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ModelError(f"model {name!r}: {path} is neither a diffusers folder nor a .safetensors file")
        for config in (path.with_suffix(".json"), path.parent / "config.json"):
            if config.is_file():
                return config, path, path
        raise ModelError(f"model {name!r}: no config beside {path}: put it there as {path.stem}.json or config.json")
    if not path.is_dir():
        raise ModelError(f"model {name!r}: {path} does not exist")
    if not (path / "config.json").is_file() and (path / "vae" / "config.json").is_file():
        path = path / "vae"  # a pipeline's folder
    if not (path / "config.json").is_file():
        raise ModelError(f"model {name!r}: no config.json in {path}: name the folder of the autoencoder itself")
    for candidate in CANDIDATES:
        if (path / candidate).is_file():
            return path / "config.json", path / candidate, path
    raise ModelError(f"model {name!r}: no weights in {path}: expected {CANDIDATES[0]} (or an index, or fp16)")


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{what}: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelError(f"{what}: {path} is not JSON: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{what}: {path} holds {type(content).__name__}, expected an object")
    return content


def _family(name: str, config: Mapping[str, Any], path: Path) -> FamilyBase:
    cls = config.get("_class_name")
    if not isinstance(cls, str):
        raise ModelError(f"model {name!r}: {path} names no _class_name: known: {', '.join(FAMILIES)}")
    if cls not in FAMILIES:
        raise ModelError(f"model {name!r}: {path}: {unknown(FAMILIES.kind, cls, FAMILIES)}")
    return FAMILIES.get(cls)  # type: ignore[return-value]


# ---------------------------------------------------------------- weight files


def _shards(name: str, weights: Path) -> tuple[Path, ...]:
    """The files of an index, or the one file."""
    if weights.suffix != ".json":
        return (weights,)
    index = _read_json(weights, f"model {name!r}")
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(file, str) for file in table.values()):
        raise ModelError(f"model {name!r}: {weights} has no weight_map: it is no index of shards")
    files = tuple(weights.parent / file for file in sorted(set(table.values())))
    gone = [file.name for file in files if not file.is_file()]
    if gone:
        raise ModelError(f"model {name!r}: {_some('shards missing', gone)} of {weights}")
    found = _merge(name, ((key, file.name) for file in files for key in read_header(file, ModelError)))
    if found != table:
        odd = sorted(set(found.items()) ^ set(table.items()))
        raise ModelError(f"model {name!r}: {weights} and its shards disagree on {odd[0][0]!r} ({len(odd)} entries)")
    return files


def _read_headers(name: str, family: FamilyBase, files: tuple[Path, ...]) -> dict[str, TensorInfo] | None:
    """Names, dtypes and shapes of all files; None for a pickle, whose content is not known before it is loaded."""
    if any(file.suffix == ".bin" for file in files):
        return None
    merged = {key: info for file in files for key, info in read_header(file, ModelError).items()
              if not _is_ignored(family, key)}  # fmt: skip
    odd = [f"{key}: {info.dtype}" for key, info in merged.items() if info.dtype not in FLOATS]
    if odd:
        raise ModelError(f"model {name!r}: {_some('weights', odd)} of {files[0]} are not {', '.join(FLOATS)}")
    return merged


def _merge(name: str, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """A table of the pairs. Raises ModelError where a weight comes twice: one of the two would be lost in silence."""
    merged: dict[str, T] = {}
    for key, value in pairs:
        if key in merged:
            raise ModelError(f"model {name!r}: weight {key!r} comes twice, in two files or by an old and a new name")
        merged[key] = value
    return merged


def _check_landmarks(
    name: str, family: FamilyBase, config: Mapping[str, Any], headers: Mapping[str, TensorInfo]
) -> None:
    try:
        expected = family.landmarks(config)
    except ModelError as error:
        raise ModelError(f"model {name!r}: config of {family.name}: {error}") from None
    found = _merge(name, ((family.rename(key), info.shape) for key, info in headers.items()))
    problem = difference(expected, {key: found[key] for key in expected if key in found})
    if problem:
        raise ModelError(f"model {name!r}: weights do not fit {family.name} of its config: {problem}{_hint(headers)}")


def _read_tensors(name: str, file: Path) -> Iterable[tuple[str, torch.Tensor]]:
    if file.suffix != ".safetensors":
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # its own words advise to load without this safety
            said = "it holds more than plain tensors, perhaps code, and nothing of it was run"
            raise ModelError(
                f"model {name!r}: {file}: {said}: save a table of tensors, best as .safetensors"
            ) from error
        except Exception as error:  # unpicklers raise whatever they like
            raise ModelError(f"model {name!r}: {file} cannot be read as plain weights: {first_line(error)}") from error
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise ModelError(f"model {name!r}: {file} is no table of tensors")
        return state.items()
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file, device="cpu").items()
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model {name!r}: {file} cannot be read: {first_line(error)}") from None
