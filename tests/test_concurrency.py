"""Decodes at once: what all threads allocate together, whether they spoil one another, and the rule to admit them."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fidelity import admission, capacity, registry
from fidelity.cli import main
from fidelity.concurrency import record, serving, together
from fidelity.errors import RequestError
from fidelity.memory import allocator, threads
from fidelity.memory.threads import Changes
from fidelity.predict import of_shape
from fidelity.records import DecodePlan, Tiling, from_json, to_json

registry.load_plugins()
KL, TINY = registry.MODELS.get("reference-kl"), registry.MODELS.get("small-tiny")
MB = 10**6


@pytest.fixture(autouse=True)
def _one_thread():
    before, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(deterministic)


def small(model=KL, side=16):
    frames = (2,) if model.geometry.video else ()
    return together.seeded(model, (1, model.geometry.latent_channels, *frames, side, side))


def status(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["concurrency", *words])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


# ---------------------------------------------------------------- recording by thread


def allocated(together: bool) -> list[Changes]:
    """Two threads that hold 10 and 20 MB: at the same time, or one after the other."""
    turns, recordings = threading.Barrier(2, timeout=20), [Changes(), Changes()]
    first_is_done = threading.Event()

    def run(index: int) -> None:
        with threads.record() as changes:
            if index and not together:
                first_is_done.wait(20)
            held = torch.empty((index + 1) * 10 * MB, dtype=torch.uint8)
            if together:
                turns.wait()  # both have allocated
            del held
            first_is_done.set()
        recordings[index] = changes

    workers = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return recordings


def test_what_two_threads_hold_at_one_instant_is_added():
    recordings = allocated(together=True)
    assert [threads.peak([one]) for one in recordings] == [10 * MB, 20 * MB]
    assert threads.peak(recordings) == 30 * MB


def test_what_two_threads_hold_one_after_the_other_is_not():
    assert threads.peak(allocated(together=False)) == 20 * MB


def test_a_thread_s_recording_has_nothing_of_another():
    with threads.record() as mine:
        worker = threading.Thread(target=lambda: torch.empty(MB, dtype=torch.uint8))
        worker.start()
        worker.join()
    assert mine.events == []


def test_peaks_before_and_after_a_mark():
    with threads.record() as changes:
        first = torch.empty(5 * MB, dtype=torch.uint8)
        second = torch.empty(7 * MB, dtype=torch.uint8)
        del first
        with torch.autograd.profiler.record_function("fidelity:convert"):
            third = torch.empty(3 * MB, dtype=torch.uint8)
        del second, third
    assert threads.peaks_around(changes, "fidelity:convert") == (12 * MB, 10 * MB)
    with pytest.raises(KeyError):
        threads.peaks_around(changes, "fidelity:other")
    late = Changes([(1, 5), (2, 7), (9, -12)], marks={"m": 3})
    assert threads.peaks_around(late, "m") == (12, 12)  # what lives at the mark counts on both sides
    assert threads.peaks_around(Changes([(1, 5), (4, 7)], marks={"m": 3}), "m") == (5, 12)


def test_a_torch_without_it_gives_a_reason_and_no_figure(monkeypatch):
    monkeypatch.delattr(torch._C._autograd, "_enable_profiler_legacy")
    with threads.record() as changes:
        torch.empty(MB)
    assert (changes.events, changes.reason) == ([], threads.ABSENT)
    found = together.measure(TINY, small(TINY), count=2, rounds=1)
    assert found.rule is found.alone_peak_bytes is found.unneeded_bytes is None
    assert found.peaks == ()
    assert found.reason == threads.ABSENT
    assert f"memory          not measured: {threads.ABSENT}" in record.lines(found)


def test_one_thread_recorded_has_the_peak_of_the_trace():
    module, latents = KL.load(), small()
    with torch.no_grad():
        _, trace = allocator.trace(lambda: KL.family.decode(module, latents), module=module, device="cpu")
    served = serving.request(module, KL, latents, recorded=True)
    assert threads.peaks_around(served.changes, serving.CONVERT)[0] == trace.allocated_peak_bytes - trace.weights_bytes
    assert sum(change for _, change in served.changes.events) == 0  # nothing of a request is left


# ---------------------------------------------------------------- the rule


def test_the_rule_is_a_sum_of_bounds():
    found = admission.rule(count=3, weights=100, decode_peak=40, convert_peak=45, resident=1000)
    assert (found.decode_bytes, found.conversion_bytes, found.reserve_bytes) == (40, 5, 100 + 3 * 45 + 1000)
    assert admission.rule(count=3, weights=100, decode_peak=40, convert_peak=30).reserve_bytes == 100 + 3 * 40
    assert admission.rule(count=3, weights=100, decode_peak=40, copies=3).reserve_bytes == 3 * 140


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=6), min_size=1, max_size=4), st.randoms())
def test_whatever_the_timing_no_sum_is_above_the_rule(sizes, random):
    recordings = []
    for each in sizes:
        held = [(random.random(), random.random(), size) for size in each]
        events = [event for a, b, size in held for event in ((min(a, b), size), (max(a, b) + 1e-9, -size))]
        recordings.append(Changes(sorted(events)))
    one = max(threads.peak([recording]) for recording in recordings)
    rule = admission.rule(count=len(sizes), weights=7, decode_peak=one)
    assert max(sum(each) for each in sizes) <= 7 + sum(map(sum, sizes))
    assert 7 + threads.peak(recordings) <= rule.reserve_bytes


# ---------------------------------------------------------------- measured


@pytest.mark.slow
@pytest.mark.parametrize("plan", [DecodePlan(), DecodePlan(tiling=Tiling(8, 0.25))], ids=["plain", "tiled"])
def test_measured_together_stays_within_the_rule_and_prediction_within_five_percent(plan):
    found = together.measure(KL, small(), plan, count=3, rounds=2)
    assert found.findings == ()
    assert len(found.peaks) == len(found.seconds_together) == 2
    assert max(found.peaks) <= found.rule.reserve_bytes
    assert found.unneeded_bytes == found.rule.reserve_bytes - max(found.peaks)
    assert max(found.peaks) > found.alone_peak_bytes  # more than one of them was seen
    assert all(1 / 3 < share <= 1 for share in found.coincided)
    predicted = of_shape(KL, tuple(small().shape), plan, "cpu").allocated_peak_bytes
    assert predicted == pytest.approx(found.alone_peak_bytes, rel=0.05)
    assert from_json(to_json(found), record.Concurrency) == found
    assert any("each decode gives those that it gives alone" in line for line in record.lines(found))


def test_a_stand_in_is_allocated_and_counted():
    plain = together.measure(TINY, small(TINY), count=2, rounds=1)
    beside = together.measure(TINY, small(TINY), count=2, rounds=1, resident=30 * MB)
    assert beside.rule.resident_bytes == 30 * MB
    assert beside.rule.reserve_bytes - plain.rule.reserve_bytes == 30 * MB
    assert 30 * MB < min(beside.peaks) <= max(beside.peaks) <= beside.rule.reserve_bytes
    assert beside.available_bytes > beside.rule.reserve_bytes


@pytest.mark.slow
def test_a_class_that_keeps_state_on_the_instance_is_found_out(capsys):
    code, out, _ = status(capsys, "small-wan", "-n", "3", "--rounds", "3", "--size", "64x64", "--frames", "5")
    assert code == 1
    assert "decodes at once" in out
    assert "finding         AutoencoderKLWan cannot share one instance between threads: each decode writes" in out
    assert "_feat_map" in out


def test_state_that_is_shared_is_found_out_whatever_the_timing():
    """A decode that keeps its latents on the module while another comes in gives that other's."""
    turns = threading.Barrier(2, timeout=20)

    def racy(module, latents):
        module.kept = latents
        turns.wait()
        return module.kept[:, :3]

    model = SimpleNamespace(family=SimpleNamespace(decode=racy), data_range=(-1.0, 1.0))
    module, latents = torch.nn.Module(), [small(), small() + 1]
    served = serving.in_threads(lambda one: serving.request(module, model, one), latents)
    expected = [one[:, :3].contiguous().view(torch.uint8).numpy() for one in latents]
    off = [serving.difference(one.bits, right, "float32") for one, right in zip(served, expected)]
    assert sorted(off, key=lambda each: each or 0) == [None, pytest.approx(1.0)]


