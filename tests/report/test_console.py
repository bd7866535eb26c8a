"""The terminal: what is printed, how wide, and what a pipe gets."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path

import pytest

from fidelity.records import CaseResult, Reason, RunResult
from fidelity.report import console
from tests.report import sample


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunResult:
    return sample.build(tmp_path_factory.mktemp("run"))


def shown(run: RunResult, width: int = 80, **options: object) -> list[str]:
    stream = io.StringIO()
    console.table(run, stream=stream, width=width, **options)  # type: ignore[arg-type]
    return stream.getvalue().splitlines()


def test_table_fits_eighty_columns_with_every_figure(run):
    lines = shown(run)
    table = lines[: lines.index("… and 76 more")]
    assert max(map(len, table)) <= 80
    assert table[0].split() == ["case", "verdict", "rmse", "lpips", "seam", "peak", "s"]
    assert "ERROR" in table[1]
    assert "SURPRISE" in table[3]
    assert table[4].strip().startswith("bf16-upcast0-slice0-t8o0.25-disk")
    assert "1.38 0.00829 1.22 46.5 MiB 0.43" in table[3]
    assert any("expected E" in line for line in table), "emulated is said"


def test_table_wide_is_one_line_a_case(run):
    lines = shown(run, width=200, limit=5)
    assert lines[1].startswith("reference-kl-hot/photo-pair/bf16-upcast0-slice1-t8o0.25-disk")
    assert lines[6] == "… and 91 more"


def test_piped_output_is_plain_and_whole(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    console.table(run, stream=stream)
    console.finish(run, stream=stream, seconds=221.0, report=Path("runs/" + "x" * 200 + "/report.html"))
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "reference-kl-hot/photo-pair/bf16-upcast0-slice1-t8o0.25-disk" in text
    assert text.splitlines()[-1].endswith("in 3:41 → runs/" + "x" * 200 + "/report.html")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_color_is_honoured(run, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    console.finish(run, stream=coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    console.finish(run, stream=plain)
    assert re.search(r"\x1b\[[\d;]*3\d", coloured.getvalue())
    assert not re.search(r"\x1b\[[\d;]*3\d", plain.getvalue())


def test_markup_and_control_characters_do_nothing_on_a_terminal():
    stream = io.StringIO()
    console.table(RunResult({}, {}, cases=(sample.judged(id="[red]x[/red]\x1b[2J"),)), stream=stream, width=80)
    assert "[red]x[/red]" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def cases(count: int) -> list[CaseResult]:
    return [sample.judged(id=f"case-{place}") for place in range(count)]


def clock(monkeypatch, step: float = 4.0) -> None:
    ticks = itertools.count(0.0, step)
    monkeypatch.setattr(console.time, "monotonic", lambda: next(ticks))


def test_progress_is_sparse_where_there_is_no_terminal(monkeypatch):
    clock(monkeypatch, 2.0)
    stream = io.StringIO()
    with console.progress({case.id: 1.0 for case in cases(30)}, stream=stream) as advance:
        for case in cases(30):
            advance(case)
    lines = stream.getvalue().splitlines()
    assert 5 < len(lines) < 15
    assert lines[0].startswith("1/30 case-0, about ")
    assert lines[-1].startswith("30/30 case-29 in ")


def test_progress_on_a_terminal_shows_the_case(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with console.progress({"a": 1.0, "b": 1.0}, stream=stream) as advance:
        advance(sample.judged(id="a"))
        advance(sample.judged(id="b"))
    assert "2/2" in stream.getvalue()
    assert "b" in stream.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_verbose_tells_each_case_as_it_ends(monkeypatch, terminal):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal() if terminal else io.StringIO()
    bad = sample.judged(id="two", verdict="fail", surprise=True, reasons=(Reason("rmse", "rmse is\n9"),))
    with console.progress({"one": 1.0, "two": 1.0}, verbose=True, stream=stream) as advance:
        advance(sample.judged(id="one"))
        advance(bad)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue())
    assert "[1/2] pass     one · rmse 0.500 · peak 100 MiB · 1.00 s" in text.replace("100.0 MiB", "100 MiB")
    assert "[2/2] SURPRISE two · rmse 0.500 · peak 100 MiB · 1.00 s · rmse is 9" in text.replace("100.0 MiB", "100 MiB")


def test_what_is_left_follows_the_costs_and_the_pace(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    pace = console.Pace({"kept": 50.0, "a": 1.0, "b": 1.0, "dear": 18.0, "c": 1.0}, kept={"kept"})
    pace.advance("kept")
    assert pace.left() is None, "a kept case says nothing of the pace"
    now[0] = 100.0  # the workers' start came with it
    pace.advance("a")
    assert pace.left() == 20.0, "nothing is known but the costs"
    now[0] = 102.0
    pace.advance("b")
    assert pace.left() == pytest.approx(19 * (2 + 2) / (1 + 2)), "twice as slow as thought, believed by a third"
    now[0] = 138.0
    pace.advance("dear")
    assert pace.left() == pytest.approx((38 + 2) / (19 + 2))
    pace.advance("c")
    assert (pace.left(), pace.done, pace.total) == (0.0, 5, 5)
    pace.advance("a stranger")
    assert pace.done == 5


def test_the_first_case_scales_the_costs_of_all(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    pace = console.Pace({"a": 1.0, "b": 1.0, "c": 9.0}, jobs=2)
    now[0] = 50.0
    pace.advance("a", 6.0)
    assert pace.left() == pytest.approx(10 * 6 / 2), "six times as slow as thought, two at once"


def test_a_guess_has_no_hundredths(monkeypatch):
    clock(monkeypatch, 4.0)
    stream = io.StringIO()
    with console.progress({case.id: 1.0 for case in cases(30)}, stream=stream) as advance:
        for case in cases(30):
            advance(case)
    said = [line.partition("about ")[2] for line in stream.getvalue().splitlines()[:-1]]
    assert all(re.fullmatch(r"(\d+ s|\d+:\d\d) left", text) for text in said), said


def test_a_terminal_shows_what_goes_on_before_the_first_case(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with console.progress({"a": 1.0}, stream=stream) as advance:
        advance.phase("holding 2 references")
    assert "holding 2 references" in stream.getvalue()


def test_an_interrupted_run_says_how_to_go_on():
    stream = io.StringIO()
    run = RunResult({"name": "s", "judged": 9}, {}, cases=tuple(cases(2)), partial=True)
    console.resume(run, "fidelity run s.toml --out runs/s --resume", others=["t"], stream=stream)
    assert stream.getvalue().splitlines() == [
        "interrupted after 2 of 9 cases; go on with", "  fidelity run s.toml --out runs/s --resume", "not begun: t",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [1, 5, 16, 33])
def test_fold_loses_nothing(width):
    name = "reference-kl/photo-pair/bf16-upcast0-slice1-t16o0.25-group_block"
    assert console.fold(name, width).replace("\n", "") == name
    assert max(map(len, console.fold(name, width).split("\n"))) <= width
