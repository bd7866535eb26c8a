"""Memory predicted on shapes alone, held against the allocator, operator by operator and decode by decode."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fidelity.models  # noqa: F401  registers
from fidelity import optimizations, registry
from fidelity.errors import EvaluationError, ModelError
from fidelity.memory import allocator, profiler
from fidelity.models import configs
from fidelity.optimizations.weights import kept_in_fp32
from fidelity.records import DecodePlan, Geometry, Tiling
from fidelity.registry import FAMILIES
from fidelity.simulation import attention, caching, law, layouts, repeat, schedule
from fidelity.simulation.ledger import Holding, Ledger, Script
from fidelity.simulation.simulate import simulate

MIB = 2**20
registry.load_plugins()
KL = registry.MODELS.get("reference-kl")
WAN = {"_class_name": "AutoencoderKLWan", "base_dim": 16, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
       "temperal_downsample": [False, True, True], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}  # fmt: skip
TINY = {"_class_name": "AutoencoderTiny", "encoder_block_out_channels": [32] * 4, "num_encoder_blocks": [1] * 4,
        "decoder_block_out_channels": [32] * 4, "num_decoder_blocks": [1] * 4}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def walk(module_of, decode, shape, dtype=torch.float32, device="cpu", **how):
    ledger, _, weights = simulate(module_of, decode, shape, dtype=dtype, device=device, keep_fp32=kept_in_fp32, **how)
    return ledger, weights


def predicted(model, shape, plan=None, *, dtype=torch.float32, device="cpu", offload="none", **how):
    plan = plan or DecodePlan()
    return walk(
        lambda: model.family.build(model.config),
        model.family.decode,
        shape,
        dtype,
        device,
        offload=offload,
        decoder=model.family.decoder,
        applied=lambda module: optimizations.apply_plan(module, plan, model=model, device=device),
        **how,
    )


def measured(model, shape, plan=None, *, dtype=torch.float32):
    module, latents = model.family.build(model.config).to(dtype), torch.zeros(shape, dtype=dtype)
    with torch.no_grad(), optimizations.apply_plan(module, plan or DecodePlan(), model=model, device="cpu"):
        _, trace = allocator.trace(
            lambda: model.family.decode(module, latents),
            module=module,
            device="cpu",
            decoder=model.family.decoder(module),
        )
    return trace


def plain(config, geometry):
    family = FAMILIES.get(config["_class_name"])
    return family.describe(config["_class_name"].lower(), config, lambda: None)


# ---------------------------------------------------------------- the ledger


def test_peak_is_the_largest_sum_alive_at_one_instant():
    ledger = Ledger()
    first = ledger.hold(Holding(100, "a"))
    with ledger.span("tile") as span:
        second = ledger.hold(Holding(50, "b"))
        ledger.release(first)
        ledger.passing(Holding(60, "c"), Holding(20, "d"))
    ledger.release(second)
    assert (ledger.peak, ledger.alive, span.peak) == (150, 0, 150)
    assert {holding.what for holding in ledger.at_peak} == {"a", "b"}
    assert ledger.stage_at_peak == "tile"
    assert sum(change for _, change in ledger.events) == 0


def test_a_span_knows_what_was_alive_at_its_start():
    ledger = Ledger()
    kept = ledger.hold(Holding(70, "kept"))
    with ledger.span("assemble") as span:
        ledger.release(kept)
    assert span.peak == 70


def test_releasing_twice_is_an_error():
    ledger = Ledger()
    number = ledger.hold(Holding(1, "a"))
    ledger.release(number)
    with pytest.raises(KeyError):
        ledger.release(number)


# ---------------------------------------------------------------- following tensors


class Chain(nn.Module):
    """Two tensors of 4 KiB at most, as the first is let go of before the third is made."""

    def forward(self, x):
        first = x + 1
        second = first * 2
        del first
        return second.abs()


class Keeper(Chain):
    """Three of them: the first is kept."""

    def forward(self, x):
        first = x + 1
        second = first * 2
        return second.abs() + first[:1].sum()


@pytest.mark.parametrize(("kind", "tensors"), [(Chain, 2), (Keeper, 4)])
def test_storages_are_followed_until_python_lets_go(kind, tensors):
    ledger, weights = walk(kind, lambda module, x: module(x), (4, 256))
    assert weights == 0
    assert ledger.peak // 4096 == tensors  # Keeper: first, second, its abs and their sum, at once


def test_views_hold_nothing_and_the_largest_tensor_has_its_module():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Upsample(scale_factor=2)

        def forward(self, x):
            return self.inner(x.transpose(-1, -2).flatten(1)[:, None])[:, :, :4].clone()

    ledger, _ = walk(Views, lambda module, x: module(x), (1, 16, 16))
    assert (ledger.largest.bytes, ledger.largest.module) == (2048, "inner")
    assert ledger.peak == 1024 + 2048  # the flattened transpose is a copy


def test_weights_get_their_dtype_but_for_those_kept():
    class Kept(nn.Module):
        _keep_in_fp32_modules = ("second",)

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.second.weight = self.second.weight
            self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

        def forward(self, x):
            return x

    _, weights = walk(Kept, lambda module, x: module(x), (1, 8), torch.bfloat16)
    assert weights == 64 * 2 + 64 * 4 + 3 * 8


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=4), st.randoms())
def test_view_strides_are_torchs(shape, random):
    axes = list(range(len(shape)))
    random.shuffle(axes)
    tensor = torch.empty(shape).permute(axes)
    sizes = [size for size in tensor.shape for size in ([size] if size != 4 else [2, 2])]
    sizes.insert(random.randrange(len(sizes) + 1), 1)
    for new in (sizes, list(tensor.shape), [tensor.numel()], [1, *tensor.shape]):
        try:
            expected = tensor.view(new).stride()
        except RuntimeError:
            expected = None
        assert layouts.view_strides(tensor.shape, tensor.stride(), new) == expected


# ---------------------------------------------------------------- workspaces on this CPU, against its allocator

CONVOLUTIONS = [  # input, output channels, kernel: blocked, its padding, plain input, im2col, pointwise
    ((1, 64, 64, 64), 64, 3), ((2, 64, 64, 64), 3, 3), ((1, 20, 64, 64), 40, 3), ((1, 8, 64, 64), 8, 3),
    ((1, 8, 32, 32), 8, 3), ((1, 64, 64, 64), 128, 1), ((2, 4, 64, 64), 8, 1), ((1, 16, 3, 34, 34), 16, 3),
    ((1, 32, 3, 66, 66), 32, 3), ((1, 64, 64, 64), 64, 5),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "channels", "kernel", "nhwc"),
    [(*one, nhwc) for one in CONVOLUTIONS for nhwc in (False, True) if not nhwc or len(one[0]) == 4],
)
def test_a_convolutions_workspace_is_the_allocators(shape, channels, kernel, nhwc, dtype):
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bf16 convolution in oneDNN")
    kind = nn.Conv2d if len(shape) == 4 else nn.Conv3d

    def build():
        return kind(shape[1], channels, kernel, padding=kernel // 2 if len(shape) == 4 else 0)

    def decode(module, x):
        return module(x.contiguous(memory_format=torch.channels_last)) if nhwc else module(x)

    ledger, weights = walk(build, decode, shape, dtype)
    module, x = build().to(dtype), torch.zeros(shape, dtype=dtype)
    with torch.no_grad():
        decode(module, x)
        with profiler.record() as timeline:
            decode(module, x)
    assert ledger.peak - weights == pytest.approx(max(timeline.alive), abs=8 * 1024)


# ---------------------------------------------------------------- decodes, against the allocator

PLANS = [
    ((2, 4, 16, 16), DecodePlan()),
    ((1, 4, 16, 24), DecodePlan()),
    ((2, 4, 16, 16), DecodePlan(slicing=True)),
    ((2, 4, 12, 12), DecodePlan(tiling=Tiling(8, 0.25))),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("shape", "plan"), PLANS, ids=[f"{shape[0]}-{plan.id}" for shape, plan in PLANS])
def test_a_decodes_stages_are_the_allocators(shape, plan, dtype):
    ledger, weights = predicted(KL, shape, plan, dtype=dtype)
    trace = measured(KL, shape, plan, dtype=dtype)
    assert weights == trace.weights_bytes
    assert ledger.peak == pytest.approx(trace.allocated_peak_bytes, rel=0.005)
    spans = {}
    for span in ledger.closed:
        spans.setdefault(span.name, []).append(span.peak)
    for stage in trace.stages:
        assert max(spans[stage.name]) == pytest.approx(stage.peak_bytes, rel=0.005), stage.name
        if stage.name == "tile":
            assert len(spans["tile"]) == stage.calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "geometry", "shape"),
    [
        (WAN, Geometry(spatial=8, temporal=4, latent_channels=4, video=True), (1, 4, 2, 8, 8)),
        (TINY, Geometry(spatial=8, latent_channels=4), (1, 4, 24, 16)),
    ],
    ids=["AutoencoderKLWan", "AutoencoderTiny"],
)
def test_other_classes_are_the_allocators_too(config, geometry, shape):
    model = plain(config, geometry)
    ledger, _ = predicted(model, shape)
    assert ledger.peak == pytest.approx(measured(model, shape).allocated_peak_bytes, rel=0.005)


@pytest.mark.slow
def test_shortcuts_change_no_figure(monkeypatch):
    plan, shape = DecodePlan(tiling=Tiling(4, 0.25)), (1, 4, 12, 12)
    quick, _ = predicted(KL, shape, plan, device="cuda", offload="sequential")
    monkeypatch.setattr(repeat, "few_rows", lambda module: nullcontext())
    monkeypatch.setattr(repeat, "replayed", lambda *_: nullcontext())
    slow, _ = predicted(KL, shape, plan, device="cuda", offload="sequential")
    assert len(quick.events) < len(slow.events)
    assert (quick.peak, quick.largest) == (slow.peak, slow.largest)
    assert [(span.name, span.peak) for span in quick.closed] == [(span.name, span.peak) for span in slow.closed]
    assert sorted(map(repr, quick.at_peak)) == sorted(map(repr, slow.at_peak))
    assert caching.reserved_bytes(quick.events) == caching.reserved_bytes(slow.events)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("small-wan", None),
        pytest.param("small-wan", 8, marks=pytest.mark.campaign),
        ("small-magvit", 8),
        ("small-hunyuan-video15", 8),
    ],
)
def test_shortcuts_change_no_figure_of_videos_with_caches_or_masks(name, tile, monkeypatch):
    model = registry.MODELS.get(name)
    shape = (1, model.geometry.latent_channels, 5, 12, 12)
    plan = DecodePlan(tiling=Tiling(tile, 0.25) if tile else None)
    quick, _ = predicted(model, shape, plan, device="cuda")
    monkeypatch.setattr(repeat, "few_rows", lambda module: nullcontext())
    monkeypatch.setattr(repeat, "replayed", lambda *_: nullcontext())
    slow, _ = predicted(model, shape, plan, device="cuda")
    assert (quick.peak, quick.largest) == (slow.peak, slow.largest)
    assert [(span.name, span.peak) for span in quick.closed] == [(span.name, span.peak) for span in slow.closed]
    assert caching.reserved_bytes(quick.events) == caching.reserved_bytes(slow.events)


@pytest.mark.slow
def test_what_one_size_shows_of_calls_holds_for_another():
    plan, memo = DecodePlan(tiling=Tiling(8, 0.25)), {}
    model = registry.MODELS.get("small-wan")
    for side in (14, 20):
        shape = (1, model.geometry.latent_channels, 3, side, side)
        fresh, _ = predicted(model, shape, plan, device="cuda")
        known, _ = predicted(model, shape, plan, device="cuda", memo=memo)
        assert (known.peak, known.largest) == (fresh.peak, fresh.largest)
        assert caching.reserved_bytes(known.events) == caching.reserved_bytes(fresh.events)


class Counted(nn.Module):
    """Keeps its last input as a cache, in an attribute; says how often it was run."""

    runs: list[int] = []  # noqa: RUF012  of the class: no part of what a call leaves in the module

    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        self.runs.append(1)
        kept, self.last = self.last, x + 1
        return x * 2 if kept is None else x * 2 + kept


class Framewise(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Counted()


def test_a_cache_in_an_attribute_is_carried_on():
    ran, held = [], []

    def decode(module, x):
        Counted.runs.clear()
        for _ in range(9):
            module.decoder(x)
        ran.append(len(Counted.runs))
        held.append(module.decoder.last)
        return x.clone()

    quick, _ = walk(Framewise, decode, (1, 1024), decoder=lambda module: module.decoder)
    assert held.pop().shape == (1, 1024)
    slow, _ = walk(Framewise, decode, (1, 1024))
    held.clear()
    assert ran[0] < ran[1] == 9
    assert quick.peak == slow.peak
    assert [change for _, change in quick.events if abs(change) == 4096] == [
        change for _, change in slow.events if abs(change) == 4096
    ]


def test_a_script_is_booked_as_it_was():
    ledger, script = Ledger(), Script(((0, Holding(50, "a")), (~0, None), (1, Holding(30, "b")), (0, None)), (20,))
    old = ledger.hold(Holding(20, "old"))
    assert (script.rise, dict(script.stays)) == (60, {1: Holding(30, "b")})
    stays = ledger.play(script, [old])  # the worst so far: instant by instant
    assert (ledger.peak, ledger.alive) == (80, 30)
    ledger.release(stays[1])
    top = ledger.hold(Holding(500, "top"))
    ledger.release(top)
    with ledger.span("tile") as span:
        stays = ledger.play(script, [ledger.hold(Holding(20, "old"))])  # below it: at once
    assert (ledger.peak, ledger.alive, span.peak) == (500, 30, 80)
    ledger.release(stays[1])
    assert sum(change for _, change in ledger.events) == ledger.alive == 0


def test_a_decoder_that_grows_what_it_keeps_is_never_replayed():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = []

        def forward(self, x):
            self.kept.append(x + 1)
            return x * 2

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = Caching()

    ran = []

    def decode(module, x):
        for _ in range(5):
            module.decoder(x)
        ran.append(len(module.decoder.kept))
        return x.clone()

    ledger, _ = walk(Outer, decode, (1, 1024), decoder=lambda module: module.decoder)
    assert ran == [5]
    assert ledger.peak >= 5 * 4096


# ---------------------------------------------------------------- CUDA, without one


@pytest.mark.slow
def test_published_figures_of_qwen_image():
    model = configs.from_name("qwen-image")
    for side, published in ((512, 1.27), (1536, 9.53)):
        ledger, _ = predicted(model, (1, 16, 1, side // 8, side // 8), dtype=torch.float16, device="cuda")
        assert ledger.peak / 2**30 == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("channels", "dtype", "mask", "kernel"),
    [
        (64, torch.float16, None, "flash"),
        (256, torch.bfloat16, None, "flash"),
        (512, torch.float16, None, "efficient"),
        (64, torch.float32, None, "efficient"),
        (64, torch.float16, True, "efficient"),
        (3, torch.float16, True, "math"),
    ],
)
def test_the_kernel_that_a_device_would_take(channels, dtype, mask, kernel):
    query = torch.empty(1, 1, 4, channels, dtype=dtype)
    assert attention.choose(query, query, mask) == kernel


def test_no_matrix_of_scores_on_cuda():
    def attend(module, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    ledger, _ = walk(nn.Module, attend, (1, 1, 65536, 512), torch.float16, "cuda")
    out = 65536 * 512 * 2
    assert ledger.peak == pytest.approx(out + 2 * out, abs=4096)  # its output, and an accumulator in fp32


def test_channels_last_needs_no_workspace_on_cuda():
    def last(module, x):
        return module(x.contiguous(memory_format=torch.channels_last))

    def conv():
        return nn.Conv2d(64, 64, 3, padding=1, bias=False)

    plain_peak = walk(conv, lambda module, x: module(x), (1, 64, 128, 128), torch.float16, "cuda")[0].peak
    size, weights = 64 * 128 * 128 * 2, 64 * 64 * 9 * 2
    assert plain_peak == 3 * size + 2 * weights  # output, and NHWC copies of input, weights and output
    assert walk(conv, last, (1, 64, 128, 128), torch.float16, "cuda")[0].peak == 2 * size + 2 * weights


# ---------------------------------------------------------------- offload


@pytest.mark.slow
def test_offload_is_a_residency_schedule():
    shape = (1, 4, 16, 16)
    peaks = {mode: predicted(KL, shape, device="cuda", offload=mode)[0].peak for mode in schedule.MODES}
    assert peaks["model"] == peaks["none"]
    assert peaks["sequential"] == peaks["disk"] == peaks["group_leaf"] < peaks["group_block"] < peaks["none"]
    on_cpu = {mode: predicted(KL, shape, offload=mode) for mode in schedule.MODES}
    weights = on_cpu["none"][1]
    assert peaks["none"] - peaks["sequential"] > 0.9 * weights  # one layer's at a time
    assert {on_cpu[mode][0].peak for mode in schedule.MODES if mode != "disk"} == {on_cpu["none"][0].peak}
    assert on_cpu["disk"][0].peak == on_cpu["none"][0].peak - weights


def test_blocks_are_those_of_diffusers():
    module = KL.family.build(KL.config)
    mine = {
        (group.path, sum(tensor.numel() for tensor in group.tensors))
        for group in schedule._blocks("", module, set(module._group_offload_block_modules))
    }
    module.enable_group_offload(torch.device("cpu"), torch.device("cpu"), "block_level", num_blocks_per_group=1)
    theirs = set()
    for path, part in module.named_modules():
        registry_ = part.__dict__.get("_diffusers_hook")
        hook = registry_.get_hook("group_offloading") if registry_ is not None else None
        if hook is not None:
            group = hook.group
            inside = [tensor for one in group.modules for tensor in (*one.parameters(), *one.buffers())]
            tensors = {id(tensor): tensor for tensor in (*inside, *group.parameters, *group.buffers)}
            theirs.add((path, sum(tensor.numel() for tensor in tensors.values())))
    assert mine == theirs


def moves_of_diffusers(module, calls):
    """Onloads and offloads of a block-level offload with a stream, by diffusers' own hooks, its moves noted only."""
    from diffusers.hooks import group_offloading as theirs

    seen: list[tuple[str, str]] = []
    config = theirs.GroupOffloadingConfig(
        onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), non_blocking=True, record_stream=False,
        offload_type=theirs.GroupOffloadingType.BLOCK_LEVEL, low_cpu_mem_usage=True, num_blocks_per_group=1,
        stream=Stream(), block_modules=module._group_offload_block_modules,
    )  # fmt: skip
    names = {id(part): path for path, part in module.named_modules()}
    with pytest.MonkeyPatch.context() as patch:
        # on a CPU what was prefetched looks as if it were away, and is fetched again: no move on a GPU
        here: set[str] = set()

        def note(way):
            def noted(group):
                name = names[id(group.offload_leader)]
                if (name in here) is (way == "out"):
                    seen.append((way, name))
                here.symmetric_difference_update({name} if (name in here) is (way == "out") else ())

            return noted

        patch.setattr(theirs.ModuleGroup, "onload_", note("in"))
        patch.setattr(theirs.ModuleGroup, "offload_", note("out"))
        theirs._apply_group_offloading(module, config)
        seen.clear()
        here.clear()
        calls(module)
    return seen