def test_the_conversion_is_part_of_a_request():
    model = SimpleNamespace(family=SimpleNamespace(decode=lambda _, latents: latents[:, :3]), data_range=(-1.0, 1.0))
    latents = torch.zeros(1, 4, 64, 64)
    served = serving.request(torch.nn.Module(), model, latents, recorded=True)
    decode, convert = threads.peaks_around(served.changes, serving.CONVERT)
    assert decode == 0  # a view
    assert convert >= 3 * 64 * 64 * (4 + 1)  # floats, and the bytes made of them
    assert admission.rule(count=2, weights=0, decode_peak=decode, convert_peak=convert).reserve_bytes == 2 * convert


def test_what_a_decode_raises_is_kept_in_one_line():
    def fails(module, latents):
        raise ValueError("two\nlines")

    model = SimpleNamespace(family=SimpleNamespace(decode=fails), data_range=(-1.0, 1.0))
    served = serving.request(torch.nn.Module(), model, small(), recorded=True)
    assert (served.bits, served.error) == (None, "ValueError: two")


@pytest.mark.parametrize(
    ("bits", "expected", "off"),
    [([1.0, 2.0], [1.0, 2.0], None), ([1.0, 2.0], [1.0, 2.5], 0.5), ([1.0, float("nan")], [1.0, 2.0], float("inf")),
     ([1.0], [1.0, 2.0], float("inf")), ([0.0, 1.0], [-0.0, 1.0], 0.0)],
)  # fmt: skip
def test_samples_are_compared_bit_for_bit(bits, expected, off):
    mine, theirs = (torch.tensor(each).view(torch.uint8).numpy() for each in (bits, expected))
    assert serving.difference(mine, theirs, "float32") == off


