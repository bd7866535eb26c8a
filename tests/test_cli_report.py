"""`fidelity report`: the stored run again, with the exit status that it had."""

from __future__ import annotations

import pytest

from fidelity import cli
from fidelity.cli.common import status_of
from fidelity.records import CaseResult, DecodePlan, RunResult, to_json


def a_run(*verdicts: str, partial: bool = False) -> RunResult:
    cases = tuple(
        CaseResult(f"m/l{place}", "m", f"l{place}", DecodePlan(), verdict, surprise=verdict in ("fail", "error"))  # type: ignore[arg-type]
        for place, verdict in enumerate(verdicts)
    )
    return RunResult({"name": "small"}, {}, cases=cases, partial=partial)


@pytest.mark.parametrize(
    ("run", "status"),
    [
        (a_run("pass", "not_applicable"), 0),
        (a_run("pass", "fail"), 1),
        (a_run("fail", "error"), 3),
        (a_run(), 3),
        (a_run("not_applicable"), 3),
        (a_run("pass", partial=True), 130),
        (a_run("error", partial=True), 130),
        (a_run(partial=True), 130),
    ],
)
def test_report_exits_as_the_run_did(capsys, tmp_path, run, status):
    (tmp_path / "results.json").write_bytes(to_json(run))
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(tmp_path)])
    assert end.value.code == status == status_of(run)
    assert (tmp_path / "report.html").is_file()


def test_a_run_may_be_named_by_its_results(capsys, tmp_path):
    (tmp_path / "results.json").write_bytes(to_json(a_run("pass")))
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(tmp_path / "results.json")])
    assert end.value.code == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    assert (tmp_path / "report.html").is_file()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(tmp_path / "other.json")])
    assert end.value.code == 2