class Stream:
    def synchronize(self):
        pass


@pytest.mark.slow
def test_a_stream_prefetches_in_diffusers_order():
    def calls(module):
        with torch.no_grad():
            for _ in range(3):
                module.decode(torch.zeros(1, 4, 4, 4))

    module = KL.load()
    ledger, mine = Ledger(), []
    hold, release = ledger.hold, ledger.release
    paths: dict[int, str] = {}

    def noted_hold(holding):
        number = hold(holding)
        paths[number] = holding.module
        mine.append(("in", holding.module))
        return number

    def noted_release(number):
        mine.append(("out", paths[number]))
        release(number)

    ledger.hold, ledger.release = noted_hold, noted_release
    with pytest.MonkeyPatch.context() as patch:  # on this machine the weights lie on the CPU, as if it were a device
        patch.setattr(schedule.torch, "device", lambda *_: type("Device", (), {"type": "cuda"}))
        with schedule.residency(module, "group_block", "cuda", ledger, stream=True):
            patch.undo()
            calls(module)
    squeezed = [move for move, before in zip(mine, [None, *mine]) if move != before]  # a group has many weights
    theirs = [move for move in moves_of_diffusers(KL.load(), calls) if move[1].startswith(("decoder", "post_quant"))]
    assert squeezed == theirs
    blocks = [f"decoder.up_blocks.{index}" for index in range(2)]
    first, second = (squeezed.index(("in", block)) for block in blocks)
    assert ("out", blocks[0]) in squeezed[first:second], "the first call fetches one at a time"
    begins = [place for place, move in enumerate(squeezed) if move == ("in", "decoder")][1]
    again = squeezed[begins:]
    assert again.index(("in", blocks[1])) < again.index(("out", blocks[0])), "from the second on two are there"


