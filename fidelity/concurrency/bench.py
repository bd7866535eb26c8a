"""One instance of a model under a plan: what each of several decodes on it takes and gives alone, and which differ.

Bits are held against the same latents' own decode alone, on the same instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fidelity import optimizations
from fidelity.concurrency import serving
from fidelity.concurrency.serving import Served
from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.memory import allocator, cuda, threads
from fidelity.records import DecodePlan, Model
from fidelity.runner import Runner

if TYPE_CHECKING:
    from torch import Tensor, nn

AT_ONCE = "at once"
SHOWN = 6


@dataclass
class Alone:
    """Single decodes: the largest peaks beside the weights of decode and conversion, and the seconds of each."""

    decode: list[int] = field(default_factory=list)
    convert: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    reason: str | None = None


class Bench:
    """One instance under the plan, the latents, what each of them gives alone, and what was found."""

    def __init__(self, model: Model, plan: DecodePlan, device: str, latents: list[Tensor]):
        self.model, self.plan, self.device, self.latents = model, plan, device, latents
        self.dtype = str(latents[0].dtype).removeprefix("torch.")
        self.expected: list[Any] = []
        self.compared: dict[str, list[float | str | None]] = {}
        """By when, of each decode: how far its values were from those alone, or what it raised; None where equal."""
        runner = Runner(model, device)
        receipts = runner.decode(latents[0].float(), plan, trace=False).receipts
        self.not_engaged = {name: receipt.get("reason") or ", ".join(receipt.get("leaks", ()))
                            for name, receipt in receipts.items() if receipt.get("engaged") is False}  # fmt: skip
        self.module = runner.module
        self.on_cuda = torch.device(device).type == "cuda"

    @contextmanager
    def ready(self) -> Iterator[None]:
        """With the plan applied."""
        with torch.no_grad(), optimizations.apply_plan(self.module, self.plan, model=self.model, device=self.device):
            self.weights = allocator.resident_weights(self.module, self.device)
            yield

    def serve(self, latents: Tensor, *, recorded: bool = False) -> Served:
        return serving.request(self.module, self.model, latents, recorded=recorded)

    def alone(self) -> Alone:
        """Each of the latents by itself, twice: recorded, and timed. Raises EvaluationError."""
        alone = Alone()
        for index, one in enumerate(self.latents):
            served, timed = self._metered(one, alone), self.serve(one)
            for each in (served, timed):
                if each.error is not None:
                    raise EvaluationError(f"{self.model.name}, {self.plan.id}: one decode alone fails: {each.error}")
            self.expected.append(served.bits)
            self.compare([timed], "alone, a second time,", index)
            alone.seconds.append(timed.end - timed.start)
        return alone

    def _metered(self, latents: Tensor, alone: Alone) -> Served:
        if self.on_cuda:
            meter = cuda.Meter(self.device)
            meter.start(0)
            served = serving.request(self.module, self.model, latents, stage=meter.stage)
            alone.decode += meter.allocated.get("decode", [])
            alone.convert += meter.allocated.get("convert", [])
            return served
        served = self.serve(latents, recorded=True)
        if served.changes.reason is not None:
            alone.reason = served.changes.reason
        elif served.error is None:
            before, after = threads.peaks_around(served.changes, serving.CONVERT)
            alone.decode.append(before)
            alone.convert.append(after)
        return served

    def compare(self, served: Sequence[Served], when: str, index: int = 0) -> None:
        """Note of each decode whether it raised, or gave other bits than alone."""
        for one, expected in zip(served, self.expected[index:]):
            off = one.error if one.error is not None else serving.difference(one.bits, expected, self.dtype)
            self.compared.setdefault(when, []).append(off)

    @property
    def spoiled(self) -> bool:
        """Whether any decode at once was not what it is alone."""
        return any(off is not None for off in self.compared.get(AT_ONCE, ()))

    def written(self) -> str:
        """Which attributes of the instance a single decode sets, in words: what decodes at once fight over."""
        paths = {id(part): path for path, part in self.module.named_modules()}
        found: dict[str, set[str]] = {}
        plain = torch.nn.Module.__setattr__

        def note(part: nn.Module, name: str, value: Any) -> None:
            if id(part) in paths:
                found.setdefault(name, set()).add(paths[id(part)])
            plain(part, name, value)

        torch.nn.Module.__setattr__ = note  # type: ignore[method-assign, assignment]
        try:
            self.serve(self.latents[0])
        finally:
            torch.nn.Module.__setattr__ = plain  # type: ignore[method-assign]
        names = [name if len(where) == 1 else f"{name} of {len(where)} modules" for name, where in found.items()]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return ", ".join(sorted(names)[:SHOWN]) + more
