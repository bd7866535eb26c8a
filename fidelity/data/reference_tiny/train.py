# mypy: ignore-errors
"""Train the preview decoder `reference-tiny`: an AutoencoderTiny that gives in one small pass what reference-kl gives.

    python train.py --images FOLDER --out OUT

A distillation: nothing but reference-kl's own latents and decodes are shown to it. Pictures, crops and augmentations
are those of ../reference_kl/train_reference_kl.py (FOLDER as there); latents are scaled as a denoiser gives them
(times reference-kl's scaling_factor), which is what preview decoders of the TAESD kind take. The schedule counts
steps, not seconds, so that a run is the same on the same machine. OUT receives config.json, MANIFEST.json and
diffusion_pytorch_model.safetensors (fp16); every 250 steps a checkpoint OUT/ckpt.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, AutoencoderTiny
from PIL import Image, ImageOps

HERE = Path(__file__).resolve().parent
TEACHER = HERE.parent / "reference_kl"
sys.path.insert(0, str(TEACHER))
from train_reference_kl import LUMA, Data, gather, open_rgb  # noqa: E402

PHASES = [(0.0, 4, 96), (0.5, 4, 128)]  # from this share of the steps: batch, crop in pixels


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="folder of further images with licences.json")
    parser.add_argument("--out", default="out", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--stop", type=int, default=1250, help="end after this many of them: the rest is a low rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--widths", default="24,32", help="channels of the encoder and of the decoder")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def preview_loss(error):
    """Absolute and squared error, the error of colour, and that of 8 × 8 means: tone matters more than detail."""
    chroma = error - (error * LUMA).sum(1, keepdim=True)
    tone = F.avg_pool2d(error, 8)
    return error.abs().mean() + 0.5 * ((error**2).mean() + chroma.abs().mean() + tone.abs().mean())


@torch.no_grad()
def figures(student, teacher, factor, held):
    """Per picture: RMSE of preview against full decode (grey levels), of latents (spread 1); round trip in dB."""
    rows = []
    for x in held:
        z = teacher.encode(x).latent_dist.mode()
        full, preview = teacher.decode(z).sample, student.decode(z * factor).sample
        own = student.encode(x).latents
        trip = student.decode(own).sample.clamp(-1, 1)
        rows.append((
            (preview - full).pow(2).mean().sqrt().item() * 127.5,
            (own - z * factor).pow(2).mean().sqrt().item(),
            10 * math.log10(4 / F.mse_loss(trip, x).item()),
        ))  # fmt: skip
    return rows


def words(rows):
    names = ("RMSE", "latents", "trip dB")
    return "; ".join(f"{name} {' '.join(f'{row[i]:.3f}' for row in rows)}" for i, name in enumerate(names))


def main():
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    entries, held_paths = gather(args.images, ("picosdeeuropa",))
    manifest = [{key: entry[key] for key in ("package", "file", "licence")} for entry in entries]
    (args.out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    data = Data(entries, args.seed)
    squares = [np.array(ImageOps.fit(open_rgb(path), (512, 512), Image.LANCZOS)) for path in held_paths]
    held = [torch.from_numpy(a).permute(2, 0, 1)[None].float() / 127.5 - 1 for a in squares]

    teacher = AutoencoderKL.from_pretrained(TEACHER, torch_dtype=torch.float32).eval().requires_grad_(False)
    factor = teacher.config.scaling_factor
    encoder, decoder = (int(width) for width in args.widths.split(","))
    shape = {"encoder_block_out_channels": (encoder,) * 4, "decoder_block_out_channels": (decoder,) * 4}
    student = AutoencoderTiny(**shape)
    average = AutoencoderTiny(**shape).eval()
    average.load_state_dict(student.state_dict())
    sides = (student.encoder, average.encoder), (student.decoder, average.decoder)
    optimizers = [torch.optim.AdamW(side.parameters(), betas=(0.9, 0.99), weight_decay=1e-5) for side, _ in sides]
    generator = torch.Generator().manual_seed(args.seed)
    sizes = [sum(p.numel() for p in side.parameters()) for side, _ in sides]
    print(f"{len(entries)} pictures, encoder {sizes[0]}, decoder {sizes[1]} weights", flush=True)

    start, sums = time.time(), []
    for step in range(min(args.steps, args.stop)):
        share = step / args.steps
        count, size = [(b, s) for since, b, s in PHASES if share >= since][-1]
        rate = args.lr * min(1, (step + 1) / 100) * (0.49 * (1 + math.cos(math.pi * share)) + 0.02)
        x = data.batch(count, size)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            z = teacher.encode(x).latent_dist.mode().float()
            if step % 4 == 3:  # latents of a denoiser are never quite those of a picture
                z = z + torch.randn(z.shape, generator=generator) * (0.05 / factor)
            target = teacher.decode(z).sample.float()
        losses = []
        for side, (own, mean) in enumerate(sides):
            if side == 0 and step % 3:  # the encoder is the easier half: every third step
                continue
            with torch.autocast("cpu", torch.bfloat16):
                got = own(x) if side == 0 else own(z * factor)
            loss = (got.float() - z * factor).abs().mean() if side == 0 else preview_loss(got.float() - target)
            optimizers[side].param_groups[0]["lr"] = rate
            optimizers[side].zero_grad(set_to_none=True)
            loss.backward()
            if math.isfinite(torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0).item()):
                optimizers[side].step()
            with torch.no_grad():
                weight = 1 - min(0.995, (1 + step) / (10 + step))
                torch._foreach_lerp_(list(mean.parameters()), list(own.parameters()), weight)
            losses.append(loss.item())
        sums.append(losses[-1])
        if step % 250 == 249:
            rows = figures(average, teacher, factor, held)
            print(f"{time.time() - start:5.0f} s, step {step + 1}, loss {np.mean(sums):.4f}: {words(rows)}", flush=True)
            average.save_pretrained(args.out / "ckpt")
            sums = []

    average.half().save_pretrained(args.out)
    final = AutoencoderTiny.from_pretrained(args.out, torch_dtype=torch.float32).eval()
    print(f"done after {time.time() - start:.0f} s: {words(figures(final, teacher, factor, held))}")


if __name__ == "__main__":
    main()
