"""`fidelity compare`: two runs side by side, gated on what got worse."""

from __future__ import annotations

from pathlib import Path

import click

from fidelity.comparison import Rise, Rises
from fidelity.errors import RequestError


def rise(text: str, option: str) -> Rise:
    """`0.1` or `5%`. Raises RequestError."""
    number = text.strip()
    relative = number.endswith("%")
    try:
        amount = float(number.rstrip("% "))
    except ValueError:
        amount = float("nan")
    if not 0 <= amount < float("inf"):
        raise RequestError(f"{option} {text!r}: write an amount like 0.1, or a share like 5%")
    return Rise(amount / 100, True) if relative else Rise(amount)


@click.command("compare")
@click.argument("base", metavar="BASE", type=click.Path(path_type=Path))
@click.argument("head", metavar="HEAD", type=click.Path(path_type=Path))
@click.option("--max-rise", "measured", multiple=True, metavar="NAME=AMOUNT",
              help="How much worse a measurement may get: rmse=0.1, ssim=2%. By default its noise floor.")  # fmt: skip
@click.option("--max-rmse-rise", metavar="AMOUNT", help="Short for --max-rise rmse=AMOUNT (grey levels).")
@click.option("--max-memory-rise", metavar="SHARE",
              help="Rise of a case's allocated peak, or off. Default: 5% within one environment class.")  # fmt: skip
@click.option("--max-time-rise", default="off", show_default=True, metavar="SHARE",
              help="Rise of decode seconds, as the median ratio over all cases.")  # fmt: skip
@click.option("--allow", multiple=True, type=click.Choice(["vanished", "goldens", "partial"]),
              help="Cases absent from HEAD; cases that lean on another golden; a partial run as BASE.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
              help="Write comparison.html, comparison.md and comparison.json there.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Only the summary line.")
def compare_(base: Path, head: Path, measured: tuple[str, ...], max_rmse_rise: str | None, max_memory_rise: str | None,
             max_time_rise: str, allow: tuple[str, ...], out: Path | None, quiet: bool) -> int:  # fmt: skip
    """Hold the run in HEAD against the run in BASE; 1 if something got worse beyond what may rise.

    Both are folders that `fidelity run` wrote: of two branches, two versions of a library, two machines.
    """
    from fidelity.compare import compare
    from fidelity.report import compare as rendering
    from fidelity.report import compare_console, compare_markdown, github, json

    if out is not None:
        rendering.refuse_foreign(out)
    rises = Rises(
        measurements=_measured(measured, max_rmse_rise),
        memory=_share(max_memory_rise or "5%", "--max-memory-rise"),
        memory_across=max_memory_rise is not None,
        time=_share(max_time_rise, "--max-time-rise"),
        allow=allow,  # type: ignore[arg-type]
    )
    found = compare(json.read(base), json.read(head), rises, names=(str(base), str(head)))
    if out is not None:
        rendering.write_all(found, out)
    if not quiet:
        compare_console.show(found)
    github.comparison(found, compare_markdown.render(found))
    compare_console.finish(found, page=out / rendering.NAMES[2] if out else None)
    return found.exit_status


def _measured(pairs: tuple[str, ...], rmse: str | None) -> dict[str, Rise]:
    found: dict[str, Rise] = {}
    for pair in [*pairs, *([f"rmse={rmse}"] if rmse is not None else [])]:
        name, equals, amount = pair.partition("=")
        if not equals or not name:
            raise RequestError(f"--max-rise {pair!r}: write NAME=AMOUNT, as in --max-rise lpips_alex=0.001")
        if name in found:
            raise RequestError(f"--max-rise {name} is given twice")
        found[name] = rise(amount, f"--max-rise {name}")
    return found


def _share(text: str, option: str) -> Rise | None:
    """A share of what it was, or None for `off`."""
    if text.strip().lower() == "off":
        return None
    found = rise(text, option)
    if not found.relative:
        raise RequestError(f"{option} {text!r}: write a share like 5%, or off")
    return found
