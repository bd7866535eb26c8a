"""Where a golden lies, and what lies beside its tensors: the certificate and the approved measurements.

All of it is read and checked without torch. Every fault is a GoldenError of one line that names the command to run.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from fidelity.errors import GoldenError, first_line
from fidelity.records import ApprovedValues, DecodePlan, from_json

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

    @property
    def digests(self) -> dict[str, str]:
        """What two runs must share for their measurements against the golden to be comparable."""
        return {"weights": self.weights_digest, "latents": self.latents_digest, "sample": self.sample_digest}


class Approval(Struct, frozen=True, forbid_unknown_fields=True):
    """What was approved in one environment class: values by plan id, noise floors by dtype, each by measurement."""

    cases: dict[str, dict[str, float]]
    floors: dict[str, dict[str, float]]
    reason: str
    date: str


def approved_values(
    environments: Mapping[str, Approval], here: str, plan: DecodePlan, *, gate: bool
) -> ApprovedValues | None:
    """What was approved for this plan: in this environment class, else in the one approved last; None if in none.

    Another class's values are for people to see beside the measured ones: they are never gated.
    """
    known = [(name == here, each.date, name) for name, each in environments.items() if plan.id in each.cases]
    if not known:
        return None
    own, _, name = max(known)
    approval = environments[name]
    return ApprovedValues(name, own and gate, dict(approval.cases[plan.id]), dict(approval.floors.get(plan.dtype, {})))


class ApprovedFile(Struct, frozen=True, forbid_unknown_fields=True):
    """approved.json: what was approved in each environment class."""

    schema: str
    sample_digest: str
    """Of the golden against which these were measured: they say nothing of another one."""
    environments: dict[str, Approval]


@dataclass(frozen=True)
class Place:
    """Where the golden of a model's latents lies; `suite` is what its messages tell people to run."""

    root: Path
    model: str
    latents: str
    suite: str = "SUITE"

    @property
    def folder(self) -> Path:
        return Path(self.root) / self.model / self.latents

    @property
    def approving(self) -> str:
        return f"fidelity golden approve {self.suite} --reason …"

    @property
    def restoring(self) -> str:
        return f"restore it from version control, or {self.approving}"

    def fault(self, what: str, remedy: str) -> GoldenError:
        """One line: where, what, and the command to run."""
        return GoldenError(f"golden {self.folder}: {what}: {remedy}")

    def certificate(self) -> Certificate:
        """The certificate, if the tensors' file is the one that it certifies. Raises GoldenError."""
        if not self.folder.exists():
            raise GoldenError(f"golden {self.folder} is missing: fidelity golden record {self.suite}")
        found: Certificate = self._read(CERTIFICATE, Certificate, SCHEMA)
        if (found.model, found.latents) != (self.model, self.latents):
            raise self.fault(f"its certificate is of {found.model}/{found.latents}", self.restoring)
        data = self.read_bytes(SAMPLE)
        if hashlib.sha256(data).hexdigest() != found.file_digest:
            what = f"{SAMPLE} ({len(data)} bytes) is not the file that was certified, but cut short or changed"
            raise self.fault(what, self.restoring)
        return found

    def approvals(self, certificate: Certificate) -> dict[str, Approval]:
        """Approved measurements by environment class; none if none were ever approved. Raises GoldenError."""
        if not (self.folder / APPROVED).exists():
            return {}
        found: ApprovedFile = self._read(APPROVED, ApprovedFile, APPROVED_SCHEMA)
        if found.sample_digest != certificate.sample_digest:
            raise self.fault(f"{APPROVED} was measured against another golden", self.approving)
        return found.environments

    def _read(self, name: str, kind: type[Any], schema: str) -> Any:
        data = self.read_bytes(name)
        try:
            found = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.fault(f"{name} is not JSON ({first_line(error)})", self.restoring) from error
        said = found.get("schema") if isinstance(found, dict) else None
        if said != schema:
            raise self.fault(f"{name} has the schema {said!r}, known is {schema!r}", self.approving)
        try:
            return from_json(data, kind)
        except msgspec.ValidationError as error:
            raise self.fault(f"{name} does not fit its schema ({first_line(error)})", self.restoring) from error

    def read_bytes(self, name: str) -> bytes:
        """A file of the golden. Raises GoldenError if it cannot be read."""
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise self.fault(f"{name} {why}", self.restoring) from error


def write_whole(path: Path, data: bytes) -> None:
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
