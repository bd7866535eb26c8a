"""One tree of exceptions. Each message is one line: what, where, measured, limit, next step.

FidelityError
├── RequestError            the request is wrong: exit status 2, nothing written
│   ├── UnknownName         a model, latents, option, metric … that nobody registered
│   ├── SuiteError          a suite that cannot be read or asks for the impossible
│   │   └── IllegalTiling   a tile and an overlap that a class cannot decode faithfully
│   ├── ModelError          a model directory without config, with missing or extra weights …
│   ├── LatentsError        latents of the wrong rank, channels, dtype or with NaN
│   ├── GoldenError         a golden that is missing, corrupted or of something else
│   ├── OutputError         an output folder that cannot be written, or that holds something else
│   ├── HistoryBusy         a history that another run is writing to
│   └── PluginError         a plugin that does not import or register
└── EvaluationError         a case could not be judged: verdict `error`, exit status 3
    ├── AttestationError    LPIPS weights are missing, altered or give the wrong answer
    └── WorkerDied          the worker process ended under a case
"""

from __future__ import annotations


class FidelityError(Exception):
    """Base of everything that fidelity raises on purpose."""


class RequestError(FidelityError):
    """The request is wrong; nothing was measured or written."""


class UnknownName(RequestError):
    """A name that no registry knows."""


class SuiteError(RequestError):
    """A suite that cannot be read, or that asks for the impossible."""


class IllegalTiling(SuiteError):
    """A tile and an overlap that the model's class cannot decode faithfully."""


class ModelError(RequestError):
    """A model that cannot be described or loaded strictly."""


class LatentsError(RequestError):
    """Latents that the model cannot take."""


class GoldenError(RequestError):
    """A golden that is missing, corrupted, or of something else."""


class OutputError(RequestError):
    """An output folder that cannot be written, or that holds something other than a fidelity run."""


class HistoryBusy(RequestError):
    """A history that another run is writing to for longer than one waits."""


class PluginError(RequestError):
    """A plugin that does not import, or that registers a name twice."""


class EvaluationError(FidelityError):
    """A case could not be judged."""


class AttestationError(EvaluationError):
    """A perceptual metric did not reproduce its known answer, so it may not gate."""


class WorkerDied(EvaluationError):
    """The worker process ended under a case."""

    of_memory: bool | None = None
    """Whether it is known that memory ran out, or that it did not; None: nobody can tell."""


def first_line(error: BaseException) -> str:
    """What an exception says, in one line of at most 300 characters; its kind where it says nothing.

    A line that ends in a colon says nothing without the one that follows (torch's `load_state_dict`).
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    words = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return words if len(words) <= 300 else f"{words[:299]}…"


def in_one_line(error: BaseException) -> str:
    """Its kind, and what it says, in one line."""
    return f"{type(error).__name__}: {first_line(error) if str(error).strip() else 'no message'}"
