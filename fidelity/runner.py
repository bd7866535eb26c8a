"""One plan in, one Decoded out: apply → decode → prove that it ran → restore, on one and the same module.

A Runner loads a model once and decodes it under plan after plan. After each one the very instance is compared with
itself before (flags, tile attributes, dtypes, devices, hooks, weights) and decodes a probe again to the same bits; a
module to which something stuck is named in the receipts and replaced, so that it cannot spoil the next case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from fidelity import optimizations, oracles, response
from fidelity.errors import FidelityError, ModelError, first_line
from fidelity.lazy import torch
from fidelity.memory import allocator, limit
from fidelity.optimizations import activations, state
from fidelity.optimizations.observe import dtype_name, observe
from fidelity.optimizations.outputs import sample_of
from fidelity.optimizations.precision import compute_dtype, is_emulated
from fidelity.records import Decoded, DecodePlan, MemoryTrace, Model, Observation, Proof, Receipts

if TYPE_CHECKING:
    from torch import Tensor, nn

    Decode = Callable[[nn.Module, Tensor], Any]

PROBE = 8  # latent pixels: a plain decode of this size costs milliseconds


def image_of(sample: Tensor, data_range: tuple[float, float]) -> Tensor:
    """What the viewer gets: uint8 (B, C, [T,] H, W), rounded and clipped as the pipelines' image processor does."""
    low, high = data_range
    unit = torch.nan_to_num((sample - low) / (high - low), nan=0.0)
    return unit.clamp(0, 1).mul(255).round().to(torch.uint8)