@pytest.mark.slow
def test_processes_have_their_weights_each(capsys):
    code, out, _ = status(capsys, "small-tiny", "-n", "2", "--rounds", "1", "--processes", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["way"] == "processes"
    rule = found["rule"]
    assert rule["copies"] == 2
    assert 2 * rule["weights_bytes"] < found["peaks"][0] <= rule["reserve_bytes"]
    assert found["findings"] == []


def test_more_decodes_than_the_machine_holds_are_not_let_in(monkeypatch):
    monkeypatch.setattr(together, "available_bytes", lambda device: 50 * MB)
    said = r"4 decodes at once may take .* MiB and cpu has 47.7 MiB left: 3 fit"
    monkeypatch.setattr(together, "Bench", None)  # refused by a prediction, before anything is decoded
    with pytest.raises(RequestError, match=said):
        together.measure(KL, small(), count=4)
    monkeypatch.undo()
    monkeypatch.setattr(together, "available_bytes", lambda device: 50 * MB)
    monkeypatch.setattr(capacity, "expected", lambda *_, **__: None)  # what cannot be predicted is measured alone
    with pytest.raises(RequestError, match=said):
        together.measure(KL, small(), count=4)


def test_what_is_expected_is_what_the_rule_reserves():
    for copies in (1, 2):
        found = capacity.expected(KL, tuple(small().shape), DecodePlan(), "cpu", count=2, resident=7, copies=copies)
        one = of_shape(KL, tuple(small().shape), DecodePlan(), "cpu")
        each = one.allocated_peak_bytes - one.weights_bytes
        assert found.reserve_bytes == copies * one.weights_bytes + 2 * each + 7
    capacity.refuse_beyond(found, found.reserve_bytes, "cpu")
    with pytest.raises(RequestError, match=r"2 decodes at once may take .*: 1 fit"):
        capacity.refuse_beyond(found, found.reserve_bytes - 1, "cpu")
    assert capacity.expected(SimpleNamespace(), (1, 4, 8, 8), DecodePlan(), "cpu") is None


def test_a_loader_that_cannot_travel_is_refused():
    mine = SimpleNamespace(name="mine", load=lambda: None)
    with pytest.raises(RequestError, match="mine: its loader cannot be handed to another process"):
        serving.check_portable(mine)


# ---------------------------------------------------------------- wrong requests


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("reference-kl", "-n", "0"), "0 decodes at once: at least 1"),
        (("reference-kl", "--rounds", "0"), "0 rounds: at least 1"),
        (("reference-kl", "-n", "33"), "allow 32: choose fewer"),
        (("reference-kl", "--plan", "fp16"), "fp16 is emulated on a CPU"),
        (("reference-kl", "--plan", "slicing"), "a batch of one has nothing to slice: leave it out"),
        (("reference-kl", "--plan", "tile=15,overlap=0.33"), "cannot tile by 15 with overlap 0.33"),
        (("reference-kl", "--resident", "900000GiB"), "left; say less"),
        (("reference-kl", "--resident", "many"), "write a size above 0"),
        (("reference-kl", "--latents", "photo-pair", "--size", "64x64"), "named latents have a size of their own"),
        (("reference-kl", "--frames", "5"), "go with --size HxW"),
        (("reference-kl", "--size", "64"), "write HEIGHTxWIDTH"),
        (("reference-kl", "--size", "65x64"), "multiples of 8 pixels"),
        (("sdxl",), "sdxl is a configuration without weights, which can be predicted and not decoded: give sdxl=PATH"),
        (("refrence-kl",), "did you mean 'reference-kl'?"),
        (("reference-kl", "--device", "tpu"), "known are cpu, cuda"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_wrong_request_is_one_line(capsys, words, said):
    code, out, err = status(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


# ---------------------------------------------------------------- on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_each_thread_has_a_stream_and_the_counters_see_all():
    found = together.measure(KL, small(), count=3, rounds=2, device="cuda", resident=30 * MB)
    assert found.findings == ()
    assert max(found.peaks) <= found.rule.reserve_bytes
    assert found.reserved_peak_bytes >= max(found.peaks)
    assert max(found.peaks) > found.alone_peak_bytes + 30 * MB
