"""Why a decode ran out of memory, from its log alone: in which stage, and what to change.

The frames of the traceback say the stage; the figures of the allocator say whether a smaller tile helps, or whether it
is what else lies in memory that must go. Every statement shows its arithmetic, and what a log cannot tell is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from fidelity.errors import RequestError
from fidelity.exhaustion import Exhaustion, Frame, parse
from fidelity.prediction import in_units
from fidelity.stages import STAGES, Stage, innermost, operator_of, stage_of

Change = Literal["tile", "overlap", "assembly", "conversion", "dtype", "slicing", "resident", "fragmentation"]

ALIVE = 8
"""Tensors of one size that a decoder holds at once, at most: predicted decodes hold 5.1 times their largest tensor in
AutoencoderKL, workspace included, and 7.4 in AutoencoderKLWan (`fidelity predict`: peak − weights over `largest`)."""
SMALL, SMALL_BLOCK, LARGE_BLOCK = 2**20, 2 * 2**20, 20 * 2**20
"""What CUDA's allocator asks the driver for: 2 MiB for a tensor of up to 1 MiB, 20 MiB for larger ones below that, else
multiples of 2 MiB (c10/cuda/CUDACachingAllocator.cpp, `get_allocation_size`)."""

CHANGES: dict[Change, str] = {
    "tile": "a smaller tile (or tiles at all)",
    "overlap": "a smaller overlap",
    "assembly": "where the output is put together: on the CPU, tile by tile",
    "conversion": "the conversion: item by item, in uint8",
    "dtype": "the dtype: half precision",
    "slicing": "slicing: one item of the batch at a time",
    "resident": "what else is in memory: other models, other processes",
    "fragmentation": "the allocator, whose room is in pieces: expandable_segments:True, or empty_cache before",
}


class Explanation(Struct, frozen=True):
    """What a log of memory that ran out tells."""

    stage: Stage
    where: str
    """The frame that says so; empty where none does."""
    module: str
    """The innermost frame outside of torch and numpy; empty where there is none."""
    operator: str
    """The innermost call that the log shows; empty where it shows none."""
    change: tuple[Change, ...]
    """What to change, what helps most first; none where that cannot be told."""
    derived: tuple[str, ...]
    """What follows, with its arithmetic."""
    untold: tuple[str, ...]
    """What the log does not tell."""
    refusal: Exhaustion


def explain(text: str, name: str = "the log") -> Explanation:
    """Explain the last refusal of memory in a log.

    Raises RequestError where there is none, or where its frames have nothing to do with an autoencoder or a pipeline.
    """
    refusal = parse(text, name)
    stage, frame = stage_of(refusal.frames)
    if refusal.stage:
        stage = next((name for name, words in STAGES.items() if words == refusal.stage), stage)
    elif stage == "unknown" and refusal.frames:
        raise RequestError(
            f"{name}: memory ran out, but no frame of an autoencoder, a pipeline or an image processor led there: the "
            f"innermost is {refusal.frames[-1].where}; looked for diffusers' and ComfyUI's files"
        )
    where, inner = (each.where if each is not None else "" for each in (frame, innermost(refusal.frames)))
    where = where or refusal.module
    return Explanation(stage, where, inner, operator_of(refusal.frames), *_judged(stage, refusal, frame), refusal)


# ---------------------------------------------------------------- what follows


def _judged(
    stage: Stage, refusal: Exhaustion, frame: Frame | None
) -> tuple[tuple[Change, ...], tuple[str, ...], tuple[str, ...]]:
    pieces: list[Change] = ["fragmentation"] if _is_fragmented(refusal) else []
    change: list[Change] = [] if stage in OTHERS else [*pieces]
    derived = [*_sums(refusal), *(refusal.message.split("; ")[1:] if refusal.stage else ())]
    text = frame.text if frame is not None else ""
    if stage in ("tile", "decode", "convert") or "cat(result_rows" in text:
        change += ["resident"] if _others_hold_most(refusal) else []
        derived += _of_others(refusal)
    if stage in ("tile", "decode"):
        change += ["slicing"] if _batch(refusal) > 1 else []
        change += ["tile", "dtype"]
        derived += _for_tiles(stage, refusal)
    elif stage in OTHERS:
        change += OTHERS[stage]
        if stage in ("blend", "assemble"):
            derived += _for_output(stage, refusal, text)
        elif stage == "convert":
            derived += _for_conversion(refusal)
        else:
            derived.append(WHY.get(stage, f"no autoencoder was decoding ({STAGES[stage]}): tile, overlap and dtype of "
                                          "the decode change nothing here"))  # fmt: skip
    return tuple(dict.fromkeys([*change, *pieces])), tuple(derived), tuple(_untold(stage, refusal))


OTHERS: dict[Stage, tuple[Change, ...]] = {
    "blend": ("overlap", "assembly"), "assemble": ("assembly", "dtype"), "convert": ("conversion",),
    "upcast": ("dtype",), "encode": ("tile",),
    "denoise": ("resident",), "text": ("resident",), "load": ("resident",), "onload": ("resident",),
}  # fmt: skip
"""What to change where the decoder itself was not running."""
WHY: dict[Stage, str] = {
    "upcast": "the pipeline casts its autoencoder to fp32 before it decodes (force_upcast): weights and every tensor "
    "of the decode take 4 / 2 = 2 times the bytes of fp16; bf16, or weights that do not overflow in fp16, need no cast",
    "encode": "it is the encoder that ran out: tiles cut an encode as they cut a decode",
}


def _sums(refusal: Exhaustion) -> Iterator[str]:
    """What the figures add up to."""
    asked, total, free, held, idle = (
        refusal.requested, refusal.total, refusal.free, refusal.allocated, refusal.idle
    )  # fmt: skip
    if asked is None:
        return
    if total is not None and held is not None:
        parts = [f"{in_units(held)} in torch's tensors"]
        parts += [f"{in_units(idle)} reserved and idle"] if idle is not None else []
        parts += [f"{in_units(free)} free"] if free is not None else []
        rest = _others(refusal)
        parts += [f"{in_units(rest)} of others (other processes, the driver's context)"] if rest else []
        yield f"of {in_units(total)}: {', '.join(parts)}; asked for {in_units(asked)} more"
    if total is not None and asked > total:
        yield f"one tensor of {in_units(asked)} is larger than all of the {in_units(total)}: no other model is to blame"
    if _is_fragmented(refusal):
        room = (free or 0) + (idle or 0)
        yield (
            f"free and idle together are {in_units(free or 0)} + {in_units(idle or 0)} = {in_units(room)}, no less "
            f"than the {in_units(asked)} asked for: there is room, but not in one piece"
        )


def _is_fragmented(refusal: Exhaustion) -> bool:
    asked, free, idle = refusal.requested, refusal.free, refusal.idle
    return None not in (asked, free, idle) and asked <= free + idle  # type: ignore[operator]


def _others(refusal: Exhaustion) -> int:
    """Bytes outside of this process's torch, as far as the figures tell."""
    if refusal.others is not None:
        return refusal.others
    if refusal.total is None or refusal.allocated is None or refusal.free is None:
        return 0
    return max(0, refusal.total - refusal.free - refusal.allocated - (refusal.idle or 0))


