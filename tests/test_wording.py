"""Figures and places in words: what people read in a reason."""

from __future__ import annotations

import pytest

from fidelity.wording import amount, place


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (None, ""),
        ({}, ""),
        ({"image": 1, "x": 128}, "in image 1 at x 128"),
        ({"x": 3, "y": 7}, "at x 3, y 7"),
        (
            {"image": 0, "x": 128, "y": 160, "axis": "x", "position": 128, "span": [128, 192], "tile": [1, 1],
             "line": "border"},
            "in image 0 at x 128, y 160: left border of tile (1, 1), rows 128 to 192",
        ),
        (
            {"image": 0, "x": 32, "y": 80, "axis": "y", "position": 80, "span": [0, 64], "tile": [1, 0],
             "line": "band end"},
            "in image 0 at x 32, y 80: far edge of the blend of tile (1, 0), columns 0 to 64",
        ),
        (
            {"image": 2, "x": 8, "y": 4, "box": [0, 8, 4, 12], "tile": [0, 1]},
            "in image 2 at x 8, y 4: tile (0, 1), rows 0 to 8, columns 4 to 12",
        ),
        ({"image": 0, "x": 8, "y": 4, "tile": [0, 1], "channel": 2}, "in image 0 at x 8, y 4: tile (0, 1), channel 2"),
        ({"image": 0, "axis": "y", "pitch": 16, "phase": 3}, "in image 0: lines every 16 rows from 3"),
        ({"image": 0, "frame": 9, "line": 8, "chunk": 1}, "in image 0, frame 9: joint at frame 8, chunk 1"),
        ({"image": 0, "frame": 9, "shows": "frame 8"}, "in image 0, frame 9: shows frame 8"),
        (
            {"image": 0, "x": 1, "y": 2, "channel": 0, "candidate": 0.123456, "golden": -1.0},
            "in image 0 at x 1, y 2: channel 0, candidate 0.1235, golden -1",
        ),
        ({"word": "of a plug-in's", "axis": 3}, "word of a plug-in's, axis 3"),
    ],
)  # fmt: skip
def test_a_place_is_a_sentence_and_leaves_nothing_out(where, said):
    assert place(where) == said


def test_a_place_stays_as_it_is():
    where = {"image": 0, "tile": [1, 1]}
    place(where)
    assert where == {"image": 0, "tile": [1, 1]}


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [(22.5432, "grey levels", "22.54 grey levels"), (1.0, "1", "1"), (0.25, "share", "0.25"), (0.5, "", "0.5")],
)
def test_a_pure_number_has_no_unit(value, unit, said):
    assert amount(value, unit) == said
