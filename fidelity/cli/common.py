"""What the commands share: options, the registry with its plugins, and a suite ready to run."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fidelity.errors import RequestError, UnknownName

if TYPE_CHECKING:
    from fidelity.records import RunResult
    from fidelity.runs import Options
    from fidelity.suite import Suite

WRONG_REQUEST, NOT_JUDGED, INTERRUPTED = 2, 3, 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)

plugin_option = click.option("--plugin", "plugins", multiple=True, metavar="MODULE", help="Import MODULE first.")
model_option = click.option("--model", metavar="NAME[=PATH]",
                            help="Evaluate the autoencoder at PATH as NAME; without PATH a known one.")  # fmt: skip
case_option = click.option("--case", "glob", metavar="GLOB", help="Only cases whose whole id matches.")
device_option = click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
jobs_option = click.option("--jobs", type=int, help="Worker processes, each on cores of its own.")
suite_argument = click.argument("path", metavar="SUITE", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")


def status_of(result: RunResult) -> int:
    """The exit status of a run, made just now or stored: what is missing or was never judged is no success."""
    if result.partial:
        return INTERRUPTED
    return result.exit_status if any(case.verdict != "not_applicable" for case in result.cases) else NOT_JUDGED


def tell(failed: tuple[str, ...], status: int) -> int:
    """Say on standard error what could not be rendered; the exit status with that in it."""
    for line in failed:
        click.echo(f"fidelity: {line}", err=True)
    return max(status, NOT_JUDGED) if failed else status


@contextmanager
def undisturbed() -> Iterator[None]:
    """Finish the block whatever signal comes: minutes of decodes are being written."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare(plugins: tuple[str, ...], model: str | None) -> tuple[Any, tuple[str, str] | None, Any]:
    """The registry with plugins loaded, and the --model's name, path and Model."""
    sys.path[:0] = [entry for entry in [os.getcwd()] if plugins and entry not in sys.path]
    from fidelity import registry
    from fidelity.models.load import from_path

    registry.load_plugins(plugins)
    if model is None:
        return registry, None, None
    name, equals, path = model.partition("=")
    if not equals and name in registry.MODELS:
        return registry, (name, ""), registry.MODELS.get(name)
    if not equals or not name or not path:
        raise RequestError(f"--model {model!r}: write NAME=PATH, as in --model mine=/models/sdxl-vae, or the name of a "
                           "registered model: fidelity ls models")  # fmt: skip
    absolute = str(Path(path).expanduser().absolute())
    return registry, (name, absolute), from_path(name, absolute)


def with_weights(name: str, registry: Any, mine: Any) -> Any:
    """The Model of a MODEL argument that is to be decoded: `mine`, if it is the one, or a registered one. Raises
    RequestError for a configuration that ships, as that has no weights."""
    from fidelity.models import configs

    if mine is not None and mine.name == name.partition("=")[0]:
        return mine
    if name not in registry.MODELS and name in configs.known():
        raise RequestError(f"{name} is a configuration without weights, which can be predicted and not decoded: give "
                           f"{name}=PATH")  # fmt: skip
    return registry.MODELS.get(name)


def described(name: str, registry: Any) -> Any:
    """The Model of a MODEL argument: a registered name, NAME=PATH of a config, or a configuration that ships.

    Weights need not be there. Raises RequestError, UnknownName."""
    from fidelity.models import configs

    if "=" in name:
        own, _, path = name.partition("=")
        if not own or not path:
            raise RequestError(f"MODEL {name!r}: write NAME=PATH, as in mine=/models/sdxl-vae")
        if own in registry.MODELS and hasattr(registry.MODELS.get(own).family, "at"):
            return registry.MODELS.get(own).family.at(registry.MODELS.get(own), path)
        return configs.from_config(own, Path(path))
    if name in registry.MODELS:
        return registry.MODELS.get(name)
    if name in configs.known():
        return configs.from_name(name)
    raise UnknownName(registry.unknown("model", name, [*registry.MODELS, *configs.known()]))


def parse_size(text: str) -> tuple[int, int]:
    """Height and width of `1024x1024`, in pixels. Raises RequestError."""
    found = re.fullmatch(r"(\d+)[x×](\d+)", text.strip())
    if not found:
        raise RequestError(f"--size {text!r}: write HEIGHTxWIDTH in pixels, as in 1024x1024")
    return int(found[1]), int(found[2])


def latents_shape(model: Any, size: str | None, frames: int | None, batch: int | None) -> tuple[int, ...] | None:
    """The latents' shape of `--size`, `--frames` and `--batch`; None where none was given. Raises RequestError."""
    from fidelity import predict

    if size is not None:
        return predict.latents_shape(model, parse_size(size), frames, 1 if batch is None else batch)
    if (frames, batch) != (None, None):
        raise RequestError("--frames and --batch go with --size HxW")
    return None


def suite_and_options(
    path: Path, device: str, model: str | None, plugins: tuple[str, ...], jobs: int | None = None
) -> tuple[Suite, Options]:
    from fidelity import runs
    from fidelity import suite as suite_

    registry, substitute, mine = prepare(plugins, model)
    loaded = suite_.load(path, registry, substitute=mine)
    options = runs.Options(device=device, jobs=jobs, plugins=plugins, path=(os.getcwd(),) if plugins else (),
                           substitute=substitute)  # fmt: skip
    return loaded, options