class Runner:
    """One loaded model on one device.

    Raises ModelError if the model cannot be loaded; whatever a decode raises passes through, after restoration.
    """

    def __init__(self, model: Model, device: str = "cpu"):
        self.model = model
        self.device = device
        self.fingerprint: dict[str, str] = {}
        self.reload()

    def reload(self) -> None:
        """Load the model anew, whatever was done to the instance."""
        self.module, self.loading = allocator.load(lambda: self.model.load().to(self.device), self.device)
        geometry = self.model.geometry
        size = geometry.size or (PROBE, PROBE)
        shape = (1, geometry.latent_channels, *((self.model.family.least_frames,) if geometry.video else ()), *size)
        self._probe = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        loaded = state.fingerprint(self.module, self.model.family)
        self._probe_bits = self._decode_probe() if self.fingerprint else self._first_probe()
        # some classes make their caches at the first decode; whatever else that changes is a leak
        decoded = state.fingerprint(self.module, self.model.family)
        caches = {name: seen for name, seen in decoded.items() if name.startswith("attribute ")}
        self.fingerprint = {**caches, **loaded}

    def _first_probe(self) -> Tensor:
        """Raises ModelError, in one line, where a model does not decode what it is declared to take."""
        try:
            return self._decode_probe()
        except (FidelityError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a class raises: it is the declaration, or the class, that is wrong
            if "allocate memory" in str(error):
                raise
            shape = "×".join(map(str, self._probe.shape))
            raise ModelError(
                f"{self.model.name}: it does not decode latents of {shape}, which its geometry declares "
                f"(B×C×[T×]H×W): {first_line(error)}; check latent_channels, video and size"
            ) from error

    def _decode_probe(self) -> Tensor:
        with torch.no_grad():
            return sample_of(self.model.family.decode(self.module, self._probe)).cpu().clone()

    def decode(
        self,
        latents: Tensor,
        plan: DecodePlan,
        *,
        decode: Decode | None = None,
        trace: bool = True,
        watch: bool = False,
        memory_limit: int | None = None,
    ) -> Decoded:
        """Decode latents (B, C, [T,] H, W; fp32, as the decoder takes them) under `plan`.

        With `trace`, a decode of its own measures memory first: it warms up, and its sample tells whether the plan
        repeats bit for bit. `decode(module, latents)` is somebody's own decode: it gets fp32 latents, and `plan` is
        what it claims to do, applied by itself and not by us. With `watch`, the judged decode keeps what each module
        gave; that makes it slower. Beyond `memory_limit` bytes more than there are when a decode begins, the traced and
        the judged one are refused memory (`memory.limit`).
        """
        run = limit.around(decode or self.model.family.decode, memory_limit, self.device)
        applied = DecodePlan() if decode else plan
        emulated = is_emulated(applied, self.device)
        traced, memory = None, MemoryTrace(reason=allocator.EMULATED if emulated else "not asked for")
        try:
            with (
                torch.no_grad(),
                optimizations.apply_plan(self.module, applied, model=self.model, device=self.device) as proofs,
            ):
                taken: dict[str, float] = {}
                if memory_limit is not None:
                    rehearsed = (self.module, self._feed(latents, applied))
                    limit.rehearse(decode or self.model.family.decode, rehearsed, memory_limit, self.device)
                if trace and not emulated:
                    start = time.perf_counter()
                    traced, memory = self._trace(run, self._feed(latents, applied))
                    taken["memory"] = time.perf_counter() - start
                fed = self._feed(latents, applied)
                if traced is None and emulated and applied.options:  # no oracle, no traced decode: does it repeat?
                    traced = sample_of(run(self.module, fed.clone())).detach().to("cpu", torch.float32)
                sample, taken["decode"], seen, resident = self._judge(run, fed, plan, watch)
                receipts = _receipts(proofs, seen) if decode is None else _claims(seen, plan)
        except BaseException:
            self.reload()  # whatever a crash left behind must not reach the next case
            raise
        receipts["state"] = self.restore()
        if not torch.equal(fed, self._feed(latents, applied)):
            stuck = ["the decode changed its latents in place", *receipts["state"]["leaks"]]
            receipts["state"] |= {"engaged": False, "restored": False, "leaks": stuck}
        candidate = sample.detach().to("cpu", torch.float32)
        if memory.method and resident is not None:
            memory = msgspec.structs.replace(memory, resident_peak_bytes=resident + (memory.weights_bytes or 0))
        if memory.method:
            after = response.stages(sample, self.model.data_range, held_bytes=memory.weights_bytes or 0)
            memory = msgspec.structs.replace(memory, stages=(*memory.stages, *after))
        exact = None if traced is None else bool(torch.equal(_bits(traced), _bits(candidate)))
        return Decoded(candidate, taken, receipts, memory, exact, seen.activations)

    @contextmanager
    def applied(self, plan: DecodePlan) -> Iterator[Callable[[Tensor], tuple[Tensor, Receipts]]]:
        """Yield a decode to be called as often as one likes under one application of `plan`, without the net: what
        sticks to the instance stays there until `restore` or `reload`. It gives a sample of its own (fp32 on the CPU)
        and the receipts of that very call."""
        with (
            torch.no_grad(),
            optimizations.apply_plan(self.module, plan, model=self.model, device=self.device) as proofs,
        ):

            def decode(latents: Tensor) -> tuple[Tensor, Receipts]:
                sample, _, seen, _ = self._judge(self.model.family.decode, self._feed(latents, plan), plan)
                return sample.detach().to("cpu", torch.float32).clone(), _receipts(proofs, seen)

            yield decode

    def passes_afresh(self, latents: Tensor, plan: DecodePlan) -> bool:
        """Whether a decode under `plan` passes on an instance that has decoded nothing before."""
        module = self.model.load().to(self.device)
        try:
            with torch.no_grad(), optimizations.apply_plan(module, plan, model=self.model, device=self.device):
                self.model.family.decode(module, self._feed(latents, plan))
        except Exception:  # whatever it raises: the answer is no
            return False
        return True

    def peak_bytes(self, latents: Tensor, plan: DecodePlan) -> int | None:
        """The allocated peak of one decode under `plan`; None where it has no figure."""
        with (
            torch.no_grad(),
            optimizations.apply_plan(self.module, plan, model=self.model, device=self.device),
        ):
            _, memory = self._trace(self.model.family.decode, self._feed(latents, plan))
        return memory.allocated_peak_bytes

    def expected(self, latents: Tensor, plan: DecodePlan) -> Tensor:
        """What the plan's options should give, by the oracle: fp32 on the CPU, shape as the sample."""
        fed = self._feed(latents, plan)
        sample = oracles.expected(self.module, fed, plan, model=self.model, device=self.device)
        return sample.detach().to("cpu", torch.float32)

    def _feed(self, latents: Tensor, plan: DecodePlan) -> Tensor:
        """Latents of a decode's own: one that writes to them must not reach the golden's."""
        return latents.detach().to(self.device, dtype=compute_dtype(plan), copy=True)

    def _trace(self, run: Decode, latents: Tensor) -> tuple[Tensor, MemoryTrace]:
        output, memory = allocator.trace(
            lambda: sample_of(run(self.module, latents)),
            module=self.module,
            decoder=self.model.family.decoder(self.module),
            device=self.device,
            convert=lambda sample: image_of(sample, self.model.data_range),
        )
        memory = msgspec.structs.replace(memory, stages=(self.loading, *memory.stages))
        return output.detach().to("cpu", torch.float32), memory

    def _judge(
        self, run: Decode, latents: Tensor, plan: DecodePlan, watch: bool = False
    ) -> tuple[Tensor, float, Observation, int | None]:
        watching = activations.watch(self.module, self.model, latents.shape[0]) if watch else nullcontext()
        with observe(self.module, self.model) as seen, watching as seen.activations:
            seen.batch = latents.shape[0]
            self._foresee(seen, latents, plan)
            with allocator.resident_peak(self.device) as resident:
                start = time.perf_counter()
                sample = sample_of(run(self.module, latents))
                if self.device.startswith("cuda"):
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
            seen.output_dtype = str(sample.dtype).removeprefix("torch.")
        return sample, seconds, seen, resident.rise_bytes

    def _foresee(self, seen: Observation, latents: Tensor, plan: DecodePlan) -> None:
        """What the decoder should see of this plan: its tiles, its chunks, and the frames of each call."""
        family, shape = self.model.family, tuple(latents.shape)
        seen.grid = optimizations.tile_grid(plan, self.model, shape) or oracles.native_grid(self.model, shape)
        if not self.model.geometry.video:
            seen.call_frames = family.call_frames(1)
            return
        seen.chunks = optimizations.frame_chunks(plan, self.model, shape)
        seen.frames = optimizations.frame_axis(plan, self.model, shape)
        parts = [each.stop - each.start for each in seen.chunks] or [shape[2]]
        if plan.temporal is not None and family.carries:
            seen.call_frames = tuple(parts)  # a call a chunk, whatever it streams by otherwise
            return
        law = family.tile_frames if plan.tiling is not None else family.call_frames
        seen.call_frames = tuple(frame for part in parts for frame in law(part))

    def restore(self) -> dict[str, Any]:
        """The receipt `state`: compare the instance with itself as loaded, and decode the probe again; load it anew if
        anything stuck."""
        leaks = state.leaks(self.fingerprint, state.fingerprint(self.module, self.model.family))
        if not leaks and not torch.equal(_bits(self._decode_probe()), _bits(self._probe_bits)):
            leaks = ["a plain decode no longer gives the bits that it gave before"]
        if leaks:
            self.reload()
        return {"requested": True, "engaged": not leaks, "restored": not leaks, "leaks": leaks, "reason": None}


def _decoder_receipt(seen: Observation) -> Receipts:
    return {
        "decoder": {
            "requested": True,
            "engaged": seen.calls > 0 or None,
            "reason": None if seen.calls else "the decoder submodule was never called: nothing about it can be proved",
            "calls": seen.calls,
            "shapes": [list(shape) for shape in dict.fromkeys(seen.shapes)],
            "middle_layer": sorted(seen.middle_dtypes),
            "output": seen.output_dtype,
        }
    }


def _receipts(proofs: dict[str, Proof], seen: Observation) -> Receipts:
    receipts = _decoder_receipt(seen)
    if "precision" not in proofs:
        wrong = sorted({*seen.middle_dtypes, seen.output_dtype} - {"float32"})
        receipts["precision"] = {
            "requested": False,
            "engaged": not wrong,
            "reason": f"fp32 asked, {', '.join(wrong)} seen" if wrong else None,
            "emulated": False,
        }
    for name, prove in proofs.items():
        receipts[name] = {"requested": True, **prove(seen)}
    return receipts


def _claims(seen: Observation, plan: DecodePlan) -> Receipts:
    """Receipts of a decode that is not ours: what the hooks saw, and where its tiles must lie if it says that it tiles.

    A decode that goes past the model's decoder leaves nothing to prove; the picture alone decides then.
    """
    receipts = _decoder_receipt(seen)
    refuted = _refuted(seen, plan) if seen.calls else {}
    for name in plan.settings:
        own = f"claimed by the decode itself: the decoder was called {seen.calls} times, nothing more can be proved"
        wrong = refuted.get(name)
        receipts[name] = {"requested": True, "engaged": False if wrong else None, "reason": wrong or own}
    if plan.tiling is not None and seen.grid is not None:
        receipts["tiling"] |= {"calls": seen.calls, "grid": msgspec.to_builtins(seen.grid)}
    if plan.temporal is not None and seen.frames is not None:
        receipts["temporal"] |= {"calls": seen.calls, "grid": msgspec.to_builtins(seen.frames)}
    return receipts


def _refuted(seen: Observation, plan: DecodePlan) -> dict[str, str]:
    """What the decoder's calls say against a plan's claims, by setting."""
    found = {}
    dtype = dtype_name("fp32" if plan.force_upcast else plan.dtype)
    if "precision" in plan.settings and seen.middle_dtypes - {dtype}:
        found["precision"] = (
            f"{dtype} claimed, {', '.join(sorted(seen.middle_dtypes))} seen in the middle of the decoder"
        )
    batches = {shape[0] for shape in seen.shapes}
    if plan.slicing and batches != {1}:
        found["slicing"] = f"slicing claimed, the decoder saw batches of {', '.join(map(str, sorted(batches)))}"
    if plan.tiling is not None and seen.grid is not None:
        calls = seen.grid.count * len(seen.call_frames) * (seen.batch if batches == {1} else 1)
        side = max(max(shape[-2:]) for shape in seen.shapes)
        if seen.calls != calls:
            found["tiling"] = f"expected {calls} decoder calls for {seen.grid.count} tiles, saw {seen.calls}"
        elif side > plan.tiling.tile:
            found["tiling"] = f"tiles of {plan.tiling.tile} latent pixels claimed, the decoder saw {side}"
    if plan.temporal is not None and seen.frames is not None:
        lengths = {shape[-3] for shape in seen.shapes}
        if lengths != set(seen.call_frames):
            found["temporal"] = f"chunks of {words(set(seen.call_frames))} latent frames claimed, saw {words(lengths)}"
    return found


def words(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _bits(sample: Tensor) -> Tensor:
    """The bits of an fp32 tensor, so that NaN equals NaN."""
    return sample.contiguous().view(torch.int32)


__all__ = ["Runner", "image_of", "sample_of"]
