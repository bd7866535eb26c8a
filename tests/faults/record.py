"""One fault: what shipped, how it is injected, what names it, and its variants."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

Inject = Callable[..., AbstractContextManager[Any]]
TILED = ("tile=16,overlap=0.25", "tile=16,overlap=0.5", "bf16,tile=16,overlap=0.25", "tile=20,overlap=0.25")
"""Plans under which a fault of the tiled path is looked for."""
PLAIN = ("fp32", "fp32,slicing")
SALT = "second"


@dataclass(frozen=True)
class Variant:
    """One injection: the fault with its amounts, on these latents, under this plan."""

    fault: Fault
    plan: str
    latents: str
    amounts: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        amounts = "".join(f",{key}={value}" for key, value in self.amounts)
        return f"{self.fault.name}/{self.latents}/{self.plan}{amounts}"

    @property
    def scoring_only(self) -> bool:
        """Whether this variant is kept for scoring: a fifth of them, by a hash of the name and a salt.

        Whoever reads how one of them ended in order to mend something changes the salt, and another fifth is unseen.
        """
        return int(hashlib.sha256(f"{SALT} {self.name}".encode()).hexdigest(), 16) % 5 == 0

    def inject(self) -> AbstractContextManager[Any]:
        return self.fault.inject(**dict(self.amounts))


@dataclass(frozen=True)
class Fault:
    """A fault that shipped. `number` is its place in FAULTS.md (or the nearest, with a +: a further kind).

    `inject(**amounts)` is a context manager under which the module is loaded and decoded; `named` are the diagnoses of
    which one must be given. `amounts`, `plans` and `latents` span the variants. `hidden` says of which variants
    (by a part of their name) honest physics hides the fault, and why.
    """

    name: str
    number: str
    inject: Inject
    named: tuple[str, ...]
    plans: tuple[str, ...] = TILED
    latents: tuple[str, ...] = ("face", "cat")
    amounts: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    model: str = "reference-kl"
    hidden: dict[str, str] = field(default_factory=dict)

    @property
    def variants(self) -> list[Variant]:
        """Plans × amounts, the latents taken in turn: each plan and each amount on each of the latents somewhere."""
        amounts = [tuple(zip(self.amounts, values)) for values in product(*self.amounts.values())]
        cells = list(product(self.plans, amounts))
        turns = [self.latents[i % len(self.latents)] for i in range(len(cells))]
        found = [Variant(self, plan, latents, each) for (plan, each), latents in zip(cells, turns)]
        spare = [name for name in self.latents if name not in turns]
        return found + [Variant(self, self.plans[0], latents, amounts[0]) for latents in spare]

    def why_hidden(self, variant: Variant) -> str | None:
        return next((why for part, why in self.hidden.items() if part in variant.name), None)


@dataclass(frozen=True)
class NotApplicable:
    """A fault of the list that cannot be injected here."""

    name: str
    number: str
    reason: str


def numbers(faults: Iterable[Fault | NotApplicable]) -> set[int]:
    """The numbers of FAULTS.md that are covered."""
    return {int(part) for fault in faults for part in fault.number.rstrip("+").split(",")}
