"""A memory limit: what it refuses, what it lets pass, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from fidelity.memory import fraction, limit

MIB = 2**20
HERE = pytest.mark.skipif(sys.platform != "linux", reason="a limit on the address space holds on Linux only")


def alone(script: str, **variables: str) -> dict:
    """What a script prints as its last line, in a process that is fit for limits."""
    start = """
    import json, resource, threading
    import torch
    from fidelity.memory import limit
    MIB = 2**20

    def block(mib):
        return torch.empty(mib * MIB, dtype=torch.uint8)

    def refused(mib, allowed):
        try:
            with limit.held(allowed * MIB):
                block(mib)
        except RuntimeError as error:
            return "allocate memory" in str(error)
        return False
    """
    environment = {**os.environ, **limit.ENVIRONMENT, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(script)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@HERE
@pytest.mark.slow
def test_blocks_pass_and_are_refused_at_the_limit():
    seen = alone("""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pieces = [torch.empty(100_000, dtype=torch.uint8) for _ in range(2000)]  # 190 MiB in the heap ...
    keep = pieces[::2]
    del pieces  # ... of which half is free, in holes
    with limit.held(60 * MIB):
        several = [block(10) for _ in range(5)]
        del several
        again = [block(10) for _ in range(5)]
        del again
    after_refusal = [refused(30, 20) for _ in range(3)]

    def many(allowed):
        try:
            with limit.held(allowed * MIB):
                return len([torch.empty(100_000, dtype=torch.uint8) for _ in range(500)])
        except RuntimeError:
            return "refused"

    print(json.dumps({
        "fits": refused(19, 20), "over": refused(21, 20), "after": after_refusal, "small_fit": many(53),
        "small_over": many(30), "small_after": many(53),
        "back": resource.getrlimit(resource.RLIMIT_AS) == before, "free": block(300).numel(),
    }))
    """)
    assert seen == {
        "fits": False, "over": True, "after": [True, True, True], "small_fit": 500, "small_over": "refused",
        "small_after": 500, "back": True, "free": 300 * MIB,
    }  # fmt: skip


@HERE
@pytest.mark.slow
def test_a_limit_is_put_back_whatever_the_block_raises_and_a_tighter_one_outside_stays():
    seen = alone("""
    before = resource.getrlimit(resource.RLIMIT_AS)
    for error in (ValueError, KeyboardInterrupt, MemoryError):
        try:
            with limit.held(20 * MIB):
                raise error
        except error:
            pass
    put_back = resource.getrlimit(resource.RLIMIT_AS) == before
    outer = limit._address_space() + 50 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (outer, before[1]))
    with limit.held(200 * MIB):
        inside = resource.getrlimit(resource.RLIMIT_AS)[0]
    print(json.dumps({"back": put_back, "inside": inside <= outer,
                      "outer": resource.getrlimit(resource.RLIMIT_AS)[0] == outer}))
    """)
    assert seen == {"back": True, "inside": True, "outer": True}


@HERE
@pytest.mark.slow
def test_what_does_not_hold_to_a_limit_is_no_pass():
    script = """
    def hold():
        try:
            with limit.held(20 * MIB):
                return "passed"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    if HEAPS:
        stop = threading.Event()
        def work():
            kept = bytearray(100); stop.wait()
        import ctypes
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        thread = threading.Thread(target=lambda: (libc.malloc(1000), stop.wait()))
        thread.start()
        import time
        time.sleep(0.5)
        said = hold()
        stop.set()
    else:
        resource.setrlimit = lambda *_: None
        said = hold()
    print(json.dumps({"said": said}))
    """
    unheld = alone(f"HEAPS = False\n{textwrap.dedent(script)}")["said"]
    assert unheld.startswith("EvaluationError: memory limit: the system gave")
    heaps = alone(f"HEAPS = True\n{textwrap.dedent(script)}", MALLOC_ARENA_MAX="8")["said"]
    assert "start it with MALLOC_ARENA_MAX=1" in heaps


@HERE
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("DecodePlan()", marks=pytest.mark.campaign, id="plain"),
        pytest.param("DecodePlan(tiling=Tiling(16, 0.25))", marks=pytest.mark.slow, id="tiled"),
    ],
)
def test_a_decode_passes_above_its_peak_and_is_refused_below(plan):
    seen = alone(
        """
    from fidelity import predict, registry
    from fidelity.records import DecodePlan, Tiling
    from fidelity.runner import Runner
    registry.load_plugins(())
    model = registry.MODELS.get("reference-kl")
    runner = Runner(model)
    latents = registry.LATENTS.get("ramp").make(model, runner.module).tensor
    found = {}
    for plan in [PLAN]:
        shapes = predict.of_shape(model, tuple(latents.shape), plan, "cpu")
        # of kernels whose code nobody has written yet
        first = runner.decode(latents, plan, memory_limit=shapes.allocated_peak_bytes - shapes.weights_bytes + 6 * MIB)
        plain = runner.decode(latents, plan)
        assert torch.equal(first.sample, plain.sample)
        peak = plain.memory.allocated_peak_bytes
        outcomes = []
        for share in (0.5, 1.3, 0.5, 1.3):
            try:
                held = runner.decode(latents, plan, memory_limit=int(share * peak) + (4 * MIB if share > 1 else 0))
                same = torch.equal(held.sample, plain.sample)
                outcomes.append([same, held.memory.allocated_peak_bytes == peak, held.receipts["state"]["restored"]])
            except RuntimeError as error:
                outcomes.append("allocate memory" in str(error))
        try:
            runner.decode(latents, plan, trace=False, memory_limit=peak // 2)
            outcomes.append("the judged decode is not held to it")
        except RuntimeError as error:
            outcomes.append("allocate memory" in str(error))
        found[plan.id] = outcomes
    print(json.dumps(found))
    """.replace("PLAN]", f"{plan}]")
    )
    passed = [True, True, True]
    assert list(seen.values()) == [[True, passed, True, passed, True]]


# ---------------------------------------------------------------- where it cannot be held to


@pytest.mark.parametrize(
    ("platform", "device", "allowed", "said"),
    [
        ("linux", "cpu", 24 * MIB, None),
        ("linux", "cpu", 2**60, "it is no limit: this machine has"),
        ("darwin", "cpu", 24 * MIB, "which darwin does not hold a process to: run it on Linux"),
        ("win32", "cpu", 24 * MIB, "which win32 does not hold a process to: run it on Linux"),
        ("linux", "mps", 24 * MIB, "holds on cpu and cuda, not on mps"),
    ],
)
def test_a_limit_that_cannot_hold_says_why(monkeypatch, platform, device, allowed, said):
    monkeypatch.setattr(limit.sys, "platform", platform)
    found = limit.refusal(allowed, device)
    assert found is None if said is None else said in found


def test_without_a_limit_the_decode_itself_runs():
    assert limit.around(len, None, "cpu") is len


# ---------------------------------------------------------------- CUDA


def test_the_share_of_a_device():
    assert fraction.share(2 * 2**30, 6 * 2**30, 16 * 2**30) == 0.5
    assert fraction.share(12 * 2**30, 6 * 2**30, 16 * 2**30) == 1.0


def test_a_limit_larger_than_the_device_is_refused(monkeypatch):
    monkeypatch.setattr(fraction, "available", lambda: True)
    monkeypatch.setattr(fraction, "total_bytes", lambda _: 8 * 2**30)
    assert limit.refusal(6 * 2**30, "cuda:0") is None
    assert "cuda:0 has 8589934592 bytes in all" in limit.refusal(8 * 2**30, "cuda:0")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_refuses_beyond_the_limit_and_is_whole_after():
    kept = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError), fraction.held(64 * MIB, "cuda"):
        torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    with fraction.held(64 * MIB, "cuda"):
        torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.empty(256 * MIB, dtype=torch.uint8, device="cuda").numel() == 256 * MIB
    assert kept.numel() == 16 * MIB
