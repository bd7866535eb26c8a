"""`fidelity predict`: what a decode will need, without weights and without a GPU."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from fidelity import wording
from fidelity.cli.common import described, json_option, parse_size, plugin_option, prepare
from fidelity.errors import RequestError
from fidelity.records import DTYPES, OFFLOADS, STREAM, DecodePlan, Temporal, Tiling


@click.command("predict")
@click.argument("name", metavar="MODEL")
@click.option("--size", required=True, metavar="HxW", help="Height and width of the sample, in pixels.")
@click.option("--frames", type=int, help="Frames of the sample.  [default: the fewest that the class decodes]")
@click.option("--batch", type=int, default=1, show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="fp32", show_default=True)
@click.option("--force-upcast", is_flag=True, help="Decode fp16 weights in fp32.")
@click.option("--tile", type=int, metavar="T", help="Tile in latent pixels.")
@click.option("--overlap", type=float, metavar="O", help="Overlap as a share of the tile.  [default: 0.25]")
@click.option("--temporal-tile", type=int, metavar="T", help="Chunk of a video, in latent frames.")
@click.option("--temporal-overlap", type=float, metavar="O", help="Overlap as a share of the chunk.  [default: 0.25]")
@click.option("--slicing", is_flag=True, help="Each item of the batch alone.")
@click.option("--offload", type=click.Choice(OFFLOADS), default="none", show_default=True)
@click.option("--offload-stream", is_flag=True, help="Of a group offload on cuda: bring in the next group meanwhile.")
@click.option("--plan", metavar="PLAN", help="All of these at once, and any option: bf16,tile=16,slicing,streaming=2.")
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
@click.option("--concurrency", type=int, default=1, show_default=True, metavar="N",
              help="Decodes at once in one process, which share the weights.")  # fmt: skip
@click.option("--resident", metavar="6GiB", help="What else stays on the device: a denoiser.")
@click.option("--law", "with_law", is_flag=True, help="Fit peak = constant + k · pixels over sizes, stage by stage.")
@click.option("--budget", metavar="8GiB", help="The largest picture that fits, with all of that; brings the law.")
@json_option
@plugin_option
def predict(name: str, size: str, frames: int | None, batch: int, device: str, concurrency: int, resident: str | None,
            with_law: bool, budget: str | None, as_json: bool, plugins: tuple[str, ...], plan: str | None,
            **options: Any) -> int:  # fmt: skip
    """Predicted peak memory by stage, without weights and without a GPU.

    MODEL is a registered name, NAME=PATH (a config.json is enough), or a configuration that ships: sd15, sdxl, sd3,
    flux, qwen-image, wan21 …
    """
    registry, _, _ = prepare(plugins, None)
    from fidelity.records import to_json

    wanted = _plan(plan, options, registry)
    model, pixels = described(name, registry), parse_size(size)
    room = wording.parse_bytes(budget, "--budget") if budget is not None else None
    held = wording.parse_bytes(resident, "--resident") if resident is not None else 0
    from fidelity import predict as predict_
    from fidelity import prediction

    found = predict_.predict(model, pixels, wanted, frames=frames, batch=batch, device=device, concurrency=concurrency,
                             resident=held, with_law=with_law, budget=room)  # fmt: skip
    if as_json:
        click.echo(to_json(found).decode())
        return 0
    for line in prediction.lines(found):
        click.echo(line)
    return 0


def _plan(text: str | None, options: dict[str, Any], registry: Any) -> DecodePlan:
    if text is not None:
        typed = click.get_current_context().get_parameter_source  # a 0 and a default that was written count too
        given = [key for key in options if typed(key) is ParameterSource.COMMANDLINE]
        if given:
            raise RequestError(f"--plan and --{given[0].replace('_', '-')}: give one or the other")
        from fidelity import plans

        return plans.parse_plan(text, registry)
    tile = _cut(options, "tile", "overlap", "a tile is, in latent pixels")
    chunk = _cut(options, "temporal_tile", "temporal_overlap", "a chunk is, in latent frames")
    return DecodePlan(
        dtype=options["dtype"],
        force_upcast=options["force_upcast"],
        slicing=options["slicing"],
        tiling=Tiling(*tile) if tile is not None else None,
        temporal=Temporal(*chunk) if chunk is not None else None,
        offload=options["offload"],
        options={STREAM: True} if options[STREAM] else {},
    )


def _cut(options: dict[str, Any], tile: str, overlap: str, what: str) -> tuple[int, float] | None:
    """A tile and its overlap, in range. Raises RequestError."""
    from fidelity import plans

    size, share = options[tile], options[overlap]
    if size is None:
        if share is not None:
            raise RequestError(f"{_flag(overlap)} without {_flag(tile)}: say how large {what}")
        return None
    axis = "tiling" if tile == "tile" else "temporal"
    plans.tile_number(axis, "tile", size)
    plans.tile_number(axis, "overlap", 0.25 if share is None else share)
    return size, 0.25 if share is None else share


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
