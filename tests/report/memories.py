"""Memory traces as a decode leaves them, made by hand: what happens when, by kind, and what was alive at the peak."""

from __future__ import annotations

from fidelity.records import DecodePlan, Exhausted, Holding, MemoryTrace, Peak, Span, Stage, Transfers

MIB = 2**20
SHARES = 120
SMALL = "resident: a sample under 4 MiB is lost among the process's own pages"
CONV = "decoder.up_blocks.2.resnets.1.conv1"


def trace(plan: DecodePlan, total: int, weights: int, pixels: int) -> MemoryTrace:
    """The trace of a decode whose allocated peak is `total`; `pixels` of the whole batch."""
    layers, spans = _scripted(plan, weights, pixels)
    alive = [sum(held[share] for held in layers.values()) for share in range(SHARES)]
    fixed = [layers["weights"][share] + layers["staging"][share] for share in range(SHARES)]
    at, scale = min(
        ((share, (total - fixed[share]) / (alive[share] - fixed[share])) for share in range(SHARES)),
        key=lambda each: each[1],
    )
    for kind, held in layers.items():
        if kind not in ("weights", "staging"):
            layers[kind] = [int(each * scale) for each in held]
    layers["activations"][at] += total - sum(held[at] for held in layers.values())
    alive = [sum(held[share] for held in layers.values()) for share in range(SHARES)]
    tiles = [max(alive[span.start : span.stop]) for span in spans if span.name == "tile"]
    stages = (
        Stage("load", weights),
        Stage("decode", total),
        *((Stage("tile", max(tiles), len(tiles), each=tuple(tiles)), Stage("assemble", total // 3)) if tiles else ()),
        Stage("convert", alive[-1]),
        *after(plan, weights, pixels),
    )
    return MemoryTrace(
        allocated_peak_bytes=total,
        resident_peak_bytes=int(total * 1.08),
        weights_bytes=weights,
        method="allocator events",
        stages=stages,
        timeline=tuple(alive),
        layers={kind: tuple(held) for kind, held in layers.items() if any(held)},
        spans=spans,
        peak=_peak(layers, at, plan),
        transfers=_transfers(plan, layers, weights),
    )


def _scripted(plan: DecodePlan, weights: int, pixels: int) -> tuple[dict[str, list[int]], tuple[Span, ...]]:
    """Bytes by kind in each share, unscaled but for the weights, and which stage runs when."""
    moving = plan.offload in ("disk", "sequential")
    layers = {
        kind: [0] * SHARES for kind in ("weights", "staging", "activations", "workspace", "tiles", "output", "copies")
    }
    decode = SHARES - 10
    calls = 4 if plan.tiling else 1
    length = (decode - 8) // calls
    spans = []
    for share in range(SHARES):
        layers["weights"][share] = weights * (1 + share % 5) // 5 if moving and share < decode else weights
        layers["staging"][share] = weights // 6 if moving and share < decode and share % 5 == 0 else 0
    for call in range(calls):
        start = call * length
        spans.append(Span("tile" if plan.tiling else "decode", start, start + length))
        for step in range(length):
            rise = (step + 1) / length
            layers["activations"][start + step] = int(1000 * (0.15 + 0.6 * rise**2))
            layers["workspace"][start + step] = int(600 * rise) if step % 4 in (1, 2) else 0
            layers["tiles"][start + step] = 60 * call
    for share in range(calls * length, SHARES):
        layers["output"][share] = 240
        layers["tiles"][share] = 240 if plan.tiling and share < decode else 0
        layers["copies"][share] = 300 if share >= decode else 0
    spans += [Span("assemble" if plan.tiling else "decode", calls * length, decode), Span("convert", decode, SHARES)]
    return layers, tuple(spans)


def _peak(layers: dict[str, list[int]], at: int, plan: DecodePlan) -> Peak:
    by_kind = {kind: held[at] for kind, held in layers.items() if held[at]}
    half = by_kind["activations"] // 2
    dtype = {"bf16": "bfloat16"}.get(plan.dtype, "float32")
    held = [
        Holding(half, "activations", "silu", CONV.replace("conv1", "norm1"), (2, 128, 128, 128), dtype),
        Holding(by_kind["activations"] - half, "activations", "upsample_nearest2d", "decoder.up_blocks.1.upsamplers.0",
                (2, 128, 128, 128), dtype),
        Holding(by_kind["weights"], "weights", "", "", (), dtype, 138),
    ]  # fmt: skip
    if by_kind.get("workspace"):
        held.append(Holding(by_kind["workspace"], "workspace", "conv2d", CONV))
    if by_kind.get("tiles"):
        held.append(Holding(by_kind["tiles"], "tiles", "blend_h", "", (2, 3, 64, 64), dtype, 3))
    held.sort(key=lambda one: -one.bytes)
    stage = "tile" if plan.tiling else "decode"
    return Peak(sum(by_kind.values()), stage, CONV, "conv2d", tuple(held), by_kind)


def _transfers(plan: DecodePlan, layers: dict[str, list[int]], weights: int) -> Transfers | None:
    if plan.offload == "none":
        return None
    moved = 34 * weights // 5 if plan.offload in ("disk", "sequential") else 0
    return Transfers(34, 34, moved, 0, 0.214, tuple(layers["weights"]))


def after(plan: DecodePlan, weights: int, pixels: int) -> tuple[Stage, ...]:
    """Pictures of `pixels` pixels, RGB, too small for the kernel's count."""
    size = {"bf16": 6}.get(plan.dtype, 12) * pixels
    sample = Holding(size, "output", "sample", shape=(2, 3, 128, 128))
    unit, array = Holding(size, "copies", "denormalised"), Holding(12 * pixels, "copies", "float32 array")
    pixel, pictures = Holding(3 * pixels, "copies", "uint8 array"), Holding(4 * pixels, "copies", "PIL")

    def step(part, held, result, *, peak=None, traced=None, by="", seconds=4e-4):
        past = f"{by} allocates past torch's allocator; " if by else ""
        kind = "encode" if by == "the encoder" else "convert"
        about = {"result_bytes": result, "traced_bytes": traced, "held": held, "seconds": seconds}
        return Stage(kind, peak, 2 if kind == "encode" else 1, part, reason=f"{past}{SMALL}", **about)

    def file(part, result, traced, seconds):
        return step(part, (pictures,), result, traced=traced, by="the encoder", seconds=seconds)

    return (
        step("denormalise", (sample,), size, peak=weights + 3 * size),
        step("float32 array", (sample, unit), 12 * pixels, peak=weights + 2 * size),
        step("uint8", (sample, array), 3 * pixels, traced=24 * pixels, by="numpy"),
        step("PIL", (sample, array, pixel), 4 * pixels, traced=3 * pixels, by="Pillow"),
        file("PNG", 2 * pixels, 3 * pixels, 0.0085),
        file("JPEG", pixels // 2, pixels, 0.0011),
        file("WebP", pixels // 4, pixels // 3, 0.0064),
    )


def ran_out(
    fits: str | None = "reference-kl/photo-pair/bf16-upcast0-slice1-t8o0.25-none", **changes: object
) -> MemoryTrace:
    """A decode that was allowed 48 MiB and stopped within its second tile."""
    held = (Holding(30 * MIB, "activations", "silu", CONV, (2, 128, 128, 128), "float32", 2),
            Holding(14 * MIB, "weights", "", "", (), "float32", 138))  # fmt: skip
    about = {
        "stage": "tile", "module": CONV,
        "message": "DefaultCPUAllocator: can't allocate memory: you tried to allocate 12582912 bytes",
        "requested_bytes": 12 * MIB, "alive_bytes": 44 * MIB, "limit_bytes": 48 * MIB, "held": held, "fits": fits,
        "fits_bytes": 15 * MIB if fits else None, "reason": None if fits else "the least of them needs 51.0 MiB",
        **changes,
    }  # fmt: skip
    return MemoryTrace(reason="memory ran out", exhausted=Exhausted(**about))  # type: ignore[arg-type]
