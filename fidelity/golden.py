"""Goldens: the stored full decodes, what certifies them, and the approved measurements kept beside them.

    <root>/<model>/<latents>/certificate.json    what it is: digests, versions, environment class
    <root>/<model>/<latents>/sample.safetensors  `sample` and the `latents` it was decoded from, fp32
    <root>/<model>/<latents>/approved.json       measurements by environment class and plan

A run decodes the stored latents, so that another machine's encoder moves nothing. Nothing is overwritten without
`replace`, what is stored is there whole or not at all, and every fault is one line that names the command to run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from fidelity.certificate import (
    APPROVED,
    APPROVED_SCHEMA,
    CERTIFICATE,
    SAMPLE,
    SCHEMA,
    Approval,
    ApprovedFile,
    Certificate,
    Place,
    write_whole,
)
from fidelity.environment import versions
from fidelity.errors import GoldenError, first_line
from fidelity.latents import digest
from fidelity.records import Model, to_json

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Golden:
    """A verified golden: `sample` (B, C, [T,] H, W) in the model's declared range, of exactly these `latents`; fp32."""

    certificate: Certificate
    sample: Tensor
    latents: Tensor
    approved: Mapping[str, Approval]


# ---------------------------------------------------------------- reading


def exists(root: Path, model: str, latents: str) -> bool:
    """Whether there is anything at this golden's place, sound or not."""
    return Place(root, model, latents).folder.exists()


def check(
    root: Path, model: str, latents: str, *, suite: str = "SUITE", weights_digest: str | None = None
) -> Certificate:
    """Verify a golden without torch: its files are there, whole and of this model and latents.

    Raises GoldenError, one line with the command to run.
    """
    place = Place(root, model, latents, suite)
    certificate = place.certificate()
    if weights_digest is not None and certificate.weights_digest != weights_digest:
        seen = f"{certificate.weights_digest[:12]}, now {weights_digest[:12]}"
        raise place.fault(f"made with other weights of {model} ({seen})", f"if the change is meant, {place.approving}")
    place.approvals(certificate)
    return certificate


def load(
    root: Path, model: str, latents: str, *, weights_digest: str, suite: str = "SUITE", device: str = "cpu"
) -> Golden:
    """Read a golden and verify all of it. Raises GoldenError, one line with the command to run."""
    from safetensors.torch import load as load_tensors

    place = Place(root, model, latents, suite)
    certificate = check(root, model, latents, suite=suite, weights_digest=weights_digest)
    try:
        tensors = load_tensors(place.read_bytes(SAMPLE))
    except Exception as error:  # safetensors raises what it likes on a file that is none
        raise place.fault(f"{SAMPLE} cannot be read ({first_line(error)})", place.restoring) from error
    _verify(place, "sample", tensors, certificate.sample_shape, certificate.sample_digest)
    _verify(place, "latents", tensors, certificate.latents_shape, certificate.latents_digest)
    sample, stored = tensors["sample"].to(device), tensors["latents"].to(device)
    return Golden(certificate, sample, stored, place.approvals(certificate))


def _verify(place: Place, key: str, tensors: dict[str, Tensor], shape: tuple[int, ...], certified: str) -> None:
    if key not in tensors:
        raise place.fault(f"{SAMPLE} holds no tensor {key!r}", place.restoring)
    tensor = tensors[key]
    if tuple(tensor.shape) != shape or str(tensor.dtype) != "torch.float32":
        what = f"{key} is {tensor.dtype} {list(tensor.shape)}, certified is torch.float32 {list(shape)}"
        raise place.fault(what, place.restoring)
    if digest(tensor) != certified:
        raise place.fault(f"{key} is not the tensor that was certified (its digest differs)", place.restoring)


# ---------------------------------------------------------------- recording


def record(
    root: Path,
    model: Model,
    latents: str,
    *,
    sample: Tensor,
    latents_tensor: Tensor,
    weights_digest: str,
    plan_id: str,
    environment_class: str,
    replace: bool = False,
) -> Certificate:
    """Store a reference decode, all of it at once. Raises GoldenError if there is one, unless `replace`.

    Replacing drops the approved measurements: they were taken against the golden that goes.
    """
    place = Place(root, model.name, latents)
    if place.folder.exists() and not replace:
        raise GoldenError(f"golden {place.folder} exists, nothing was overwritten: {place.approving} replaces it")
    _refuse_strange(place, sample=sample, latents=latents_tensor)
    data = _tensor_bytes(sample, latents_tensor)
    certificate = Certificate(
        schema=SCHEMA,
        model=model.name,
        latents=latents,
        plan=plan_id,
        reference=model.reference,
        weights_digest=weights_digest,
        latents_digest=digest(latents_tensor),
        sample_digest=digest(sample),
        file_digest=hashlib.sha256(data).hexdigest(),
        latents_shape=tuple(latents_tensor.shape),
        sample_shape=tuple(sample.shape),
        data_range=model.data_range,
        environment_class=environment_class,
        versions=versions(),
        recorded=_today(),
    )
    files = {SAMPLE: data, CERTIFICATE: to_json(certificate) + b"\n"}
    try:
        _store(place.folder, files, replace=replace)
    except OSError as error:
        raise GoldenError(f"golden {place.folder} cannot be stored: {first_line(error)}") from error
    return certificate


