"""`fidelity explain`: why a decode ran out of memory, from its log."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fidelity.cli.common import json_option
from fidelity.errors import RequestError


@click.command("explain")
@click.argument("log", metavar="LOG", type=click.Path(path_type=Path, allow_dash=True))
@json_option
def explain(log: Path, as_json: bool) -> int:
    """Why a decode ran out of memory, from its saved log or traceback (- for standard input): in which stage, whether a
    smaller tile helps, and what to change.

    CUDA, HIP, XPU, MPS, the CPU's allocators and the Linux kernel; diffusers' autoencoders, and others as far as frames
    tell.
    """
    from fidelity import explain as explain_
    from fidelity.records import to_json

    found = explain_.explain(_read(log), str(log))
    if as_json:
        click.echo(to_json(found).decode())
    else:
        click.echo("\n".join(explain_.lines(found)))
    return 0


def _read(log: Path) -> str:
    if str(log) == "-":
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RequestError(f"{log} cannot be read: {error.strerror or error}: name a saved log, or - for standard "
                           "input") from error  # fmt: skip
