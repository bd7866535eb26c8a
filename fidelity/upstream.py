"""What diffusers does wrongly, as a page: the expected failures of suites that say in which versions they hold.

The suites are the list; the page is only drawn from them, with the newest figures of runs where those are given.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fidelity import snippet
from fidelity.errors import SuiteError
from fidelity.records import Case, CaseResult, RunResult
from fidelity.rules import ExpectRule
from fidelity.suite import Suite

CHECKOUT = Path(__file__).resolve().parent.parent
MEASURED = "Measured"
"""How a line with figures of a run begins: all else on the page is drawn from the suites alone."""
HEAD = """\
# Defects of diffusers that these suites hold

<!-- Generated: fidelity upstream {suites} --write docs/upstream.md -->

Each entry is an `[[expect]]` with `versions` in a suite: the case must fail, with exactly this diagnosis. So the list
is checked by every run, and a release that fixes one shows up by itself: the case passes, which is a **surprise** (exit
status 1, `unexpectedly passed`). Then the entry gets an upper bound, `versions = "diffusers>=0.35,<0.43"`, and stays
for those who have the older release; under a version outside of its bounds the case has to pass.

`fidelity run SUITE --case ID` judges a case again and prints the program below it. The programs need diffusers alone.
Their weights are random, so figures differ from those of the cases; what is wrong does not.
"""


@dataclass(frozen=True)
class Defect:
    """One expected failure: its rule, the suite that holds it, and the cases that it covers."""

    suite: Suite
    rule: ExpectRule
    cases: tuple[Case, ...]

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Of the models that show it, in order."""
        return tuple(dict.fromkeys(self.suite.models[case.model].family.name for case in self.cases))

    @property
    def first(self) -> Case:
        """The case whose program stands on the page."""
        return self.cases[0]

    @property
    def command(self) -> str:
        return f"fidelity run {self.suite.path.as_posix()} --case {shlex.quote(self.first.id)}"

    @property
    def code(self) -> str:
        case = self.first
        return snippet.of_case(case, self.suite.models[case.model], self.suite.shapes[case.model, case.latents])


def collect(suites: Sequence[Suite]) -> list[Defect]:
    """Every expected failure with versions, in the order of classes. Raises SuiteError where there is none."""
    found = [defect for suite in suites for defect in _of(suite)]
    if not found:
        names = ", ".join(suite.name for suite in suites)
        raise SuiteError(f"{names}: no [[expect]] has versions, so there is nothing to write of diffusers")
    return sorted(found, key=lambda defect: (len(defect.classes) > 1, defect.classes[0]))


def _of(suite: Suite) -> list[Defect]:
    """Each rule with the cases that it decides: the last one in force that matches does, as in the suite itself."""
    decided: dict[int, list[Case]] = {}
    rules = suite.document.rules.expect
    for case in suite.judged:
        cell = (case.model, case.latents, case.plan, case.check)
        matching = [index for index, rule in enumerate(rules) if rule.match(cell) and rule.out_of_force is None]
        if matching:
            decided.setdefault(matching[-1], []).append(case)
    return [
        Defect(suite, rules[index], tuple(cases))
        for index, cases in sorted(decided.items())
        if rules[index].versions is not None and rules[index].expectation.verdict != "pass"
    ]


# ---------------------------------------------------------------- the page


def render(suites: Sequence[Suite], runs: Sequence[RunResult] = ()) -> str:
    """The page in Markdown; `runs` give the figures of their cases, a later run before an earlier one."""
    defects = collect(suites)
    results = {case.id: (case, run) for run in runs for case in run.cases}
    lines = [HEAD.format(suites=" ".join(suite.path.as_posix() for suite in suites)), *_table(defects)]
    for number, defect in enumerate(defects, start=1):
        lines += _entry(number, defect, results)
    out = [rule.out_of_force for suite in suites for rule in suite.document.rules.expect if rule.out_of_force]
    if out:
        lines += ["## Not in the installed version", "", *(f"- {_words(each)}" for each in out), ""]
    page = "\n".join(lines).rstrip() + "\n"
    return page.replace(f"{CHECKOUT}{os.sep}", "")  # the page is the same wherever it is drawn


def without_figures(page: str) -> str:
    """The page as it is drawn from the suites alone."""
    return "\n".join(line for line in page.splitlines() if not line.startswith(MEASURED)) + "\n"


def _table(defects: Sequence[Defect]) -> list[str]:
    rows = [
        f"| [{number}](#{number}) | {_classes(defect)} | {_words(defect.rule.expectation.reason)} "
        f"| {', '.join(defect.rule.expectation.diagnosis)} | {defect.rule.versions} |"
        for number, defect in enumerate(defects, start=1)
    ]
    return ["| | class | what | diagnosis | holds for |", "|---|---|---|---|---|", *rows, ""]


def _classes(defect: Defect) -> str:
    return ", ".join(f"`{name}`" for name in defect.classes)


def _entry(number: int, defect: Defect, results: Mapping[str, tuple[CaseResult, RunResult]]) -> list[str]:
    expected, others = defect.rule.expectation, len(defect.cases) - 1
    return [
        f'<a id="{number}"></a>',
        "",
        f"## {number}. {_classes(defect)}",
        "",
        f"{_words(expected.reason)} ({expected.verdict}: {', '.join(expected.diagnosis)}; `{defect.rule.versions}`)",
        "",
        *_measured(defect, results),
        f"`{defect.command}`" + (f" and {others} more" if others else ""),
        "",
        "```python",
        defect.code.rstrip(),
        "```",
        "",
    ]


def _measured(defect: Defect, results: Mapping[str, tuple[CaseResult, RunResult]]) -> list[str]:
    """One line with what the newest run measured of the first case; none where none judged it."""
    if defect.first.id not in results:
        return []
    case, run = results[defect.first.id]
    said = "; ".join(_words(reason.message) for reason in case.reasons) or case.verdict
    version = run.environment.get("versions", {}).get("diffusers")
    return [f"{MEASURED}{f' with diffusers {version}' if version else ''}: {said}"]


def _words(text: str) -> str:
    """One line that Markdown leaves alone within a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
