"""The table of `fidelity ls models`: what each autoencoder is, as derived from its configuration."""

from __future__ import annotations

from collections.abc import Iterable

from fidelity.records import Model, Scaling

HEADER = ("name", "class", "f", "f_t", "c", "f²·f_t·3/c", "scaling", "upcast", "tiles", "chunks", "reference")


def lines(models: Iterable[Model], configurations: Iterable[Model]) -> list[str]:
    """A line for each model that can be decoded here, then each configuration that is known without weights."""
    with_weights, without = [row(model) for model in models], [row(model) for model in configurations]
    widths = [max(map(len, column)) for column in zip(HEADER, *with_weights, *without)]

    def line(cells: tuple[str, ...]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()

    out = [line(HEADER), *map(line, with_weights)]
    if without:
        out += ["without weights: fidelity predict NAME, or --model NAME=PATH to decode", *map(line, without)]
    return out


def row(model: Model) -> tuple[str, ...]:
    """One model's cells, in the order of HEADER."""
    geometry, family = model.geometry, model.family
    return (
        model.name,
        family.name,
        str(geometry.spatial),
        str(geometry.temporal) if geometry.video else "–",
        str(geometry.latent_channels),
        f"{geometry.compression:g}",
        scaling(model.scaling),
        "yes" if model.force_upcast else "–",
        family.tile_controls,
        family.temporal_controls if geometry.video else "–",
        model.reference,
    )


def scaling(convention: Scaling) -> str:
    """A scaling convention in a few words."""
    parts = [f"{convention.factor:g}"] if convention.factor is not None else []
    parts += [f"shift {convention.shift:g}"] if convention.shift is not None else []
    parts += ["mean, std per channel"] if convention.std is not None else []
    return ", ".join(parts) or "not in the config"
