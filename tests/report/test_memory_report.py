"""Memory in the report: the compact form loses nothing that is drawn, colours tell apart, running out is one line."""

from __future__ import annotations

import io
import itertools
import re
from importlib import resources
from xml.etree import ElementTree as XML

import msgspec
import numpy as np
import pytest

from fidelity import shortage
from fidelity.records import MEMORY_KINDS, Holding, MemoryTrace, Reason, RunResult, Stage, Tiling
from fidelity.report import console, html, junit, markdown, memory
from tests.report import memories, sample
from tests.report.sample import MIB


def traced(tiled=True, offload="none", weights=14 * MIB):
    plan = sample.DecodePlan(tiling=Tiling(8, 0.25) if tiled else None, offload=offload)
    return memories.trace(plan, 83 * MIB, weights, 2 * 128 * 128)


# ---------------------------------------------------------------- the hand-made traces keep the records' own rules


@pytest.mark.parametrize(("tiled", "offload"), list(itertools.product([True, False], ["none", "disk"])))
def test_sample_traces_add_up(tiled, offload):
    trace = traced(tiled, offload)
    assert max(trace.timeline) == trace.allocated_peak_bytes == trace.peak.bytes == sum(trace.peak.by_kind.values())
    for share, alive in enumerate(trace.timeline):
        assert sum(held[share] for held in trace.layers.values()) == alive
    assert sum(holding.bytes for holding in trace.peak.held) == trace.peak.bytes
    assert set(trace.layers) <= set(MEMORY_KINDS)


# ---------------------------------------------------------------- compact


def levels(text):
    return [int(text[at : at + 2], 36) for at in range(0, len(text), 2)]


def test_layers_are_drawn_to_a_thousandth_of_the_peak():
    trace = traced()
    built = memory.Compact().of(trace)
    for kind, held in trace.layers.items():
        drawn = np.array(levels(built["layers"][kind])) * trace.allocated_peak_bytes / memory.LEVELS
        assert np.abs(drawn - np.array(held)).max() <= trace.allocated_peak_bytes / 1000
    assert built["most"] == trace.allocated_peak_bytes, "the peak keeps its bytes"
    assert levels(built["timeline"])[trace.timeline.index(built["most"])] == memory.LEVELS
    assert len(msgspec.json.encode(built["layers"])) < len(msgspec.json.encode(trace.layers)) / 2


def test_steps_after_the_decode_are_kept_once_whatever_the_weights():
    compact = memory.Compact()
    places = [compact.of(traced(weights=weights))["after"] for weights in (14 * MIB, 2 * MIB)]
    assert places == [0, 0]
    assert len(compact.after) == 1
    assert compact.of(sample._memory(sample.DecodePlan("bf16"), False, 128))["after"] == 1
    steps = {step["part"]: step for step in compact.after[0]["steps"]}
    pixels = 2 * 128 * 128
    assert compact.after[0]["why"][:2] == [memories.SMALL, "numpy allocates past torch's allocator"]
    assert steps["denormalise"]["rise"] == 2 * 12 * pixels
    assert (steps["denormalise"]["by"], steps["uint8"]["by"]) == ("torch", "numpy and Python, at least")
    assert (steps["uint8"]["copies"], steps["uint8"]["rise"], steps["uint8"]["leaves"]) == (
        24 * pixels,
        24 * pixels,
        3 * pixels,
    )


def test_resident_is_preferred_to_what_numpy_alone_reports():
    held = (Holding(100, "output", "sample"),)
    stage = Stage("encode", None, part="PNG", resident_bytes=70, traced_bytes=20, result_bytes=10, held=held)
    step = memory._after(stage, MemoryTrace())
    assert (step["rise"], step["by"], step["copies"]) == (70, "resident", 100)


def test_a_picture_takes_at_least_its_pixels():
    stage = Stage("convert", None, part="PIL", traced_bytes=20, result_bytes=400)
    assert memory._after(stage, MemoryTrace())["rise"] == 400


