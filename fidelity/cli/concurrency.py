"""`fidelity concurrency`: n decodes at once, measured, and what to reserve before letting them in."""

from __future__ import annotations

import click

from fidelity.cli.common import (
    NOT_JUDGED,
    device_option,
    json_option,
    latents_shape,
    model_option,
    plugin_option,
    prepare,
    with_weights,
)
from fidelity.errors import RequestError
from fidelity.wording import parse_bytes


@click.command("concurrency")
@click.argument("name", metavar="MODEL")
@click.option("--size", metavar="HxW", help="Height and width of each sample, in pixels.  [default: 32×32 latents]")
@click.option("--frames", type=int, help="Frames of each sample, with --size.")
@click.option("--batch", type=int, help="Items of each decode, with --size.  [default: 1]")
@click.option("--latents", metavar="NAME", help="Named latents instead: fidelity ls latents.")
@click.option("--plan", metavar="PLAN", help="As bf16,tile=16,overlap=0.25,slicing.  [default: fp32, all at once]")
@click.option("-n", "count", type=int, default=4, show_default=True, help="Decodes at once.")
@click.option("--processes", is_flag=True, help="In processes, an instance each, instead of threads on one instance.")
@click.option("--resident", metavar="2GiB", help="What stays in memory beside them, as a denoiser does.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Peaks together depend on timing.")
@device_option
@model_option
@plugin_option
@json_option
def concurrency(name: str, size: str | None, frames: int | None, batch: int | None, latents: str | None,
                plan: str | None, count: int, processes: bool, resident: str | None, rounds: int, device: str,
                model: str | None, plugins: tuple[str, ...], as_json: bool) -> int:  # fmt: skip
    """Measure n decodes at once: their peak together, the bits of each, and what an admission rule must reserve.

    MODEL is a registered name or NAME=PATH. Exit status 1 where decodes at once spoil one another, or the rule fails.
    """
    registry, _, mine = prepare(plugins, model or (name if "=" in name else None))
    chosen = with_weights(name, registry, mine)
    if latents is not None and (size, frames, batch) != (None, None, None):
        raise RequestError("--latents and --size, --frames or --batch: named latents have a size of their own")
    shape = latents_shape(chosen, size, frames, batch)
    held = parse_bytes(resident, "--resident") if resident is not None else 0
    from fidelity import plans
    from fidelity.concurrency import record, together
    from fidelity.environment import check_device, make_deterministic
    from fidelity.records import DecodePlan, to_json

    wanted = plans.parse_plan(plan, registry) if plan is not None else DecodePlan()
    check_device(device)
    make_deterministic(1)
    fed = (registry.LATENTS.get(latents).make(chosen, chosen.load()).tensor if latents is not None
           else together.seeded(chosen, shape))  # fmt: skip
    found = together.measure(chosen, fed, wanted, count=count, resident=held, rounds=rounds, device=device,
                                 way="processes" if processes else "threads", plugins=plugins)  # fmt: skip
    if as_json:
        click.echo(to_json(found).decode())
    else:
        for line in record.lines(found):
            click.echo(line)
    return NOT_JUDGED if found.rule is None else 1 if found.findings else 0
