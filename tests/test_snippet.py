"""A plan as a program in plain diffusers: it runs, and does to the class what the plan does."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch
from msgspec.structs import replace

from fidelity import registry, snippet
from fidelity.errors import EvaluationError, IllegalTiling
from fidelity.models.interface import interface
from fidelity.optimizations import apply_plan, inapplicable
from fidelity.records import Case, DecodePlan, Temporal, Tiling

registry.load_plugins()
NAMES = [name for name, model in registry.MODELS.items() if model.config.get("_class_name") == model.family.name]
FULL = DecodePlan(slicing=True, tiling=Tiling(4, 0.25), temporal=Temporal(2, 0.0))


def shape_of(model, batch=1):
    geometry = model.geometry
    size = geometry.size or (6, 9)
    return (batch, geometry.latent_channels, *((4,) if geometry.video else ()), *size)


def plan_for(model, shape, plan=FULL):
    """The plan without what this class cannot do to latents of this shape."""
    for setting, nothing in (("slicing", False), ("tiling", None), ("temporal", None)):
        alone = DecodePlan(**{setting: getattr(plan, setting)})
        try:
            applies = inapplicable(alone, model, shape) is None
            snippet.settings(model, alone)
        except IllegalTiling:
            applies = False
        if setting == "slicing":
            applies = applies and "use_slicing" in interface(model.family.name).attributes
        if not applies:
            plan = replace(plan, **{setting: nothing})
    return plan


def run(code):
    """What a program prints. It may set torch's global state."""
    told = io.StringIO()
    with torch.no_grad(), contextlib.redirect_stdout(told):
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    return told.getvalue()


def lines(*said):
    return lambda script: script.say(*said)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_program_of_every_model_runs(name):
    model = registry.MODELS.get(name)
    shape = shape_of(model)
    plan = plan_for(model, shape)
    if name == "small-tiny-f4":  # in tiles, its class raises: test_upstream knows
        plan = replace(plan, tiling=None)
    code = snippet.code(model, plan, shape)
    assert "import fidelity" not in code
    told = run(code)
    assert re.search(r"^full decode( \d+)+$", told, re.MULTILINE), told
    assert re.search(r"^this decode( \d+)+$", told, re.MULTILINE), told


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_settings_set_what_the_plan_sets(name):
    model = registry.MODELS.get(name)
    plan = plan_for(model, shape_of(model, 2))

    def flags(module):
        return {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str))}

    module = model.load()
    before = flags(module)
    exec(snippet.settings(model, plan), {"vae": module, "torch": torch})
    pasted = flags(module)
    other = model.load()
    with apply_plan(other, plan, model=model, device="cpu"):
        assert flags(other) == pasted
    assert plan == DecodePlan() or pasted != before


