"""TAEF2, the preview autoencoder of FLUX.2's latents, which no diffusers class loads (madebyollin/taesd, MIT licence).

fidelity run suites/smoke.toml --plugin taef2 --model taef2=FOLDER --record-missing
"""

import os

from torch import nn

from fidelity import Geometry, decoder, weights

FOLDER = os.environ.get("TAEF2", "taef2")  # of encoder.safetensors and decoder.safetensors, unless --model says where


class Clamp(nn.Module):
    def forward(self, x):
        return (x / 3).tanh() * 3


class Block(nn.Module):
    def __init__(self, pools=False):
        super().__init__()
        self.conv = nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU(), conv())
        if pools:  # statistics of the whole input: those of a tile are others
            self.pool = nn.Sequential(
                conv(64, 256, 1, bias=False), nn.GroupNorm(4, 256), nn.ReLU(), conv(256, 64, 1, bias=False)
            )

    def forward(self, x):
        if hasattr(self, "pool"):
            x = x + self.pool(x)
        return (self.conv(x) + x).relu()


def conv(before=64, after=64, size=3, **about):
    return nn.Conv2d(before, after, size, padding=size // 2, **about)


def up():
    return nn.Upsample(scale_factor=2), conv(bias=False)


def down():
    return conv(stride=2, bias=False)


def blocks(count, pools=False):
    return [Block(pools) for _ in range(count)]


def filled(module, path):
    module.load_state_dict(weights(path))
    return module


def encoder(folder=FOLDER):
    layers = [conv(3), Block(), down(), *blocks(3), down(), *blocks(3), down(), *blocks(3, pools=True), conv(64, 32)]
    return filled(nn.Sequential(*layers), f"{folder}/encoder.safetensors")


@decoder("taef2", geometry=Geometry(spatial=8, latent_channels=32), data_range=(0, 1), encoder=encoder)
def taef2(folder=FOLDER):
    """TAEF2, a preview decoder of FLUX.2's latents: f=8, 32 channels, GroupNorm in its first blocks"""
    layers = [Clamp(), conv(32), nn.ReLU(), *blocks(3, pools=True), *up(), *blocks(3), *up(), *blocks(3), *up()]
    return filled(nn.Sequential(*layers, Block(), conv(64, 3)), f"{folder}/decoder.safetensors")
