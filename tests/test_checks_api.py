"""Checks of diffusers' own calls: each finds its fault, and is clean where the fault is mended."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType

import pytest
import torch

from fidelity import checks, registry
from fidelity.evaluator import Evaluator
from fidelity.models.interface import Interface, interface
from fidelity.records import Case, DecodePlan, Temporal, Tiling
from fidelity.registry import CHECKS

registry.load_plugins()
SIZE = (6, 9)
TILED = DecodePlan(tiling=Tiling(4, 0.25))


def shape_of(model, batch=2):
    geometry = model.geometry
    return (batch, geometry.latent_channels, *((4,) if geometry.video else ()), *SIZE)


def judge(tmp_path, name, check, plan=None, mend=None):
    """The result of a check on a model whose every instance `mend(module)` has changed."""
    model = registry.MODELS.get(name)
    if mend is not None:
        load = model.load

        def mended():
            module = load()
            mend(module)
            return module

        model = replace(model, load=mended)
    latents = torch.randn(shape_of(model), generator=torch.Generator().manual_seed(3))
    bench = Evaluator({name: model}, {}, tmp_path)
    bench.make_latents = lambda *_: latents
    about, plan = CHECKS.get(check), plan or DecodePlan()
    assert about.reason(plan, tuple(latents.shape), model) is None
    return bench.case(Case(name, "drawn", plan, limits={checks.NAME: checks.limit(about)}, check=check))


def method(module, name, function):
    """Replace a method of this instance; the fingerprint of the instance begins with it."""
    setattr(module, name, MethodType(function, module))


# ---------------------------------------------------------------- enable_tiling


def strides_follow(module):
    """enable_tiling as it should be: a stride that is not given is three quarters of the tile, and 0 is refused."""
    whole = type(module).enable_tiling

    def enable_tiling(self, **given):
        if 0 in given.values():
            raise ValueError("0")
        for side in ("height", "width"):
            tile = given.get(f"tile_sample_min_{side}")
            if tile is not None:
                given.setdefault(f"tile_sample_stride_{side}", max(32, tile * 3 // 4 // 32 * 32))
        whole(self, **given)

    method(module, "enable_tiling", enable_tiling)


def tiling_forgets(module):
    before = {name: value for name, value in vars(module).items() if name.startswith("tile_")}

    def disable_tiling(self):
        vars(self).update(before)
        self.use_tiling = False

    method(module, "disable_tiling", disable_tiling)


def test_a_tile_alone_crops_the_picture(tmp_path):
    result = judge(tmp_path, "small-dc", "tile_alone")
    assert (result.verdict, result.diagnosis) == ("fail", ("geometry",))
    f = registry.MODELS.get("small-dc").geometry.spatial
    cropped, whole = f"1×3×{3 * f}×{3 * f}", f"1×3×{6 * f}×{9 * f}"
    assert f"{whole} became {cropped} in 1 calls" in result.reasons[0].message


def test_a_tile_alone_passes_where_the_stride_follows(tmp_path):
    assert judge(tmp_path, "small-dc", "tile_alone", mend=strides_follow).verdict == "pass"


def test_a_zero_is_ignored_or_refused(tmp_path):
    result = judge(tmp_path, "small-dc", "zero_argument")
    assert (result.verdict, result.diagnosis) == ("fail", ("not_engaged",))
    assert "tile_sample_min_height stayed 512" in result.reasons[0].message
    assert judge(tmp_path, "small-dc", "zero_argument", mend=strides_follow).verdict == "pass"


def test_sizes_of_ones_own_survive_disable_or_not(tmp_path):
    result = judge(tmp_path, "small-dc", "disable_forgets")
    assert (result.verdict, result.diagnosis) == ("fail", ("state_leak",))
    assert "tile_sample_min_height 512 → " in result.reasons[0].message
    assert judge(tmp_path, "small-dc", "disable_forgets", mend=tiling_forgets).verdict == "pass"


def test_arguments_give_what_attributes_give(tmp_path):
    def deaf(module):
        method(module, "enable_tiling", lambda self, **_: setattr(self, "use_tiling", True))

    assert judge(tmp_path, "small-dc", "tiling_arguments", TILED).verdict == "pass"
    result = judge(tmp_path, "small-dc", "tiling_arguments", TILED, mend=deaf)
    assert (result.verdict, result.diagnosis) == ("fail", ("not_as_specified",))


def test_disable_restores_the_decode(tmp_path):
    def stays_on(module):
        method(module, "disable_tiling", lambda self: None)

    assert judge(tmp_path, "small-tiny", "disable_restores").verdict == "pass"
    result = judge(tmp_path, "small-dc", "disable_restores", mend=lambda m: (strides_follow(m), stays_on(m)))
    assert (result.verdict, result.diagnosis) == ("fail", ("state_leak",))


def test_height_and_width_have_tiles_of_their_own(tmp_path):
    def swapped(module):
        """Decides by the other side's tile."""

        def _decode(self, z):
            high, wide = z.shape[-2:]
            if self.use_tiling and (wide > self.tile_latent_min_height or high > self.tile_latent_min_width):
                return self.tiled_decode(z, return_dict=False)[0]
            return self.decoder(z)

        method(module, "_decode", _decode)

    assert judge(tmp_path, "small-dc", "one_way").verdict == "pass"
    result = judge(tmp_path, "small-dc", "one_way", mend=swapped)
    assert (result.verdict, result.diagnosis) == ("fail", ("geometry",))


