"""The fingerprint sees whatever an optimization could leave behind, and names it."""

from __future__ import annotations

import time

import pytest
import torch

from fidelity.optimizations import apply_plan, state
from fidelity.records import DecodePlan, Temporal, Tiling
from fidelity.registry import OPTIMIZATIONS
from tests.optimizations.small import MODEL, build, decode


def left_behind(change, module=None):
    module = module or build()
    before = state.fingerprint(module, MODEL.family)
    change(module)
    return state.leaks(before, state.fingerprint(module, MODEL.family))


def flip_a_bit(module):
    weight = module.decoder.conv_in.weight.data.view(-1).view(torch.int32)
    weight[17] ^= 1


def replace_a_parameter(module):
    old = module.decoder.conv_in.weight
    module.decoder.conv_in.weight = torch.nn.Parameter(old.detach().clone(), requires_grad=False)


def replace_a_module(module):
    module.decoder.conv_in = type(module.decoder.conv_in)(4, 64, 3, padding=1)


def hook_twice(module):
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(module, "cpu")
    cpu_offload_with_hook(module, "cpu")


def group(module):
    module.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")


def half_middle(module):
    module.decoder.mid_block.half()


def to_meta(module):
    module.encoder.conv_in.weight = torch.nn.Parameter(module.encoder.conv_in.weight.to("meta"), requires_grad=False)


