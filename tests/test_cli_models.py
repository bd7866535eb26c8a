"""`fidelity ls models`: one table, derived from the configurations."""

from __future__ import annotations

import pytest

from fidelity import cli
from fidelity.cli import models
from fidelity.registry import FAMILIES, MODELS, load_plugins


def table(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) > 2}


@pytest.fixture(scope="module", autouse=True)
def registered():
    load_plugins()


def test_every_model_and_configuration_stands_in_it(capsys):
    from fidelity.models import configs

    with pytest.raises(SystemExit, match="0"):
        cli.main(["ls", "models"])
    rows = table(capsys.readouterr().out)
    assert {*MODELS, *configs.known()} <= set(rows)
    assert rows["name"] == list(models.HEADER[1:])


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("sd15", ("AutoencoderKL", "8", "–", "4", "48", "0.18215", "yes", "tile, overlap share", "–", "full")),
        ("sdxl", ("AutoencoderKL", "8", "–", "4", "48", "0.13025", "yes", "tile, overlap share", "–", "full")),
        ("flux", ("AutoencoderKL", "8", "–", "16", "12", "0.3611, shift 0.1159", "yes", "tile, overlap share", "–",
                  "full")),
        ("wan21", ("AutoencoderKLWan", "8", "4", "16", "48", "mean, std per channel", "–", "tile, stride",
                   "streams by frame", "full")),
    ],
)  # fmt: skip
def test_what_is_known_of_published_models(name, cells):
    from fidelity.models import configs

    assert models.row(configs.from_name(name)) == (name, *cells)


def test_the_figures_come_from_the_config():
    family = FAMILIES.get("AutoencoderKL")
    config = {"block_out_channels": [8, 8, 8], "latent_channels": 16, "scaling_factor": 0.5, "force_upcast": False}
    row = dict(zip(models.HEADER, models.row(family.describe("mine", config, lambda: None))))
    assert (row["f"], row["c"], row["f²·f_t·3/c"], row["scaling"], row["upcast"]) == ("4", "16", "3", "0.5", "–")