# ---------------------------------------------------------------- while the decoder ran


def _others_hold_most(refusal: Exhaustion) -> bool:
    """Whether more is held by something else than the tensors of one stage can be, this request included."""
    asked, held, total = refusal.requested, refusal.allocated, refusal.total
    if asked is None or held is None or (total is not None and asked > total):
        return False
    return held - ALIVE * asked + _others(refusal) > (ALIVE + 1) * asked


def _of_others(refusal: Exhaustion) -> Iterator[str]:
    asked, held = refusal.requested, refusal.allocated
    if asked is None or held is None or held <= ALIVE * asked:
        return
    yield (
        f"a decode holds at most {ALIVE} tensors of one size at once, so that {ALIVE} × {in_units(asked)} = "
        f"{in_units(ALIVE * asked)} can be this stage's; at least {in_units(held)} − {in_units(ALIVE * asked)} = "
        f"{in_units(held - ALIVE * asked)} are something else: weights, other models, earlier results"
    )


def _batch(refusal: Exhaustion) -> int:
    """Items of the last shape that the log prints, where no frame says that they are decoded one at a time."""
    sliced = any("decoded_slices" in frame.text for frame in refusal.frames)
    return refusal.shapes[-1][0] if refusal.shapes and not sliced else 1


def _for_tiles(stage: Stage, refusal: Exhaustion) -> Iterator[str]:
    """Whether a smaller tile helps, or what else is in memory must go."""
    if stage == "decode":
        yield "no frame of a tiled decode: tiling was off, or the picture within one tile"
    asked, batch = refusal.requested, _batch(refusal)
    if asked is None:
        return
    if batch > 1:
        yield (
            f"the log prints a shape of {batch} items: one item alone asks for {in_units(asked)} / {batch} = "
            f"{in_units(asked // batch)}"
        )
    yield from _fitting(refusal)
    if refusal.free:
        share = refusal.free / asked
        if share < 1:
            yield (
                f"by itself this request fits the {in_units(refusal.free)} that are free at {share:.2f} of its area, "
                f"√{share:.2f} = {math.sqrt(share):.2f} of its side; at half the bytes a value it is "
                f"{in_units(asked // 2)}"
            )
    elif refusal.free == 0:
        yield "nothing is free: only what the decode itself gives back makes room for it"