def test_what_hardly_counts_at_the_peak_is_counted_alone():
    trace = traced()
    crumb = Holding(8, "workspace", "div")
    peak = msgspec.structs.replace(trace.peak, held=(*trace.peak.held, crumb, crumb))
    built = memory.Compact().of(msgspec.structs.replace(trace, peak=peak))["peak"]
    assert (len(built["held"]), built["smaller"]) == (len(trace.peak.held), 2)


def test_a_step_without_a_figure_says_why():
    missing = Stage("encode", None, part="MP4", reason="PyAV is not installed: pip install 'fidelity[video]'")
    step = memory._after(missing, MemoryTrace())
    assert not {"rise", "by", "leaves"} & set(step)
    assert "PyAV" in step["reason"]


def test_many_calls_have_a_bar_each_or_the_largest_of_some():
    few, many = tuple(range(10)), tuple(range(1000, 0, -1))
    built = memory.Compact().of(
        MemoryTrace(stages=(Stage("tile", 9, 10, each=few), Stage("onload", 1000, 1296, each=many)))
    )
    assert tuple(built["stages"][0]["each"]) == few
    bars = built["stages"][1]["each"]
    assert len(bars) == memory.MOST_BARS
    assert (bars[0], bars[1]) == (1000, 990)


def test_old_traces_and_none_stay_what_they_are():
    old = MemoryTrace(90 * MIB, method="allocator events", stages=(Stage("decode", 90 * MIB),), timeline=(1, 2, 3))
    built = memory.Compact().of(old)
    assert "after" not in built
    assert (built["layers"], levels(built["timeline"]), built["most"]) == ({}, [432, 863, 1295], 3)
    assert len(built["stages"]) == 1
    assert memory.Compact().of(None) is None
    assert memory.Compact().of(MemoryTrace(reason="emulated"))["layers"] == {}


def test_a_page_grows_little_by_the_traces(tmp_path):
    run = sample.build(tmp_path, models=(sample.MODEL,))
    bare = [msgspec.structs.replace(case, memory=None) for case in run.cases]
    sizes = [
        len(html.render(msgspec.structs.replace(run, cases=cases), tmp_path)) for cases in (run.cases, tuple(bare))
    ]
    judged = sum(case.memory is not None and bool(case.memory.timeline) for case in run.cases)
    assert (sizes[0] - sizes[1]) / judged < 4_000, "characters a case"


# ---------------------------------------------------------------- colours