@pytest.mark.slow
def test_a_stream_holds_two_blocks_of_many_tiles_and_pins_copies():
    plan, shape = DecodePlan(tiling=Tiling(8, 0.25)), (1, 4, 20, 20)
    alone, _ = predicted(KL, shape, plan, device="cuda", offload="group_block")
    ahead, _ = predicted(KL, shape, plan, device="cuda", offload="group_block", stream=True)
    assert ahead.peak > alone.peak
    once, _ = predicted(KL, (1, 4, 8, 8), device="cuda", offload="group_block")
    first, _ = predicted(KL, (1, 4, 8, 8), device="cuda", offload="group_block", stream=True)
    assert first.peak == once.peak  # one call: the order is not known yet
    module = KL.load()
    pinned = schedule.pinned_bytes(module, "group_leaf")
    assert schedule.weights_bytes(module) <= pinned < 2 * schedule.weights_bytes(module)
    for mode, device in (("none", "cuda"), ("group_block", "cpu")):
        with pytest.raises(EvaluationError, match="a stream brings groups to a GPU"):
            predicted(KL, (1, 4, 8, 8), device=device, offload=mode, stream=True)


def test_blocks_that_a_decode_never_brings_in_are_refused():
    model = plain(TINY, Geometry(spatial=8, latent_channels=4))
    with pytest.raises(EvaluationError, match=r"group_block: decode runs decoder.*choose group_leaf"):
        predicted(model, (1, 4, 8, 8), device="cuda", offload="group_block")
    with pytest.raises(EvaluationError, match="unknown mode 'other'"), ExitStack() as stack:
        stack.enter_context(schedule.residency(nn.Module(), "other", "cuda", Ledger()))


