"""`fidelity inspect --roofline`: what memory and arithmetic allow a decode, part by part."""

from __future__ import annotations

from typing import Any

import click

from fidelity.cli.common import described, latents_shape
from fidelity.errors import OutputError, RequestError
from fidelity.records import DecodePlan

OPTIONS = ("bandwidth", "compute", "size", "frames", "batch", "dtype", "plan", "svg")


def refuse_without(roofline: bool, options: dict[str, Any]) -> None:
    """Raise RequestError for an option of the roofline where none was asked for."""
    given = next((name for name in OPTIONS if options.get(name) is not None), None)
    if given is not None and not roofline:
        raise RequestError(f"--{given} goes with --roofline")


def show(name: str, registry: Any, mine: Any, device: str, options: dict[str, Any], as_json: bool) -> int:
    """Print the roofline of a model with weights, or of a configuration on shapes alone."""
    from fidelity import plans
    from fidelity.concurrency import together
    from fidelity.environment import check_device
    from fidelity.records import to_json
    from fidelity.roofline import plot, roof

    for value, what, unit in ((options["bandwidth"], "bandwidth", "GB/s"), (options["compute"], "compute", "GFLOP/s")):
        if value is not None:
            roof.rate(value, f"--{what}", unit)
    if options["plan"] is not None and options["dtype"] is not None:
        raise RequestError("--plan and --dtype: give one or the other")
    plan = (plans.parse_plan(options["plan"], registry) if options["plan"] is not None
            else DecodePlan(dtype=options["dtype"] or "fp32"))  # fmt: skip
    check_device(device)
    if options["svg"] is not None and not options["svg"].parent.is_dir():
        raise OutputError(f"--svg {options['svg']}: there is no folder {options['svg'].parent}")
    weights = mine is not None or name in registry.MODELS
    model = mine if mine is not None else described(name, registry)
    shape = latents_shape(model, options["size"], options["frames"], options["batch"])
    found = roof.measure(model, together.seeded(model, shape), plan, bandwidth=options["bandwidth"],
                             compute=options["compute"], device=device, weights=weights)  # fmt: skip
    if options["svg"] is not None:
        options["svg"].write_text(plot.svg(found), encoding="utf-8")
    if as_json:
        click.echo(to_json(found).decode())
        return 0
    for line in roof.lines(found):
        click.echo(line)
    return 0