def _fitting(refusal: Exhaustion) -> Iterator[str]:
    """Square tensors of AutoencoderKL's channels that the request may have been."""
    if not any(frame.path.endswith("/autoencoder_kl.py") for frame in refusal.frames):
        return
    low, high = size_range(refusal)
    found = [
        f"1×{channels}×{side}×{side} {dtype}"
        for channels in CHANNELS
        for dtype, each in (("fp32", 4), ("fp16 or bf16", 2))
        for side in range(32, 16385, 32)
        if low <= channels * side * side * each <= high
    ]
    if 0 < len(found) <= MOST:
        yield f"{in_units(refusal.requested or 0)} is, if square, {' or '.join(found)}: which, the log does not say"


CHANNELS = (512, 256, 128)
"""Of the decoder of Stable Diffusion's AutoencoderKL and its kin."""
MOST = 6
"""Tensors that are named; where more would fit, the figure tells nothing."""


def size_range(refusal: Exhaustion) -> tuple[int, int]:
    """The least and the most bytes that a tensor can have had for which this was asked."""
    asked = refusal.requested or 0
    if refusal.exact:
        return asked, asked
    unit = 2**30 if asked >= 2**30 else 2**20 if asked >= 2**20 else 2**10
    low, high = asked - unit * 5 // 1000, asked + unit * 5 // 1000
    if refusal.allocator in ("CUDA", "HIP"):
        if asked == SMALL_BLOCK:
            return 1, SMALL
        if asked == LARGE_BLOCK:
            return SMALL + 1, LARGE_BLOCK
        return low - SMALL_BLOCK + 1, high
    return low, high


# ---------------------------------------------------------------- after the decoder


