"""Goldens: the stored full decodes, what certifies them, and the approved measurements kept beside them.

    <root>/<model>/<latents>/certificate.json    what it is: digests, versions, environment class
    <root>/<model>/<latents>/sample.safetensors  `sample` and the `latents` it was decoded from, fp32
    <root>/<model>/<latents>/approved.json       measurements by environment class and plan

A run decodes the stored latents, so that another machine's encoder does not move anything. Nothing is overwritten
without `replace`, a file is there whole or not at all, and every fault is one line that names the command to run.
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
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from fidelity.environment import versions
from fidelity.errors import GoldenError
from fidelity.records import DecodePlan, Model, from_json, to_json

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "fidelity.golden/1"
APPROVED_SCHEMA = "fidelity.approved/1"
CERTIFICATE, SAMPLE, APPROVED = "certificate.json", "sample.safetensors", "approved.json"


class Certificate(Struct, frozen=True, forbid_unknown_fields=True):
    """What a golden is a decode of, and where it was made. Digests are of tensors but for `file_digest` (SHA-256)."""

    schema: str
    model: str
    latents: str
    plan: str
    reference: str
    weights_digest: str
    latents_digest: str
    sample_digest: str
    file_digest: str
    latents_shape: tuple[int, ...]
    sample_shape: tuple[int, ...]
    data_range: tuple[float, float]
    environment_class: str
    versions: dict[str, str]
    recorded: str


class Approval(Struct, frozen=True, forbid_unknown_fields=True):
    """What was approved in one environment class: values by plan id, noise floors by dtype, each by measurement."""

    cases: dict[str, dict[str, float]]
    floors: dict[str, dict[str, float]]
    reason: str
    date: str


class _ApprovedFile(Struct, frozen=True, forbid_unknown_fields=True):
    schema: str
    sample_digest: str
    """Of the golden against which these were measured: they say nothing of another one."""
    environments: dict[str, Approval]


@dataclass(frozen=True)
class Approved:
    """Approved values of one case, and the noise floors of its dtype, by measurement."""

    values: Mapping[str, float]
    floors: Mapping[str, float]


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
    return _folder(root, model, latents).exists()


def check(
    root: Path, model: str, latents: str, *, suite: str = "SUITE", weights_digest: str | None = None
) -> Certificate:
    """Verify a golden without torch: its files are there, whole and of this model and latents.

    Raises GoldenError, one line with the command to run.
    """
    folder = _folder(root, model, latents)
    certificate = _certificate(folder, model, latents, suite)
    if weights_digest is not None and certificate.weights_digest != weights_digest:
        raise GoldenError(
            f"golden {folder}: made with other weights of {model} ({certificate.weights_digest[:12]}, now "
            f"{weights_digest[:12]}): if the change is meant, {_approve(suite)}"
        )
    _approvals(folder, certificate, suite)
    return certificate


def load(
    root: Path, model: str, latents: str, *, weights_digest: str, suite: str = "SUITE", device: str = "cpu"
) -> Golden:
    """Read a golden and verify all of it. Raises GoldenError, one line with the command to run."""
    from safetensors.torch import load as load_tensors

    folder = _folder(root, model, latents)
    certificate = check(root, model, latents, suite=suite, weights_digest=weights_digest)
    try:
        tensors = load_tensors(_bytes(folder, SAMPLE, suite))
    except Exception as error:  # safetensors raises what it likes on a file that is none
        raise GoldenError(f"golden {folder}: {SAMPLE} cannot be read ({_line(error)}): {_restore(suite)}") from error
    for key, shape, digest in (
        ("sample", certificate.sample_shape, certificate.sample_digest),
        ("latents", certificate.latents_shape, certificate.latents_digest),
    ):
        _verify(folder, key, tensors, shape, digest, suite)
    approved = _approvals(folder, certificate, suite)
    return Golden(certificate, tensors["sample"].to(device), tensors["latents"].to(device), approved)


def _verify(
    folder: Path, key: str, tensors: dict[str, Tensor], shape: tuple[int, ...], digest: str, suite: str
) -> None:
    if key not in tensors:
        raise GoldenError(f"golden {folder}: {SAMPLE} holds no tensor {key!r}: {_restore(suite)}")
    tensor = tensors[key]
    if tuple(tensor.shape) != shape or str(tensor.dtype) != "torch.float32":
        raise GoldenError(
            f"golden {folder}: {key} is {tensor.dtype} {list(tensor.shape)}, certified is fp32 {list(shape)}: "
            f"{_restore(suite)}"
        )
    if tensor_digest(tensor) != digest:
        raise GoldenError(f"golden {folder}: {key} is not what was certified (its digest differs): {_restore(suite)}")


def _certificate(folder: Path, model: str, latents: str, suite: str) -> Certificate:
    if not folder.exists():
        raise GoldenError(f"golden {folder} is missing: fidelity golden record {suite}")
    certificate: Certificate = _read(folder, CERTIFICATE, Certificate, SCHEMA, suite)
    if (certificate.model, certificate.latents) != (model, latents):
        raise GoldenError(
            f"golden {folder}: its certificate is of {certificate.model}/{certificate.latents}: {_restore(suite)}"
        )
    data = _bytes(folder, SAMPLE, suite)
    if hashlib.sha256(data).hexdigest() != certificate.file_digest:
        raise GoldenError(
            f"golden {folder}: {SAMPLE} ({len(data)} bytes) is not the file that was certified, cut short or "
            f"changed: {_restore(suite)}"
        )
    return certificate


def _approvals(folder: Path, certificate: Certificate, suite: str) -> dict[str, Approval]:
    if not (folder / APPROVED).exists():
        return {}
    stored: _ApprovedFile = _read(folder, APPROVED, _ApprovedFile, APPROVED_SCHEMA, suite)
    if stored.sample_digest != certificate.sample_digest:
        raise GoldenError(f"golden {folder}: {APPROVED} was measured against another golden: {_approve(suite)}")
    return stored.environments


def _read(folder: Path, name: str, kind: type[Any], schema: str, suite: str) -> Any:
    data = _bytes(folder, name, suite)
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GoldenError(f"golden {folder}: {name} is not JSON ({_line(error)}): {_restore(suite)}") from error
    said = found.get("schema") if isinstance(found, dict) else None
    if said != schema:
        raise GoldenError(f"golden {folder}: {name} has the schema {said!r}, known: {schema!r}: {_approve(suite)}")
    try:
        return from_json(data, kind)
    except msgspec.ValidationError as error:
        raise GoldenError(
            f"golden {folder}: {name} does not fit its schema: {_line(error)}: {_restore(suite)}"
        ) from error


def _bytes(folder: Path, name: str, suite: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise GoldenError(f"golden {folder}: {name} {why}: {_restore(suite)}") from error


def _folder(root: Path, model: str, latents: str) -> Path:
    return Path(root) / model / latents


def _approve(suite: str) -> str:
    return f"fidelity golden approve {suite} --reason …"


def _restore(suite: str) -> str:
    return f"restore it from version control, or {_approve(suite)}"


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tensor_digest(tensor: Tensor) -> str:
    """The digest of a tensor over dtype, shape and bytes: the one that latents carry."""
    from fidelity.latents import digest

    return digest(tensor)


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
    folder = _folder(root, model.name, latents)
    if folder.exists() and not replace:
        raise GoldenError(f"golden {folder} exists: nothing overwritten; fidelity golden approve replaces it")
    _refuse_strange(folder, {"sample": sample, "latents": latents_tensor})
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{latents}.", dir=folder.parent))
    try:
        data = _tensor_bytes(sample, latents_tensor)
        certificate = Certificate(
            schema=SCHEMA,
            model=model.name,
            latents=latents,
            plan=plan_id,
            reference=model.reference,
            weights_digest=weights_digest,
            latents_digest=tensor_digest(latents_tensor),
            sample_digest=tensor_digest(sample),
            file_digest=hashlib.sha256(data).hexdigest(),
            latents_shape=tuple(latents_tensor.shape),
            sample_shape=tuple(sample.shape),
            data_range=model.data_range,
            environment_class=environment_class,
            versions=versions(),
            recorded=_today(),
        )
        (staging / SAMPLE).write_bytes(data)
        (staging / CERTIFICATE).write_bytes(to_json(certificate) + b"\n")
        staging.chmod(0o755)
        _take_place(staging, folder, replace)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return certificate


def _refuse_strange(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if str(tensor.dtype) != "torch.float32":
            raise GoldenError(f"golden {folder}: {name} is {tensor.dtype}: a golden is fp32")
        if not bool(tensor.isfinite().all()):
            raise GoldenError(
                f"golden {folder}: {name} has values that are NaN or inf: nothing can be compared with it"
            )


def _tensor_bytes(sample: Tensor, latents: Tensor) -> bytes:
    from safetensors.torch import save

    return save({"sample": sample.detach().cpu().contiguous(), "latents": latents.detach().cpu().contiguous()})


def _take_place(staging: Path, folder: Path, replace: bool) -> None:
    """Rename `staging` to `folder`; what is there moves away first, and back if that fails."""
    if not (replace and folder.exists()):
        try:
            os.rename(staging, folder)
        except OSError as error:  # someone else recorded it meanwhile
            raise GoldenError(f"golden {folder} cannot be stored: {_line(error)}") from error
        return
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
    if not reason.strip():
        raise GoldenError("approve: the reason is empty: say why these measurements are right")
    folder = _folder(root, model, latents)
    certificate = _certificate(folder, model, latents, "SUITE")
    environments: dict[str, Approval] = {}
    with suppress(GoldenError):  # what was approved against another golden, or is unreadable, is what gets replaced
        environments = dict(_approvals(folder, certificate, "SUITE"))
    before = environments.get(environment_class)
    environments[environment_class] = Approval(
        cases=_sorted({**(before.cases if before else {}), **cases}),
        floors=_sorted({**(before.floors if before else {}), **floors}),
        reason=reason,
        date=_today(),
    )
    stored = _ApprovedFile(APPROVED_SCHEMA, certificate.sample_digest, dict(sorted(environments.items())))
    _write(folder / APPROVED, to_json(stored) + b"\n")


def _sorted(table: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {key: float(value) for key, value in sorted(row.items())} for name, row in sorted(table.items())}


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def approved_for(golden: Golden, environment_class: str, plan: DecodePlan) -> Approved | None:
    """What was approved for this plan in this environment class; None where nothing was, and then nothing is gated."""
    approval = golden.approved.get(environment_class)
    if approval is None or plan.id not in approval.cases:
        return None
    return Approved(approval.cases[plan.id], approval.floors.get(plan.dtype, {}))


# ---------------------------------------------------------------- unused ones


def unused(root: Path, wanted: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Model and latents of every golden under `root` that nobody wants, sorted."""
    if not Path(root).is_dir():
        return []
    found = {(folder.parent.name, folder.name) for folder in Path(root).glob("*/*") if _is_golden(folder)}
    return sorted(found - set(wanted))


def _is_golden(folder: Path) -> bool:
    return not folder.name.startswith(".") and ((folder / CERTIFICATE).is_file() or (folder / SAMPLE).is_file())


def remove(root: Path, model: str, latents: str) -> None:
    """Delete a golden. Raises GoldenError if its folder holds anything else, and then deletes nothing."""
    folder = _folder(root, model, latents)
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
