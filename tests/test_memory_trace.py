"""What a trace says beside the peak: who made what, for what, when; and that the peak is counted in two ways."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fidelity.memory import allocator, events, interruption, sums, trace
from fidelity.memory.kinds import classify
from fidelity.memory.running import Given, Running
from fidelity.memory.traced import Traced
from fidelity.optimizations import apply_plan
from fidelity.records import MEMORY_KINDS, DecodePlan, Tiling
from tests.optimizations.small import MODEL, build, latents

MIB = 2**20
NOTHING = torch.nn.Module()


def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8)


# ---------------------------------------------------------------- one sum, counted in two ways


@st.composite
def lives(draw):
    """Allocations as an allocator hands them out: each event is a birth, or the death of something that lives."""
    living, intervals, totals, total = [], [], [], 0
    for instant in range(draw(st.integers(1, 40))):
        if living and draw(st.booleans()):
            number = living.pop(draw(st.integers(0, len(living) - 1)))
            intervals[number][1] = instant
            total -= intervals[number][2]
        else:
            living.append(len(intervals))
            intervals.append([instant, None, draw(st.integers(1, 1000))])
            total += intervals[-1][2]
        totals.append(total)
    return [tuple(one) for one in intervals], totals


@given(lives())
def test_the_largest_simultaneous_sum_is_that_of_the_worst_instant(made):
    intervals, totals = made
    by_hand = max(
        sum(size for born, gone, size in intervals if born <= instant and (gone is None or instant < gone))
        for instant in range(len(totals))
    )
    assert max(sums.line(intervals, len(totals))) == by_hand == max(totals)
    assert sums.disagreement(sums.line(intervals, len(totals)), totals) is None


@given(lives(), st.data())
def test_a_life_that_is_wrong_by_anything_disagrees_with_the_total(made, data):
    intervals, totals = made
    number = data.draw(st.integers(0, len(intervals) - 1))
    born, gone, size = intervals[number]
    wrong = data.draw(st.sampled_from(["longer", "larger", "absent"]))
    if wrong == "longer" and gone is not None:
        changed = [*intervals[:number], (born, None, size), *intervals[number + 1 :]]
    elif wrong == "absent":
        changed = [*intervals[:number], *intervals[number + 1 :]]
    else:
        changed = [*intervals[:number], (born, gone, size + 1), *intervals[number + 1 :]]
    assert "no figure" in sums.disagreement(sums.line(changed, len(totals)), totals)


def test_the_sum_of_peaks_of_stages_is_no_peak():
    first, second = (0, 1, 50), (2, 3, 50)  # never alive at once
    assert max(sums.line([first, second], 4)) == 50


@pytest.mark.parametrize("then", [5, 64], ids=["place taken again", "place left"])
def test_a_release_that_goes_unseen_leaves_a_reason_and_no_figure(monkeypatch, then):
    whole = events._Book.change

    def deaf(self, event, call):
        if event.alloc_size == -20 * MIB:
            return
        whole(self, event, call)

    def blocks():
        first = block(20)
        del first
        return block(then)

    assert trace(blocks, module=NOTHING, device="cpu")[1].allocated_peak_bytes == max(20, then) * MIB
    monkeypatch.setattr(events._Book, "change", deaf)
    _, memory = trace(blocks, module=NOTHING, device="cpu")
    assert memory.allocated_peak_bytes is None
    assert memory.peak is None
    assert memory.stages == ()
    assert any(words in memory.reason for words in ("running total", "went unseen"))


def test_what_an_earlier_trace_left_alive_is_released_without_harm():
    kept = []
    trace(lambda: kept.append(block(30)), module=NOTHING, device="cpu")

    def release():
        kept.clear()
        return block(10)

    _, memory = trace(release, module=NOTHING, device="cpu")
    assert memory.reason is None
    assert memory.allocated_peak_bytes == 10 * MIB


# ---------------------------------------------------------------- known patterns


class Decoder(torch.nn.Module):
    """A kernel's workspace, an activation that is dropped, and a result."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Identity()
        self.inner.forward = lambda x: x + 1

    def forward(self, mib):
        x = self.inner(block(mib))
        torch.nn.functional.group_norm(x.view(1, 1, -1).float(), 1)
        return x.clone()


def tiled():
    decoder = Decoder()
    holder = torch.nn.Module()
    holder.decoder = decoder

    def decode():
        tiles = [decoder(1) for _ in range(3)]
        return torch.cat(tiles)

    def convert(sample):
        half = sample.float()
        return half[::2].clone()

    return trace(decode, module=holder, decoder=decoder, device="cpu", convert=convert)[1]


