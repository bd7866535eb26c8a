"""Goldens: each way in which one can be wrong is one line with a command; nothing is half written or overwritten."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch

from fidelity import certificate, golden
from fidelity.certificate import approved_values
from fidelity.errors import GoldenError
from fidelity.records import ApprovedValues, DecodePlan, Geometry, Model, Scaling

PLAN = DecodePlan()
HERE = "cpu-here"
SAMPLE = torch.linspace(-1, 1, 2 * 3 * 16 * 24).reshape(2, 3, 16, 24)
LATENTS = torch.linspace(-3, 3, 2 * 4 * 2 * 3).reshape(2, 4, 2, 3)


def kl() -> Model:
    return Model("kl", "a model", None, Geometry(8, 4), Scaling(1.0), {}, load=lambda: None)


def record(root, name="photo", sample=SAMPLE, latents=LATENTS, **more):
    about = {"weights_digest": "w" * 32, "plan_id": PLAN.id, "environment_class": HERE, **more}
    return golden.record(root, kl(), name, sample=sample, latents_tensor=latents, **about)


def load(root, name="photo", weights="w" * 32):
    return golden.load(root, "kl", name, weights_digest=weights, suite="my.toml")


def approve(root, cases, floors=None, where=HERE, reason="looked at them", name="photo"):
    golden.approve(root, "kl", name, cases, floors or {}, where, reason)


@pytest.fixture
def root(tmp_path):
    record(tmp_path)
    return tmp_path


@pytest.fixture
def folder(root):
    return root / "kl" / "photo"


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def recertify(folder, sample=SAMPLE, latents=LATENTS, **tensors):
    """Store other tensors under a certificate whose file digest fits: only the tensors' own digests can tell."""
    from safetensors.torch import save

    data = save({"sample": sample, "latents": latents, **tensors})
    (folder / "sample.safetensors").write_bytes(data)
    edit(folder / "certificate.json", file_digest=golden.hashlib.sha256(data).hexdigest())


# ---------------------------------------------------------------- what is stored comes back


def test_a_golden_comes_back_bit_for_bit_with_its_certificate(root):
    loaded = load(root)
    assert torch.equal(loaded.sample, SAMPLE)
    assert torch.equal(loaded.latents, LATENTS)
    assert loaded.approved == {}
    found = loaded.certificate
    assert (found.model, found.latents, found.plan, found.environment_class) == ("kl", "photo", PLAN.id, HERE)
    assert found.sample_shape == (2, 3, 16, 24)
    assert found.versions["torch"] == torch.__version__.split("+")[0] or found.versions["torch"] == torch.__version__
    assert found == golden.check(root, "kl", "photo")


def test_a_tensor_that_is_a_view_is_stored_as_it_reads(tmp_path):
    turned = SAMPLE.transpose(2, 3)
    record(tmp_path, sample=turned)
    assert torch.equal(load(tmp_path).sample, turned)


# ---------------------------------------------------------------- each way to be wrong


def cut(folder):
    path = folder / "sample.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def flip(folder):
    path = folder / "sample.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_sample(folder):
    changed = SAMPLE.clone()
    changed[0, 0, 0, 0] += 1e-6
    recertify(folder, sample=changed)


def garbage(folder):
    (folder / "sample.safetensors").write_bytes(b"no tensors")
    edit(folder / "certificate.json", file_digest=golden.hashlib.sha256(b"no tensors").hexdigest())


def without_latents(folder):
    from safetensors.torch import save

    data = save({"sample": SAMPLE})
    (folder / "sample.safetensors").write_bytes(data)
    edit(folder / "certificate.json", file_digest=golden.hashlib.sha256(data).hexdigest())


LIGHT = [
    (lambda folder: (folder / "sample.safetensors").unlink(), "sample.safetensors is missing"),
    (lambda folder: (folder / "certificate.json").unlink(), "certificate.json is missing"),
    (cut, "not the file that was certified"),
    (flip, "not the file that was certified"),
    (lambda folder: (folder / "certificate.json").write_text("{"), "certificate.json is not JSON"),
    (lambda folder: (folder / "certificate.json").write_bytes(b"\xff"), "certificate.json is not JSON"),
    (lambda folder: (folder / "certificate.json").write_text("[]"), "has the schema None"),
    (
        lambda folder: edit(folder / "certificate.json", schema="fidelity.golden/9"),
        "has the schema 'fidelity.golden/9'",
    ),
    (lambda folder: edit(folder / "certificate.json", model=3), "does not fit its schema"),
    (lambda folder: edit(folder / "certificate.json", colour="red"), "does not fit its schema"),
    (lambda folder: edit(folder / "certificate.json", latents="other"), "its certificate is of kl/other"),
    (lambda folder: (folder / "approved.json").write_text("no"), "approved.json is not JSON"),
    (lambda folder: (folder / "approved.json").write_text('{"schema": "x"}'), "approved.json has the schema 'x'"),
]
HEAVY = [
    (other_sample, "sample is not the tensor that was certified"),
    (lambda folder: recertify(folder, latents=LATENTS + 1), "latents is not the tensor that was certified"),
    (lambda folder: recertify(folder, sample=SAMPLE[:1]), "sample is torch.float32 [1, 3, 16, 24], certified is"),
    (lambda folder: recertify(folder, sample=SAMPLE.half()), "sample is torch.float16"),
    (without_latents, "holds no tensor 'latents'"),
    (garbage, "sample.safetensors cannot be read"),
]


