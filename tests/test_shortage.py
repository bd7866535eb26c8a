"""Memory that ran out inside a case: what counts as that, what is told of it, and which plan is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fidelity import pool, registry, runs, shortage, suite
from fidelity.evaluator import Evaluator
from fidelity.explain import explain
from fidelity.memory.allocator import EMULATED, trace
from fidelity.records import (
    Case,
    Decoded,
    DecodePlan,
    Exhausted,
    Expectation,
    MemoryTrace,
    RunResult,
    Tiling,
    from_json,
)
from fidelity.stages import STAGES
from tests.suites import fidelity, write_suite

MIB = 2**20
REFUSED = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "12582912 bytes. Error code 12 (Cannot allocate memory)"
)


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as found:  # with a traceback of its own
        return found


def of(error, limit=None, passes=True):
    return shortage.of_error(error, limit, lambda: passes)


# ---------------------------------------------------------------- what counts


@pytest.mark.parametrize(
    ("error", "requested"),
    [
        (RuntimeError(REFUSED), 12582912),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."), 64),
        (RuntimeError("std::bad_alloc"), None),
        (RuntimeError("unable to mmap 4096 bytes from file <x>: Cannot allocate memory (12)"), None),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), None),
        (OSError(12, "Cannot allocate memory"), None),
        (MemoryError(), None),
        (MemoryError("in words of its own"), None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8 GiB "
                                "of which 1.00 MiB is free."), 20 * MIB),
        (torch.OutOfMemoryError("in words of a later release"), None),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_allocators_raise_counts(error, requested):
    found = of(raised(error))
    assert found is not None
    assert found.requested_bytes == requested
    assert of(raised(ValueError("cannot decode"), cause=raised(error))) is not None  # wrapped


def test_numpy_counts_with_its_figure():
    with pytest.raises(MemoryError) as caught:
        np.empty(2**45)
    assert of(caught.value).requested_bytes == 2**48


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Sizes of tensors must match except in dimension 1"),
        RuntimeError("the kernel is not amused"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("could not create a primitive descriptor for a convolution forward propagation primitive"),
        ValueError(REFUSED),
        OSError(2, "No such file or directory"),
        ZeroDivisionError(),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_errors_are_no_exhaustion_even_under_a_limit(error):
    assert of(raised(error)) is None
    assert of(raised(error), limit=MIB) is None


@pytest.mark.parametrize("words", ["could not create a primitive", "could not create a memory object",
                                   "could not execute a primitive"])  # fmt: skip
def test_onednn_counts_only_under_a_limit_without_which_the_decode_passes(words):
    error = raised(RuntimeError(words))
    assert of(error) is None
    assert of(error, limit=MIB, passes=False) is None
    assert of(error, limit=MIB).limit_bytes == MIB


def test_doubt_alone_is_asked_about():
    def never():
        raise AssertionError("asked")

    assert shortage.of_error(raised(MemoryError()), MIB, never) is not None
    assert shortage.of_error(raised(RuntimeError("shapes")), MIB, never) is None


# ---------------------------------------------------------------- what is told


class Block(torch.nn.Module):
    def forward(self, x):
        kept = torch.zeros(4 * MIB, dtype=torch.uint8)
        return kept, torch.empty(2**46)


def test_a_traced_decode_tells_the_module_what_was_asked_for_and_what_lived():
    whole = torch.nn.Module()
    whole.decoder = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), Block())
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        trace(lambda: whole.decoder(torch.zeros(1, 1, 8, 8)), module=whole, device="cpu")
    found = of(caught.value, limit=8 * MIB)
    assert (found.module, found.requested_bytes, found.limit_bytes) == ("decoder.1", 2**48, 8 * MIB)
    assert 4 * MIB <= found.alive_bytes < 5 * MIB
    assert found.held[0].bytes == 4 * MIB
    memory = shortage.trace(caught.value, found)
    assert memory.allocated_peak_bytes is None  # of a decode that never was
    assert memory.reason == "memory ran out"
    assert memory.timeline


def test_what_lived_is_told_though_undoing_the_plan_raised_too():
    whole = torch.nn.Module()
    whole.decoder = torch.nn.Sequential(Block())
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        trace(lambda: whole.decoder(torch.zeros(1)), module=whole, device="cpu")
    undoing = AttributeError("no attribute to put back")
    undoing.__context__ = caught.value
    found = of(undoing)
    assert (found.module, found.requested_bytes, found.reason) == ("decoder.0", 2**48, None)
    assert shortage.trace(undoing, found).timeline


class Caught(torch.nn.Module):
    """Falls back when it is refused, as some decoders do."""

    def forward(self, x):
        for size in (2**46, 2**45):
            try:
                return torch.empty(size)
            except RuntimeError:
                pass
        return x + 1


def test_a_decode_that_caught_a_refusal_and_went_on_is_no_pass():
    whole = torch.nn.Module()
    whole.decoder = torch.nn.Sequential(Caught())
    with torch.no_grad():
        _, memory = trace(lambda: whole.decoder(torch.zeros(1)), module=whole, device="cpu")
    assert memory.allocated_peak_bytes is not None
    (reason,) = shortage.caught(memory)
    assert (reason.measured, reason.limit, reason.diagnosis) == (2, 0, ("memory",))
    assert "refused memory 2 times, caught that and went on" in reason.message
    whole.decoder = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1))
    with torch.no_grad():
        _, memory = trace(lambda: whole.decoder(torch.zeros(1, 1, 8, 8)), module=whole, device="cpu")
    assert shortage.caught(memory) == []
    on_cuda = MemoryTrace(1, method="torch.cuda peak counters", refused=1)
    assert shortage.caught(on_cuda) == [], "cuDNN asks for a workspace, and does with less"


@pytest.mark.parametrize(("limit", "told"), [(2**48 + 13 * MIB, None), (2**48 + 4 * MIB, None), (3 * 2**47, True)])
def test_what_went_past_torchs_allocator_is_told(limit, told):
    whole = torch.nn.Module()
    whole.decoder = torch.nn.Sequential(Block())
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        trace(lambda: whole.decoder(torch.zeros(1)), module=whole, device="cpu")
    reason = of(caught.value, limit=limit).reason
    assert reason is None if told is None else "were taken past torch's allocator" in reason


def test_without_a_trace_the_traceback_tells_and_says_what_is_missing():
    def new_function():
        torch.empty(2**46)

    with pytest.raises(RuntimeError) as caught:
        new_function()
    found = of(caught.value)
    assert "in new_function" in found.module
    assert (found.alive_bytes, found.held) == (None, ())
    assert "no trace followed this decode" in found.reason


def test_the_reason_is_one_line_with_every_figure():
    found = Exhausted("tile", "decoder.up_blocks.2", REFUSED, 12 * MIB, 20 * MIB, 24 * MIB, (), "bf16", 14 * MIB)
    reason = shortage.reason(found)
    assert reason.diagnosis == ("crash", "memory")
    assert reason.message == (
        "memory ran out while decoding one tile (decoder.up_blocks.2): 12.0 MiB more were asked for, 20.0 MiB were "
        "alive, 24.0 MiB beyond the loaded model are allowed; nearest plan of this suite that fits: bf16 needs 14.0 "
        "MiB, predicted"
    )
    dead = shortage.reason(shortage.of_death("the worker process was killed by SIGKILL", None))
    assert dead.message == f"memory ran out: {shortage.DEATH}; the worker process was killed by SIGKILL"


@pytest.mark.parametrize("stage", sorted(set(STAGES) - {"unknown"}))
def test_the_line_of_a_case_is_a_log_that_can_be_explained(stage):
    line = shortage.reason(Exhausted(stage, "decoder", REFUSED, 12 * MIB, None, 8 * MIB, (), "bf16", 6 * MIB)).message
    found = explain(f"some/case: error (crash, memory), expected pass\n  {line}\n")
    assert (found.stage, found.where, found.refusal.requested) == (stage, "decoder", 12 * MIB)
    assert any("that fits: bf16 needs 6.0 MiB" in said for said in found.derived)


# ---------------------------------------------------------------- the plan that fits


def small_suite(peaks, monkeypatch, expected=None):
    """A suite of plans whose predicted peaks are made up."""
    registry.load_plugins(())
    plans = list(peaks)
    cases = tuple(Case("kl", "one", plan, expected=(expected or {}).get(plan, Expectation())) for plan in plans)
    made = suite.Suite("s", None, None, "", cases, (), {"kl": registry.MODELS.get("reference-kl")}, {},
                       {("kl", "one"): (1, 4, 32, 32)})  # fmt: skip
    asked = []

    def of_shape(model, shape, plan, device):
        asked.append(plan)
        if isinstance(peaks[plan], Exception):
            raise peaks[plan]
        reserved = 2 * peaks[plan] * MIB if device == "cuda" else None
        return SimpleNamespace(allocated_peak_bytes=peaks[plan] * MIB, reserved_peak_bytes=reserved)

    monkeypatch.setattr(shortage.predict, "of_shape", of_shape)
    return shortage.Plans(made, made.models, "cpu"), cases[0], asked


PLAIN, BF16, TILED = DecodePlan(), DecodePlan(dtype="bf16"), DecodePlan(tiling=Tiling(16, 0.25))
BOTH, DISK, FP16 = (
    DecodePlan(dtype="bf16", tiling=Tiling(16, 0.25)), DecodePlan(offload="disk"), DecodePlan(dtype="fp16"),
)  # fmt: skip
PEAKS = {PLAIN: 68, BOTH: 14, BF16: 34, TILED: 29, DISK: 60, FP16: 1}


@pytest.mark.parametrize(
    ("room", "plan", "peak"),
    [(64, BF16, 34), (34, BF16, 34), (33, TILED, 29), (28, BOTH, 14), (14, BOTH, 14)],
)
def test_the_nearest_plan_changes_least_and_is_the_fastest_of_those(monkeypatch, room, plan, peak):
    plans, case, _ = small_suite(PEAKS, monkeypatch)
    assert plans.fitting(case, room * MIB, "the limit") == (plan.id, peak * MIB, None)


def test_on_cuda_it_is_the_reserved_peak_that_must_fit(monkeypatch):
    plans, case, _ = small_suite(PEAKS, monkeypatch)
    plans.device = "cuda:0"
    assert plans.fitting(case, 68 * MIB, "the limit")[:2] == (BF16.id, 68 * MIB)
    assert plans.fitting(case, 67 * MIB, "the limit")[:2] == (FP16.id, 2 * MIB)  # not emulated there, and small


def test_the_room_is_the_limit_or_what_is_free(monkeypatch):
    plans, case, _ = small_suite(PEAKS, monkeypatch)
    limited = Case("kl", "one", PLAIN, memory_limit=5 * MIB)
    assert plans.room(limited) == (5 * MIB, "the limit")
    monkeypatch.setattr(shortage, "available_bytes", lambda _: 7 * MIB)
    assert plans.room(case) == (7 * MIB, "what is free")


def test_where_nothing_fits_the_least_is_named(monkeypatch):
    plans, case, _ = small_suite(PEAKS, monkeypatch)
    assert plans.fitting(case, 13 * MIB, "the limit") == (
        None, None, f"no plan of this suite fits the limit: the least, {BOTH.id}, needs 14.0 MiB, predicted",
    )  # fmt: skip


def test_plans_that_fail_or_cannot_be_predicted_are_not_offered(monkeypatch):
    seam = Expectation("fail", ("seam",), "no overlap")
    plans, case, _ = small_suite({**PEAKS, BF16: RuntimeError("values")}, monkeypatch, {TILED: seam})
    assert plans.fitting(case, 40 * MIB, "the limit")[0] == BOTH.id
    plans, case, _ = small_suite({PLAIN: 68, BF16: RuntimeError("values")}, monkeypatch)
    assert "no other plan for these latents whose peak can be predicted" in plans.fitting(case, MIB, "x")[2]
    assert shortage.Plans(None, {}, "cpu").fitting(case, MIB, "x")[2] == "there is no suite to take another plan from"
    assert "nobody knows how much memory there was" in plans.fitting(case, None, "x")[2]


def test_a_peak_is_predicted_once_for_all_offloads_that_move_nothing(monkeypatch):
    leaf = DecodePlan(offload="group_leaf")
    plans, _, asked = small_suite({PLAIN: 68, leaf: 68, DISK: 60}, monkeypatch)
    peaks = [plans.peak("kl", (1, 4, 32, 32), plan) for plan in (PLAIN, leaf, PLAIN, DISK)]
    assert peaks == [68 * MIB, 68 * MIB, 68 * MIB, 60 * MIB]
    assert asked == [PLAIN, DISK]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"encode": True}, "it is the encoder's memory"), ({"made_up": True}, "made_up is a plug-in's option")],
)
def test_what_is_not_predicted_says_why(monkeypatch, options, said):
    if "made_up" in options:
        own = SimpleNamespace(name="made_up", function=pytest.raises, inapplicable=lambda *_: None)
        monkeypatch.setitem(registry.OPTIMIZATIONS._entries, "made_up", own)
    plans, _, asked = small_suite(PEAKS, monkeypatch)
    assert said in plans.peak("kl", (1, 4, 32, 32), DecodePlan(options=options))
    assert asked == []


def test_settings_that_differ_are_counted():
    assert shortage.changes(PLAIN, PLAIN) == 0
    assert shortage.changes(PLAIN, BOTH) == 2
    assert shortage.changes(TILED, DecodePlan(tiling=Tiling(24, 0.25))) == 1
    assert shortage.changes(DecodePlan(options={"preview": True}), DISK) == 2


# ---------------------------------------------------------------- a worker that died


def test_the_kernels_count_tells_who_killed(tmp_path, monkeypatch):
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(pool, "KERNEL_COUNTS", counts)
    assert pool.out_of_memory_kills() is None
    counts.write_text("nr_free_pages 5\noom_kill 7\noom_kill_more 9\n")
    assert pool.out_of_memory_kills() == 7
    assert pool._who_killed(7, 8)[1] is True
    assert pool._who_killed(7, 7)[1] is False
    assert pool._who_killed(None, 7)[1] is None


KILL = """
import contextlib, os, pathlib, signal
import torch
from fidelity import optimization

