"""What a log says of memory that ran out: who refused, the figures it gave, and the frames that led there.

The formats are those of torch's allocators (c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp, which
HIP shares; c10/xpu/XPUCachingAllocator.cpp; aten/src/ATen/mps/MPSAllocator.mm; c10/core/impl/alloc_cpu.cpp), numpy's,
and the Linux kernel's (mm/oom_kill.c). Sizes are binary: also MPS's older `GB` is 1024³ (its `format_size`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from fidelity.errors import RequestError

Allocator = Literal["CUDA", "HIP", "XPU", "MPS", "CPU", "numpy", "Python", "system", "oneDNN", "kernel", "a case"]

UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
         "KB": 2**10, "MB": 2**20, "GB": 2**30}  # fmt: skip
SIZE = r"(\d+(?:\.\d*)?) (bytes|B|[KMGT]iB|[KMG]B)"
LOOKED_FOR = (
    "CUDA, HIP or XPU out of memory; MPS backend out of memory; DefaultCPUAllocator; numpy's Unable to allocate; "
    "MemoryError; CUDNN_STATUS_ALLOC_FAILED; the kernel's Killed process"
)


class Frame(Struct, frozen=True):
    """One line of a traceback."""

    path: str
    line: int
    function: str
    text: str = ""
    """The source that ran; empty where the log does not show it."""

    @property
    def where(self) -> str:
        """`autoencoder_kl.py:391 in tiled_decode`."""
        return f"{self.path.rsplit('/', 1)[-1]}:{self.line} in {self.function}"


class Exhaustion(Struct, frozen=True):
    """One refusal, as the log has it; bytes. What the log does not say is None."""

    allocator: Allocator
    message: str
    requested: int | None = None
    exact: bool = False
    """Whether `requested` is to the byte; else it is rounded to two digits of its unit."""
    total: int | None = None
    """Of the device, or what a program may have."""
    free: int | None = None
    allocated: int | None = None
    """By torch, in tensors that live."""
    idle: int | None = None
    """By torch, reserved and in no tensor."""
    others: int | None = None
    """By other processes, where the log names them; on MPS by the system's other allocations."""
    resident: int | None = None
    """Of a process that the kernel killed."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    frames: tuple[Frame, ...] = ()
    """Outermost first."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of tensors of four or five axes that the log prints before."""
    progress: str = ""
    """The last progress bar before it that came to its end."""
    stage: str = ""
    """In words, where the log is a run's of fidelity and says it itself; `module` then too."""
    module: str = ""
    count: int = 1
    """How often memory ran out in this log; this is the last time."""


# ---------------------------------------------------------------- figures

_GPU = re.compile(rf"\b(CUDA|HIP|XPU) out of memory\. Tried to allocate {SIZE}")
_ASYNC = re.compile(
    rf"would exceed allowed memory\. \(out of memory\)\s*Currently allocated\s*: {SIZE}\s*Requested\s*: {SIZE}"
    rf"\s*Device limit\s*: {SIZE}\s*Free \(according to CUDA\)\s*: {SIZE}"
)
_MPS = re.compile(
    rf"MPS backend out of memory \(MPS allocated: {SIZE}, other allocations: {SIZE}(?:, max allowed: {SIZE})?\)"
    rf"\. Tried to allocate {SIZE}"
)
_MPS_BUFFER = re.compile(rf"Invalid buffer size: {SIZE}")
_CPU = re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (\d+) ?bytes")
_NUMPY = re.compile(rf"Unable to allocate {SIZE} for an array with shape \(([\d, ]+)\) and data type (\w+)")
_KERNEL = re.compile(
    r"Killed process (\d+),? \(?([^)\s,]+)\)?,?[^\n]*?total-vm:\s*([\d,]+)\s*kB,\s*anon-rss:\s*([\d,]+)\s*kB"
)
_LIMIT = re.compile(r"memory: usage (\d+)kB, limit (\d+)kB")
AMBIGUOUS = re.compile(r"\bcould not (?:create|execute) a (?:primitive|memory object)\b(?! descriptor)")
"""oneDNN's words where memory ran out (ideep: dnnl_out_of_memory), and in a few other cases."""
_OWN = re.compile(
    rf"memory ran out(?: while ([^:(]+?))?(?: \(([^)]*)\))?: {SIZE} more were asked for(?:, {SIZE} were alive)?"
)
"""What `fidelity.shortage` says of a case."""
_SILENT: tuple[tuple[Allocator, re.Pattern[str]], ...] = (
    ("CUDA", re.compile(r"(?:CUDNN|CUBLAS)_STATUS_ALLOC_FAILED|CUDA error: out of memory")),
    ("CUDA", re.compile(r"(?:(?<=Error: )|(?<=!!! ))Allocation on device(?! \d+ would)")),
    ("HIP", re.compile(r"HIP error: out of memory|miopenStatusAllocFailed")),
    ("Python", re.compile(r"^MemoryError\b|std::bad_alloc", re.MULTILINE)),
    ("system", re.compile(r"\[Errno 12\] Cannot allocate memory|\bCannot allocate memory \(12\)")),
    ("oneDNN", AMBIGUOUS),
    ("kernel", re.compile(r"^Killed\s*$|\b\d+ Killed\b|exit (?:code|status) 137\b|\bSIGKILL\b", re.MULTILINE)),
)
"""Refusals without a figure."""