def test_each_kind_by_its_rule():
    memory = tiled()
    assert memory.reason is None
    assert {kind for kind, line in memory.layers.items() if any(line)} == {
        "activations", "workspace", "tiles", "output", "copies",
    }  # fmt: skip
    assert max(memory.layers["tiles"]) == 3 * MIB  # all three wait for the cat
    assert max(memory.layers["output"]) == 3 * MIB
    assert max(memory.layers["copies"]) == 12 * MIB + 6 * MIB
    assert memory.peak.stage == "convert"
    assert memory.peak.by_kind == {"copies": 18 * MIB, "output": 3 * MIB}
    assert memory.peak.operator == "clone"
    assert memory.peak.held[0].kind == "copies"
    assert memory.peak.held[-1].shape == (3 * MIB,)
    assert memory.peak.held[-1].what == "cat"


def test_each_tile_has_a_peak_of_its_own():
    (tile,) = [stage for stage in tiled().stages if stage.name == "tile"]
    assert tile.calls == len(tile.each) == 3
    assert tile.peak_bytes == max(tile.each)
    assert [each - tile.each[0] for each in tile.each] == [0, MIB, 2 * MIB]  # with the tiles before it


def repeated(decoder, calls):
    holder = torch.nn.Module()
    holder.decoder = decoder
    return trace(lambda: torch.cat([decoder(1) for _ in range(calls)]), module=holder, decoder=decoder, device="cpu")[1]


class Holding(Decoder):
    """Keeps what it works with: a cache that is full after `most` calls, or a leak."""

    def __init__(self, most):
        super().__init__()
        self.most, self.held = most, []

    def forward(self, mib):
        if len(self.held) < self.most:
            self.held.append(self.inner(block(mib)))
        return super().forward(mib)


def test_calls_that_each_leave_more_behind_are_told():
    honest = repeated(Decoder(), 6)
    assert honest.kept == (0,) * 6
    assert allocator.findings(honest) == ()
    leaking = repeated(Holding(6), 6)
    assert leaking.kept == tuple(MIB * number for number in range(1, 7))
    (said,) = allocator.findings(leaking)
    assert "4.0 MiB more after the last of 6 than after the second" in said
    assert allocator.findings(repeated(Holding(2), 6)) == (), "a cache that is full"
    assert allocator.findings(repeated(Holding(3), 3)) == (), "too few to tell"
    assert repeated(Decoder(), 1).kept == ()


def test_alike_holdings_stand_together():
    def decode():
        return [torch.ones(MIB) for _ in range(5)]

    _, memory = trace(decode, module=NOTHING, device="cpu")
    (held,) = memory.peak.held
    assert (held.count, held.bytes, held.kind, held.what) == (5, 20 * MIB, "output", "ones")
    assert (held.shape, held.dtype) == ((MIB,), "float32")


def test_loading_is_measured_with_what_it_dropped():
    def load():
        twice = block(20)
        return twice[: 10 * MIB].clone()

    built, stage = allocator.load(load, "cpu")
    assert len(built) == 10 * MIB
    assert stage.name == "load"
    assert stage.peak_bytes == 30 * MIB
    assert stage.seconds > 0


def test_a_load_under_somebody_elses_profiler_has_no_figure():
    with torch.autograd.profiler.profile():
        built, stage = allocator.load(lambda: block(1), "cpu")
    assert len(built) == MIB
    assert stage.peak_bytes is None
    assert "profiler" in stage.reason


# ---------------------------------------------------------------- a decode

PLANS = [
    DecodePlan(),
    DecodePlan(tiling=Tiling(8, 0.25)),
    DecodePlan(slicing=True),
    DecodePlan(dtype="bf16"),
    DecodePlan(offload="sequential", tiling=Tiling(8, 0.25)),
    DecodePlan(offload="group_leaf"),
    DecodePlan(offload="disk"),
]


@pytest.fixture(scope="module")
def module():
    return build()


