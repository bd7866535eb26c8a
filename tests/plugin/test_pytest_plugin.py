"""`pytest suite.toml` by inner pytest runs: one item per case, with the verdicts of `fidelity run`."""

from __future__ import annotations

import pytest

from tests.suites import LIMITS, write_suite

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

SEAM = (
    LIMITS
    + """tile_step = { max = 1.0, origin = "test" }
[[expect]]
match     = { tiling = { overlap = 0.0 } }
verdict   = "fail"
diagnosis = ["seam"]
reason    = "no overlap leaves edges"
"""
)
MATRIX = 'dtype = ["fp32", "bf16"]\nforce_upcast = [false, true]\ntiling = [false, { tile = 16, overlap = 0.0 }]'


@pytest.fixture
def suite(pytester):
    from fidelity import goldens, registry, runs
    from fidelity import suite as suite_

    path = write_suite(pytester.path, MATRIX, SEAM)
    registry.load_plugins()
    goldens.record(suite_.load(path, registry), runs.Options())
    return path


def run(pytester, *arguments):
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def test_one_item_a_case_with_the_suite_s_verdicts(pytester, suite):
    result = run(pytester, suite, "-v", "-rsx", "--junitxml=junit.xml")
    result.assert_outcomes(passed=2, xfailed=2, skipped=4)
    result.stdout.fnmatch_lines(
        [
            "*small.toml::reference-kl/ramp/fp32-upcast0-slice0-t0-none PASSED*",
            "*force_upcast: the pipelines apply it to fp16 only*",
            "*as expected: seam (no overlap leaves edges)*",
        ]
    )
    assert "rmse" in (pytester.path / "junit.xml").read_text()


def test_a_surprise_fails_with_reasons_and_the_command(pytester, suite):
    suite.write_text(suite.read_text().replace("max = 6.0", "max = 0.001"))
    result = run(pytester, suite, "-k", "bf16-upcast0-slice0-t0-none")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rmse is * grey levels, above the limit 0.001*", "*reproduce: fidelity run *"])


def test_a_bad_suite_or_missing_golden_is_said_in_one_line(pytester):
    path = write_suite(pytester.path, 'dtype = ["fp33"]')
    result = run(pytester, path)
    assert result.ret == pytest.ExitCode.INTERRUPTED  # nothing was run
    result.stdout.fnmatch_lines(["*small.toml: matrix*unknown dtype 'fp33': did you mean 'fp32'*"])
    result.stdout.no_fnmatch_line("*Traceback*")
    write_suite(pytester.path, 'dtype = ["bf16"]')
    result = run(pytester, path)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*fidelity golden record*"])


def test_other_toml_files_are_nobody_s_business(pytester):
    pytester.makefile(".toml", pyproject="[tool.x]\n")
    pytester.makepyfile("def test_one(): pass")
    run(pytester).assert_outcomes(passed=1)


def test_the_fixture_checks_a_decode(pytester):
    pytester.makepyfile(
        """
        def honest(module, latents):
            return module.decode(latents).sample

        def dark(module, latents):
            return module.decode(latents).sample - 0.1

        def test_honest(fidelity):
            result = fidelity.check(honest, model="reference-kl", latents="ramp", limits={"rmse": 1.0})
            assert result.verdict == "pass"

        def test_dark(fidelity):
            fidelity.check(dark, model="reference-kl", latents="ramp", limits={"rmse": 1.0})
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*rmse is 12.75 grey levels, above the limit 1*"])