def _for_output(stage: Stage, refusal: Exhaustion, text: str) -> Iterator[str]:
    if stage == "blend":
        yield (
            "blending works in place, a line of pixels at a time: what fills the memory are the decoded tiles, all of "
            "which stay until the end; with an overlap of o they have 1 / (1 − o)² times the picture's pixels, 1.78 at "
            "0.25 and 1 at 0, whatever the tile: a smaller overlap lowers that, a smaller tile does not"
        )
        return
    what, why = next((said for part, said in OUTPUTS.items() if part in text), ("a part of the output", ""))
    asked = refusal.requested
    size = f" ({in_units(asked)})" if asked is not None else ""
    asking = f"`{text}` asks" if text else "what joins the parts asks"
    yield f"no decoder was running: {asking} for {what}{size}{why}"
    if asked is None:
        return
    if "cat(result_rows" in text:
        together = in_units(round(asked * 3.78))
        yield (
            f"beside it lie the rows that it joins, {in_units(asked)} as well, and all decoded tiles, 1 / (1 − o)² "
            f"times that: at an overlap of 0.25 {in_units(asked)} × (1 + 1 + 1.78) = {together} together"
        )
    pixels = " or ".join(
        f"{in_units(asked)} / (3 × {each} B) = {asked / 3 / each / 1e6:.1f} Mpx in {name}"
        for name, each in (("fp32", 4), ("half precision", 2))
    )
    yield f"as RGB it has {pixels}"


OUTPUTS = {
    "decoded_slices": ("the output of all items", ", beside that of each item: as large with any tile"),
    "cat(result_rows": ("the whole output", ": as large with any tile"),
    "cat(result_row": ("a row of tiles", ": all rows together are the whole output, with any tile"),
    "[out, out_]": ("all frames so far", ", beside the same frames before: as large with any tile"),
}
"""What a line that joins tensors makes, and what follows."""


def _for_conversion(refusal: Exhaustion) -> Iterator[str]:
    yield "the decode was done: no tile or overlap changes what the conversion asks for"
    each = {"float64": 8, "float32": 4, "float16": 2, "uint8": 1}.get(refusal.dtype)
    if refusal.shape and each is not None:
        count = math.prod(refusal.shape)
        yield (
            f"{' × '.join(map(str, refusal.shape))} values of {refusal.dtype}, {each} B each, are "
            f"{in_units(count * each)}; as uint8 {in_units(count)}; one of {refusal.shape[0]} items at a time "
            f"{in_units(count * each // refusal.shape[0])}"
        )
    elif refusal.requested is not None:
        yield f"if these {in_units(refusal.requested)} are fp32, as uint8 they are {in_units(refusal.requested // 4)}"


# ---------------------------------------------------------------- what is not told


def _untold(stage: Stage, refusal: Exhaustion) -> Iterator[str]:
    if not refusal.frames and not refusal.stage:
        bar = f"; the last progress bar before it came to {refusal.progress}" if refusal.progress else ""
        yield f"the stage: the log has no traceback{bar}"
    if refusal.requested is None and refusal.resident is None:
        yield "how much was asked for, and how much there was: the message has no figures"
    elif refusal.allocator in ("CPU", "numpy"):
        yield "how much was in use: this allocator says only what was asked for"
    if refusal.resident is not None:
        limit = f" of a limit of {in_units(refusal.total)}" if refusal.total is not None else ""
        yield (
            f"what held it: the kernel counts the process's {in_units(refusal.resident)}{limit}, and knows of no tensor"
        )
    if stage in ("tile", "decode", "blend", "assemble"):
        yield "the decode's dtype, and how much of what is allocated are weights: of a model, `fidelity predict` tells"


# ---------------------------------------------------------------- in words


def lines(found: Explanation) -> list[str]:
    """The explanation in words, a line each."""
    refusal = found.refusal
    times = f"; the last of {refusal.count} times in this log" if refusal.count > 1 else ""
    asked = (
        f"asked for {in_units(refusal.requested)}"
        if refusal.requested is not None
        else "what was asked for is not said"
    )
    out = [f"{refusal.allocator} ran out: {asked}{times}", f"stage    {STAGES[found.stage]}"]
    if found.where:
        out.append(f"         {' › '.join(dict.fromkeys(filter(None, (found.where, found.module, found.operator))))}")
    out += [f"derived  {sentence}" for sentence in found.derived]
    out += [f"change   {place}. {CHANGES[change]}" for place, change in enumerate(found.change, 1)]
    if not found.change:
        out.append("change   cannot be told from this log")
    return [*out, *(f"untold   {sentence}" for sentence in found.untold)]
