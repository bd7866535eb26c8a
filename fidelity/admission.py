"""What a server must keep free before it lets n decodes in: a sum of bounds, each measured or predicted of one alone.

Peaks of decodes that run side by side may or may not meet at one instant; no rule may count on it that they do not.
"""

from __future__ import annotations

from msgspec import Struct

from fidelity.wording import in_units


class Rule(Struct, frozen=True):
    """copies × weights + count × (decode + conversion) + stand-in, in bytes."""

    count: int
    """Decodes at once."""
    weights_bytes: int
    """Of one copy of the autoencoder; 0 where they come and go within a decode, whose peak then has them."""
    copies: int
    """1, where all share one instance; one a process, where each has its own."""
    decode_bytes: int
    """The peak of one decode beside the weights."""
    conversion_bytes: int
    """What the conversion of its sample to an image needs above that."""
    resident_bytes: int
    """What else stays in memory, as a denoiser does."""
    reserve_bytes: int
    """The sum: whatever their timing, the decodes do not go above it."""

    @property
    def each_bytes(self) -> int:
        """What must be free for each decode, until it has ended."""
        return self.decode_bytes + self.conversion_bytes

    @property
    def once_bytes(self) -> int:
        """What must be free once: all copies of the weights, and what stays."""
        return self.reserve_bytes - self.count * self.each_bytes


def rule(
    *, count: int, weights: int, decode_peak: int, convert_peak: int = 0, resident: int = 0, copies: int = 1
) -> Rule:
    """The rule for `count` decodes at once, from one alone: `decode_peak` and `convert_peak` are the largest sums alive
    beside the weights while it decodes and while it converts."""
    above = max(0, convert_peak - decode_peak)
    reserve = copies * weights + count * (decode_peak + above) + resident
    return Rule(count, weights, copies, decode_peak, above, resident, reserve)


def formula(one: Rule) -> str:
    """The sum with its figures."""
    copies = "weights once" if one.copies == 1 else f"{one.copies} × weights"
    terms = [f"{copies} {in_units(one.weights_bytes)}", f"{one.count} × decode {in_units(one.decode_bytes)}",
             f"{one.count} × conversion above it {in_units(one.conversion_bytes)}",
             f"stand-in {in_units(one.resident_bytes)}"]  # fmt: skip
    return f"{' + '.join(terms)} = {in_units(one.reserve_bytes)}"
