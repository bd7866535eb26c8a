"""Pictures as they are stored: lossless, each once, of a video every frame."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from fidelity import images

RANGE = (-1.0, 1.0)


def stored(folder, name):
    with Image.open(folder / name) as picture:
        return np.asarray(picture).tolist()


def test_a_picture_is_its_pixels_and_the_difference_is_signed_around_grey(tmp_path):
    golden = torch.tensor([-1.0, 0.0, 1.0, 2.0]).expand(1, 3, 2, 4).contiguous()
    candidate = golden + 2 * 2 / 255
    kept = images.save(candidate, golden, RANGE, tmp_path)
    assert {name: len(paths) for name, paths in kept.items()} == {"golden": 1, "candidate": 1, "difference": 1}
    assert stored(tmp_path, kept["golden"][0])[0] == [[0] * 3, [128] * 3, [255] * 3, [255] * 3]
    assert stored(tmp_path, kept["candidate"][0])[0] == [[2] * 3, [130] * 3, [255] * 3, [255] * 3]
    assert stored(tmp_path, kept["difference"][0])[0] == [[144] * 3] * 4, "unclipped: the floats differ by 2 levels"


def test_a_video_keeps_every_frame_item_after_item_and_equal_ones_once(tmp_path):
    levels = torch.tensor([[0.0, 0.25, 0.5], [0.5, 0.75, 1.0]])  # (item, frame)
    golden = levels[:, None, :, None, None].expand(2, 3, 3, 4, 5).contiguous()
    candidate = golden.clone()
    candidate[1, :, 2] -= 0.5
    kept = images.save(candidate, golden, RANGE, tmp_path)
    greys = [stored(tmp_path, path)[0][0][0] for path in kept["golden"]]
    assert greys == [128, 159, 191, 191, 223, 255]
    assert kept["candidate"][:5] == kept["golden"][:5]
    assert kept["candidate"][5] == kept["golden"][2]
    assert len(kept["difference"]) == 6
    assert len(list((tmp_path / "images").iterdir())) == 6, "five greys and one difference: no difference is grey too"