@pytest.mark.parametrize("offload", ["none", "model", "sequential", "group_block", "group_leaf", "disk"])
@pytest.mark.parametrize("dtype", [{}, {"dtype": "bf16"}, {"dtype": "fp16", "force_upcast": True}], ids=str)
def test_every_dtype_and_offload_runs(offload, dtype, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the disk offload writes beside
    model = registry.MODELS.get("small-tiny-f4")
    told = run(snippet.code(model, DecodePlan(offload=offload, **dtype), (1, 4, 4, 4)))
    error = float(re.search(r"relative RMSE (\S+)", told)[1])
    most = {"": 0.0, "bf16": 0.1, "fp16": 0.01}[dtype.get("dtype", "")]
    assert error <= most, told
    assert bool(error) == bool(dtype), told


def test_a_decode_that_raises_is_told():
    model = registry.MODELS.get("small-tiny-f4")
    code = snippet.program(model, (1, 4, 4, 4), lines("sample = vae.decode(latents[:, :3]).sample"))
    assert re.search(r"^RuntimeError: .*channels", run(code), re.MULTILINE)


def test_a_sample_of_another_size_is_not_compared():
    model = registry.MODELS.get("small-tiny-f4")
    told = run(snippet.program(model, (1, 4, 4, 4), lines("sample = full[..., :8]")))
    assert told == "full decode 1 3 16 16\nthis decode 1 3 16 8\n"


def test_weights_come_from_the_models_own_folder():
    code = snippet.code(registry.MODELS.get("reference-kl"), DecodePlan(), (1, 4, 8, 8))
    assert re.search(r"vae = AutoencoderKL.from_pretrained\('.*reference_kl'\)", code)


def test_weights_come_from_a_single_file(tmp_path):
    from safetensors.torch import save_file

    model = registry.MODELS.get("small-tiny-f4")
    file = tmp_path / "weights.safetensors"
    zeros = {key: torch.zeros_like(value) for key, value in model.load().state_dict().items()}
    save_file(zeros, file)
    told = run(snippet.program(_replaced(model, source=str(file)), (1, 4, 4, 4), lines("print(full.std().item())")))
    assert told.splitlines()[-1] == "0.0"


def _replaced(record, **about):
    from dataclasses import replace as replaced

    return replaced(record, **about)


def test_settings_are_only_what_the_plan_turns_on():
    model = registry.MODELS.get("reference-kl")
    assert snippet.settings(model, DecodePlan()) == ""
    assert snippet.settings(model, DecodePlan(slicing=True)) == "vae.enable_slicing()"
    assert snippet.settings(model, DecodePlan(options={"mine": 3})) == "# mine = 3: no option of diffusers"
    assert snippet.settings(model, DecodePlan(offload="group_leaf", options={"offload_stream": True})) == (
        'vae.enable_group_offload(onload_device=torch.device("cuda"), offload_device=torch.device("cpu"), '
        'offload_type="leaf_level", use_stream=True)'
    )
    with pytest.raises(IllegalTiling):
        snippet.settings(registry.MODELS.get("small-wan"), DecodePlan(tiling=Tiling(5, 0.33)))


def test_a_case_without_a_program_says_why():
    model = registry.MODELS.get("small-wan")
    case = Case("small-wan", "small", DecodePlan(tiling=Tiling(5, 0.33)))
    assert snippet.of_case(case, model, (1, 4, 4, 6, 9)).startswith("# AutoencoderKLWan cannot cut")
    own = _replaced(model, config={})
    assert snippet.of_case(case, own, (1, 4, 4, 6, 9)).startswith("# small-wan is no class of diffusers")


# ---------------------------------------------------------------- the echo


TINY = registry.MODELS.get("small-tiny")


def test_an_echo_writes_down_what_is_done_to_it():
    def act(vae):
        vae.use_tiling = not vae.use_tiling
        vae.enable_tiling(8, stride=(1, 2))
        vae.decoder.pad = "constant"
        vae.decode(vae.encoder(1)[:1]).sample.shape  # noqa: B018  (used, so no line of its own)
        vae.tile_sample_min_size = vae.tile_sample_min_size // 2
        vae.tile_latent_min_size = vae.tile_sample_min_size // 8
        vae.disable_tiling()

    assert snippet.recorded(TINY, act) == [
        "vae.use_tiling = True",
        "vae.enable_tiling(8, stride=(1, 2))",
        "vae.decoder.pad = 'constant'",
        "vae.tile_sample_min_size = 256",
        "vae.tile_latent_min_size = 32",
        "vae.disable_tiling()",
    ]


def test_a_call_within_a_call_is_no_line_of_its_own():
    assert snippet.recorded(TINY, lambda vae: vae.encode(vae.decode(1))) == ["vae.encode(vae.decode(1))"]
    assert snippet.recorded(TINY, lambda vae: setattr(vae, "x", [vae.decode(1)])) == ["vae.x = [vae.decode(1)]"]


def test_what_a_class_does_not_have_is_not_there():
    assert snippet.recorded(TINY, lambda vae: vae.decode(hasattr(vae, "use_framewise_decoding"))) == [
        "vae.decode(False)"
    ]
    with pytest.raises(AttributeError):
        snippet.recorded(TINY, lambda vae: vae.enable_tilling())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.25, "0.25"),
        ((1,), "(1,)"),
        ([1, 2], "[1, 2]"),
        (None, "None"),
        ("a", "'a'"),
        (torch.tensor([0.5]), "torch.tensor([0.5])"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.Generator().manual_seed(7), "torch.Generator().manual_seed(7)"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,  # the same in every process
)
def test_values_are_said_as_python(value, text):
    assert snippet.said(value) == text


@pytest.mark.parametrize("act", [lambda vae: vae.decode(1) + 1, lambda vae: 2 * vae.decode(1),
                                 lambda vae: int(vae.decode(1)), lambda vae: list(vae.decode(1))])  # fmt: skip
def test_what_no_line_says_is_refused(act):
    with pytest.raises(EvaluationError, match=r"vae\.decode\(1\) is computed with"):
        snippet.recorded(TINY, act)


def test_arguments_of_the_decode_are_the_familys():
    model = registry.MODELS.get("small-svd")
    code = snippet.code(model, DecodePlan(), (2, 4, 3, 6, 9))
    assert "latents = torch.randn(6, 4, 6, 9)" in code
    assert "full = vae.decode(latents, num_frames=3).sample" in code


def test_a_decode_past_the_class_is_refused():
    class Past(type(TINY.family)):
        def decode(self, module, latents):
            return module.decoder(latents)

    with pytest.raises(EvaluationError, match="does not call its class's decode"):
        snippet.code(_replaced(TINY, family=Past()), DecodePlan(), (1, 4, 6, 9))
