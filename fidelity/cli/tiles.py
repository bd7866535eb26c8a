"""`fidelity tiles`: which tiles a class decodes faithfully and why not the others, before anything is decoded."""

from __future__ import annotations

import click

from fidelity.cli.common import described, json_option, parse_size, plugin_option, prepare
from fidelity.errors import RequestError
from fidelity.records import Temporal, Tiling


@click.command("tiles")
@click.argument("name", metavar="MODEL")
@click.option("--size", metavar="HxW", help="Height and width of the sample, in pixels: where the tiles will lie.")
@click.option("--tile", type=int, metavar="T", help="Tile in latent pixels: is it legal, and as which attributes?")
@click.option("--overlap", type=float, metavar="O", help="Overlap as a share of the tile.  [default: 0.25]")
@click.option("--frames", type=int, metavar="N", help="Frames of the sample.")
@click.option("--temporal-tile", type=int, metavar="T", help="Chunk in latent frames.")
@click.option("--temporal-overlap", type=float, metavar="O", help="Overlap as a share of the chunk.  [default: 0.25]")
@json_option
@plugin_option
def tiles(name: str, size: str | None, tile: int | None, overlap: float | None, frames: int | None,
          temporal_tile: int | None, temporal_overlap: float | None, as_json: bool,
          plugins: tuple[str, ...]) -> int:  # fmt: skip
    """Which tiles and overlaps are legal for a class, why not the others, and where the tiles of a size will lie.

    MODEL is a registered name, NAME=PATH (a config.json is enough), or a configuration that ships: sdxl, flux, wan21 …
    An illegal tile that is asked for is a wrong request: exit status 2, with the nearest legal one.
    """
    registry, _, _ = prepare(plugins, None)
    for given, needs, what in ((overlap, tile, "tile"), (temporal_overlap, temporal_tile, "temporal-tile")):
        if given is not None and needs is None:
            option = "--overlap" if what == "tile" else "--temporal-overlap"
            raise RequestError(f"{option} without --{what}: an overlap is a share of a tile; say how large it is")
    from fidelity import tiles as tiles_
    from fidelity.records import to_json

    found = tiles_.report(
        described(name, registry),
        size=parse_size(size) if size is not None else None,
        tiling=Tiling(tile, 0.25 if overlap is None else overlap) if tile is not None else None,
        frames=frames,
        temporal=None
        if temporal_tile is None
        else Temporal(temporal_tile, 0.25 if temporal_overlap is None else temporal_overlap),
    )
    if as_json:
        click.echo(to_json(found).decode())
        return 0
    for line in tiles_.lines(found):
        click.echo(line)
    return 0
