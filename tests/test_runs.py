"""Whole runs over worker processes: what is written, what is not, and what a dying worker costs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fidelity.records import RunResult, from_json
from tests.suites import LIMITS, fidelity, write_suite

pytestmark = pytest.mark.slow

MATRIX = 'dtype = ["fp32", "bf16"]\noffload = ["none", "disk"]'


def results(folder: Path) -> RunResult:
    return from_json((folder / "results.json").read_bytes(), RunResult)


def without_times(folder: Path) -> object:
    def drop(node):
        if isinstance(node, dict):
            return {
                key: drop(value)
                for key, value in node.items()
                if key not in ("seconds", "resident_peak_bytes", "resident_bytes", "traced_bytes", "recorded")
            }
        return [drop(value) for value in node] if isinstance(node, list) else node

    return drop(json.loads((folder / "results.json").read_text()))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with a suite, its golden, and the run that recorded it."""
    folder = tmp_path_factory.mktemp("recorded")
    write_suite(folder, MATRIX)
    done = fidelity("run", "small.toml", "--record-missing", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_run_writes_every_report_and_says_that_it_recorded(recorded):
    out = recorded / "runs" / "small"
    assert {path.name for path in out.iterdir()} == {
        "results.json", "report.html", "summary.md", "junit.xml", "images",
    }  # fmt: skip
    run = results(out)
    assert [case.verdict for case in run.cases] == ["pass"] * 4
    assert [reference.recorded for reference in run.reference] == [True]
    assert "recorded in this very run" in run.notes[0]
    fp32 = run.cases[0]
    assert fp32.measurements["rmse"].value == 0.0
    assert fp32.measurements["psnr"].value is None
    assert fp32.measurements["psnr"].exact
    assert fp32.memory.allocated_peak_bytes > 4 * 2**20
    for name in ("golden", "candidate", "difference"):
        assert (out / fp32.images[name][0]).is_file()
    bf16 = run.cases[2]
    assert bf16.plan.dtype == "bf16"
    assert 0.05 < bf16.measurements["rmse"].value < 2.0
    assert bf16.memory.allocated_peak_bytes < fp32.memory.allocated_peak_bytes
    assert bf16.receipts["precision"]["middle_layer"] == ["bfloat16"]
    disk = run.cases[1]
    assert disk.receipts["offload"]["moved_bytes"] > 0


def test_the_same_inputs_give_the_same_file_but_for_times(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "copy")
    first, second = (fidelity("run", "small.toml", "--out", out, cwd=tmp_path / "copy") for out in ("a", "b"))
    assert first.returncode == second.returncode == 0, first.stderr
    assert without_times(tmp_path / "copy/a") == without_times(tmp_path / "copy/b")
    assert results(tmp_path / "copy/a").reference[0].recorded is False


def test_a_missing_golden_is_a_wrong_request_and_nothing_is_written(tmp_path):
    write_suite(tmp_path, MATRIX)
    done = fidelity("run", "small.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "fidelity golden record" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


def test_an_output_folder_that_holds_something_else_is_left_alone(recorded):
    foreign = recorded / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    done = fidelity("run", "small.toml", "--out", "foreign", cwd=recorded)
    assert done.returncode == 2
    assert "holds something other than a fidelity run" in done.stderr
    assert (foreign / "thesis.tex").read_text() == "years of work"


PLUGIN = """
import os, signal
from fidelity import optimization

@optimization("fault")
def fault(module, value, *, plan, model, device):
    "Does what it is told to while decoding."
    def hook(*_):
        if value == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if value == "segfault":
            import ctypes; ctypes.string_at(0)
        if value == "raise":
            raise RuntimeError("the kernel is not amused")
        if value == "oom":
            import torch; torch.empty(2**46)
    handle = module.decoder.register_forward_pre_hook(hook)
    if value == "leak":
        module.use_slicing = True
    yield lambda seen: {"engaged": None if value == "idle" else True, "reason": "idle" if value == "idle" else None}
    handle.remove()
"""


def test_a_worker_that_dies_costs_its_own_case_only(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "copy")
    (folder / "faults.py").write_text(PLUGIN)
    write_suite(folder, 'offload = ["none", "group_leaf"]\nfault = [false, "kill", "segfault", "raise", "oom", "leak"]')
    done = fidelity("run", "small.toml", "--plugin", "faults", "--out", "out", cwd=folder)
    assert done.returncode == 3, done.stderr
    by_fault = {}
    for case in results(folder / "out").cases:
        by_fault.setdefault(case.plan.options.get("fault", False), []).append(case)
    assert {fault: {case.verdict for case in cases} for fault, cases in by_fault.items()} == {
        False: {"pass"}, "kill": {"error"}, "segfault": {"error"}, "raise": {"error"}, "oom": {"error"},
        "leak": {"fail"},
    }  # fmt: skip
    said = {fault: cases[0].reasons[0].message for fault, cases in by_fault.items() if fault}
    assert "SIGKILL" in said["kill"]
    assert "SIGSEGV" in said["segfault"]
    assert "RuntimeError at faults.py:14: the kernel is not amused" in said["raise"]
    assert by_fault["oom"][0].diagnosis == ("crash", "memory")
    assert by_fault["leak"][0].diagnosis == ("state_leak",)
    assert "use_slicing" in said["leak"]


EXPECT = """
[[expect]]
match     = { tiling = { overlap = 0.0 } }
verdict   = "fail"
diagnosis = ["tone_drift"]
reason    = "the wrong reason, on purpose"
"""


def test_an_expected_failure_for_another_reason_is_a_surprise(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "copy")
    limits = LIMITS + 'tile_step = { max = 1.0, origin = "test" }\n'
    write_suite(folder, "tiling = [{ tile = 16, overlap = 0.0 }]", limits + EXPECT)
    done = fidelity("run", "small.toml", "--out", "out", cwd=folder)
    assert done.returncode == 1, done.stderr
    case = results(folder / "out").cases[0]
    assert case.verdict == "fail"
    assert case.surprise
    assert case.diagnosis == ("seam",)


def test_a_reference_that_moved_is_an_error_and_blames_no_option(recorded, tmp_path):
    from fidelity import golden, registry

    folder = shutil.copytree(recorded, tmp_path / "copy")
    registry.load_plugins()
    certificate = golden.check(folder / "golden", "reference-kl", "ramp")
    stored = golden.load(folder / "golden", "reference-kl", "ramp", weights_digest=certificate.weights_digest)
    golden.record(
        folder / "golden", registry.MODELS.get("reference-kl"), "ramp", sample=stored.sample + 0.01,
        latents_tensor=stored.latents, weights_digest=certificate.weights_digest, plan_id=certificate.plan,
        environment_class=certificate.environment_class, replace=True,
    )  # fmt: skip
    done = fidelity("run", "small.toml", "--out", "out", cwd=folder)
    assert done.returncode == 3
    run = results(folder / "out")
    assert {case.verdict for case in run.cases} == {"error"}
    assert {case.diagnosis for case in run.cases} == {("drift", "shift")}
    assert run.reference[0].drift == pytest.approx(1.275, rel=1e-3)
    assert fidelity("golden", "verify", "small.toml", cwd=folder).returncode == 3


def test_the_life_of_goldens(tmp_path):
    write_suite(tmp_path, 'dtype = ["fp32", "bf16"]')
    assert fidelity("golden", "record", "small.toml", cwd=tmp_path).stdout == "recorded reference-kl/ramp\n"
    again = fidelity("golden", "record", "small.toml", cwd=tmp_path)
    assert again.returncode == 2
    assert "nothing to record" in again.stderr
    shutil.copytree(tmp_path / "golden/reference-kl/ramp", tmp_path / "golden/reference-kl/forgotten")
    unused = fidelity("golden", "verify", "small.toml", cwd=tmp_path)
    assert unused.returncode == 1
    assert "reference-kl/forgotten: no case uses this golden" in unused.stdout
    assert fidelity("golden", "prune", "small.toml", cwd=tmp_path).stdout == "removed reference-kl/forgotten\n"
    assert fidelity("golden", "verify", "small.toml", cwd=tmp_path).returncode == 0

    approved = fidelity("golden", "approve", "small.toml", "--reason", "first values", cwd=tmp_path)
    assert approved.returncode == 0, approved.stderr
    path = tmp_path / "golden/reference-kl/ramp/approved.json"
    stored = json.loads(path.read_text())
    (values,) = stored["environments"].values()
    assert values["reason"] == "first values"
    assert values["cases"]["fp32-upcast0-slice0-t0-none"]["rmse"] == 0.0
    assert fidelity("run", "small.toml", cwd=tmp_path).returncode == 0

    values["cases"]["bf16-upcast0-slice0-t0-none"]["rmse"] /= 2  # as if it had been better once
    path.write_text(json.dumps(stored))
    worse = fidelity("run", "small.toml", cwd=tmp_path)
    assert worse.returncode == 1, worse.stderr
    judged = results(tmp_path / "runs/small").cases[1]
    assert judged.diagnosis == ("regressed",)
    assert judged.approved.gated
    assert judged.approved.values["rmse"] < judged.measurements["rmse"].value

    stored["environments"] = {"another-cpu": values}
    path.write_text(json.dumps(stored))
    assert fidelity("run", "small.toml", cwd=tmp_path).returncode == 0, "another class's values are shown, not gated"
    shown = results(tmp_path / "runs/small").cases[1].approved
    assert (shown.environment_class, shown.gated) == ("another-cpu", False)


def test_an_interrupt_leaves_a_valid_partial_run_that_can_be_resumed(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "copy")
    offloads = '["none", "model", "sequential", "group_block", "group_leaf", "disk"]'
    write_suite(folder, f'dtype = ["fp32", "bf16", "fp16"]\noffload = {offloads}\n'
                        "tiling = [false, { tile = 8, overlap = 0.5 }]")  # fmt: skip
    command = [sys.executable, "-m", "fidelity.cli", "run", "small.toml", "--out", "out"]
    running = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stderr is not None
    running.stderr.readline()  # the first progress line: some case has ended
    time.sleep(0.5)
    os.kill(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    partial = results(folder / "out")
    assert partial.partial
    assert 0 < len(partial.cases) < 36
    resumed = fidelity("run", "small.toml", "--out", "out", "--resume", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    whole = results(folder / "out")
    assert not whole.partial
    assert len(whole.cases) == 36
    kept = {case.id: case for case in partial.cases}
    assert all(case == kept.get(case.id, case) for case in whole.cases)
    assert all((folder / "out" / path).is_file() for case in whole.cases for path in case.images["candidate"])


def test_a_plan_without_a_suite_needs_no_golden(tmp_path):
    done = fidelity("run", "--plan", "bf16,tile=16,overlap=0.25", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (case,) = results(tmp_path / "out").cases
    assert case.id == "reference-kl/photo-pair/bf16-upcast0-slice0-t16o0.25-none"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_workers_end_with_a_parent_that_was_killed(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "copy")
    slow = PLUGIN.replace('if value == "kill":', "import time; time.sleep(600)\n        if value:")
    (folder / "slow.py").write_text(slow)
    write_suite(folder, 'fault = ["sleep"]')
    command = [sys.executable, "-m", "fidelity.cli", "run", "small.toml", "--plugin", "slow", "--jobs", "1"]
    running = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def children():
        listed = Path(f"/proc/{running.pid}/task").glob("*/children")
        return [int(pid) for path in listed for pid in path.read_text().split()]

    deadline = time.monotonic() + 120
    while not (workers := children()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers
    running.kill()
    running.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


DIE_LATE = """
import fidelity.worker as worker

_answer = worker._answer

def dying(bench, task):
    yield from _answer(bench, task)
    if isinstance(task, worker.Judge):
        import os, sys
        sys.stderr.write("gone after the last reply")
        os._exit(9)

worker._answer = dying
"""


def test_a_worker_that_dies_after_its_last_reply_loses_nothing(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "copy")
    (folder / "late.py").write_text(DIE_LATE)
    done = fidelity("run", "small.toml", "--plugin", "late", "--jobs", "1", "--out", "out", cwd=folder)
    run = results(folder / "out")
    assert [case.verdict for case in run.cases] == ["pass"] * 4, done.stderr
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_resume_refuses_a_run_of_another_request(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "copy")
    (folder / "harmless.py").write_text("")
    done = fidelity("run", "small.toml", "--plugin", "harmless", "--resume", cwd=folder)
    assert done.returncode == 2
    assert "another model, plugin or device" in done.stderr


def test_a_partial_run_does_not_replace_a_whole_one(tmp_path):
    from fidelity import folders

    whole = RunResult({}, {}, cases=())
    with folders.staged(tmp_path / "out") as stage:
        (stage.path / "results.json").write_bytes(b'{"schema": "fidelity.results/1"}')
        assert stage.settle(whole) == tmp_path / "out"
    with folders.staged(tmp_path / "out") as stage:
        (stage.path / "results.json").write_bytes(b'{"schema": "fidelity.results/1", "partial": true}')
        assert stage.settle(RunResult({}, {}, partial=True)).name == "out.partial"
    assert b"partial" not in (tmp_path / "out/results.json").read_bytes()
    assert b"partial" in (tmp_path / "out.partial/results.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]


def test_approve_renews_a_golden_of_other_weights_and_needs_a_reason(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "copy")
    write_suite(folder, 'dtype = ["fp32"]')
    path = folder / "golden/reference-kl/ramp/certificate.json"
    stored = json.loads(path.read_text())
    stored["weights_digest"] = "0" * 16
    path.write_text(json.dumps(stored))
    refused = fidelity("run", "small.toml", "--out", "out", cwd=folder)
    assert refused.returncode == 2
    assert "fidelity golden approve" in refused.stderr
    assert "small.toml" in refused.stderr
    silent = fidelity("golden", "approve", "small.toml", "--reason", " ", cwd=folder)
    assert silent.returncode == 2
    assert json.loads(path.read_text())["weights_digest"] == "0" * 16
    renewed = fidelity("golden", "approve", "small.toml", "--reason", "new weights", cwd=folder)
    assert renewed.returncode == 0, renewed.stderr
    assert "recorded anew reference-kl/ramp" in renewed.stdout
    assert fidelity("run", "small.toml", "--out", "out", cwd=folder).returncode == 0


OFFLOADED = '''
from fidelity import Measurement, detector

@detector("offloaded", unit="share", better="lower")
def offloaded(candidate, golden, *, plan, receipts, data_range):
    """One for an offloaded decode."""
    return Measurement(per_image=(float(plan.offload != "none"),) * candidate.shape[0])
'''


@pytest.mark.slow
def test_a_plugins_detector_is_asked_of_every_case(tmp_path):
    """Cases that share their pixels share what the project's own instruments measure, and nothing else."""
    (tmp_path / "offloaded.py").write_text(OFFLOADED)
    write_suite(tmp_path, 'offload = ["none", "model"]', '[limits]\noffloaded = { max = 0.5, origin = "test" }\n')
    done = fidelity("run", "small.toml", "--plugin", "offloaded", "--record-missing", "--jobs", "1", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "offloaded is 1" in done.stdout