def _refuse_strange(place: Place, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if str(tensor.dtype) != "torch.float32":
            raise GoldenError(f"golden {place.folder}: {name} is {tensor.dtype}, but a golden is fp32: nothing stored")
        broken = int((~tensor.isfinite()).sum())
        if broken:
            what = f"{broken} of {tensor.numel()} values of the {name} are NaN or inf"
            raise GoldenError(f"golden {place.folder}: {what}: nothing can be compared with it, nothing stored")


def _tensor_bytes(sample: Tensor, latents: Tensor) -> bytes:
    from safetensors.torch import save

    return save({"sample": sample.detach().cpu().contiguous(), "latents": latents.detach().cpu().contiguous()})


def _store(folder: Path, files: Mapping[str, bytes], *, replace: bool) -> None:
    """Make a folder of these files at once; what is there moves away first, and back if that fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, data in files.items():
            (staging / name).write_bytes(data)
        staging.chmod(0o755)
        if replace and folder.exists():
            _swap(staging, folder)
        else:
            os.rename(staging, folder)  # refuses a folder that another process filled meanwhile
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already when all went well


def _swap(staging: Path, folder: Path) -> None:
    retired = staging.with_name(staging.name + ".old")
    os.rename(folder, retired)
    try:
        os.rename(staging, folder)
    except BaseException:
        os.rename(retired, folder)
        raise
    shutil.rmtree(retired)


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


# ---------------------------------------------------------------- approving


def approve(
    root: Path,
    model: str,
    latents: str,
    cases: Mapping[str, Mapping[str, float]],
    floors: Mapping[str, Mapping[str, float]],
    environment_class: str,
    reason: str,
) -> None:
    """Store measurements of cases (by plan id) and noise floors (by dtype) as approved in this environment class.

    Other cases and other classes stay as they were. Raises GoldenError without a golden or a reason, and ValueError
    for a value that is no finite number.
    """
    place = Place(root, model, latents)
    if not reason.strip():
        raise GoldenError(f"golden {place.folder}: approving needs a reason: say why these measurements are right")
    certificate = place.certificate()
    environments = _still_valid(place, certificate)
    before = environments.get(environment_class)
    environments[environment_class] = Approval(
        cases=_sorted({**(before.cases if before else {}), **cases}),
        floors=_sorted({**(before.floors if before else {}), **floors}),
        reason=reason,
        date=_today(),
    )
    stored = ApprovedFile(APPROVED_SCHEMA, certificate.sample_digest, dict(sorted(environments.items())))
    try:
        write_whole(place.folder / APPROVED, to_json(stored) + b"\n")
    except OSError as error:
        raise GoldenError(f"golden {place.folder}: {APPROVED} cannot be stored: {first_line(error)}") from error


def _still_valid(place: Place, certificate: Certificate) -> dict[str, Approval]:
    """What was approved before; nothing if that was against another golden or cannot be read: it gets replaced."""
    try:
        return dict(place.approvals(certificate))
    except GoldenError:
        return {}


def _sorted(table: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {key: float(value) for key, value in sorted(row.items())} for name, row in sorted(table.items())}


# ---------------------------------------------------------------- unused ones


def unused(root: Path, wanted: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Model and latents of every golden under `root` that nobody wants, sorted."""
    found = {(folder.parent.name, folder.name) for folder in Path(root).glob("*/*") if _is_golden(folder)}
    return sorted(found - set(wanted))


def _is_golden(folder: Path) -> bool:
    return not folder.name.startswith(".") and any(
        (folder / name).is_file() for name in (CERTIFICATE, SAMPLE, APPROVED)
    )


def remove(root: Path, model: str, latents: str) -> None:
    """Delete a golden. Raises GoldenError if its folder holds anything else, and then deletes nothing."""
    folder = Place(root, model, latents).folder
    if not folder.is_dir():
        raise GoldenError(f"golden {folder} is missing: nothing to remove")
    strangers = sorted({path.name for path in folder.iterdir()} - {CERTIFICATE, SAMPLE, APPROVED})
    if strangers:
        raise GoldenError(f"golden {folder} also holds {strangers[0]}: move it away; nothing was removed")
    shutil.rmtree(folder)
    with suppress(OSError):  # other goldens of the model keep its folder
        folder.parent.rmdir()


def prune(root: Path, wanted: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Delete every golden that nobody wants; returns them."""
    doomed = unused(root, wanted)
    for model, latents in doomed:
        remove(root, model, latents)
    return doomed
