"""CUDA's side of a trace: the events of the caching allocator, read from a recording made by hand, and on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fidelity.memory import cuda, trace
from fidelity.memory.events import Recording
from fidelity.memory.running import Running
from fidelity.memory.traced import Traced
from fidelity.optimizations import apply_plan
from fidelity.records import DecodePlan, Tiling
from fidelity.residency import Move
from tests.optimizations.small import MODEL, build, latents

MIB = 2**20
WEIGHTS = 1000
ELSEWHERE = 5000
"""What others hold on the device."""


class Tree:
    """The profiler's events, as it hands them out: `name`, `children` and what an allocation says of itself."""

    def __init__(self):
        self.total = ELSEWHERE + WEIGHTS

    def node(self, name, *children):
        return SimpleNamespace(name=name, children=list(children))

    def change(self, pointer, size, device="cuda"):
        self.total += size if device == "cuda" else 0
        about = SimpleNamespace(
            ptr=pointer, alloc_size=size, total_allocated=self.total, device=torch.device(device), id=None
        )
        return SimpleNamespace(name="[memory]", children=[], extra_fields=about)


def recorded():
    """Weights of 1,000 bytes are there; 600 of them leave, 400 come back through 100 of staging; tiles of 512."""
    tree = Tree()
    return [
        tree.node(
            "fidelity:decode",
            tree.node("fidelity:offload", tree.change(7, -600)),
            tree.node(
                "fidelity:tile",
                tree.node("fidelity:module:decoder", tree.change(1, 99, "cpu"),
                          tree.node("aten::conv2d", tree.change(1, 512), tree.change(2, 2048), tree.change(2, -2048))),
            ),
            tree.node("fidelity:onload", tree.change(3, 400), tree.change(4, 100), tree.change(4, -100)),
            tree.node("fidelity:tile", tree.node("aten::conv2d", tree.change(5, 512))),
            tree.node("aten::cat", tree.change(6, 1024)),
            tree.change(1, -512),
        )
    ]  # fmt: skip


@pytest.fixture
def traced(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    recording = Recording(device="cuda")
    recording.fill(recorded())
    seen = Running(given=[()], gave=[()], moves=[Move("out", 600, 1000, 400), Move("in", 400, 400, 800)])
    return Traced(recording, seen, [WEIGHTS])


def test_weights_that_leave_a_device_are_no_longer_held(traced):
    memory = traced.memory()
    assert memory.reason is None
    # 1000 − 600 + 512 + 2048, against 1000 at the start and 400 + 400 + 2 · 512 + 1024 at the end
    assert memory.allocated_peak_bytes == 2960
    assert memory.peak.by_kind == {"activations": 512, "weights": 400, "workspace": 2048}
    assert memory.peak.stage == "tile"
    assert memory.peak.module == "decoder"
    assert memory.peak.operator == "conv2d"
    assert memory.timeline[:3] == (400, 912, 2960)  # what the CPU's allocator did meanwhile is not the device's
    assert [sum(share) for share in zip(*memory.layers.values())] == list(memory.timeline)
    assert memory.layers["weights"][-1] == 800
    assert max(memory.layers["staging"]) == 100
    assert memory.transfers.resident[0] == 1000
    assert memory.transfers.resident[-1] == 800


def meter(peak):
    return cuda.Meter("cuda", allocated={"tile": [peak, 1924], "assemble": [2936], "onload": [1412]}, reserved=4096)


def test_events_and_counters_that_agree_are_one_trace(traced):
    memory = cuda.joined(meter(2960), traced, WEIGHTS)
    assert memory.reason is None
    assert memory.allocated_peak_bytes == 2960
    assert memory.reserved_peak_bytes == 4096
    assert memory.method == cuda.METHOD
    assert memory.peak.bytes == 2960


def test_events_and_counters_that_disagree_leave_the_counters_and_a_reason(traced):
    memory = cuda.joined(meter(3000), traced, WEIGHTS)
    assert memory.allocated_peak_bytes == 3000
    assert memory.peak is None
    assert memory.layers == {}
    assert "2960 bytes, the counters' 3000" in memory.reason
    stages = {stage.name: (stage.peak_bytes, stage.calls, stage.each) for stage in memory.stages}
    assert stages == {
        "decode": (3000, 1, ()), "onload": (1412, 1, ()), "tile": (3000, 2, (3000, 1924)), "assemble": (2936, 1, ()),
    }  # fmt: skip


# ---------------------------------------------------------------- on a GPU


def offloaded(mode):
    return DecodePlan(offload=mode)


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_a_gpu
def test_events_and_counters_agree_on_known_blocks():
    def blocks():
        first = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        second = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        del first
        return second

    _, memory = trace(blocks, module=torch.nn.Module(), device="cuda")
    assert memory.reason is None
    assert memory.peak.by_kind == {"activations": 64 * MIB, "output": 32 * MIB}


@needs_a_gpu
@torch.no_grad()
@pytest.mark.parametrize("plan", [
    DecodePlan(), DecodePlan(tiling=Tiling(8, 0.25)), *map(offloaded, ("sequential", "group_leaf")),
], ids=lambda plan: plan.id)  # fmt: skip
def test_events_and_counters_agree_on_a_decode(plan):
    module, z = build().to("cuda"), latents(1, 16, 16).to("cuda")
    with apply_plan(module, plan, model=MODEL, device="cuda"):
        MODEL.family.decode(module, z)
        _, memory = trace(lambda: MODEL.family.decode(module, z), module=module, decoder=module.decoder, device="cuda")
    assert memory.reason is None
    assert sum(memory.peak.by_kind.values()) == memory.allocated_peak_bytes
    if plan.offload != "none":
        assert memory.transfers.bytes_in > 0
        assert max(memory.transfers.resident) < sum(weight.nbytes for weight in module.parameters())
