"""`fidelity predict`: what a decode will need, without weights and without a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from fidelity import wording
from fidelity.cli.common import json_option, plugin_option, prepare
from fidelity.errors import RequestError, UnknownName
from fidelity.records import DTYPES, OFFLOADS, DecodePlan, Tiling


@click.command("predict")
@click.argument("name", metavar="MODEL")
@click.option("--size", required=True, metavar="HxW", help="Height and width of the sample, in pixels.")
@click.option("--frames", type=int, help="Frames of the sample.  [default: the fewest that the class decodes]")
@click.option("--batch", type=int, default=1, show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="fp32", show_default=True)
@click.option("--force-upcast", is_flag=True, help="Decode fp16 weights in fp32.")
@click.option("--tile", type=int, metavar="T", help="Tile in latent pixels.")
@click.option("--overlap", type=float, metavar="O", help="Overlap as a share of the tile.  [default: 0.25]")
@click.option("--slicing", is_flag=True, help="Each item of the batch alone.")
@click.option("--offload", type=click.Choice(OFFLOADS), default="none", show_default=True)
@click.option("--plan", metavar="PLAN", help="All of these at once: bf16,tile=16,overlap=0.25,slicing.")
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
@click.option("--law", "with_law", is_flag=True, help="Fit peak = constant + k · pixels over sizes.")
@click.option("--budget", metavar="8GiB", help="The largest picture that fits; brings the law.")
@json_option
@plugin_option
def predict(name: str, size: str, frames: int | None, batch: int, device: str, with_law: bool, budget: str | None,
            as_json: bool, plugins: tuple[str, ...], plan: str | None, **options: Any) -> int:  # fmt: skip
    """Predicted peak memory by stage, without weights and without a GPU.

    MODEL is a registered name, NAME=PATH (a config.json is enough), or a configuration that ships: sd15, sdxl, sd3,
    flux, qwen-image, wan21 …
    """
    registry, _, _ = prepare(plugins, None)
    from fidelity.records import to_json

    wanted = _plan(plan, options, registry)
    model, pixels, room = _model(name, registry), _size(size), parse_bytes(budget) if budget is not None else None
    from fidelity import predict as predict_
    from fidelity import prediction

    found = predict_.predict(model, pixels, wanted, frames=frames, batch=batch, device=device, with_law=with_law,
                             budget=room)  # fmt: skip
    if as_json:
        click.echo(to_json(found).decode())
        return 0
    for line in prediction.lines(found):
        click.echo(line)
    return 0


def _model(name: str, registry: Any) -> Any:
    from fidelity.models import configs

    if "=" in name:
        own, _, path = name.partition("=")
        if not own or not path:
            raise RequestError(f"MODEL {name!r}: write NAME=PATH, as in mine=/models/sdxl-vae")
        if own in registry.MODELS and hasattr(registry.MODELS.get(own).family, "at"):
            return registry.MODELS.get(own).family.at(registry.MODELS.get(own), path)
        return configs.from_config(own, Path(path))
    if name in registry.MODELS:
        return registry.MODELS.get(name)
    if name in configs.known():
        return configs.from_name(name)
    raise UnknownName(registry.unknown("model", name, [*registry.MODELS, *configs.known()]))


def _plan(text: str | None, options: dict[str, Any], registry: Any) -> DecodePlan:
    given = [key for key, value in options.items() if value not in (None, False, "fp32", "none")]
    if text is not None:
        if given:
            raise RequestError(f"--plan and --{given[0].replace('_', '-')}: give one or the other")
        from fidelity import plans

        return plans.parse_plan(text, registry)
    tile, overlap = options["tile"], options["overlap"]
    if overlap is not None and tile is None:
        raise RequestError("--overlap without --tile: say how large a tile is, in latent pixels")
    return DecodePlan(
        dtype=options["dtype"],
        force_upcast=options["force_upcast"],
        slicing=options["slicing"],
        tiling=Tiling(tile, 0.25 if overlap is None else overlap) if tile is not None else None,
        offload=options["offload"],
    )


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)[x×](\d+)", text.strip())
    if not found:
        raise RequestError(f"--size {text!r}: write HEIGHTxWIDTH in pixels, as in 1024x1024")
    return int(found[1]), int(found[2])


def parse_bytes(text: str) -> int:
    """Bytes of a --budget: `8GiB`, `6.5 GB`, `512MiB` or a bare number. Raises RequestError."""
    return wording.parse_bytes(text, "--budget")
