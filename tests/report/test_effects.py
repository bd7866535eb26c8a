"""Attribution and metamorphic checks as the reports show them."""

from __future__ import annotations

import pytest

from fidelity import standings
from fidelity.attribution import attribute
from fidelity.records import DecodePlan, Measurement, Reason, RunResult
from fidelity.report import html, markdown
from tests.report.sample import build, judged

BF16 = DecodePlan(dtype="bf16")


def measured(value: float) -> dict[str, Measurement]:
    return {"rmse": Measurement("rmse", value, "grey levels", "lower", (value,))}


def run(*cases) -> RunResult:
    return RunResult(suite={"name": "s"}, environment={}, cases=cases, attribution=attribute(cases))


def check(name: str, plan: DecodePlan = BF16, verdict: str = "pass", **more):
    found = {"check_max_abs": Measurement("check_max_abs", 0.0 if verdict == "pass" else 3.0, "grey levels")}
    return judged(plan=plan, check=name, id=f"m/l/{plan.id}~{name}", verdict=verdict, measurements=found, memory=None,
                  seconds={"check": 1.0}, **more)  # fmt: skip


def test_the_summary_has_effects_with_their_sign(tmp_path):
    text = markdown.render(build(tmp_path))
    section = text[text.index("### What each setting does by itself") :]
    assert "| `reference-kl` | dtype bf16 | +" in section
    disk = next(line for line in section.splitlines() if "| offload disk |" in line)
    assert disk.split("|")[3].strip() == "+0"
    assert disk.split("|")[6].strip().startswith("−")


def test_an_alarm_is_in_the_summary_and_open_in_the_page(tmp_path):
    disk = DecodePlan(offload="disk")
    found = run(judged(measurements=measured(0.0)), judged(plan=disk, measurements=measured(2.0)))
    assert len(found.attribution.alarms) == 1
    assert "- ❌ m: offload disk moves RMSE by 2 grey levels" in markdown.render(found)
    page = html.render(found, tmp_path)
    assert page.index("offload disk moves RMSE by 2 grey levels") < page.index('id="effects"')


def test_a_run_of_before_has_no_effects_and_still_renders(tmp_path):
    old = RunResult(suite={}, environment={}, cases=(judged(), judged(plan=BF16)))
    assert "What each setting does" not in markdown.render(old)
    assert '"attribution":null' in html.render(old, tmp_path)


def test_checks_are_no_plans_but_one_that_fails_disqualifies_its_plan():
    plain, half = judged(), judged(plan=BF16, measurements=measured(0.1))
    sound = run(plain, half, check("second_decode"))
    summaries = standings.summarize(sound)["m"]
    assert [each.plan for each in summaries] == [DecodePlan(), BF16]
    assert [each.passes for each in summaries] == [True, True]
    assert standings.yardstick(sound.cases) == "l"

    reason = Reason("check_max_abs", "differs", 3.0, 0.01, "grey levels", ("nondeterministic",))
    broken = run(plain, half, check("second_decode", verdict="fail", reasons=(reason,), surprise=True))
    whole, failed = standings.summarize(broken)["m"]
    assert whole.passes
    assert not failed.passes
    assert failed.failed == ("l~second_decode",)
    assert BF16 not in [each.plan for each in standings.recommend([whole, failed])]


def test_a_run_of_checks_alone_says_so_and_counts_them(tmp_path):
    found = run(check("second_decode"), check("a_b_a"), check("a_b_a", DecodePlan(), "fail", surprise=True))
    text = markdown.render(found)
    assert "| `a_b_a` | 1 of 2 | 3.00 grey levels |" in text
    assert "| `second_decode` | 1 of 1 | 0 grey levels |" in text
    assert "What each plan costs" not in text
    page = html.render(found, tmp_path)
    assert "No plan was held against a golden, only checks were judged." in page
    assert "bf16 · check a_b_a" in page or "bf16 \\u00b7 check a_b_a" in page


@pytest.mark.parametrize("hostile", ["<b>x</b>", "</script>", "a|b"])
def test_names_in_effects_are_inert(tmp_path, hostile):
    odd = DecodePlan(options={hostile: True})
    found = run(judged(measurements=measured(0.0)), judged(plan=odd, measurements=measured(1.0)))
    assert "<b>x" not in markdown.render(found)
    assert "</script><" not in html.render(found, tmp_path).replace("</script>\n<", "")