INJECTED = {
    "tile size": (lambda m: setattr(m, "tile_latent_min_size", 8), "attribute tile_latent_min_size: 16 → 8"),
    "slicing": (lambda m: m.enable_slicing(), "attribute use_slicing: False → True"),
    "tiling": (lambda m: m.enable_tiling(), "attribute use_tiling: False → True"),
    "one bit": (flip_a_bit, "value decoder.conv_in.weight: "),
    "parameter": (replace_a_parameter, "object decoder.conv_in.weight: replaced by another object"),
    "module": (replace_a_module, "module decoder.conv_in: replaced by another object (Conv2d → Conv2d)"),
    "half": (half_middle, "dtype decoder.mid_block.attentions.0.group_norm.weight and "),
    "whole half": (lambda m: m.half(), "dtype encoder.conv_in.weight and "),
    "meta": (to_meta, "device encoder.conv_in.weight: cpu → meta"),
    "stacked hooks": (hook_twice, "hook _hf_hook: absent → SequentialHook(CpuOffload, CpuOffload)"),
    "group hooks": (group, "hook encoder.conv_in._diffusers_hook and "),
    "torch hook": (
        lambda m: m.decoder.register_forward_hook(lambda *call: None), "hook decoder._forward_hooks: absent → 1 of "),
    "forward": (lambda m: setattr(m.decoder, "forward", m.decoder.forward), "hook decoder.forward: absent → Decoder."),
    "decode": (lambda m: setattr(m, "decode", m.decode), "hook decode: absent → "),
    "cache": (lambda m: setattr(m, "_feat_map", [None, torch.ones(2)]), "attribute _feat_map: absent → list(None, "),
    "training": (lambda m: m.decoder.conv_out.train(), "attribute decoder.conv_out.training: False → True"),
    "buffer": (lambda m: m.register_buffer("extra", torch.ones(1)), "dtype extra: absent → float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", INJECTED)
def test_what_is_left_behind_is_named(name):
    change, words = INJECTED[name]
    found = left_behind(change)
    assert any(line.startswith(words) for line in found), found


def test_nothing_left_behind_is_no_leak(module):
    assert left_behind(lambda part: None, module) == []
    assert left_behind(lambda part: decode(part), module) == []


def test_a_cache_that_grows_is_seen():
    module = build()
    module.cache = [torch.zeros(2)]
    before = state.fingerprint(module, MODEL.family)
    module.cache[0][1] = 1
    assert [line.split(":")[0] for line in state.leaks(before, state.fingerprint(module, MODEL.family))] == [
        "attribute cache"
    ]


def test_alike_differences_are_one_line_and_bits_are_not_repeated():
    found = left_behind(lambda part: part.half())
    count = len(list(build().parameters()))
    assert found == [f"dtype encoder.conv_in.weight and {count - 1} more: float32 → float16"]


def test_the_digest_of_all_weights_is_of_their_bits_alone():
    one, other = (state.fingerprint(build(seed=7), MODEL.family)[state.WEIGHTS] for _ in range(2))
    assert one == other
    assert len(one) == 16
    module = build(seed=7)
    flip_a_bit(module)
    assert state.fingerprint(module, MODEL.family)[state.WEIGHTS] != one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
def test_digests_take_any_dtype_layout_and_size(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert state.digest_of(tensor) == state.digest_of(tensor.clone())
    assert state.digest_of(tensor.t()) == state.digest_of(tensor.t().contiguous())
    assert state.digest_of(torch.tensor(1).to(dtype)) != state.digest_of(torch.tensor(0).to(dtype))
    assert state.digest_of(torch.empty(0, dtype=dtype))


def test_a_fingerprint_is_quick():
    module = build()
    weights = sum(weight.numel() for weight in module.parameters())
    times = []
    for _ in range(5):
        start = time.process_time()
        state.fingerprint(module, MODEL.family)
        times.append(time.process_time() - start)
    assert min(times) < 0.03 * max(1, weights / 2e6)


@pytest.mark.slow
def test_every_option_on_and_off_in_any_order_gives_the_first_bits(module):
    first, _ = decode(module)
    plans = [
        DecodePlan(dtype="fp16", slicing=True, offload="group_leaf"),
        DecodePlan(dtype="bf16", tiling=Tiling(8, 0.25), offload="sequential"),
        DecodePlan(dtype="fp16", force_upcast=True, slicing=True, tiling=Tiling(8, 0.5), offload="disk"),
        DecodePlan(offload="model"),
    ]
    order = torch.randperm(len(plans), generator=torch.Generator().manual_seed(5)).tolist()
    for index in [*order, *reversed(order)]:
        decode(module, plans[index])
        assert torch.equal(decode(module)[0], first)


def test_settings_are_applied_in_order_and_undone_in_reverse(module, monkeypatch):
    events = []
    for name in ("precision", "slicing", "tiling", "offload"):
        entry = OPTIMIZATIONS.get(name)

        class Watched:
            def __init__(self, entry):
                self.entry, self.order, self.name = entry, entry.order, entry.name

            def apply(self, *args, **kwargs):
                from contextlib import contextmanager

                @contextmanager
                def watched():
                    events.append(f"+{self.name}")
                    with self.entry.apply(*args, **kwargs) as prove:
                        yield prove
                    events.append(f"-{self.name}")

                return watched()

        monkeypatch.setitem(OPTIMIZATIONS._entries, name, Watched(entry))
    plan = DecodePlan(dtype="bf16", slicing=True, tiling=Tiling(8, 0.25), offload="model")
    decode(module, plan)
    names = ["precision", "slicing", "tiling", "offload"]
    assert events == [*(f"+{name}" for name in names), *(f"-{name}" for name in reversed(names))]


def test_a_receipt_that_does_not_say_fails_closed(module, monkeypatch):
    from fidelity.registry import FunctionOptimization

    def silent(*_, **__):
        from contextlib import nullcontext

        return nullcontext(lambda seen: {"note": "trust me"})

    monkeypatch.setitem(OPTIMIZATIONS._entries, "silent", FunctionOptimization("silent", "", 50, silent))
    _, receipts = decode(module, DecodePlan(options={"silent": True}))
    assert receipts["silent"]["engaged"] is False
    assert "does not say whether it engaged" in receipts["silent"]["reason"]


def test_temporal_tiling_is_refused_by_name(module):
    from fidelity.errors import EvaluationError

    with pytest.raises(EvaluationError, match="no frames"):
        apply_plan(module, DecodePlan(temporal=Temporal(4, 0.0)), model=MODEL, device="cpu").__enter__()