@pytest.mark.parametrize(("break_it", "said"), [*LIGHT, *HEAVY], ids=[said for _, said in [*LIGHT, *HEAVY]])
def test_a_broken_golden_is_one_line_with_the_command(root, folder, break_it, said):
    break_it(folder)
    with pytest.raises(GoldenError) as raised:
        load(root)
    assert said in str(raised.value)
    assert "fidelity golden approve my.toml" in str(raised.value)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("break_it", "said"), LIGHT, ids=[said for _, said in LIGHT])
def test_the_light_check_sees_it_without_torch(root, folder, break_it, said):
    break_it(folder)
    with pytest.raises(GoldenError, match=re.escape(said)):
        golden.check(root, "kl", "photo")


def test_a_missing_golden_names_the_command_that_records_it(root):
    for read in (golden.check, load):
        with pytest.raises(GoldenError, match=r"kl/normal is missing: fidelity golden record \S+"):
            read(root, "kl", "normal") if read is golden.check else read(root, "normal")
    assert golden.exists(root, "kl", "photo")
    assert not golden.exists(root, "kl", "normal")


def test_a_golden_of_other_weights_is_refused(root):
    for read in (
        lambda: load(root, weights="v" * 32),
        lambda: golden.check(root, "kl", "photo", weights_digest="v" * 32),
    ):
        with pytest.raises(
            GoldenError, match=r"other weights of kl \(wwwwwwwwwwww, now vvvvvvvvvvvv\).*golden approve"
        ):
            read()


# ---------------------------------------------------------------- recording


def test_nothing_is_overwritten(root, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(GoldenError, match=r"exists, nothing was overwritten: fidelity golden approve"):
        record(root, sample=SAMPLE / 2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["photo"]


def test_replacing_drops_what_was_approved_against_the_old_one(root, folder):
    approve(root, {PLAN.id: {"rmse": 1.0}})
    record(root, sample=SAMPLE / 2, replace=True)
    assert torch.equal(load(root).sample, SAMPLE / 2)
    assert load(root).approved == {}
    assert [path.name for path in folder.parent.iterdir()] == ["photo"]


@pytest.mark.parametrize("fail_at", [0, 1])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_crash_in_the_middle_of_replacing_leaves_the_old_golden(root, folder, monkeypatch, fail_at, kind):
    rename, calls = os.rename, []

    def failing(source, target):
        calls.append(target)
        if len(calls) == fail_at + 1:
            raise kind("pulled the plug")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises((GoldenError, KeyboardInterrupt)):
        record(root, sample=SAMPLE / 2, replace=True)
    assert torch.equal(load(root).sample, SAMPLE)
    assert [path.name for path in folder.parent.iterdir()] == ["photo"]


def test_a_crash_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def failing(record):
        raise KeyboardInterrupt

    monkeypatch.setattr(golden, "to_json", failing)
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path)
    assert list(tmp_path.rglob("*.safetensors")) == []
    assert not golden.exists(tmp_path, "kl", "photo")


def test_another_process_that_was_faster_wins(tmp_path, monkeypatch):
    mkdtemp = golden.tempfile.mkdtemp

    def overtaken(*arguments, **more):
        staging = mkdtemp(*arguments, **more)
        monkeypatch.undo()
        record(tmp_path, sample=SAMPLE / 2)
        return staging

    monkeypatch.setattr(golden.tempfile, "mkdtemp", overtaken)
    with pytest.raises(GoldenError, match="cannot be stored"):
        record(tmp_path)
    assert torch.equal(load(tmp_path).sample, SAMPLE / 2)


@pytest.mark.parametrize(("sample", "said"), [(SAMPLE.half(), "float16"), (SAMPLE.log(), "NaN or inf")])
def test_only_finite_fp32_is_a_golden(tmp_path, sample, said):
    with pytest.raises(GoldenError, match=said):
        record(tmp_path, sample=sample)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "kl").write_text("a file where the model's folder belongs")
    with pytest.raises(GoldenError, match="cannot be stored"):
        record(tmp_path)