MACHADO = {  # Machado et al. 2009, severity 1, linear RGB
    "all": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def linear(rgb):
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def rgb_of(text):
    return np.array([int(text[at : at + 2], 16) for at in (1, 3, 5)]) / 255


@pytest.fixture(scope="module", params=["light", "dark"])
def palette(request):
    """The kinds' colours of one theme, and its card's."""
    place = ["light", "dark"].index(request.param)
    read = lambda name: (resources.files("fidelity.report") / "templates" / name).read_text()  # noqa: E731
    block = re.findall(r":root[^{]*\{([^}]*)\}", read("memory.css"))[place]
    card = re.findall(r"--card:(#\w+)", read("base.css"))[place]
    card = "#ffffff" if card == "#fff" else card
    return {name: rgb_of(text) for name, text in re.findall(r"--m-(\w+):(#\w{6})", block)}, rgb_of(card)


def test_every_kind_has_a_colour_with_contrast(palette):
    colours, card = palette
    assert list(colours) == list(MEMORY_KINDS)
    light = lambda rgb: float(linear(rgb) @ [0.2126, 0.7152, 0.0722])  # noqa: E731
    for name, rgb in colours.items():
        low, high = sorted((light(rgb), light(card)))
        assert (high + 0.05) / (low + 0.05) >= 3, name


@pytest.mark.parametrize("vision", MACHADO)
def test_every_two_kinds_differ_for_every_colour_vision(palette, vision):
    from skimage import color

    seen = {}
    for name, rgb in palette[0].items():
        mixed = np.clip(np.array(MACHADO[vision]) @ linear(rgb), 0, 1)
        seen[name] = color.rgb2lab(np.where(mixed <= 0.0031308, mixed * 12.92, 1.055 * mixed ** (1 / 2.4) - 0.055))
    for one, other in itertools.combinations(seen, 2):
        assert color.deltaE_ciede2000(seen[one], seen[other]) > 10, (one, other)


# ---------------------------------------------------------------- the law


def plain(latents, shape, peak, **about):
    return sample.judged(
        latents=latents, memory=MemoryTrace(allocated_peak_bytes=peak, method="events"),
        receipts={"decoder": {"calls": 1, "shapes": [shape]}}, **about,
    )  # fmt: skip


def test_the_law_is_of_plain_decodes_of_several_sizes():
    bf16 = sample.DecodePlan("bf16")
    cases = [
        plain("a", [2, 4, 16, 16], 8 * MIB + 512 * 1024), plain("b", [1, 4, 32, 32], 8 * MIB + 1024 * 1024),
        plain("c", [1, 4, 5, 16, 16], 8 * MIB + 1280 * 1024), plain("d", [1, 4, 64, 64], 1, plan=bf16),
    ]  # fmt: skip
    said = memory.laws(RunResult({}, {}, cases=tuple(cases)))
    assert said == {
        "m": "A plain fp32 decode peaks at 8.00 MiB and 1.00 KiB for each latent pixel of a batch, by 3 sizes "
        "(off by 0.0% at most)."
    }
    assert memory.laws(RunResult({}, {}, cases=tuple(cases[:1]))) == {}, "one size has no law"
    assert memory.laws(RunResult({}, {}, cases=(sample.judged(), sample.judged(latents="k")))) == {}, "no size is known"


# ---------------------------------------------------------------- out of memory


SAID = (
    "memory ran out while decoding one tile (decoder.up_blocks.2.resnets.1.conv1): 12.0 MiB more were asked for, "
    "44.0 MiB were alive, 48.0 MiB beyond the loaded model are allowed; nearest plan of this suite that fits: "
    "reference-kl/photo-pair/bf16-upcast0-slice1-t8o0.25-none needs 15.0 MiB, predicted"
)


def ran_out():
    found = memories.ran_out()
    return sample.judged(
        verdict="error", surprise=True, reasons=(shortage.reason(found.exhausted),), measurements={}, memory=found
    )


def test_running_out_is_said_as_its_reason_says_it():
    assert memory.exhausted(ran_out()) == SAID
    assert memory.exhausted(sample.judged()) is None
    assert memory.exhausted(sample.judged(memory=None)) is None
    others = msgspec.structs.replace(ran_out(), reasons=(Reason("decode", "RuntimeError"),))
    assert memory.exhausted(others) == others.memory.exhausted.message


def test_every_rendering_says_it():
    case = ran_out()
    run, line = RunResult({}, {}, cases=(case,)), memory.exhausted(case)
    stream = io.StringIO()
    console.table(run, stream=stream)
    assert stream.getvalue().count(line) == 1
    assert markdown.render(run).replace("\\", "").count("memory ran out") == 1
    element = XML.fromstring(junit.render(run).encode()).find(".//testcase/error")
    assert line in element.text
    expected = RunResult(
        {}, {}, cases=(msgspec.structs.replace(case, surprise=False, expected="error"), sample.judged())
    )
    stream = io.StringIO()
    console.table(expected, stream=stream)
    assert stream.getvalue().count(f"{case.id}: {line}") == 1
    assert "Out of memory, as expected" in markdown.render(expected)
    assert markdown.render(expected).replace("\\", "").count("memory ran out") == 1
    assert line in junit.render(RunResult({}, {}, cases=(msgspec.structs.replace(case, surprise=False),))), (
        "as a property"
    )