# ---------------------------------------------------------------- the caching allocator, and the law


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),  # the small pool's segment
        ([MIB, MIB], 2 * MIB),  # both in one
        ([MIB + 1], 20 * MIB),  # the large pool's
        ([10 * MIB], 10 * MIB),  # from there on by itself, in units of 2 MiB
        ([11 * MIB], 12 * MIB),
        ([8 * MIB, 8 * MIB, 8 * MIB], 40 * MIB),  # two in the first segment
    ],
)
def test_segments_of_the_caching_allocator(sizes, reserved):
    assert caching.reserved_bytes(enumerate(sizes)) == reserved


def test_freed_neighbours_are_joined_and_the_smallest_fit_is_taken():
    held = [(0, 8 * MIB), (1, 8 * MIB)]  # one segment of 20 MiB
    freed = [(0, -8 * MIB), (1, -8 * MIB)]
    assert caching.reserved_bytes([*held, *freed, (2, 18 * MIB)]) == 20 * MIB
    assert caching.reserved_bytes([*held, freed[0], (2, 18 * MIB)]) == 38 * MIB
    assert caching.reserved_bytes([(0, 64 * MIB), (0, -64 * MIB), (1, 16 * MIB), (2, 40 * MIB)]) == 64 * MIB


def test_the_law_is_a_line_of_least_squares():
    found = law.fit({(10, 10): 1100, (20, 10): 2100, (30, 10): 3100})
    assert (found.constant_bytes, found.bytes_per_pixel, found.largest_error) == (100, 10.0, 0.0)
    assert found.peak(40, 10) == 4100
    assert (found.pixels(4100), found.pixels(50)) == (400, 0)
    assert law.fit({(1, 1): 100, (1, 2): 100, (1, 3): 160}).largest_error > 0.05
    with pytest.raises(ValueError, match="two sizes"):
        law.fit({(10, 20): 1, (20, 10): 2})