# ---------------------------------------------------------------- what comes out


def test_a_batch_is_its_items(tmp_path):
    def mixes(module):
        whole = type(module).decode
        method(module, "decode", lambda self, z, **how: whole(self, z - z.mean(0), **how))

    assert judge(tmp_path, "small-tiny", "batch_alone").verdict == "pass"
    result = judge(tmp_path, "small-tiny", "batch_alone", mend=mixes)
    assert (result.verdict, result.diagnosis) == ("fail", ("not_as_specified",))


def test_a_batch_that_raises_is_an_error(tmp_path):
    result = judge(tmp_path, "small-hunyuan-video15", "batch_alone")
    assert (result.verdict, result.diagnosis) == ("error", ("crash",))


def test_the_tuple_holds_the_sample(tmp_path):
    def twisted(module):
        whole = type(module).decode

        def decode(self, z, return_dict=True, **how):
            output = whole(self, z, **how)
            return output if return_dict else (-output.sample,)

        method(module, "decode", decode)

    assert judge(tmp_path, "small-svd", "tuple_output").verdict == "pass"
    assert judge(tmp_path, "small-tiny", "tuple_output", mend=twisted).diagnosis == ("not_as_specified",)
    result = judge(tmp_path, "small-tiny", "tuple_output", mend=lambda m: method(
        m, "decode", lambda self, z, return_dict=True, **_: type(self).decode(self, z)))  # fmt: skip
    assert result.verdict == "error"
    assert "gave no tuple" in result.reasons[0].message


def test_half_stays_half(tmp_path):
    half = DecodePlan(dtype="bf16")
    assert judge(tmp_path, "small-tiny", "half_output", half).verdict == "pass"
    tiled = judge(tmp_path, "small-tiny", "half_output", DecodePlan(dtype="bf16", tiling=Tiling(4, 0.25)))
    assert (tiled.verdict, tiled.diagnosis) == ("fail", ("dtype",))
    assert any("the sample is float32" in reason.message for reason in tiled.reasons)


# ---------------------------------------------------------------- frames


@pytest.mark.slow
def test_chunks_that_are_a_frame_late_are_found(tmp_path):
    plan = DecodePlan(temporal=Temporal(2, 0.0))
    result = judge(tmp_path, "small-ltx", "frames_aligned", plan)
    assert (result.verdict, result.diagnosis) == ("fail", ("misaligned",))
    assert "1 late" in result.reasons[0].message
    assert judge(tmp_path, "small-hunyuan-video", "frames_aligned", plan).verdict == "pass"


@pytest.mark.slow
def test_batches_of_frames_that_forget_are_found(tmp_path):
    def remembers(module):
        for part in module.modules():
            if hasattr(part, "pad_mode"):
                part.pad_mode, part.conv.padding = "constant", part.const_padding_conv3d

    result = judge(tmp_path, "small-mochi", "framewise_remembers")
    assert (result.verdict, result.diagnosis) == ("fail", ("temporal_seam",))
    assert judge(tmp_path, "small-mochi", "framewise_remembers", mend=remembers).verdict == "pass"


@pytest.mark.slow
def test_batches_of_frames_that_shrink_the_picture_are_found(tmp_path):
    def pads(module):
        for part in module.modules():
            if hasattr(part, "pad_mode"):
                part.conv.padding = part.const_padding_conv3d
        method(module, "decode", lambda self, z, **_: type("Output", (), {"sample": z[..., : 2 + (
            0 if self.use_framewise_decoding else 1)]})())  # fmt: skip

    assert judge(tmp_path, "small-mochi", "framewise_size").verdict == "error"  # nothing is left of it
    result = judge(tmp_path, "small-mochi", "framewise_size", mend=pads)
    assert (result.verdict, result.diagnosis) == ("fail", ("geometry",))


# ---------------------------------------------------------------- encoding


def test_a_sliced_encode_is_each_alone(tmp_path):
    def reversed_(module):
        whole = type(module).encode

        def encode(self, x, **how):
            return whole(self, x.flip(0) if self.use_slicing else x, **how)

        method(module, "encode", encode)

    assert judge(tmp_path, "small-dc", "encode_sliced").verdict == "pass"
    assert judge(tmp_path, "small-dc", "encode_sliced", mend=reversed_).diagnosis == ("not_as_specified",)


