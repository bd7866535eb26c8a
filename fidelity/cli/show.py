"""`fidelity ls`, `validate`, `inspect`: what there is, before anything is judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fidelity.cli import roofline
from fidelity.cli.common import (
    device_option,
    json_option,
    model_option,
    plugin_option,
    prepare,
    suite_argument,
    with_weights,
)
from fidelity.records import DTYPES

KINDS = ("models", "latents", "optimizations", "metrics", "detectors", "checks", "suites")


@click.command("ls")
@click.argument("kind", type=click.Choice(KINDS))
@plugin_option
def ls(kind: str, plugins: tuple[str, ...]) -> int:
    """List what there is, one line each; of models, what each is as its configuration says."""
    registry, _, _ = prepare(plugins, None)
    if kind == "models":
        from fidelity.cli import models
        from fidelity.models import configs

        known = [model for _, model in registry.MODELS.items()]
        for line in models.lines(known, map(configs.from_name, configs.known())):
            click.echo(line)
        return 0
    if kind == "suites":
        from fidelity import suite as suite_

        rows = suite_.listing(Path("suites"), registry)
    else:
        rows = [(name, _describe(kind, entry)) for name, entry in getattr(registry, kind.upper()).items()]
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}".rstrip())
    return 0


def _describe(kind: str, entry: Any) -> str:
    if kind in ("metrics", "detectors"):
        return f"{entry.unit}, {entry.better} is better · {entry.summary}"
    if kind == "checks":
        return f"{entry.unit}, blamed on {', '.join(entry.diagnosis)} · {entry.summary}"
    return str(entry.summary)


@click.command()
@suite_argument
@model_option
@plugin_option
def validate(path: Path, model: str | None, plugins: tuple[str, ...]) -> int:
    """Check every name, range and tile geometry of a suite before anything is decoded."""
    from collections import Counter

    from fidelity import suite as suite_

    registry, _, mine = prepare(plugins, model)
    loaded = suite_.load(path, registry, substitute=mine)
    reasons = Counter(case.not_applicable for case in loaded.cases if case.not_applicable)
    judged = [case for case in loaded.cases if not case.not_applicable]
    expected = Counter(case.expected.verdict for case in judged)
    idle = sum(reasons.values())
    click.echo(f"{loaded.name}: {len(loaded.cases)} cases, {len(judged)} judged, {idle} not applicable")
    for verdict, count in expected.items():
        click.echo(f"  {count:5}  expected to {verdict}")
    for reason, count in reasons.most_common():
        click.echo(f"  {count:5}  not applicable: {reason}")
    for reason, count in Counter(reason for _, reason in loaded.excluded).most_common():
        click.echo(f"  {count:5}  excluded: {reason}")
    click.echo(f"  about {suite_.time_estimate(loaded):.0f} s of decodes on one core")
    return 0


@click.command("inspect")
@click.argument("name", metavar="MODEL")
@click.option(
    "--roofline", "with_roofline", is_flag=True, help="Instead: FLOPs, bytes and time by part of the decoder."
)
@click.option("--bandwidth", type=float, metavar="GB/s", help="Of memory.  [default: measured here]")
@click.option("--compute", type=float, metavar="GFLOP/s", help="At the decode's dtype.  [default: measured here]")
@click.option("--size", metavar="HxW", help="Of the sample, in pixels.  [default: 32×32 latents]")
@click.option("--frames", type=int, help="Of the sample, with --size.")
@click.option("--batch", type=int, help="Items, with --size.  [default: 1]")
@click.option("--dtype", type=click.Choice(DTYPES), help="[default: fp32]")
@click.option("--plan", metavar="PLAN", help="As bf16,tile=16,overlap=0.25,slicing.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw the roofline.")
@device_option
@model_option
@plugin_option
@json_option
def inspect_(name: str, with_roofline: bool, device: str, model: str | None, plugins: tuple[str, ...], as_json: bool,
             **options: Any) -> int:  # fmt: skip
    """Geometry, scaling, legal tiles, round-trip error, and how far the decoder looks. MODEL is a name or NAME=PATH.

    With --roofline, what memory and arithmetic allow each part of the decoder and what it reaches; MODEL may then be a
    configuration that ships, without weights: sdxl, flux, wan21 …
    """
    roofline.refuse_without(with_roofline, options)
    registry, _, mine = prepare(plugins, model or (name if "=" in name and not name.endswith(".json") else None))
    if with_roofline:
        chosen = mine if mine is not None and mine.name == name.partition("=")[0] else None
        return roofline.show(name, registry, chosen, device, options, as_json)
    from fidelity import inspection
    from fidelity.environment import check_device
    from fidelity.records import to_json

    chosen = with_weights(name, registry, mine)
    check_device(device)
    photographs = [source for each, source in registry.LATENTS.items() if each.startswith("photo-")]
    found = inspection.inspect(chosen, photographs, device)
    if as_json:
        click.echo(to_json(found).decode())
        return 0
    for line in inspection.lines(found):
        click.echo(line)
    return 0