def test_each_stage_has_a_line_and_the_law_is_the_largest():
    found = law.fit_stages({(10, side): {"tile": 1000 + side, "assemble": 100 + 10 * side} for side in (10, 20, 200)})
    assert found.peak(10, 50) == 1050
    assert found.peak(10, 1000) == 10_100
    assert (found.constant_bytes, found.bytes_per_pixel) == (100, 1.0)  # of what leads at the largest size
    assert found.pixels(10_100) == 10_000
    assert found.pixels(500) == 0  # a tile alone needs more
    assert [(size, share) for size, _, _, share in found.rows()] == [("10x10", 0.0), ("10x20", 0.0), ("10x200", 0.0)]


def test_a_constant_has_the_values_that_its_source_says_and_nothing_else_has():
    def decode(module, latents):
        steps = torch.tensor([1008, 512], device=latents.device)
        last = torch.where(steps == steps[1])[0]
        return latents[..., : int(steps[0]) - 1006] * int(last == len(steps) - 1) + torch.arange(
            2, device=latents.device
        )

    for device in ("cpu", "cuda"):
        _, sample, _ = simulate(nn.Identity, decode, (1, 8), dtype=torch.float32, device=device, keep_fp32=kept_in_fp32)
        assert sample == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small-rae", "small-consistency"])
