"""`fidelity recommend`: the plans to take under a memory budget, from a run or from predictions alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fidelity.cli.common import described, json_option, parse_size, plugin_option, prepare
from fidelity.errors import RequestError
from fidelity.wording import parse_bytes


@click.command("recommend")
@click.argument("target", metavar="DIR|MODEL")
@click.option("--budget", required=True, metavar="4GiB", help="Memory that there is.")
@click.option("--headroom", default="10%", show_default=True, metavar="SHARE", help="Of it, to be left free.")
@click.option("--model", metavar="NAME[=PATH]", help="Of a run: this model alone; PATH of a config the run was given.")
@click.option("--size", metavar="HxW", help="Predict for samples of this size; DIR is then a MODEL, as in predict.")
@click.option(
    "--frames",
    type=int,
    metavar="N",
    help="Predict: frames of the sample.  [default: the fewest that the class decodes]",
)
@click.option("--batch", type=int, metavar="N", help="Predict: samples at once.  [default: 1]")
@click.option("--device", type=click.Choice(("cpu", "cuda")), help="Predict: where it decodes.  [default: cpu]")
@click.option("--overlap", type=float, metavar="O", help="Predict: overlap as a share of the tile.  [default: 0.25]")
@json_option
@plugin_option
def recommend(target: str, budget: str, headroom: str, model: str | None, size: str | None, as_json: bool,
              plugins: tuple[str, ...], **predicted: Any) -> int:  # fmt: skip
    """The plans to take under a memory budget, cheapest first, as diffusers code to paste.

    From a run's folder: those that passed every gate and lie on the Pareto front of memory, RMSE and time. With --size,
    from predictions alone: nothing is decoded, and fidelity is not measured. Exit status 1 where nothing fits.
    """
    from fidelity import offers

    share = offers.parse_headroom(headroom)
    room = offers.Budget(parse_bytes(budget, "--budget"), share)
    given = [name for name, value in predicted.items() if value is not None]
    if size is None and given:
        raise RequestError(f"--{given[0]} is for a prediction: say --size HxW, and a MODEL in place of a run")
    if size is not None and model is not None:
        raise RequestError("--model picks a model of a run: with --size, name it in place of the run")
    registry, _, _ = prepare(plugins, None)
    if size is None:
        found = _of_run(target, model, room, registry)
    else:
        if (Path(target) / "results.json").is_file():
            raise RequestError(f"{target} is a run, of which the sizes are known: leave --size out, or name a model")
        from fidelity import proposals

        options = {name: value for name, value in predicted.items() if value is not None}
        found = [proposals.propose(described(target, registry), parse_size(size), room, **options)]
    if as_json:
        from fidelity.records import to_json

        click.echo(to_json(found).decode())
    else:
        for place, advice in enumerate(found):
            click.echo("\n".join([*([""] if place else []), *offers.lines(advice)]))
    return 0 if all(advice.offers for advice in found) else 1


def _of_run(target: str, model: str | None, room: Any, registry: Any) -> list[Any]:
    from fidelity import recommend as recommend_
    from fidelity.models import configs
    from fidelity.report import json

    if not Path(target).exists() and (target in registry.MODELS or target in configs.known()):
        raise RequestError(f"{target} is a model: say --size HxW to predict, or name the folder of a run")
    run = json.read(Path(target))
    name, equals, _ = (model or "").partition("=")
    extra = {name: described(model, registry)} if model is not None and equals else {}
    known = {**{each: configs.from_name(each) for each in configs.known()}, **dict(registry.MODELS.items())}
    return recommend_.from_run(run, recommend_.known(known, extra), room, only=name or None)
