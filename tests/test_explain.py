"""`fidelity explain`: a corpus of logs, each with its right answer; what this diffusers raises; files that are no log.

The logs are tracebacks of diffusers (0.42, an older layout, ComfyUI, notebooks) under messages in the wordings of torch
1.4 to 2.14's allocators, numpy and the Linux kernel, with figures that add up; cpu-tile-limit is one as it came, of a
process under a limit of its address space, and cpu-limited-run that of a case under `--memory-limit`.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import pytest

from fidelity import cli, exhaustion
from fidelity.errors import RequestError
from fidelity.exhaustion import Exhaustion, parse
from fidelity.explain import ALIVE, CHANGES, Explanation, explain, lines, size_range
from fidelity.stages import STAGES

LOGS = Path(__file__).parent / "logs"
MIB, GIB = 2**20, 2**30

# name: who refused, MiB asked for, stage, what to change, a statement that must be among those derived
ANSWERS = {
    "colab-tile": ("CUDA", 2048, "tile", "tile dtype", "0.60 of its area, √0.60 = 0.78 of its side"),
    "comfy-no-figures-windows": ("CUDA", None, "tile", "tile dtype", ""),
    "cpu-limited-run": ("CPU", 0.5, "tile", "tile dtype", "1×256×32×32 fp16 or bf16"),
    "cpu-pt-to-numpy": ("CPU", 768, "convert", "conversion", "as uint8 they are 192.0 MiB"),
    "cpu-slices-windows": ("CPU", 576, "assemble", "assembly dtype", "the output of all items (576.0 MiB)"),
    "cpu-tile-limit": ("CPU", 64, "tile", "tile dtype", "1×256×256×256 fp32"),
    "cpu-tiled-retry": ("CPU", 256, "tile", "tile dtype", "1×256×512×512 fp32"),
    "cpu-untiled": ("CPU", 4096, "decode", "tile dtype", "no frame of a tiled decode"),
    "cuda-async-wan-frames": ("CUDA", 640, "assemble", "assembly dtype", "beside the same frames before"),
    "cuda-batch": ("CUDA", 1536, "decode", "slicing tile dtype", "1.50 GiB / 3 = 512.0 MiB"),
    "cuda-blend-h": ("CUDA", 20, "blend", "overlap assembly", "a smaller tile does not"),
    "cuda-blend-torch-2.1": ("CUDA", 2, "blend", "overlap assembly", "1 / (1 − o)² times the picture's pixels"),
    "cuda-denoiser": ("CUDA", 108, "denoise", "resident", "no autoencoder was decoding"),
    "cuda-denormalize": ("CUDA", 576, "convert", "resident conversion", "10.90 GiB − 4.50 GiB = 6.40 GiB"),
    "cuda-encode": ("CUDA", 4096, "encode", "tile", "it is the encoder"),
    "cuda-group-onload": ("CUDA", 20, "onload", "resident", "bringing offloaded weights back in"),
    "cuda-larger-than-device": ("CUDA", 36864, "decode", "tile dtype", "36.00 GiB is larger than all of the 23.65 GiB"),
    "cuda-load": ("CUDA", 80, "load", "resident", "bringing a model's weights"),
    "cuda-row-of-tiles": ("CUDA", 192, "assemble", "assembly dtype", "a row of tiles (192.0 MiB)"),
    "cuda-sequential-onload": ("CUDA", 20, "onload", "resident", "bringing offloaded weights back in"),
    "cuda-share-of-the-card": ("CUDA", 1024, "tile", "tile dtype", "of 5.91 GiB"),
    "cuda-text-encoder": ("CUDA", 20, "text", "resident fragmentation", "11.1 MiB + 20.0 MiB = 31.1 MiB"),
    "cuda-tile-attention-fragmented": (
        "CUDA", 1536, "tile", "fragmentation tile dtype", "921.2 MiB + 1.20 GiB = 2.10 GiB",
    ),
    "cuda-tile-beside-denoiser": ("CUDA", 128, "tile", "resident tile dtype", "22.31 GiB − 1.00 GiB = 21.31 GiB"),
    "cuda-tile-torch-1.13": ("CUDA", 1024, "tile", "tile dtype", "2.10 GiB of others"),
    "cuda-tile-upsample": ("CUDA", 2048, "tile", "tile dtype", "0.55 of its area, √0.55 = 0.74 of its side"),
    "cuda-untiled": ("CUDA", 9216, "decode", "tile dtype", "1×256×3072×3072 fp32"),
    "cuda-upcast": ("CUDA", 20, "upcast", "dtype", "casts its autoencoder to fp32"),
    "cuda-whole-output": ("CUDA", 768, "assemble", "assembly dtype", "768.0 MiB × (1 + 1 + 1.78) = 2.83 GiB"),
    "cudnn-no-figures": ("CUDA", None, "tile", "tile dtype", ""),
    "hip-comfy-message-first": ("HIP", 2304, "tile", "tile dtype", "383.4 MiB of others"),
    "hip-wan-untiled": ("HIP", 6799.36, "decode", "tile dtype", "0.94 of its area"),
    "ipython-output": ("CUDA", 1536, "assemble", "assembly dtype", "1.50 GiB × (1 + 1 + 1.78) = 5.67 GiB"),
    "kernel-cgroup": ("kernel", None, "unknown", "", ""),
    "kernel-dmesg": ("kernel", None, "unknown", "", ""),
    "kernel-killed-after-sampling": ("kernel", None, "unknown", "", ""),
    "mps-older-tile-frames": ("MPS", 512, "tile", "tile dtype", "nothing is free"),
    "mps-wan-tile": ("MPS", 1331.2, "tile", "resident tile dtype", "139.74 GiB of others"),
    "numpy-to-pil": ("numpy", 1536, "convert", "conversion", "as uint8 384.0 MiB; one of 8 items at a time 192.0 MiB"),
    "run-of-a-case": ("a case", 12, "decode", "tile dtype", "fp32-upcast0-slice1-t0-none needs 39.1 MiB, predicted"),
    "rank-prefix": ("CUDA", 768, "assemble", "assembly dtype", "`dec = torch.cat(result_rows, dim=2)`"),
    "xpu-tile": ("XPU", 2048, "tile", "fragmentation tile dtype", "1.80 GiB + 320.0 MiB = 2.11 GiB"),
}  # fmt: skip


def of(name: str) -> Explanation:
    return explain((LOGS / f"{name}.log").read_text(), name)


def test_every_log_has_an_answer():
    assert {path.stem for path in LOGS.glob("*.log")} == set(ANSWERS)
    assert len(ANSWERS) >= 20


@pytest.mark.parametrize("name", ANSWERS)
def test_each_log_is_explained(name):
    allocator, asked, stage, change, statement = ANSWERS[name]
    found = of(name)
    assert found.refusal.allocator == allocator
    assert found.refusal.requested == (None if asked is None else pytest.approx(asked * MIB, abs=1))
    assert found.stage == stage
    assert " ".join(found.change) == change
    assert any(statement in said for said in found.derived) or not statement, found.derived
    text = "\n".join(lines(found))
    assert STAGES[found.stage] in text
    assert all(CHANGES[each] in text for each in found.change)
    assert bool(found.change) != ("cannot be told from this log" in text)


def test_the_frame_and_the_operator_stand_beside_the_stage():
    found = of("cuda-tile-upsample")
    assert found.where == "autoencoder_kl.py:391 in tiled_decode"
    assert (found.module, found.operator) == ("upsampling.py:175 in forward", "torch._C._nn.upsample_nearest2d")
    assert of("cuda-whole-output").where == "autoencoder_kl.py:407 in tiled_decode"
    assert of("colab-tile").where == "autoencoder_kl.py:391 in tiled_decode"
    assert of("hip-comfy-message-first").refusal.frames[0].function == "recursive_execute"


def test_what_a_log_cannot_tell_is_said():
    assert any("no traceback; the last progress bar before it came to 50/50" in said
               for said in of("kernel-killed-after-sampling").untold)  # fmt: skip
    assert any("15.85 GiB of a limit of 16.00 GiB" in said for said in of("kernel-cgroup").untold)
    assert any("29.99 GiB, and knows of no tensor" in said for said in of("kernel-dmesg").untold)
    assert any("no figures" in said for said in of("cudnn-no-figures").untold)
    assert any("says only what was asked for" in said for said in of("cpu-untiled").untold)


def test_of_several_refusals_the_last_is_explained_and_a_repeated_one_counts_once():
    assert of("cpu-tiled-retry").refusal.count == 2
    assert of("comfy-no-figures-windows").refusal.count == 1
    assert "the last of 2 times in this log" in lines(of("cpu-tiled-retry"))[0]


# ---------------------------------------------------------------- figures

SENTENCES = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 15.78 GiB of which 1.10 GiB is "
    "free. Process 41 has 700.00 MiB memory in use. Process 42 has 1.00 GiB memory in use. Including non-PyTorch "
    "memory, this process has 13.00 GiB memory in use. Of the allocated memory 12.20 GiB is allocated by PyTorch, with "
    "64.00 MiB allocated in private pools (e.g., CUDA Graphs), and 412.50 MiB is reserved by PyTorch but unallocated."
)


def test_every_figure_of_the_sentences_is_read():
    found = parse(SENTENCES)
    assert found.requested == 2 * GIB
    assert found.total == round(15.78 * GIB)
    assert found.free == round(1.10 * GIB)
    assert found.allocated == round(12.20 * GIB)
    assert found.idle == round(412.5 * MIB)
    assert found.others == 700 * MIB + GIB
    wrapped = parse(SENTENCES.replace(" GiB of which", " GiB of\nwhich"))
    assert (wrapped.free, wrapped.idle) == (found.free, found.idle)


def test_the_wording_before_torch_1_5_is_read():
    found = parse("CUDA out of memory. Tried to allocate 8.13 GiB (GPU 0; 10.76 GiB total capacity; 643.57 MiB "
                  "already allocated; 8.20 GiB free; 32.43 MiB cached)")  # fmt: skip
    assert found.idle == 0
    assert found.allocated == round(643.57 * MIB)
    older = parse("CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 8.00 GiB total capacity; 5.00 GiB already "
                  "allocated; 1.00 MiB free; 5.25 GiB reserved in total by PyTorch)")  # fmt: skip
    assert older.idle == round(0.25 * GIB)


@pytest.mark.parametrize(
    ("asked", "exact", "allocator", "low", "high"),
    [
        (2 * MIB, False, "CUDA", 1, MIB),
        (20 * MIB, False, "CUDA", MIB + 1, 20 * MIB),
        (4096, True, "CPU", 4096, 4096),
        (2 * GIB, False, "MPS", 2 * GIB - GIB * 5 // 1000, 2 * GIB + GIB * 5 // 1000),
        (2 * GIB, False, "CUDA", 2 * GIB - GIB * 5 // 1000 - 2 * MIB + 1, 2 * GIB + GIB * 5 // 1000),
    ],
)
def test_a_rounded_request_is_a_range_of_tensors(asked, exact, allocator, low, high):
    assert size_range(Exhaustion(allocator, "", asked, exact)) == (low, high)


@pytest.mark.parametrize(("free", "idle", "fragmented"), [(400, 624, True), (400, 623, False), (0, 1024, True)])
def test_room_in_pieces_is_told_at_its_boundary(free, idle, fragmented):
    text = (
        (LOGS / "cuda-tile-upsample.log")
        .read_text()
        .replace("Tried to allocate 2.00 GiB", "Tried to allocate 1.00 GiB")
    )
    text = text.replace("1.10 GiB is free", f"{free}.00 MiB is free").replace("412.50 MiB is", f"{idle}.00 MiB is")
    assert ("fragmentation" in explain(text).change) == fragmented


@pytest.mark.parametrize(("held", "first"), [(17 * 256 - 1, "tile"), (17 * 256, "tile"), (17 * 256 + 1, "resident")])
def test_what_else_is_in_memory_comes_first_where_it_is_more(held, first):
    """Of a request R at most ALIVE · R are the tile's: beyond 2 · ALIVE + 1 of them the rest is more."""
    assert ALIVE == 8
    text = (LOGS / "cuda-tile-upsample.log").read_text()
    head = text[: text.index("torch.OutOfMemoryError")]
    figures = (f"CUDA out of memory. Tried to allocate 256.00 MiB (GPU 0; {held}.00 MiB total capacity; {held}.00 MiB "
               f"already allocated; 0 bytes free; {held}.00 MiB reserved in total by PyTorch)")  # fmt: skip
    assert explain(head + figures).change[0] == first


