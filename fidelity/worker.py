"""A worker process: judges what it is told over its standard input, one JSON message a line.

    python -m fidelity.worker < messages > replies

Everything that a decode prints goes to the log (its standard error); a worker that dies takes only its own case along.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from fidelity import noise
from fidelity.errors import FidelityError, RequestError
from fidelity.records import Case, CaseResult, DecodePlan, Exhausted, ModelReach, Reference, Tiling


class Setup(Struct, frozen=True, tag="setup"):
    """What to load before the first task."""

    suite: str
    golden: str
    device: str
    threads: int
    cores: tuple[int, ...] = ()
    plugins: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    substitute: tuple[str, str] | None = None
    folder: str | None = None
    gate_regressions: bool = True
    request: str = ""
    """The command line that reproduces a case, up to its --case."""


class Prepare(Struct, frozen=True, tag="prepare"):
    """Make these latents and see whether the model takes them; writes nothing."""

    model: str
    latents: str


class Hold(Struct, frozen=True, tag="hold"):
    """Decode the reference plan of these latents and hold it against its golden.

    `record` records it first; `renew` records it anew if it does not hold, whatever is wrong with it.
    """

    model: str
    latents: str
    record: bool = False
    renew: bool = False


class Judge(Struct, frozen=True, tag="judge"):
    """Judge these cases, one reply each. They share all but the offload, so that they share measurements."""

    cases: tuple[Case, ...]


class Fit(Struct, frozen=True, tag="fit"):
    """Find the nearest plan that fits, for a case whose worker died of memory."""

    case: Case
    found: Exhausted


class Floors(Struct, frozen=True, tag="floors"):
    """Measure how far each of these plain plans moves on these latents, under each condition."""

    model: str
    latents: str
    plans: tuple[DecodePlan, ...] = noise.PLAIN_PLANS
    conditions: tuple[str, ...] = (noise.THREADS,)


class Probe(Struct, frozen=True, tag="probe"):
    """Measure how far the model looks on these latents, and predict each tiling on the latents named with it."""

    model: str
    latents: str
    tilings: tuple[tuple[str, Tiling], ...]


class Ready(Struct, frozen=True, tag="ready"):
    environment: dict[str, Any]


class Held(Struct, frozen=True, tag="held"):
    reference: Reference


class Judged(Struct, frozen=True, tag="judged"):
    result: CaseResult


class Fitted(Struct, frozen=True, tag="fitted"):
    found: Exhausted


class Floored(Struct, frozen=True, tag="floored"):
    noise: tuple[noise.Noise, ...]


class Probed(Struct, frozen=True, tag="probed"):
    reach: ModelReach


class Refused(Struct, frozen=True, tag="refused"):
    """A FidelityError: `wrong_request` tells whether the request is at fault."""

    message: str
    wrong_request: bool


class Done(Struct, frozen=True, tag="done"):
    """The task has no further replies."""


Task = Prepare | Hold | Judge | Fit | Floors | Probe
Reply = Ready | Held | Judged | Fitted | Floored | Probed | Refused | Done


def serve(commands: BinaryIO, replies: BinaryIO) -> None:
    """Answer each message until the input ends."""

    def say(reply: Reply) -> None:
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()

    try:
        setup = msgspec.json.decode(commands.readline(), type=Setup)
        bench = _prepare(setup)
        from fidelity.environment import fingerprint

        say(Ready(fingerprint(setup.device)))
    except FidelityError as error:
        say(Refused(str(error), isinstance(error, RequestError)))
        return
    for line in commands:
        task = msgspec.json.decode(line, type=Task)
        try:
            for reply in _answer(bench, task):
                say(reply)
        except FidelityError as error:
            say(Refused(str(error), isinstance(error, RequestError)))
        say(Done())


def _prepare(setup: Setup) -> Any:
    """Pin this process to its own cores, register the plugins, read the suite; torch is first imported here."""
    if setup.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    sys.path[:0] = [entry for entry in setup.path if entry not in sys.path]
    from fidelity import registry, suite
    from fidelity.environment import check_device, make_deterministic
    from fidelity.evaluator import Evaluator
    from fidelity.models.load import from_path

    registry.load_plugins(setup.plugins)
    model = from_path(*setup.substitute) if setup.substitute else None
    loaded = suite.load(Path(setup.suite), registry, substitute=model)
    check_device(setup.device)
    make_deterministic(setup.threads)
    return Evaluator(
        loaded.models,
        loaded.latents,
        Path(setup.golden),
        device=setup.device,
        folder=Path(setup.folder) if setup.folder else None,
        request=setup.request,
        suite_path=setup.suite,
        gate_regressions=setup.gate_regressions,
        suite=loaded,
    )


def _answer(bench: Any, task: Task) -> Iterator[Reply]:
    match task:
        case Prepare(model, latents):
            bench.make_latents(model, latents)
        case Hold(model, latents, record, renew):
            if record:
                bench.record(model, latents)
            yield Held(bench.renewed(model, latents) if renew else bench.reference(model, latents, recorded=record))
        case Judge(cases):
            for one in cases:
                yield Judged(bench.case(one, held=True))  # a run judges what leans on a reference that held
        case Fit(case, found):
            yield Fitted(bench.fitting(case, found))
        case Floors(model, latents, plans, conditions):
            yield Floored(bench.plain(model, latents).noise(plans, conditions))
        case Probe(model, latents, tilings):
            yield Probed(bench.probe(model, latents, tilings))


def end_with(parent: int, every: float = 1.0) -> None:
    """End this process when its parent is gone: nobody is left to read what it decodes."""
    while os.getppid() == parent:
        time.sleep(every)
    os._exit(1)


def main() -> None:
    """Keep the pipe to the parent for replies, and send everything else that is printed to standard error."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
