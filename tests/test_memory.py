"""Memory: the peak is the largest sum alive at one instant, by stage, and agrees with the kernel's own figure."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from fidelity.memory import allocator, events, resident, trace
from fidelity.optimizations import apply_plan
from fidelity.records import DecodePlan, Tiling
from tests.optimizations.small import MODEL, build, latents

MIB = 2**20
NOTHING = torch.nn.Module()


def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8)


@pytest.fixture(scope="module")
def module():
    return build()


@torch.no_grad()
def traced(module, plan=DecodePlan(), z=None, convert=None):  # noqa: B008 - frozen
    z = latents(2, 32, 32) if z is None else z
    with apply_plan(module, plan, model=MODEL, device="cpu"):
        z = z.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[plan.dtype])
        return trace(
            lambda: MODEL.family.decode(module, z), module=module, decoder=module.decoder, device="cpu", convert=convert
        )


def stage(memory, name):
    (found,) = [one for one in memory.stages if one.name == name]
    return found


# ---------------------------------------------------------------- known patterns


def test_peak_is_the_largest_sum_alive_at_one_instant():
    def three_blocks():
        first = block(10)
        second = block(20)
        del first
        third = block(5)
        return third, second[0].item()

    _, memory = trace(three_blocks, module=NOTHING, device="cpu")
    # 10 + 20 at once; neither the sum of all (35) nor the largest (20)
    assert memory.allocated_peak_bytes == 30 * MIB
    assert memory.weights_bytes == 0
    assert memory.method == allocator.CPU_METHOD
    assert memory.reason is None


def test_what_was_alive_before_counts_neither_nor_does_its_release():
    held = [block(50)]

    def free_then_allocate():
        held.clear()
        return block(10)

    _, memory = trace(free_then_allocate, module=NOTHING, device="cpu")
    assert memory.allocated_peak_bytes == 10 * MIB


def test_weights_count_at_every_instant_and_each_storage_once():
    part = torch.nn.Module()
    part.one = torch.nn.Parameter(block(8).view(torch.float32), requires_grad=False)
    part.tied = part.one
    part.view = torch.nn.Parameter(part.one[:4], requires_grad=False)
    part.register_buffer("buffer", block(4))
    part.elsewhere = torch.nn.Parameter(torch.empty(MIB, device="meta"))
    _, memory = trace(lambda: block(10), module=part, device="cpu")
    assert memory.weights_bytes == 12 * MIB
    assert memory.allocated_peak_bytes == 22 * MIB


def test_conversion_is_a_stage_of_its_own_beside_the_result():
    _, memory = trace(lambda: block(10), module=NOTHING, device="cpu", convert=lambda result: block(30) is result)
    assert [(one.name, one.peak_bytes // MIB) for one in memory.stages] == [("decode", 10), ("convert", 40)]
    assert memory.allocated_peak_bytes == 40 * MIB  # a bottleneck after the decode is not hidden


def test_the_timeline_keeps_the_peak_and_the_order_of_events():
    def two_blocks():
        first = block(10)
        second = block(20)
        del first, second
        for _ in range(200):
            block(1)
        return None

    _, memory = trace(two_blocks, module=NOTHING, device="cpu")
    line = [held // MIB for held in memory.timeline]
    assert max(memory.timeline) == memory.allocated_peak_bytes == 30 * MIB
    assert len(line) == 128
    assert line.index(30) < 2
    assert set(line[5:]) == {1}
    _, short = trace(lambda: block(3), module=NOTHING, device="cpu")
    assert [held // MIB for held in short.timeline] == [3, 0] or [held // MIB for held in short.timeline] == [3]


def test_tiles_and_assembly_are_told_apart():
    class Decoder(torch.nn.Module):
        def forward(self, mib):
            scratch = block(20)
            return scratch[: mib * MIB].clone()

    decoder = Decoder()

    def tiled():
        tiles = [decoder(4) for _ in range(3)]
        return torch.cat(tiles), torch.cat(tiles)

    _, memory = trace(tiled, module=NOTHING, decoder=decoder, device="cpu")
    peaks = {one.name: (one.peak_bytes // MIB, one.calls) for one in memory.stages}
    # third call: two tiles of 4 kept, 20 + 4 inside; assembly: three tiles and two outputs of 12
    assert peaks == {"decode": (36, 1), "tile": (32, 3), "assemble": (36, 1)}
    assert not decoder._forward_hooks
    assert not decoder._forward_pre_hooks


def test_what_the_decode_raises_passes_through_and_nothing_is_left(module):
    def fail():
        module.decoder(torch.zeros(1, 3, 8, 8))

    with pytest.raises(RuntimeError) as raised:
        trace(fail, module=module, device="cpu")
    lived = allocator.interrupted(raised.value)
    assert (lived.stage, lived.module, lived.operator) == ("tile", "decoder.conv_in", "")
    assert lived.alive_bytes == lived.trace.weights_bytes + 3 * 8 * 8 * 4
    assert not module.decoder._forward_hooks
    assert gc.isenabled()
    _, memory = trace(lambda: block(1), module=NOTHING, device="cpu")  # the profiler is free again
    assert memory.allocated_peak_bytes == MIB


def test_an_allocation_that_is_refused_is_told_with_what_lived_then():
    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.big = torch.nn.Identity()
            self.big.forward = lambda kept: torch.cat([kept, kept[:1].expand(2**60)])

        def forward(self, kept):
            return self.big(kept)

    decoder = Decoder()

    def fail():
        kept = block(10)
        done = block(50)
        del done
        with pytest.raises(ZeroDivisionError):
            1 / 0  # what is caught is no matter  # noqa: B018
        decoder(kept)

    with pytest.raises(RuntimeError, match="allocate") as raised:
        trace(fail, module=decoder, decoder=decoder, device="cpu")
    lived = allocator.interrupted(raised.value)
    assert (lived.stage, lived.module, lived.operator) == ("tile", "big", "cat")
    assert lived.alive_bytes == 10 * MIB
    assert lived.held[0].bytes == 10 * MIB
    assert lived.held[0].shape == (10 * MIB,)
    assert lived.trace.allocated_peak_bytes == 60 * MIB
    assert lived.reason is None
    assert not decoder.big._forward_hooks
    assert allocator.interrupted(ValueError("of another decode")) is None


def test_garbage_of_before_is_not_collected_into_the_trace():
    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself, cycle.held = cycle, block(64)
    del cycle

    def many_objects():
        keep = [[index] for index in range(100_000)]  # enough to call the collector
        return block(10), len(keep)

    _, memory = trace(many_objects, module=NOTHING, device="cpu")
    assert memory.allocated_peak_bytes == 10 * MIB


def test_the_timeline_counts_what_was_alive_when_a_range_began():
    recording = events.Recording(alive=[5, 9, 2, 4])
    assert recording.peak(0, 4) == 9
    assert recording.peak(2, 4) == 9  # still 9 alive until instant 2
    assert recording.peak(3, 4) == 4
    assert recording.peak(3, 3) == 2
    assert recording.peak(0, 0) == 0


# ---------------------------------------------------------------- a decode


def test_tiles_slices_and_bf16_need_less(module):
    full = traced(module)[1]
    tiled = traced(module, DecodePlan(tiling=Tiling(8, 0.25)))[1]
    sliced = traced(module, DecodePlan(slicing=True))[1]
    bf16 = traced(module, DecodePlan(dtype="bf16"))[1]
    assert tiled.allocated_peak_bytes < 0.5 * full.allocated_peak_bytes
    assert sliced.allocated_peak_bytes < 0.8 * full.allocated_peak_bytes
    assert bf16.allocated_peak_bytes < 0.7 * full.allocated_peak_bytes
    assert bf16.weights_bytes * 2 == full.weights_bytes == sum(weight.numel() * 4 for weight in module.parameters())
    assert stage(tiled, "tile").calls == 36
    assert stage(full, "tile").calls == 1
    assert "assemble" not in [one.name for one in full.stages]


def test_the_same_decode_has_the_same_peak_to_the_byte(module):
    traced(module)
    first, *others = (traced(module, DecodePlan(tiling=Tiling(8, 0.25)))[1] for _ in range(3))
    assert others == [first, first]


def test_tracing_changes_no_bit(module):
    with torch.no_grad():
        assert torch.equal(traced(module)[0], module.decode(latents(2, 32, 32)).sample)


def test_tiles_kept_alive_until_the_end_show(module):
    """A decoder whose intermediate results are kept gives the right picture and saves nothing."""
    kept = []
    handle = module.decoder.up_blocks[0].register_forward_hook(lambda *call: kept.append(call[-1]))
    try:
        hoarding = traced(module, DecodePlan(tiling=Tiling(8, 0.25)))[1]
    finally:
        handle.remove()
    honest = traced(module, DecodePlan(tiling=Tiling(8, 0.25)))[1]
    held, needed = (memory.allocated_peak_bytes - memory.weights_bytes for memory in (hoarding, honest))
    assert held > 4 * needed


@pytest.mark.parametrize(("mode", "resident_share"), [
    ("model", 1.0), ("sequential", 1.0), ("group_leaf", 1.0), ("group_block", 1.0), ("disk", 0.0),
])  # fmt: skip
def test_offloaded_weights_count_where_they_are(module, mode, resident_share):
    weights = sum(weight.numel() * 4 for weight in module.parameters())
    memory = traced(module, DecodePlan(offload=mode))[1]
    assert memory.weights_bytes == resident_share * weights
    activations = traced(module)[1].allocated_peak_bytes - weights
    assert memory.allocated_peak_bytes - memory.weights_bytes == pytest.approx(activations, rel=0.05)


def test_emulated_fp16_has_no_figure_and_says_why(module):
    sample, memory = traced(module, DecodePlan(dtype="fp16"))
    assert sample.dtype is torch.float16
    assert memory.allocated_peak_bytes is None
    assert memory.stages == ()
    assert "fp32" in memory.reason


# ---------------------------------------------------------------- the console


@pytest.mark.slow
def test_the_profilers_lines_stay_off_the_console_and_others_pass():
    code = """
        import os, torch
        from fidelity.memory import profiler, trace
        trace(lambda: torch.empty(4), module=torch.nn.Module(), device="cpu")
        with profiler._quiet():
            os.write(2, b"ERROR:2026-01-01 00:00:00 1:1 DeviceProperties.cpp:56] gpuGetDeviceCount failed\\n")
            os.write(2, b"a line of somebody else\\n")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stderr == "a line of somebody else\n"