@pytest.mark.slow
def test_a_decoder_holds_no_more_tensors_of_one_size_than_is_said():
    from fidelity import predict
    from fidelity.models import configs
    from fidelity.records import DecodePlan

    for name, shape in (("sd15", (1, 4, 64, 64)), ("wan21", (1, 16, 2, 32, 32))):
        for device in ("cpu", "cuda"):
            found = predict.of_shape(configs.from_name(name), shape, DecodePlan(), device)
            assert found.allocated_peak_bytes - found.weights_bytes <= ALIVE * found.largest.bytes, (name, device)


# ---------------------------------------------------------------- what this diffusers raises


@pytest.fixture(scope="module")
def vae():
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=2, sample_size=16, **blocks).eval()


def refused(vae, operator: str, within: str, *, tiled: bool = True, slicing: bool = False, last: bool = False) -> str:
    """The traceback of a decode of which one call of an operator, made under a function, was refused memory."""
    import inspect

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked = func.overloadpacket.__name__ == operator and (not last or args[1:] == (2,))
            if asked and within in {frame.function for frame in inspect.stack(0)}:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return func(*args, **(kwargs or {}))

    vae.use_tiling, vae.use_slicing = tiled, slicing
    vae.tile_latent_min_size, vae.tile_sample_min_size, vae.tile_overlap_factor = 8, 16, 0.25
    with pytest.raises(torch.OutOfMemoryError) as raised, torch.no_grad(), Refusing():
        vae.decode(torch.zeros(2, 4, 12, 12))
    frames = [frame for frame in traceback.extract_tb(raised.value.__traceback__)
              if frame.name != "__torch_dispatch__" and "_dynamo" not in frame.filename]  # fmt: skip
    return (
        "Traceback (most recent call last):\n"
        + "".join(traceback.format_list(frames))
        + f"OutOfMemoryError: {raised.value}"
    )


