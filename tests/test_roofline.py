"""The roof, the work counted under it, and what is said of both."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml

import pytest
import torch
from torch import nn

from fidelity import optimizations, registry
from fidelity.cli import main
from fidelity.concurrency import together
from fidelity.errors import RequestError
from fidelity.models import configs
from fidelity.records import DecodePlan, Tiling, from_json, to_json
from fidelity.roofline import machine, plot, roof, work
from fidelity.roofline.roof import ceiling, part

registry.load_plugins()
KL = registry.MODELS.get("reference-kl")


def status(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *words])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


# ---------------------------------------------------------------- the roof


@pytest.mark.parametrize(
    ("intensity", "gflops"), [(0, 0), (0.5, 50), (2, 200), (9.99, 999), (10, 1000), (10.5, 1000), (1e6, 1000)]
)
def test_the_ceiling_is_the_lower_of_both(intensity, gflops):
    assert ceiling(intensity, bandwidth=100, compute=1000) == pytest.approx(gflops)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "100", None, True])
@pytest.mark.parametrize("which", ["bandwidth", "compute"])
def test_a_roof_that_is_none_is_refused(which, bad):
    with pytest.raises(RequestError, match=which):
        ceiling(1.0, **{"bandwidth": 100, "compute": 1000, which: bad})


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), "2"])
def test_an_intensity_that_is_none_is_refused(bad):
    with pytest.raises(RequestError, match="intensity"):
        ceiling(bad, 100, 1000)


def test_a_part_under_the_roof():
    flat = part("p", ((1000, 100), (0, 900)), bandwidth=100, compute=1000, seconds=2e-8)
    assert (flat.flops, flat.bytes, flat.intensity, flat.ceiling, flat.bound) == (1000, 1000, 1.0, 100.0, "bandwidth")
    assert flat.least_seconds == pytest.approx(1e-9 + 9e-9)  # each operator under its own ceiling
    assert flat.waiting_seconds == pytest.approx(9e-9)
    assert (flat.achieved, flat.moved) == (pytest.approx(50), pytest.approx(50))
    assert (flat.share, flat.share_by_operator) == (pytest.approx(0.5), pytest.approx(0.5))
    assert part("p", ((1000, 100),), 100, 1000).bound == "compute"  # at the ridge, arithmetic holds
    assert part("p", ((999, 100),), 100, 1000).bound == "bandwidth"


def test_a_part_without_work_or_time_has_no_figures_of_either():
    idle = part("p", (), 100, 1000, seconds=1.0)
    assert (idle.intensity, idle.ceiling, idle.bound, idle.share, idle.share_by_operator) == (None, None, None, None, 0)
    untimed = part("p", ((0, 100),), 100, 1000)
    assert (untimed.intensity, untimed.ceiling, untimed.share, untimed.achieved) == (0.0, 0.0, None, None)


# ---------------------------------------------------------------- FLOPs and bytes, against arithmetic by hand


class Alone:
    """A family whose decoder is one module."""

    def decoder(self, module):
        return module.decoder

    def decode(self, module, latents):
        return module.decoder(latents)


class Model:
    family = Alone()


def operators(decoder, latents):
    module = nn.Module()
    module.decoder = decoder.requires_grad_(False)
    found = work.counted(Model(), module, latents)
    return [each for of_part in found.values() for each in of_part]


def total(decoder, latents):
    return tuple(sum(each[i] for each in operators(decoder, latents)) for i in (0, 1))


def test_one_convolution():
    flops, moved = total(nn.Conv2d(5, 7, 3, padding=1), torch.zeros(2, 5, 11, 13))
    assert flops == 2 * 3**2 * 5 * 7 * 2 * 11 * 13
    assert moved == 4 * (2 * 5 * 11 * 13 + 7 * 5 * 9 + 7 + 2 * 7 * 11 * 13)


def test_a_convolution_in_groups_and_steps():
    flops, _ = total(nn.Conv2d(8, 8, 3, groups=4, stride=2, bias=False), torch.zeros(1, 8, 9, 9))
    assert flops == 2 * 3**2 * (8 // 4) * 8 * 4 * 4


def test_one_product_of_matrices():
    flops, moved = total(nn.Linear(6, 10, bias=False), torch.zeros(4, 6, dtype=torch.float32))
    assert (flops, moved) == (2 * 4 * 6 * 10, 4 * (4 * 6 + 6 * 10 + 4 * 10))


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_counts_on_a_cpu_too():
    flops, moved = total(Attention(), torch.zeros(1, 2, 16, 8))
    assert flops == 2 * (2 * 2 * 16 * 16 * 8)  # scores, and their product with the values
    assert moved >= 4 * (1 + 1) * 2 * 16 * 8


class Steps(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, x):
        return self.step(x)


@pytest.mark.parametrize(
    ("step", "moved"),
    [
        (lambda x: x.view(-1)[5:].reshape(5, 11), 0),  # 55 of 60 values: views move nothing
        (
            lambda x: x.transpose(1, 2).expand(4, 4, 15).flatten(),
            4 * (4 * 15 + 4 * 4 * 15),
        ),  # spread values are read once
        (lambda x: x + 1, 4 * (60 + 60)),
        (lambda x: x.add_(1), 4 * (60 + 60)),
        (lambda x: x.fill_(1), 4 * 60),
        (lambda x: torch.empty(1000), 0),
        (lambda x: torch.zeros(10).copy_(x.view(-1)[:10]), 4 * 10 + 4 * (10 + 10)),
        (lambda x: torch.cat([x, x]), 4 * (60 + 120)),
    ],
    ids=["view", "spread", "add", "in place", "fill", "empty", "copy", "cat"],
)
def test_bytes_of_each_kind_of_operator(step, moved):
    assert total(Steps(step), torch.zeros(1, 15, 4)) == (0, moved)


def by_hand(model, module, latents):
    """FLOPs of a decode by hooks on its convolutions and projections, and of attention from its lengths."""
    sums = []

    def convolved(layer, inputs, out):
        kernel = layer.weight[0].numel()  # channels in a group times the window
        sums.append(2 * kernel * out.numel())

    def attended(layer, inputs, out):
        batch, _, height, width = inputs[0].shape
        inner = layer.to_q.weight.shape[0]
        sums.append(2 * 2 * batch * (height * width) ** 2 * inner)

    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.register_forward_hook(convolved)
        elif type(layer).__name__ == "Attention":
            layer.register_forward_hook(attended)
    with torch.no_grad():
        model.family.decode(module, latents)
    return sum(sums)


@pytest.mark.slow
def test_a_whole_decoder_s_flops_are_those_of_its_layers():
    latents, module = torch.zeros(1, 4, 8, 8), KL.load()
    found = work.counted(KL, module, latents)
    assert sum(done for each in found.values() for done, _ in each) == by_hand(KL, KL.load(), latents)
    assert {"conv_in", "mid_block", "up_blocks.0", "up_blocks.3", "conv_norm_out", "conv_out"} <= set(found)
    assert work.on_shapes(KL, latents.shape, DecodePlan(), torch.float32) == found


@pytest.mark.slow
def test_tiles_are_blended_around_the_decoder_and_halves_move_half():
    plan, latents = DecodePlan(tiling=Tiling(8, 0.25)), torch.zeros(1, 4, 16, 16)
    tiled = work.on_shapes(KL, latents.shape, plan, torch.float32)
    plain, half = (work.on_shapes(KL, latents.shape, DecodePlan(), each) for each in (torch.float32, torch.bfloat16))
    assert len(tiled["conv_in"]) == 9 * len(plain["conv_in"])  # a call a tile
    assert moved(tiled, work.AROUND) > 100 * moved(plain, work.AROUND)
    assert 2 * moved(half, "up_blocks.3") == pytest.approx(moved(plain, "up_blocks.3"), rel=1e-3)
    module = KL.load()
    with torch.no_grad(), optimizations.apply_plan(module, plan, model=KL, device="cpu"):
        assert work.counted(KL, module, latents) == tiled


def moved(found, name):
    return sum(size for _, size in found[name])


def test_a_chain_that_is_all_there_is_has_its_links_as_parts():
    tiny = registry.MODELS.get("small-tiny")
    names = [name for name, _ in work.parts(tiny.family.decoder(tiny.load()))]
    assert names[0].startswith("layers.")
    assert len(names) > 5


def test_seconds_are_given_to_the_part_that_took_them(monkeypatch):
    module, latents, now = KL.load(), torch.zeros(1, 4, 8, 8), [0.0]

    def waste(*_):
        now[0] += 7.0

    monkeypatch.setattr(work, "clock", lambda device: now[0])
    module.decoder.mid_block.register_forward_pre_hook(waste)
    taken = work.timed(KL, module, latents, runs=1)
    assert set(taken) >= {work.AROUND, work.BETWEEN, "conv_in", "conv_out"}
    assert {part: seconds for part, seconds in taken.items() if seconds} == {"mid_block": 7.0}
    assert not module.decoder._forward_hooks  # none is left


# ---------------------------------------------------------------- measured, and the command


@pytest.mark.slow
def test_a_machine_s_rates_are_finite_and_say_how(monkeypatch):
    monkeypatch.setattr(machine, "FLOATS", {"cpu": 2**16})
    monkeypatch.setattr(machine, "PRODUCT", {"cpu": 64})
    monkeypatch.setattr(machine, "CONVOLUTION", {"cpu": (8, 16)})
    found = roof.measure(KL, together.seeded(KL, (1, 4, 8, 8)), DecodePlan(dtype="bf16"))
    by = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    assert found.bandwidth.value > 0
    assert found.bandwidth.origin == f"measured here: a triad over three buffers of 0 MiB, best of 5 by {by}"
    assert found.compute.origin.endswith(f"in bfloat16, best of 5 by {by}")
    assert found.whole.seconds == pytest.approx(sum(each.seconds for each in found.parts))
    assert found.whole.achieved == pytest.approx(found.whole.flops / found.whole.seconds / 1e9)
    assert found.reason is None
    assert from_json(to_json(found), roof.Roofline) == found
    assert "by operator" in "\n".join(roof.lines(found))


def test_published_configurations_need_no_weights(capsys, tmp_path):
    picture = tmp_path / "roof.svg"
    code, out, _ = status(capsys, "sd15", "--roofline", "--size", "256x256", "--bandwidth", "100", "--compute", "1000",
                          "--svg", str(picture))  # fmt: skip
    assert code == 0
    assert "bandwidth  100 GB/s, declared" in out
    assert "the two meet at 10 FLOP per byte" in out
    assert f"not run: {roof.WEIGHTLESS}" in out
    assert "It says nothing of how much memory a decode needs" in out
    assert "of the ceiling" not in out  # nothing was reached
    drawn = xml.fromstring(picture.read_text())
    words = [each.text for each in drawn.iter() if each.text]
    assert "up_blocks.3" in words
    assert "whole decode" in words


def test_the_command_has_it_all_as_data(capsys):
    code, out, _ = status(capsys, "sd15", "--roofline", "--size", "64x64", "--bandwidth", "100", "--compute", "1000",
                          "--dtype", "fp16", "--json")  # fmt: skip
    found = json.loads(out)
    assert code == 0
    assert found["compute"] == {"value": 1000.0, "origin": "declared"}
    assert found["whole"]["flops"] == sum(each["flops"] for each in found["parts"])
    assert found["reason"] == roof.EMULATED


def test_a_decode_that_the_machine_cannot_hold_is_not_begun(monkeypatch):
    monkeypatch.setattr(roof, "available_bytes", lambda device: 2**22)
    monkeypatch.setattr(roof, "_worked", None)
    with pytest.raises(RequestError, match=r"one decode may take .* MiB and cpu has 4.0 MiB left: 0 fit"):
        roof.measure(KL, together.seeded(KL, (1, 4, 8, 8)), bandwidth=1.0, compute=1.0)


def test_parts_are_drawn_where_they_stand():
    model = configs.from_name("taesd")  # dozens of parts
    found = roof.measure(model, torch.zeros(1, 4, 8, 8), bandwidth=100, compute=1000, weights=False)
    assert len(list(xml.fromstring(plot.svg(found)))) > 20
    axes = plot.Axes(found, [("p", 1.0, 100.0, True)])
    assert axes.x(1.0) < axes.x(10.0)
    assert axes.y(100.0) > axes.y(1000.0)
    assert plot.LEFT <= axes.x(1.0) <= plot.WIDTH - plot.RIGHT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--roofline", "--bandwidth", "0"), "--bandwidth 0.0: write a finite number of GB/s above 0"),
        (("--roofline", "--bandwidth", "-5"), "--bandwidth -5.0"),
        (("--roofline", "--bandwidth", "nan"), "--bandwidth nan"),
        (("--roofline", "--compute", "inf"), "--compute inf: write a finite number of GFLOP/s above 0"),
        (("--roofline", "--bandwidth", "1e-300"), "--bandwidth 1e-300 GB/s: no machine has that: from 1e-06"),
        (("--roofline", "--compute", "1e300"), "--compute 1e+300 GFLOP/s: no machine has that"),
        (("--roofline", "--compute", "fast"), "'fast' is not a valid float"),
        (("--bandwidth", "100"), "--bandwidth goes with --roofline"),
        (("--roofline", "--size", "big"), "write HEIGHTxWIDTH"),
        (("--roofline", "--frames", "5"), "go with --size HxW"),
        (("--roofline", "--plan", "bf16", "--dtype", "fp32"), "give one or the other"),
        (("--roofline", "--dtype", "fp16", "--bandwidth", "9"), "a CPU emulates it"),
        (("--roofline", "--plan", "slicing", "--bandwidth", "9", "--compute", "9"), "nothing to slice: leave it out"),
        (("--roofline", "--plan", "tile=15,overlap=0.33"), "cannot tile by 15 with overlap 0.33"),
        (("--roofline", "--bandwidth", "9", "--compute", "9", "--svg", "/no/such/folder/x.svg"), "there is no folder"),
        (("--roofline", "--device", "tpu"), "known are cpu, cuda"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_wrong_request_is_one_line(capsys, words, said):
    code, out, err = status(capsys, "reference-kl", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_rates_and_seconds_wait_for_the_device():
    found = roof.measure(KL, together.seeded(KL, (1, 4, 32, 32)), device="cuda")
    assert found.bandwidth.value > 50
    assert 0 < found.whole.achieved < found.compute.value