@pytest.mark.slow
def test_tracing_without_a_console_works():
    code = """
        import os, torch
        from fidelity.memory import trace
        os.close(2)
        _, memory = trace(lambda: torch.empty(4), module=torch.nn.Module(), device="cpu")
        assert memory.allocated_peak_bytes == 16, memory
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, stderr=subprocess.DEVNULL)


# ---------------------------------------------------------------- resident


@pytest.mark.skipif(not resident._CLEAR.exists(), reason="no /proc")
def test_resident_rise_of_a_known_block():
    with resident.resident_peak() as rise:
        torch.ones(64 * MIB, dtype=torch.uint8)
    assert rise.reason is None
    assert rise.rise_bytes == pytest.approx(64 * MIB, rel=0.1)


@pytest.mark.parametrize("failure", [PermissionError("not yours"), FileNotFoundError("no such file")])
def test_no_proc_is_a_reason_and_no_number(monkeypatch, failure):
    class Closed:
        def write_text(self, _):
            raise failure

    monkeypatch.setattr(resident, "_CLEAR", Closed())
    with resident.resident_peak() as rise:
        pass
    assert rise.rise_bytes is None
    assert type(failure).__name__ in rise.reason


def test_a_kernel_without_the_figure_is_a_reason(monkeypatch, tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\n")
    monkeypatch.setattr(resident, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(resident, "_CLEAR", tmp_path / "clear_refs")
    with resident.resident_peak() as rise:
        pass
    assert rise.rise_bytes is None
    assert "VmRSS" in rise.reason


def test_resident_memory_of_another_device_is_not_measured():
    with resident.resident_peak("cuda:0") as rise:
        pass
    assert rise.rise_bytes is None
    assert "cuda:0" in rise.reason


@pytest.mark.slow
@pytest.mark.skipif(not resident._CLEAR.exists(), reason="no /proc")
def test_the_events_agree_with_the_kernel():
    """384² of the reference model, a process of its own, in which the C library keeps nothing of what is freed."""
    code = """
        import torch
        from fidelity import registry
        from fidelity.memory import resident_peak, trace
        registry.load_plugins()
        torch.set_num_threads(1)
        model = registry.MODELS.get("reference-kl")
        module = model.load()
        z = torch.randn(1, 4, 48, 48, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            module.decode(z)
            with resident_peak() as rise:
                module.decode(z)
            memory = trace(lambda: module.decode(z).sample, module=module, device="cpu")[1]
        print(memory.allocated_peak_bytes - memory.weights_bytes, rise.rise_bytes)
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True,
                          env=environment)  # fmt: skip
    allocated, risen = map(int, done.stdout.split())
    assert risen == pytest.approx(allocated, rel=0.1)


