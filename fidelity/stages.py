"""In which stage of a decode, or of a pipeline around it, a traceback stood.

Frames of torch, numpy and of blocks that encoders, decoders and denoisers share say nothing by themselves: the
innermost of the others decides, by its file, its function and the line that ran.
"""

from __future__ import annotations

import re
from typing import Literal

from fidelity.exhaustion import Frame

Stage = Literal["tile", "blend", "assemble", "decode", "convert", "upcast", "denoise", "text", "load", "onload",
                "encode", "unknown"]  # fmt: skip

STAGES: dict[Stage, str] = {
    "tile": "decoding one tile",
    "blend": "blending a tile into its neighbours",
    "assemble": "putting the output together",
    "decode": "decoding the whole picture at once",
    "convert": "converting the decoded sample to an image",
    "upcast": "casting the autoencoder to fp32",
    "denoise": "the denoiser, before any decode",
    "text": "the text encoder, before any decode",
    "load": "bringing a model's weights to the device",
    "onload": "bringing offloaded weights back in",
    "encode": "encoding, which is no decode",
    "unknown": "not told by the log",
}
_NEUTRAL = re.compile(
    r"/torch/|/numpy/|/PIL/|_contextlib\.py|accelerate_utils\.py|/hooks/hooks\.py|/(?:resnet|upsampling|downsampling|"
    r"attention|attention_processor|attention_dispatch|normalization|activations|unet_2d_blocks|unet_3d_blocks)\.py"
)
_LIBRARY = re.compile(r"/torch/|/numpy/|/PIL/")
_AUTOENCODER = re.compile(
    r"/autoencoders?/|autoencoder|/vae\.py|/vae_|_vae\.py|/vq_model|/diffusionmodules/model\.py|first_stage|/comfy/sd\.py|"
    r"/ldm_patched/modules/sd\.py|/fcbh/sd\.py", re.IGNORECASE
)  # fmt: skip
_DENOISER = re.compile(
    r"/transformers/transformer_|/transformer_\w+\.py|/unets/|/unet_\w+\.py|openaimodel\.py|/comfy/samplers\.py|"
    r"/comfy/model_base\.py|k_diffusion"
)
_TILED = re.compile(r"tiled_decode|decode_tiled|tiled_scale|tiled_vae")
_CONVERSION = re.compile(r"/(?:image_processor|video_processor|export_utils)\.py|tensor2vid")
_OFFLOAD = re.compile(r"accelerate/hooks\.py|accelerate/utils/(?:modeling|offload)\.py|group_offloading\.py")
_MOVING = re.compile(r"/nn/modules/module\.py$")
_MOVES = re.compile(r"\.(?:to|cuda|half|float|bfloat16)\(|from_pretrained")
_CAST = re.compile(r"\bvae\.(?:to\(.*float32|float\()|upcast_vae\(")


def stage_of(frames: tuple[Frame, ...]) -> tuple[Stage, Frame | None]:
    """The stage in which these frames (outermost first) stood, and the frame that says so."""
    moves = any(_MOVING.search(each.path) and each.function in ("convert", "_apply") for each in frames[-4:])
    cast = next((each for each in frames if _CAST.search(each.text) or each.function == "upcast_vae"), None)
    if moves and cast is not None:
        return "upcast", cast
    for place in range(len(frames) - 1, -1, -1):
        stage = _one(frames, place, moves)
        if stage == "tile":  # the line that calls the decoder tells more than the decoder's own
            cutting = [each for each in frames if _TILED.search(each.function)]
            return stage, cutting[-1] if cutting else frames[place]
        if stage is not None:
            return stage, frames[place]
    return "unknown", None


def _one(frames: tuple[Frame, ...], place: int, moves: bool) -> Stage | None:
    """What one frame says by itself, all deeper ones having said nothing."""
    frame = frames[place]
    path, text, function = frame.path, frame.text, frame.function
    if _OFFLOAD.search(path):
        return None if function in ("new_forward", "forward") else "onload"
    if _CONVERSION.search(path):
        return "convert"
    if _NEUTRAL.search(path):
        return None
    if moves:
        return "load" if function == "to" or _MOVES.search(text) else None
    if _AUTOENCODER.search(path):
        return _in_autoencoder(frames, place)
    if _DENOISER.search(path):
        return "denoise"
    if "/transformers/models/" in path:
        return "text"
    return _by_call(text, function)


def _in_autoencoder(frames: tuple[Frame, ...], place: int) -> Stage | None:
    frame = frames[place]
    text, function = frame.text, frame.function
    if function.startswith("blend"):
        return "encode" if _encodes(frames[:place]) else "blend"
    if _encodes(frames[: place + 1]):
        return "encode"
    # what one tile's own frames are joined to is a tile still
    joins = ("torch.cat(" in text or "torch.stack(" in text) and "cat(time" not in text
    if joins and (_TILED.search(function) or function in ("decode", "_decode")):
        return "assemble"
    if re.search(r"\.(?:cpu|float|numpy)\(\)", text) and place == len(frames) - 1:
        return "convert"
    if any(_TILED.search(each.function) for each in frames[: place + 1]):
        return "tile"
    return "decode" if any("decode" in each.function for each in frames[: place + 1]) or "decode" in text else None


def _encodes(frames: tuple[Frame, ...]) -> bool:
    """Whether the innermost of encode and decode is an encode."""
    named = [f.function for f in frames if re.search(r"encode", f.function) and _AUTOENCODER.search(f.path)]
    decodes = any("decode" in f.function and _AUTOENCODER.search(f.path) for f in frames)
    return bool(named) and not decodes


def _by_call(text: str, function: str) -> Stage | None:
    """What a pipeline's or a user's own line calls, where nothing deeper spoke."""
    calls: tuple[tuple[Stage, str], ...] = (
        ("convert", r"postprocess|pt_to_numpy|numpy_to_pil|fromarray|\.numpy\(\)|astype\(|\.cpu\(\)"),
        ("decode", r"\bvae\.decode\(|first_stage_model\.decode|decode_latents|decode_first_stage"),
        ("denoise", r"\b(?:unet|transformer|denoiser)\("),
        ("text", r"\btext_encoder(?:_\d)?\(|encode_prompt\("),
        ("load", r"from_pretrained\(|\.to\(|\.cuda\("),
    )
    return next((stage for stage, pattern in calls if re.search(pattern, text)), None)


def innermost(frames: tuple[Frame, ...]) -> Frame | None:
    """The innermost frame that is not of torch or numpy itself."""
    return next((each for each in reversed(frames) if not _LIBRARY.search(each.path)), None)


def operator_of(frames: tuple[Frame, ...]) -> str:
    """The innermost line that the log shows, as far as it is a call."""
    called = re.findall(r"([\w.]+)\(", frames[-1].text) if frames else []
    torchs = [each for each in called if each.startswith(("torch.", "F."))]
    return (torchs or called or [""])[0].lstrip(".")
