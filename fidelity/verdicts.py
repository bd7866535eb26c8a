"""A case and its reasons as a CaseResult, and what a decode that raised is blamed on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from fidelity import gates
from fidelity.errors import first_line
from fidelity.records import Case, CaseResult, Reason


def crash(error: BaseException) -> Reason:
    """The reason of a decode that raised: the kind, the first line, and the innermost line of code."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f" at {Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}" if frame else ""
    return Reason("decode", f"{type(error).__name__}{where}: {first_line(error)}", diagnosis=("crash",))


def result_of(case: Case, verdict: Any, reasons: tuple[Reason, ...], request: str = "fidelity run SUITE") -> CaseResult:
    """The CaseResult of a case with this verdict, before anything measured is added."""
    named = gates.diagnosis(reasons)
    return CaseResult(
        id=case.id,
        model=case.model,
        latents=case.latents,
        plan=case.plan,
        verdict=verdict,
        expected=case.expected.verdict,
        expected_reason=case.expected.reason,
        expected_diagnosis=case.expected.diagnosis,
        surprise=gates.surprise(case, verdict, named),
        reasons=reasons,
        diagnosis=named,
        limits=case.limits,
        memory_limit=case.memory_limit,
        check=case.check,
        reproduce=f"{request} --case {shlex.quote(case.id)}",
    )
