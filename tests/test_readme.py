"""What the README shows is what runs."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from fidelity import cli
from fidelity.records import RunResult, from_json
from tests.suites import LIMITS, fidelity, write_suite

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PLUGIN = ROOT / "docs/examples/my_plugin.py"


def test_the_readme_shows_the_example_plugin_whole():
    assert PLUGIN.read_text().rstrip() in README


@pytest.mark.parametrize("line", sorted(set(re.findall(r"^fidelity .*?(?=\s+#|$)", README, re.MULTILINE))))
def test_every_command_in_the_readme_parses(line):
    words = shlex.split(line)[1:]
    command = cli.cli
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, line
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, words)  # raises on an option that does not exist


def test_the_readme_names_every_measurement():
    from fidelity import registry

    registry.load_plugins()
    for name in [*registry.METRICS, *registry.DETECTORS, "tile_seam", "oracle_max_abs"]:
        assert f"`{name}`" in README, name


@pytest.mark.slow
def test_the_example_plugin_enters_the_matrix(tmp_path):
    shutil.copy(PLUGIN, tmp_path)
    limits = LIMITS + 'frame_glow = { max = 3.0, origin = "test" }\n'
    matrix = 'dtype = ["fp32", "bf16"]\noffload = ["none", "sequential"]\nchannels_last = [false, true]'
    write_suite(tmp_path, matrix, limits)
    done = fidelity("run", "small.toml", "--plugin", "my_plugin", "--record-missing", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = from_json((tmp_path / "out/results.json").read_bytes(), RunResult)
    own = [case for case in run.cases if case.plan.options.get("channels_last")]
    assert len(own) == 4
    for case in own:
        assert case.receipts["channels_last"]["engaged"]
        assert case.receipts["state"]["restored"]
        assert case.measurements["frame_glow"].value is not None
        assert case.id.endswith("+channels_last")