@torch.no_grad()
def decoded(module, plan):
    """The trace of a decode under a plan, and the peak of the profiler's plain memory events in another decode."""
    z = latents(2, 16, 16).to(torch.bfloat16 if plan.dtype == "bf16" else torch.float32)
    with apply_plan(module, plan, model=MODEL, device="cpu"):
        MODEL.family.decode(module, z)
        with torch.autograd.profiler.profile(profile_memory=True) as plain:
            MODEL.family.decode(module, z)
        _, memory = trace(
            lambda: MODEL.family.decode(module, z), module=module, decoder=module.decoder, device="cpu"
        )  # fmt: skip
    changes = [
        (event.start_ns(), event.nbytes()) for event in plain.kineto_results.events() if event.name() == "[memory]"
    ]
    alive = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        alive += change
        peak = max(peak, alive)
    return memory, peak


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.id)
def test_a_trace_changes_no_byte_and_its_parts_are_the_whole(module, plan):
    memory, untouched = decoded(module, plan)
    assert memory.reason is None
    assert memory.allocated_peak_bytes == memory.weights_bytes + untouched
    assert memory.peak.bytes == sum(memory.peak.by_kind.values()) == memory.allocated_peak_bytes == max(memory.timeline)
    assert set(memory.layers) <= set(MEMORY_KINDS)
    assert [sum(share) for share in zip(*memory.layers.values())] == list(memory.timeline)
    assert memory.spans[0].start == 0
    assert memory.spans[-1].stop == len(memory.timeline)
    assert all(before.stop == after.start for before, after in zip(memory.spans, memory.spans[1:]))
    assert memory.peak.module.startswith("decoder")
    assert memory.peak.operator
    assert 0 < len(memory.peak.held) <= 12
    assert [each.bytes for each in memory.peak.held] == sorted((each.bytes for each in memory.peak.held), reverse=True)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_where_a_tiled_decode_peaks(module):
    memory, _ = decoded(module, DecodePlan(tiling=Tiling(8, 0.25)))
    assert memory.peak.stage == "tile"
    assert {span.name for span in memory.spans} >= {"tile"}
    (tile,) = [stage for stage in memory.stages if stage.name == "tile"]
    assert tile.calls == len(tile.each) == 9
    assert memory.peak.by_kind["tiles"] > 0
    tensors = [held for held in memory.peak.held if held.kind == "activations" and held.shape]
    assert tensors
    for held in tensors:
        assert held.dtype == "float32"
        assert held.bytes == held.count * 4 * torch.Size(held.shape).numel()


# ---------------------------------------------------------------- weights that come and go


@torch.no_grad()
def moved(module, mode):
    """The trace under an offload; how often each module with parameters of its own was called; the predicted peak."""
    from fidelity.simulation import schedule
    from fidelity.simulation.ledger import Ledger

    z, calls, ledger = latents(1, 16, 16), {}, Ledger()
    handles = [part.register_forward_pre_hook(lambda part, _: calls.update({part: calls.get(part, 0) + 1}))
               for part in module.modules()]  # fmt: skip
    with schedule.residency(module, mode, "cuda", ledger):
        MODEL.family.decode(module, z)
    for handle in handles:
        handle.remove()
    with apply_plan(module, DecodePlan(offload=mode), model=MODEL, device="cpu"):
        _, memory = trace(
            lambda: MODEL.family.decode(module, z), module=module, decoder=module.decoder, device="cpu"
        )  # fmt: skip
    return memory, calls, ledger.peak


@pytest.mark.parametrize("mode", ["sequential", "disk"])
def test_what_sequential_and_disk_move_is_every_called_modules_own_weights(module, mode):
    memory, calls, predicted = moved(module, mode)
    own = {part: sum(weight.nbytes for weight in part.parameters(recurse=False)) for part in calls}
    expected = sum(own[part] * times for part, times in calls.items())
    moves = memory.transfers
    assert moves.bytes_in == moves.bytes_out == expected > 0
    assert moves.onloads == moves.offloads == sum(times for part, times in calls.items() if own[part])
    assert moves.seconds > 0
    assert len(moves.resident) == len(memory.timeline)
    assert max(own.values()) == max(moves.resident) <= predicted
    if mode == "disk":  # accelerate copies what it reads, so the allocator saw what the hooks counted
        assert max(memory.layers["weights"]) == max(moves.resident)
        assert memory.weights_bytes == 0
    (stage,) = [one for one in memory.stages if one.name == "onload"]
    assert stage.calls == len(stage.each) == moves.onloads
    assert 0 < stage.seconds <= moves.seconds


@pytest.mark.parametrize("mode", ["model", "group_block", "group_leaf"])
def test_in_main_memory_nothing_moves_and_all_weights_stay(module, mode):
    weights = sum(weight.nbytes for weight in module.parameters())
    with torch.no_grad(), apply_plan(module, DecodePlan(offload=mode), model=MODEL, device="cpu"):
        z = latents(1, 16, 16)
        moves = trace(lambda: MODEL.family.decode(module, z), module=module, device="cpu")[1].transfers
    assert moves.bytes_in == moves.bytes_out == 0
    assert moves.onloads > 0
    assert set(moves.resident) == {weights}


