"""What a check decodes with: one instance, again and again, while every decode still proves that its options ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fidelity.records import DecodePlan, Model, Receipts

if TYPE_CHECKING:
    from torch import Tensor

    from fidelity.runner import Runner


class Subject:
    """One loaded instance under one check. `receipts` are those of all proved decodes, the first bad one of each."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.receipts: Receipts = {}
        self.words: str | None = None
        """What a difference is, in the check's own words, which stand in the case's reason."""

    def say(self, words: str) -> None:
        """Tell what differs, where two samples alone would not."""
        self.words = words

    @property
    def model(self) -> Model:
        return self.runner.model

    @property
    def module(self) -> Any:
        return self.runner.module

    @contextmanager
    def applied(self, plan: DecodePlan) -> Iterator[Callable[..., Tensor]]:
        """Yield `decode(latents, prove=True)`, for several decodes under one application of `plan`.

        Latents (B, C, [T,] H, W) fp32 in, the sample in fp32 on the CPU out. `prove=False` keeps no receipts: for
        latents of another size, where options may have nothing to do.
        """
        with self.runner.applied(plan) as run:

            def decode(latents: Tensor, prove: bool = True) -> Tensor:
                sample, receipts = run(latents)
                if prove:
                    self._keep(receipts)
                return sample

            yield decode

    def decode(self, latents: Tensor, plan: DecodePlan, prove: bool = True) -> Tensor:
        """One decode under an application of its own."""
        with self.applied(plan) as decode:
            return decode(latents, prove)

    def tile_calls(self, latents: Tensor, plan: DecodePlan) -> list[tuple[int, int, int]]:
        """Height and width in latent pixels of the tiles that the decoder saw, and how often."""
        with self.runner.applied(plan) as run:
            _, receipts = run(latents)
        return [(shape[-3], shape[-2], shape[-1]) for shape in receipts["tiling"]["shapes"]]

    def _keep(self, receipts: Receipts) -> None:
        for name, receipt in receipts.items():
            if self.receipts.get(name, {}).get("engaged") is not False:
                self.receipts[name] = receipt