# ---------------------------------------------------------------- approving


def test_approved_values_are_of_one_plan_and_gated_in_their_own_environment_class_only(root):
    bf16 = DecodePlan("bf16")
    approve(root, {PLAN.id: {"rmse": 0.0}, bf16.id: {"rmse": 0.25, "ssim": 1}}, {"bf16": {"rmse": 0.1}})
    approved = load(root).approved
    found = approved_values(approved, HERE, bf16, gate=True)
    assert found == ApprovedValues(HERE, True, {"rmse": 0.25, "ssim": 1.0}, {"rmse": 0.1})
    assert not approved_values(approved, HERE, bf16, gate=False).gated
    assert approved_values(approved, HERE, PLAN, gate=True).floors == {}
    elsewhere = approved_values(approved, "another-cpu", bf16, gate=True)
    assert (elsewhere.environment_class, elsewhere.gated, elsewhere.values) == (HERE, False, found.values)
    assert approved_values(approved, HERE, DecodePlan("fp16"), gate=True) is None


def test_approving_some_cases_keeps_the_others_and_the_other_classes(root):
    approve(root, {"a": {"rmse": 1.0}, "b": {"rmse": 2.0}}, {"fp32": {"rmse": 0.1}})
    approve(root, {"a": {"rmse": 9.0}}, where="another-cpu")
    approve(root, {"b": {"rmse": 3.0}}, {"bf16": {"rmse": 0.2}}, reason="a better kernel")
    approved = load(root).approved
    assert approved[HERE].cases == {"a": {"rmse": 1.0}, "b": {"rmse": 3.0}}
    assert approved[HERE].floors == {"bf16": {"rmse": 0.2}, "fp32": {"rmse": 0.1}}
    assert approved[HERE].reason == "a better kernel"
    assert approved["another-cpu"].cases == {"a": {"rmse": 9.0}}


def test_approving_replaces_what_cannot_be_read(root, folder):
    (folder / "approved.json").write_text("no")
    approve(root, {"a": {"rmse": 1.0}})
    assert load(root).approved[HERE].cases == {"a": {"rmse": 1.0}}


def test_approvals_of_another_golden_are_refused(root, folder):
    approve(root, {"a": {"rmse": 1.0}})
    edit(folder / "approved.json", sample_digest="another")
    with pytest.raises(GoldenError, match=r"measured against another golden: fidelity golden approve my\.toml"):
        load(root)


def test_approving_needs_a_golden_a_reason_and_numbers(root, folder):
    with pytest.raises(GoldenError, match="missing: fidelity golden record"):
        approve(root, {}, name="normal")
    with pytest.raises(GoldenError, match="needs a reason"):
        approve(root, {}, reason=" ")
    with pytest.raises(ValueError, match="nan"):
        approve(root, {"a": {"rmse": float("nan")}})
    assert not (folder / "approved.json").exists()


def test_a_crash_while_approving_leaves_the_old_file_and_no_other(root, folder, monkeypatch):
    approve(root, {"a": {"rmse": 1.0}})

    def failing(source, target):
        raise OSError("pulled the plug")

    monkeypatch.setattr(certificate.os, "replace", failing)
    with pytest.raises(GoldenError, match=r"approved.json cannot be stored"):
        approve(root, {"a": {"rmse": 2.0}})
    assert load(root).approved[HERE].cases == {"a": {"rmse": 1.0}}
    assert sorted(path.name for path in folder.iterdir()) == ["approved.json", "certificate.json", "sample.safetensors"]


# ---------------------------------------------------------------- unused ones


def test_only_unwanted_goldens_are_unused_and_pruned(root):
    record(root, "normal")
    (root / "README.md").write_text("not a golden")
    (root / "kl" / "notes").mkdir()
    assert golden.unused(root, {("kl", "photo")}) == [("kl", "normal")]
    assert golden.prune(root, {("kl", "photo")}) == [("kl", "normal")]
    assert load(root).certificate.latents == "photo"
    assert golden.unused(root, {("kl", "photo")}) == []
    assert (root / "kl" / "notes").is_dir()
    assert golden.unused(root / "nowhere", set()) == []


def test_a_golden_with_something_else_in_its_folder_is_not_removed(root, folder):
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(GoldenError, match=r"also holds thesis\.tex"):
        golden.remove(root, "kl", "photo")
    assert load(root)
    with pytest.raises(GoldenError, match="nothing to remove"):
        golden.remove(root, "kl", "normal")


def test_the_folder_of_a_model_goes_with_its_last_golden(root):
    golden.remove(root, "kl", "photo")
    assert list(root.iterdir()) == []
