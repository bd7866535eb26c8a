"""junit.xml: one testcase a case, for CI servers."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as XML

from fidelity.records import CaseResult, RunResult
from fidelity.report import files, memory, words

NAME = "junit.xml"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(run: RunResult) -> str:
    """The run as JUnit XML. Characters that XML 1.0 cannot hold become U+FFFD.

    A surprise is a failure, or an error where the case could not be judged; what failed as expected passes and says so
    in a property; what cannot apply is skipped with its reason. A partial run has a testcase `run` with an error.
    """
    tally = words.counts(run)
    totals = {
        "name": words.suite_name(run),
        "tests": str(len(run.cases) + run.partial),
        "failures": str(tally["surprise"]),
        "errors": str(tally["error"] + run.partial),
        "skipped": str(tally["not_applicable"]),
        "time": f"{sum(sum(case.seconds.values()) for case in run.cases):.3f}",
    }
    root = XML.Element("testsuites", _clean(totals))
    began = {"timestamp": run.recorded[:19]} if run.recorded else {}  # UTC, as the format has it without a zone
    suite = XML.SubElement(root, "testsuite", _clean({**totals, **began}))
    properties = XML.SubElement(suite, "properties")
    for name, text in [*([("commit", run.commit)] if run.commit else []), *words.facts(run.environment)]:
        XML.SubElement(properties, "property", _clean({"name": name, "value": text}))
    for note in run.notes:
        XML.SubElement(properties, "property", _clean({"name": "note", "value": note}))
    for case in run.cases:
        _testcase(suite, case, words.suite_name(run))
    if run.partial:
        _unfinished(suite, run)
    XML.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + XML.tostring(root, encoding="unicode") + "\n"


def write(run: RunResult, folder: Path) -> Path:
    return files.write(folder / NAME, render(run))


def _testcase(suite: XML.Element, case: CaseResult, name: str) -> None:
    about = {
        "classname": ".".join(part.replace(".", "_") for part in (name, case.model, case.latents)),
        "name": case.id,
        "time": f"{sum(case.seconds.values()):.3f}",
    }
    element = XML.SubElement(suite, "testcase", _clean(about))
    _properties(element, case)
    kind = words.kind(case)
    told = [*(reason.message for reason in case.reasons), case.reproduce]
    text = "\n".join(line for line in told if line)
    if kind == "not_applicable":
        message = "; ".join(reason.message for reason in case.reasons) or "not applicable"
        XML.SubElement(element, "skipped", _clean({"message": message}))
    elif kind in ("surprise", "error"):
        tag = "error" if kind == "error" else "failure"
        about = {"message": _message(case), "type": ",".join(case.diagnosis) or case.verdict}
        XML.SubElement(element, tag, _clean(about)).text = _NOT_XML.sub("\ufffd", text)


def _unfinished(suite: XML.Element, run: RunResult) -> None:
    """What a server would take for green: cases that are not there because the run was interrupted."""
    element = XML.SubElement(
        suite, "testcase", _clean({"classname": words.suite_name(run), "name": "run", "time": "0"})
    )
    judged, total = len(words.judged(run)), run.suite.get("judged")
    of = f" of {total}" if isinstance(total, int) else ""
    command = str(run.suite.get("resume") or "the same command with --resume")
    about = {"message": f"interrupted after {judged}{of} cases; go on with {command}", "type": "interrupted"}
    XML.SubElement(element, "error", _clean(about)).text = _NOT_XML.sub("\ufffd", "\n".join([command, *run.notes]))


def _properties(element: XML.Element, case: CaseResult) -> None:
    pairs: list[tuple[str, str]] = [("verdict", case.verdict), ("expected", case.expected)]
    if words.kind(case) == "expected":
        pairs.append(("failed_as_expected", case.expected_reason or ", ".join(case.expected_diagnosis)))
    if case.diagnosis:
        pairs.append(("diagnosis", ",".join(case.diagnosis)))
    if words.emulated(case):
        pairs.append(("emulated", "true"))
    pairs += [(name, repr(m.value)) for name, m in case.measurements.items() if m.value is not None]
    if (peak := words.peak(case)) is not None:
        pairs.append(("allocated_peak_bytes", str(peak)))
    if (ran_out := memory.exhausted(case)) is not None:
        pairs.append(("exhausted", ran_out))
    pairs += [("note", note) for note in case.notes]
    holder = XML.SubElement(element, "properties")
    for name, text in pairs:
        XML.SubElement(holder, "property", _clean({"name": name, "value": text}))


def _message(case: CaseResult) -> str:
    if case.verdict == "pass":
        return f"expected {case.expected} ({case.expected_reason}), but it passed"
    first = case.reasons[0].message if case.reasons else case.verdict
    return (
        first
        if case.expected == "pass"
        else f"expected {case.expected} for {', '.join(case.expected_diagnosis)}: {first}"
    )


def _clean(attributes: dict[str, str]) -> dict[str, str]:
    return {name: _NOT_XML.sub("\ufffd", text) for name, text in attributes.items()}
