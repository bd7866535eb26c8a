"""The workflow in the docs is run, as far as it can be without GitHub; the options in docs/ci.md are there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from fidelity.cli import cli
from fidelity.records import RunResult, from_json
from tests.history.test_database import git
from tests.suites import LIMITS

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = yaml.safe_load((ROOT / "docs/examples/fidelity.yml").read_text())
STEPS = WORKFLOW["jobs"]["fidelity"]["steps"]


def test_the_workflow_is_one():
    assert set(WORKFLOW[True]) == {"pull_request", "push"}, "YAML 1.1 reads `on` as true, and GitHub as a name"
    assert WORKFLOW["permissions"] == {"contents": "read", "pull-requests": "write"}
    for step in STEPS:
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"[\w./-]+@v\d+", step.get("uses", "a/b@v1"))
        assert re.fullmatch(r"(\$\{\{ .* \}\})?", step.get("if", "")), "an expression, whole"
    assert (ROOT / WORKFLOW["env"]["SUITE"]).is_file()


def test_the_history_of_a_red_run_is_kept():
    """`actions/cache` by itself saves only where every step was green."""
    used = [step.get("uses", "").partition("@")[0] for step in STEPS]
    assert "actions/cache" not in used
    back, keep = (STEPS[used.index(f"actions/cache/{half}")] for half in ("restore", "save"))
    assert keep["if"] == "${{ !cancelled() }}"
    assert {key: back["with"][key] for key in ("path", "key")} == keep["with"]
    assert back["with"]["key"].startswith(back["with"]["restore-keys"])
    run = next(place for place, step in enumerate(STEPS) if f"--history {keep['with']['path']}" in step.get("run", ""))
    assert STEPS.index(back) < run < STEPS.index(keep)


def commands(text: str) -> list[list[str]]:
    """Every command line of fidelity in a text, in words."""
    text = text.replace("\\\n", " ").replace("python -m fidelity.cli", "fidelity")
    found = re.findall(r"(?:^|[ `\[])(fidelity (?:run|compare|history|report) [^`\n|\]#]*)", text, re.M)
    return [shlex.split(line) for line in found]


@pytest.mark.parametrize("name", ["docs/ci.md", "docs/examples/fidelity.yml"])
def test_options_in_the_docs_are_there(name):
    found = commands((ROOT / name).read_text())
    assert len(found) >= 3
    for _, command, *words in found:
        known = {option for parameter in cli.commands[command].params if isinstance(parameter, click.Option)
                 for option in parameter.opts}  # fmt: skip
        assert {word for word in words if word.startswith("-")} <= known, words


def test_every_option_of_compare_is_in_the_docs():
    text = (ROOT / "docs/ci.md").read_text()
    for parameter in cli.commands["compare"].params:
        if isinstance(parameter, click.Option) and parameter.name not in ("quiet",):
            assert parameter.opts[-1] in text, parameter.name


STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
"""


@pytest.fixture
def workspace(tmp_path) -> Path:
    """A clone whose origin has a main branch with a suite of one case, and a change on top of it."""
    origin, clone = tmp_path / "origin", tmp_path / "job" / "clone"
    origin.mkdir()
    matrix = '[[matrix]]\nmodels = ["reference-kl"]\nlatents = ["ramp"]\ndtype = ["bf16"]\n'
    head = f'schema = "fidelity.suite/1"\n[suite]\nname = "small"\ngolden = "{ROOT}/golden"\n'
    (origin / "small.toml").write_text(head + matrix + LIMITS)
    git(origin, "init")
    git(origin, "add", ".")
    git(origin, "commit", "-m", "base")
    clone.parent.mkdir()
    git(tmp_path, "clone", str(origin), str(clone))
    (clone / "change").write_text("")
    git(clone, "add", ".")
    git(clone, "commit", "-m", "change")
    return clone


@pytest.mark.slow
def test_the_workflow_runs(workspace, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("pip", "gh"):
        (tools / name).write_text(STUB)
        (tools / name).chmod(0o755)
    for name, module in (("fidelity", "-m fidelity.cli "), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    commit = git(workspace, "rev-parse", "HEAD")
    github = {
        "PATH": path, "CALLS": str(tmp_path / "calls"), "SUITE": "small.toml", "NUMBER": "7", "PYTHONPATH": str(ROOT),
        "GITHUB_ACTIONS": "true", "GITHUB_SHA": commit, "GITHUB_BASE_REF": "main", "GITHUB_WORKSPACE": str(workspace),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }  # fmt: skip
    for step in STEPS:
        if "run" in step:
            script = step["run"].replace("PYTHONPATH=.", "")  # the base branch here has no fidelity of its own
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", script], cwd=workspace, text=True, capture_output=True,
                env={**os.environ, **github}, timeout=300, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{step['name']}: {done.stdout}{done.stderr}"
    head, base = (
        from_json((workspace / f"runs/{side}/results.json").read_bytes(), RunResult) for side in ("head", "base")
    )
    assert (head.commit, base.commit) == (commit, git(workspace, "rev-parse", "origin/main"))
    assert len(head.trend.runs) == 1
    assert (workspace / "history.db").is_file()
    summary = (tmp_path / "summary").read_text()
    assert summary.index("## ✅ small: Every case") < summary.index("## ✅ small: Nothing got worse")
    assert summary.count("## ✅") == 2, "the base branch's own summary is nobody's business"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [
        "pip install -e .", "gh pr comment 7 --edit-last --create-if-none --body-file runs/compare/comparison.md",
    ]  # fmt: skip
    assert (workspace / "runs/compare/comparison.md").is_file()
