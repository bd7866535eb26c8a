"""Decodes at once: measured together, against n times one, against the rule that admits them, and against prediction.

    python benchmarks/concurrency.py             # the reference model plain, tiled, sliced and in bf16
    python benchmarks/concurrency.py --classes   # which autoencoder classes can share one instance between threads

Bytes are exact whatever else the machine does; throughput needs a quiet machine with as many cores as decodes, and
operators have one thread each. The last column is what `fidelity predict` says of one decode, against the measured one.
"""

from __future__ import annotations

import argparse

from fidelity import DecodePlan, Tiling, registry
from fidelity.concurrency.together import measure, seeded
from fidelity.environment import cores, make_deterministic
from fidelity.errors import FidelityError, in_one_line
from fidelity.predict import of_shape

PLANS = (
    ("plain", 1, DecodePlan()),
    ("tiled", 1, DecodePlan(tiling=Tiling(16, 0.25))),
    ("batch of 2", 2, DecodePlan()),
    ("sliced", 2, DecodePlan(slicing=True)),
    ("bf16", 1, DecodePlan(dtype="bf16")),
)
COUNTS = (1, 2, 4)
MIB = 2**20


def plans(rounds: int) -> None:
    model = registry.MODELS.get("reference-kl")
    print(f"reference-kl, latents 32×32, {rounds} rounds, {cores()} cores; MiB allocated, the worst round\n")
    print("| plan | n | n × one | together | peaks met | rule | not needed | resident rise | throughput | predicted |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, batch, plan in PLANS:
        latents = seeded(model, (batch, model.geometry.latent_channels, 32, 32))
        predicted = of_shape(model, tuple(latents.shape), plan, "cpu").allocated_peak_bytes
        for count in COUNTS:
            found = measure(model, latents, plan, count=count, rounds=rounds)
            if found.rule is None or found.alone_peak_bytes is None or found.unneeded_bytes is None or found.findings:
                raise SystemExit(f"{name}, {count} at once: {found.findings or found.reason}")
            together, each = max(found.peaks) / MIB, found.alone_peak_bytes / MIB
            met = f"{min(found.coincided):.0%} to {max(found.coincided):.0%}"
            print(f"| {name} | {count} | {count * each:.1f} | {together:.1f} | {met} | "
                  f"{found.rule.reserve_bytes / MIB:.1f} | {found.unneeded_bytes / MIB:.1f} | "
                  f"{max(found.resident_rises, default=0) / MIB:.0f} | {found.throughput:.2f} | "
                  f"{predicted / found.alone_peak_bytes - 1:+.1%} |", flush=True)  # fmt: skip


def classes(rounds: int) -> None:
    print(f"small instances, 3 at once in threads on one instance, {rounds} rounds\n")
    print("| class | can share | why not |")
    print("|---|---|---|")
    seen = set()
    for name, model in registry.MODELS.items():
        if not name.startswith("small-") or model.family.name in seen:
            continue
        seen.add(model.family.name)
        frames = (max(2, model.family.least_frames),) if model.geometry.video else ()
        shape = (1, model.geometry.latent_channels, *frames, *(model.geometry.size or (8, 8)))
        try:
            found = measure(model, seeded(model, shape), DecodePlan(), count=3, rounds=rounds)
        except FidelityError as error:
            print(f"| {model.family.name} | not measured | {in_one_line(error)} |", flush=True)
            continue
        print(
            f"| {model.family.name} | {'no' if found.findings else 'yes'} | {'; '.join(found.findings)} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    registry.load_plugins()
    make_deterministic(1)
    (classes if args.classes else plans)(args.rounds)


if __name__ == "__main__":
    main()