def test_decodes_that_ask_for_constants_are_the_allocators(name):
    model = registry.MODELS.get(name)
    if model.family.absent() is not None:
        pytest.skip(str(model.family.absent()))
    shape = (1, model.geometry.latent_channels, *(model.geometry.size or (16, 16)))
    ledger, _ = predicted(model, shape)
    assert ledger.peak == pytest.approx(measured(model, shape).allocated_peak_bytes, rel=0.005)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_that_is_not_compiled_holds_all_its_scores():
    pytest.importorskip("diffusers.models.autoencoders.ltx2_diffusion_decoder")
    from tests.models.test_videos_strided import TINY_DIFFUSION

    family = FAMILIES.get("LTX2VideoDiffusionDecoderModel")
    model = family.describe("tiny", TINY_DIFFUSION, lambda: None)
    shape = (1, 8, 2, 8, 8)
    ledger, _ = predicted(model, shape)
    assert ledger.peak == pytest.approx(measured(model, shape).allocated_peak_bytes, rel=0.1)
    # traced by dynamo first, the same operators let go of some tensors later


def test_a_decode_that_asks_for_a_value_is_refused_in_one_line():
    with pytest.raises(ModelError, match=r"^the model's code asks for a tensor's value .*: decode it to measure$"):
        simulate(
            lambda: torch.nn.Linear(1, 1),
            lambda module, latents: latents * latents.sum().item(),
            (1, 1),
            dtype=torch.float32,
            device="cpu",
            keep_fp32=kept_in_fp32,
        )