@pytest.mark.parametrize(
    ("stage", "about"),
    [
        ("tile", {"operator": "convolution", "within": "tiled_decode"}),
        ("blend", {"operator": "mul", "within": "blend_v"}),
        ("blend", {"operator": "mul", "within": "blend_h"}),
        ("assemble", {"operator": "cat", "within": "tiled_decode"}),
        ("assemble", {"operator": "cat", "within": "tiled_decode", "last": True}),
        ("assemble", {"operator": "cat", "within": "decode", "slicing": True, "tiled": False}),
        ("decode", {"operator": "convolution", "within": "decode", "tiled": False}),
    ],
)
def test_the_installed_diffusers_is_understood(vae, stage, about):
    found = explain(refused(vae, **about))
    assert found.stage == stage
    assert found.refusal.requested == 2 * GIB


# ---------------------------------------------------------------- files that are no such log


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last):\nValueError: no", "the baker was killed"])
def test_a_text_without_a_refusal_is_refused(text):
    with pytest.raises(RequestError, match=r"is no log of memory that ran out: looked for CUDA, HIP or XPU"):
        explain(text)


def test_a_refusal_far_from_any_decode_is_refused():
    text = ('Traceback (most recent call last):\n  File "/home/u/train.py", line 3, in <module>\n    loss.backward()\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")  # fmt: skip
    with pytest.raises(RequestError, match=r"no frame of an autoencoder.*train.py:3 in <module>"):
        explain(text)


def test_frames_of_an_earlier_traceback_do_not_explain_a_kill():
    text = (LOGS / "cuda-load.log").read_text().replace("out of memory", "fine") + "\nKilled\n"
    assert exhaustion.parse(text).frames == ()


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["explain", *map(str, arguments)])
    printed = capsys.readouterr()
    return end.value.code, printed.out, printed.err


def test_the_command_explains_a_file(capsys):
    code, out, _ = run(capsys, LOGS / "cuda-tile-upsample.log")
    assert code == 0
    assert out.splitlines()[0] == "CUDA ran out: asked for 2.00 GiB"
    code, out, _ = run(capsys, LOGS / "cuda-tile-upsample.log", "--json")
    told = json.loads(out)
    assert (code, told["stage"], told["change"]) == (0, "tile", ["tile", "dtype"])
    assert told["refusal"]["requested"] == 2 * GIB


def test_a_wrong_file_is_one_line_and_status_2(capsys, tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"\xff\xfe nothing here")
    for path, said in ((tmp_path / "notes.txt", "is no log"), (tmp_path / "gone.log", "cannot be read"),
                       (tmp_path, "cannot be read")):  # fmt: skip
        code, out, err = run(capsys, path)
        assert (code, out) == (2, "")
        assert err.startswith(f"fidelity: {path}")
        assert said in err
        assert len(err.splitlines()) == 1