def test_encoding_gives_the_latents_size_back(tmp_path):
    def halves(module):
        whole = type(module).encode
        method(module, "encode", lambda self, x, **how: whole(self, x[..., : x.shape[-1] // 3], **how))

    assert judge(tmp_path, "small-dc", "encode_size").verdict == "pass"
    result = judge(tmp_path, "small-dc", "encode_size", mend=halves)
    assert result.diagnosis == ("geometry",)
    assert "were encoded again to 1×" in result.reasons[0].message


def test_an_encode_leaves_the_decode_alone(tmp_path):
    def sticks(module):
        whole = type(module).encode

        def encode(self, x, **how):
            self.decoder.conv_out.padding_mode = "circular"
            return whole(self, x, **how)

        method(module, "encode", encode)

    assert judge(tmp_path, "small-dc", "decode_after_encode").verdict == "pass"
    assert "state_leak" in judge(tmp_path, "small-flux2", "decode_after_encode", mend=sticks).diagnosis


def test_a_tiled_encode_keeps_every_part_in_its_place(tmp_path):
    def shifted(module):
        whole = type(module).tiled_encode

        def tiled_encode(self, x, return_dict=True):
            return (whole(self, x, return_dict=False)[0].roll(1, -1),)

        method(module, "tiled_encode", tiled_encode)

    assert judge(tmp_path, "small-dc", "encode_tiled", TILED).verdict == "pass"
    result = judge(tmp_path, "small-dc", "encode_tiled", TILED, mend=shifted)
    assert (result.verdict, result.diagnosis) == ("fail", ("geometry",))


def test_a_tiled_encode_that_is_not_tiled_proves_nothing(tmp_path):
    def plain(module):
        method(module, "tiled_encode", lambda self, x, return_dict=True: (self.encoder(x),))

    result = judge(tmp_path, "small-dc", "encode_tiled", TILED, mend=plain)
    assert result.verdict == "error"
    assert "not cut into tiles" in result.reasons[0].message


# ---------------------------------------------------------------- who has the call


@pytest.mark.parametrize(
    ("check", "model", "words"),
    [
        ("tile_alone", "small-vq", "VQModel cannot tile"),
        ("zero_argument", "small-tiny", "AutoencoderTiny.enable_tiling takes no arguments"),
        ("one_way", "small-tiny", "AutoencoderTiny has square tiles only"),
        ("tuple_output", "small-vidtok", "AutoencoderVidTok.decode takes no return_dict"),
        ("encode_tiled", "small-tiny", "AutoencoderTiny has no tiled_encode"),
        ("encode_sliced", "small-vq", "VQModel cannot slice"),
        ("framewise_remembers", "small-wan", "AutoencoderKLWan has no batches of frames"),
    ],
)
def test_a_class_without_the_call_is_not_applicable(check, model, words):
    about = registry.MODELS.get(model)
    plan = TILED if CHECKS.get(check).needs == "tiling" else DecodePlan()
    assert CHECKS.get(check).reason(plan, shape_of(about), about) == words


@pytest.mark.parametrize(
    "cls", ["AutoencoderKL", "AutoencoderKLWan", "AutoencoderTiny", "VQModel", "AutoencoderVidTok"]
)
def test_an_interface_is_that_of_the_class_itself(cls):
    import inspect

    import diffusers

    real, read = getattr(diffusers, cls), interface(cls)
    for name in ("encode", "decode", "enable_tiling", "disable_tiling", "tiled_decode", "tiled_encode"):
        function = getattr(real, name, None)
        assert (function is not None) == (name in read.calls), name
        if function is not None:
            assert read.calls[name] == tuple(inspect.signature(function).parameters)[1:], name


def test_no_class_has_an_empty_interface():
    assert interface("AutoencoderOfNobody") == Interface()


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        name
        for name, about in CHECKS.items()
        if getattr(about.function, "__module__", "").endswith(("api", "outputs", "encodes")) and about.code is not None
    ],
)
def test_every_program_of_a_check_runs(check):
    from tests.test_snippet import run

    about = CHECKS.get(check)
    settings = {"tiling": {"tiling": Tiling(4, 0.25)}, "precision": {"dtype": "bf16"}}
    plan = DecodePlan(**settings.get(about.needs, {}))
    for name in ("small-dc", "small-mochi"):
        model = registry.MODELS.get(name)
        if about.reason(plan, shape_of(model), model) is None:
            told = run(about.code(model, plan, shape_of(model)))
            assert told.startswith("full decode "), told
            assert len(told.splitlines()) > 1, told
            shrinks = (check, name) == ("framewise_size", "small-mochi")  # what the program is there to show
            assert ("Error" in told) == shrinks, told