def parse(text: str, name: str = "the log") -> Exhaustion:
    """The last refusal in a log, with its figures and frames. Raises RequestError where there is none."""
    plain = _cleaned(text)
    found = sorted(_refusals(plain), key=lambda each: each[0])
    if not found:
        raise RequestError(f"{name} is no log of memory that ran out: looked for {LOOKED_FOR}")
    place, refusal = found[-1]
    before = plain[:place]
    bars = re.findall(r"100%\|[^|\n]*\| *(\d+)/\1 ", before)
    return replace(
        refusal,
        frames=() if refusal.allocator == "kernel" else _frames_of(plain, place, [at for at, _ in found]),
        shapes=tuple(_shapes(before)),
        progress=f"{bars[-1]}/{bars[-1]}" if bars else "",
        count=_times(found),
    )


def _times(found: list[tuple[int, Exhaustion]]) -> int:
    """A message that is repeated, as before and after its traceback, is one refusal."""
    said = [refusal.message for _, refusal in found]
    return 1 + sum(one != other for one, other in pairwise(said))


def _cleaned(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).replace("\r\n", "\n").replace("\r", "\n")


def _refusals(text: str) -> Iterator[tuple[int, Exhaustion]]:
    for found in _GPU.finditer(text):
        yield found.start(), _gpu(found, text)
    for found in _ASYNC.finditer(text):
        yield found.start(), Exhaustion("CUDA", _line(text, found), _bytes(found, 3), total=_bytes(found, 5),
                                        free=_bytes(found, 7), allocated=_bytes(found, 1))  # fmt: skip
    for found in _MPS.finditer(text):
        total = _bytes(found, 5) if found[5] else None
        held = _bytes(found, 1) + _bytes(found, 3)
        yield found.start(), Exhaustion("MPS", _line(text, found), _bytes(found, 7), total=total,
                                        free=None if total is None else max(0, total - held),
                                        allocated=_bytes(found, 1), others=_bytes(found, 3))  # fmt: skip
    for found in _MPS_BUFFER.finditer(text):
        yield found.start(), Exhaustion("MPS", _line(text, found), _bytes(found, 1))
    for found in _CPU.finditer(text):
        yield found.start(), Exhaustion("CPU", _line(text, found), int(found[1]), exact=True)
    for found in _NUMPY.finditer(text):
        shape = tuple(int(side) for side in found[3].split(",") if side.strip())
        yield found.start(), Exhaustion("numpy", _line(text, found), _bytes(found, 1), shape=shape, dtype=found[4])
    for found in _KERNEL.finditer(text):
        limit = [each for each in _LIMIT.finditer(text) if each.start() < found.start()]
        yield found.start(), Exhaustion("kernel", _line(text, found), resident=_kilobytes(found[4]),
                                        total=_kilobytes(limit[-1][2]) if limit else None)  # fmt: skip
    for found in _OWN.finditer(text):
        yield found.start(), Exhaustion("a case", _line(text, found), _bytes(found, 3), stage=found[1] or "",
                                        allocated=_bytes(found, 5) if found[5] else None,
                                        module=found[2] or "")  # fmt: skip
    for allocator, pattern in _SILENT:
        for found in pattern.finditer(text):
            yield found.start(), Exhaustion(allocator, _line(text, found))


