"""The command line, one file for each kind of command. Modules that cost time are imported by the command that needs
them: `--help`, `ls` and `validate` import neither torch nor diffusers.

Exit status: 0 as the suites expect · 1 a gate failed · 2 the request is wrong · 3 a case could not be judged.
"""

from __future__ import annotations

import os
import signal
import sys

import click

from fidelity import __version__
from fidelity.cli import (
    compare,
    concurrency,
    explain,
    golden,
    history,
    predict,
    recommend,
    report,
    run,
    show,
    tiles,
    upstream,
)
from fidelity.cli.common import INTERRUPTED, NOT_JUDGED, SIGNALS, WRONG_REQUEST
from fidelity.errors import FidelityError, RequestError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="fidelity")
def cli() -> None:
    """What did slicing, tiling, offload and half precision do to the picture?"""


for command in (
    run.run, show.ls, show.validate, show.inspect_, golden.golden_group, golden.calibrate, report.report_,
    compare.compare_, history.history_, predict.predict, recommend.recommend, explain.explain, upstream.upstream_,
    tiles.tiles, concurrency.concurrency,
):  # fmt: skip
    cli.add_command(command)


def _interrupt(number: int, frame: object) -> None:
    """Once: what was judged is then being written, and a second signal (`timeout` sends two) must not lose it."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: errors are one line on standard error. A SIGTERM ends a run as Ctrl-C does."""
    for number in SIGNALS:  # a parent may have left SIGINT ignored
        signal.signal(number, _interrupt)
    try:
        status = cli.main(args=arguments, prog_name="fidelity", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        status = 0
    except click.ClickException as error:
        click.echo(f"fidelity: {' '.join(error.format_message().split())}", err=True)
        status = WRONG_REQUEST
    except click.Abort:
        click.echo("fidelity: interrupted; nothing was written", err=True)
        status = INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone; what was asked for is written
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = run.ENDED[-1] if run.ENDED else NOT_JUDGED
    except OSError as error:
        click.echo(f"fidelity: {error.filename or 'a file'} cannot be used: {error.strerror or error}", err=True)
        status = WRONG_REQUEST
    except FidelityError as error:
        click.echo(f"fidelity: {error}", err=True)
        status = WRONG_REQUEST if isinstance(error, RequestError) else NOT_JUDGED
    sys.exit(int(status))