def test_without_offload_there_are_no_transfers(module):
    memory, _ = decoded(module, DecodePlan())
    assert memory.transfers is None
    assert "onload" not in {stage.name for stage in memory.stages}


def test_staging_is_what_a_move_needs_and_drops():
    from fidelity.residency import Move, announced

    arrived = []

    def decode():
        with announced(Move("in")) as move:
            staged = block(7)
            arrived.append(staged[: 3 * MIB].clone())
            move.bytes = move.after = 3 * MIB
            del staged
        return block(1)

    _, memory = trace(decode, module=NOTHING, device="cpu")
    assert memory.peak.by_kind == {"staging": 7 * MIB, "weights": 3 * MIB}
    assert memory.peak.stage == "onload"
    assert memory.transfers.bytes_in == 3 * MIB
    assert max(memory.transfers.resident) == 3 * MIB
    assert memory.spans[0].name == "onload"


# ---------------------------------------------------------------- borders of the rules


def test_a_result_that_is_dropped_at_once_is_no_workspace():
    """It outlived the operator that made it, if only until the next event."""

    def decode():
        torch.ones(MIB)

    assert trace(decode, module=NOTHING, device="cpu")[1].peak.by_kind == {"activations": 4 * MIB}


def test_what_lay_where_a_tile_lies_later_is_no_tile():
    whole = events.Call("stage", "decode", 0)
    calls = [events.Call("stage", "tile", start, whole) for start in (0, 3)]
    calls[0].stop, calls[1].stop, whole.stop = 3, 4, 5
    made = [
        events.Allocation(10, 7, 0, calls[0], gone=1),  # its place is taken by the tile
        events.Allocation(10, 7, 2, calls[0]),
        events.Allocation(10, 8, 3, calls[1]),
        events.Allocation(10, 9, 4, whole),
    ]
    recording = events.Recording(allocations=made, calls={"fidelity:tile": calls})
    results = [[Given(7, 10, (10,), "uint8")], [Given(8, 10, (10,), "uint8")]]
    assert classify(recording, results, [Given(9, 10, (10,), "uint8")], 5) == [
        "activations",
        "tiles",
        "tiles",
        "output",
    ]


def test_weights_that_come_and_go_within_a_share_count_in_it():
    from fidelity.residency import Move

    onload, offload = (events.Call("stage", name, instant) for name, instant in (("onload", 1), ("offload", 2)))
    recording = events.Recording(alive=[1, 2, 3, 4], calls={"fidelity:onload": [onload], "fidelity:offload": [offload]})
    moves = [Move("in", 90, 10, 100), Move("out", 90, 100, 10)]
    traced = Traced(recording, Running(moves=moves), [])
    assert traced._moved([(0, 4)]) == (100,)
    assert traced._moved([(0, 1), (1, 2), (2, 3), (3, 4)]) == (10, 100, 100, 10)
    assert traced._moved([(0, 1), (1, 4)]) == (10, 100)


# ---------------------------------------------------------------- a decode that raises


def test_what_an_operator_held_when_it_was_refused_is_told_though_it_unwound():
    whole = events.Call("stage", "decode", 0)
    operator = events.Call("operator", "conv2d", 1, whole)
    whole.stop, operator.stop = 3, 3
    recording = events.Recording(
        allocations=[events.Allocation(10, 7, 0, whole), events.Allocation(20, 8, 1, operator, gone=2)],
        changes=[(0, 10), (1, 20), (1, -20)],
        totals=[10, 30, 10],
        alive=[10, 30, 10],
        calls={"fidelity:decode": [whole]},
        refused=[(2, operator)],
    )
    error = RuntimeError("no room")
    interruption.tell(error, recording, Running(stages=["tile"], modules=["decoder", "decoder.conv"]), [5])
    lived = interruption.interrupted(error)
    assert (lived.alive_bytes, lived.operator, lived.module) == (35, "conv2d", "decoder.conv")
    assert lived.held[0].bytes == 20
    assert lived.trace.allocated_peak_bytes == 35


def test_modules_that_have_returned_or_whose_error_was_caught_are_not_where_it_raised():
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fails, self.works = torch.nn.Conv2d(3, 3, 1), torch.nn.Identity()

        def forward(self, x):
            with pytest.raises(RuntimeError):
                self.fails(x)
            return self.works(x)

    holder = torch.nn.Module()
    holder.decoder = Holder()

    def decode():
        holder.decoder(torch.zeros(1, 4, 2, 2))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        trace(decode, module=holder, device="cpu")
    lived = allocator.interrupted(raised.value)
    assert (lived.stage, lived.module) == ("decode", "")