def _gpu(found: re.Match[str], text: str) -> Exhaustion:
    """The several wordings of one message since torch 1.4: in parentheses until 2.0, in sentences since."""
    told = " ".join(text[found.start() : found.start() + 1200].split())
    total = _figure(told, rf"total capac(?:i)?ty of {SIZE}", rf"{SIZE} total capacity")
    allocated = _figure(told, rf"allocated memory {SIZE} is allocated", rf"{SIZE} already allocated")
    idle = _figure(told, rf"and {SIZE} is reserved by PyTorch but unallocated")
    reserved = _figure(told, rf"{SIZE} reserved in total", rf"{SIZE} cached")
    if idle is None and reserved is not None and allocated is not None:
        idle = max(0, reserved - allocated)
    free = _figure(told, rf"of which {SIZE} is free", rf"{SIZE} free;")
    limit = _figure(told, rf"{SIZE} allowed;")
    if limit is not None and total is not None and limit < total:  # a share that the program set itself
        total, free = limit, max(0, limit - (allocated or 0) - (idle or 0))
    processes = re.findall(rf"Process \d+ has {SIZE} memory in use", told)
    own = _figure(told, rf"this process has {SIZE} memory in use")
    return Exhaustion(
        found[1],  # type: ignore[arg-type]
        _line(text, found),
        _bytes(found, 2),
        total=total,
        free=free,
        allocated=allocated,
        idle=idle,
        others=sum(_size(*each) for each in processes) if processes and own is not None else None,
    )


def _figure(text: str, *patterns: str) -> int | None:
    for pattern in patterns:
        found = re.search(pattern, text)
        if found:
            return _bytes(found, 1)
    return None


def _bytes(found: re.Match[str], group: int) -> int:
    return _size(found[group], found[group + 1])


def _size(figure: str, unit: str) -> int:
    return round(float(figure) * UNITS[unit])


def _kilobytes(text: str) -> int:
    return int(text.replace(",", "")) * 1024


def _line(text: str, found: re.Match[str]) -> str:
    end = text.find("\n", found.end())
    return " ".join(text[found.start() : end if end >= 0 else None].split())


def _shapes(text: str) -> Iterator[tuple[int, ...]]:
    for found in re.finditer(r"(?:torch\.Size\(\[|shape[:=]? ?\(|shape[:=]? ?\[)([\d, ]+)[\])]", text):
        shape = tuple(int(side) for side in found[1].split(",") if side.strip())
        if len(shape) in (4, 5) and all(shape):
            yield shape


# ---------------------------------------------------------------- frames

_PYTHON = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>[\w.<>]+)')
_IPYTHON = re.compile(
    r"^(?:File )?(?P<path>[^\s:\"]+\.py)(?::(?P<line>\d+))?,? in (?P<function>[\w.<>]+)\(", re.MULTILINE
)
_HEADER = re.compile(r"Traceback \(most recent call last\)")


def _frames_of(text: str, place: int, refusals: list[int]) -> tuple[Frame, ...]:
    """The frames above a refusal, since the traceback's head; where there are none, those that follow it."""
    frames = sorted(_frames(text), key=lambda each: each[0])
    heads = [found.start() for found in _HEADER.finditer(text)]
    earlier = [at for at in heads if at < place] or [at for at in refusals if at < place]
    above = [frame for at, frame in frames if max(earlier, default=-1) < at < place]
    if above:
        return tuple(above)
    following = [(at, frame) for at, frame in frames if at > place]
    if not following:
        return ()
    ends = [at for at in heads if at > following[0][0]]
    return tuple(frame for at, frame in following if at < min(ends, default=len(text)))


def _frames(text: str) -> Iterator[tuple[int, Frame]]:
    for found in _PYTHON.finditer(text):
        start = text.rfind("\n", 0, found.start()) + 1
        prefix = text[start : found.start()].strip()
        end = text.find("\n", found.end())
        rest = text[end + 1 :].split("\n", 1)[0] if end >= 0 else ""
        source = rest.strip().removeprefix(prefix).strip() if prefix else rest.strip()
        is_source = source and not _PYTHON.search(source) and not re.match(r"[\w.]+(?:Error|Exception)\b", source)
        yield found.start(), _frame(found, source if is_source else "")
    for found in _IPYTHON.finditer(text):
        after = text[found.end() : found.end() + 3000]
        arrow = re.search(r"^-+> ?(\d+) ?(.*)$", after, re.MULTILINE)
        following = _IPYTHON.search(after)
        shown = arrow if arrow and (following is None or arrow.start() < following.start()) else None
        yield found.start(), _frame(found, shown[2].strip() if shown else "", shown[1] if shown else None)


def _frame(found: re.Match[str], source: str, line: str | None = None) -> Frame:
    path = found["path"].replace("\\", "/")
    return Frame(path, int(found["line"] or line or 0), found["function"].rsplit(".", 1)[-1], source)