@optimization("fault")
def fault(module, value, *, plan, model, device):
    "Dies as the kernel lets die, or as C++ does, or lives on."
    def hook(*_):
        if value == "oom":
            pathlib.Path(os.environ["COUNTS"]).write_text("oom_kill 8")
        if value in ("oom", "other"):
            os.kill(os.getpid(), signal.SIGKILL)
        if value == "caught":
            with contextlib.suppress(RuntimeError):
                torch.empty(2**46)
        if value == "bad_alloc":
            os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'")
            os.abort()
    handle = module.decoder.register_forward_pre_hook(hook)
    yield lambda seen: {"engaged": True, "reason": None}
    handle.remove()
"""


@pytest.mark.parametrize(
    ("words", "speaks"),
    [
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
        ("Segmentation fault", None),
        ("", None),
    ],
)
def test_last_words_may_speak_of_memory(words, speaks):
    assert pool._speaks_of_memory(words) is speaks


def with_faults(folder, monkeypatch, matrix):
    """A run over `matrix` whose workers may die; by fault, the cases."""
    counts = folder / "vmstat"
    counts.write_text("oom_kill 7")
    monkeypatch.setenv("COUNTS", str(counts))
    (folder / "faults.py").write_text(KILL)
    path = write_suite(folder, matrix)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(pool, "KERNEL_COUNTS", counts)
    monkeypatch.setattr(registry.OPTIMIZATIONS, "_entries", dict(registry.OPTIMIZATIONS._entries))
    monkeypatch.delitem(sys.modules, "faults", raising=False)
    registry.load_plugins(("faults",))
    options = runs.Options(plugins=("faults",), path=(str(folder),), record_missing=True, jobs=1)
    run = runs.execute(suite.load(path, registry), None, options)
    return {case.plan.options.get("fault", case.plan.dtype): case for case in run.cases}


@pytest.mark.slow
def test_a_death_by_memory_is_told_and_the_run_goes_on(tmp_path, monkeypatch):
    found = with_faults(tmp_path, monkeypatch, 'fault = ["oom", "caught", false]')
    assert {name: (case.verdict, case.diagnosis) for name, case in found.items()} == {
        "fp32": ("pass", ()), "oom": ("error", ("crash", "memory")), "caught": ("fail", ("memory",)),
    }  # fmt: skip
    exhausted = found["oom"].memory.exhausted
    assert exhausted.stage == "unknown"
    assert exhausted.fits == DecodePlan().id  # nothing else but the fault is changed
    assert "nobody can tell the stage" in exhausted.reason
    assert "killed by SIGKILL (out of memory: the kernel counted 1 such kills meanwhile)" in exhausted.message


@pytest.mark.campaign
def test_each_kind_of_death_is_told_apart(tmp_path, monkeypatch):
    found = with_faults(tmp_path, monkeypatch, 'fault = [false, "other", "bad_alloc"]')
    assert {name: case.diagnosis for name, case in found.items()} == {
        "fp32": (), "other": ("crash",), "bad_alloc": ("crash", "memory"),
    }  # fmt: skip
    assert "SIGABRT" in found["bad_alloc"].memory.exhausted.message
    assert "the kernel counted no such kill" in found["other"].reasons[0].message


def test_what_has_no_figure_of_its_own_has_its_predicted_peak_beside_it(tmp_path, monkeypatch):
    plans, _, _ = small_suite({PLAIN: 68, FP16: 34, BF16: RuntimeError("values")}, monkeypatch)
    judge = Evaluator(plans.models, {}, tmp_path)
    monkeypatch.setattr(judge, "plans", plans)
    stored = SimpleNamespace(latents=torch.zeros(1, 4, 32, 32), certificate=SimpleNamespace(model="kl", latents="one"))
    unmeasured = Decoded(torch.zeros(1), {}, {}, MemoryTrace(reason=EMULATED), None)
    assert judge._predicted(FP16, stored, unmeasured).memory == MemoryTrace(
        reason=EMULATED, predicted_peak_bytes=34 * MIB
    )
    assert "not predicted: RuntimeError: values" in judge._predicted(BF16, stored, unmeasured).memory.reason
    measured = Decoded(torch.zeros(1), {}, {}, MemoryTrace(5), None)
    assert judge._predicted(PLAIN, stored, measured) is measured


# ---------------------------------------------------------------- for real


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a limit on the address space holds on Linux only")


@LINUX
@pytest.mark.slow
def test_a_limited_run_refuses_goes_on_and_names_a_plan_that_passes(tmp_path):
    write_suite(tmp_path, 'dtype = ["fp32", "fp16"]\ntiling = [false, { tile = 16, overlap = 0.25 }]')
    options = ("--record-missing", "--memory-limit", "20MiB", "--jobs", 1, "--out", "held")
    done = fidelity("run", "small.toml", *options, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    run = from_json((tmp_path / "held" / "results.json").read_bytes(), RunResult)
    held = {case.plan: case for case in run.cases}
    assert {plan.id: case.verdict for plan, case in held.items()} == {
        PLAIN.id: "error", TILED.id: "pass", FP16.id: "not_applicable",
        DecodePlan(dtype="fp16", tiling=Tiling(16, 0.25)).id: "not_applicable",
    }  # fmt: skip
    assert {case.memory_limit for case in held.values()} == {20 * MIB}
    plain, tiled = held[PLAIN], held[TILED]
    assert plain.diagnosis == ("crash", "memory")
    assert "--memory-limit 20MiB" in plain.reproduce
    found = plain.memory.exhausted
    assert (found.stage, found.limit_bytes, found.fits) == ("decode", 20 * MIB, TILED.id)
    assert found.module.startswith("decoder.")
    assert found.alive_bytes - plain.memory.weights_bytes <= 20 * MIB
    assert found.alive_bytes - plain.memory.weights_bytes + found.requested_bytes > 18 * MIB
    assert found.fits_bytes == pytest.approx(tiled.memory.allocated_peak_bytes, rel=0.02)


@LINUX
@pytest.mark.campaign
def test_the_memory_suite_ends_as_it_expects_under_pytest_too():
    suites = Path(__file__).parent.parent / "suites"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rx", suites / "memory.toml"]
    done = subprocess.run(command, cwd=suites.parent, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "4 passed, 1 xfailed" in done.stdout
    assert "as expected: crash, memory (60 MiB are needed and 44 allowed)" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("size", ["0", "-3MiB", "lots", "900000GiB"])
def test_a_limit_that_is_none_is_a_wrong_request(tmp_path, size):
    write_suite(tmp_path, 'dtype = ["fp32"]')
    done = fidelity("run", "small.toml", "--record-missing", f"--memory-limit={size}", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]