# ---------------------------------------------------------------- CUDA


class FakeCuda:
    """torch.cuda's counters, moved by hand."""

    def __init__(self):
        self.now, self.peak, self.cached = 100, 100, 130

    def use(self, most, then):
        self.peak = max(self.peak, self.now + most)
        self.cached = max(self.cached, self.peak + 30)
        self.now += then

    def reset_peak_memory_stats(self, device):
        self.peak = self.now

    def max_memory_allocated(self, device):
        return self.peak

    def memory_allocated(self, device):
        return self.now

    def max_memory_reserved(self, device):
        return self.cached

    def synchronize(self, device=None):
        pass

    def empty_cache(self):
        self.cached = self.now + 30


def test_cuda_stages_from_counters_reset_at_each_border(monkeypatch):
    """100 bytes on the device at the start, 60 of them the module's: the arithmetic, without a GPU."""
    fake = FakeCuda()
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated", "max_memory_reserved",
                 "synchronize", "empty_cache"):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(allocator, "weights_sizes", lambda module, device: [60])

    class Decoder(torch.nn.Module):
        def forward(self):
            fake.use(most=50, then=10)

    decoder = Decoder()

    def tiled():
        decoder()
        decoder()
        fake.use(most=45, then=20)

    _, memory = trace(tiled, module=NOTHING, decoder=decoder, device="cuda", convert=lambda _: fake.use(15, 0))
    assert {one.name: (one.peak_bytes, one.calls) for one in memory.stages} == {
        "decode": (125, 1),  # 60 + 20 of two tiles + 45
        "tile": (120, 2),  # 60 + 10 + 50
        "assemble": (125, 1),
        "convert": (115, 1),
    }
    assert memory.allocated_peak_bytes == 125
    assert memory.weights_bytes == 60
    assert memory.reserved_peak_bytes == 195  # 165 allocated at most, 30 more in the cache


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_peak_of_known_blocks():
    def blocks():
        first = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        second = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        del first
        return second

    _, memory = trace(blocks, module=NOTHING, device="cuda")
    assert memory.allocated_peak_bytes == 96 * MIB
    assert memory.reserved_peak_bytes >= 96 * MIB
