"""Every command and snippet of the guide, docs/ci.md and the README is run, page by page, in one workspace.

A block is what its fence says: `bash` holds commands; `console` commands after `$ ` and what they print; `toml` a suite
or a part of one, to be validated; `python` a script, a test or a plugin; `yaml` a CI job, whose commands must parse;
`text` a line to be explained. A block that begins with `# some/path` is that file of the reader's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from fidelity import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "docs/index.md",
    "docs/ci.md",
    *sorted(f"docs/guide/{p.name}" for p in ROOT.glob("docs/guide/*.md")),
]

LANGUAGES = ("bash", "console", "toml", "python", "yaml", "text")
ONE = "--case reference-kl/photo-pair/bf16-upcast0-slice0-t0-none"
CHUNKS, JUMP = "--case '*photo-pan/fp32-upcast0-slice0-t0*'", "--case '*/photo-pan/fp32-*-f2o0-none'"
SHORTER = {
    "fidelity run suites/smoke.toml": "--case '*-t16o0-*'",
    "fidelity run suites/families.toml": "--case 'small-tiny/small/bf16-*-t0-none'",
    "fidelity run suites/geometry.toml": "--case 'small-tiny/*~tile_geometry'",
    "fidelity run suites/upstream.toml": "--case 'small-tiny/*~disable_restores'",
    "fidelity run suites/overlap.toml": "--case '*-t0-none'",
    "fidelity run suites/video.toml": f"{CHUNKS} {JUMP}",
    f"fidelity run suites/video.toml {CHUNKS}": JUMP,
    "fidelity run suites/reference.toml": f"--out runs/base --history history.db {ONE}",
    "fidelity run suites/reference.toml --out runs/base": f"--history history.db {ONE}",
    "fidelity run suites/reference.toml --history history.db": f"--out runs/base {ONE}",
    "fidelity run suites/reference.toml --out runs/head": ONE,
    'fidelity golden approve suites/reference.toml --reason "why these measurements are right"': ONE,
}
"""What is added here to commands that take minutes: one case of many (the last --case counts), shared if possible."""

NOT_RUN = {
    "pip install -e .": "installs",
    "pip install -e '.[test]'": "installs",
    "pytest": "this is it",
    "fidelity run --plan bf16,tile=32,overlap=0.25 --model mine=/models/sdxl-vae": "the reader's own weights",
    "fidelity run suites/reference.toml --model mine=/models/sdxl-vae --record-missing": "the reader's own weights",
    "fidelity predict sdxl --size 1024x1024 --dtype fp16 --device cuda --tile 64 --budget 4GiB": "a minute or more",
    "fidelity recommend runs/smoke --budget 40MiB": "a whole run; tests/test_recommend.py has its own",
    "fidelity recommend sdxl --size 1024x1024 --device cuda --budget 1.5GiB": "a minute",
    "fidelity explain decode.log": "the reader's own log; tests/test_explain.py has forty",
    "python benchmarks/overhead.py": "minutes",
    "python benchmarks/detection.py": "an hour",
    "python benchmarks/prediction.py": "minutes",
    "python benchmarks/detectors_cost.py": "minutes",
    "python benchmarks/reach.py": "minutes",
    "python benchmarks/advice.py": "minutes",
    "python benchmarks/concurrency.py": "minutes",
    "python benchmarks/roofline.py": "minutes",
    "python -m tests.faults": "minutes; tests/test_faults.py runs a part",
}
"""Commands that are only parsed, and why."""

SHORTER_CODE = {'case="*-disk"': 'case="reference-kl/photo-pair/bf16-upcast0-slice1-t0-disk"'}
"""The same for what a python block asks for."""

BEFORE = {
    "docs/ci.md": [
        "fidelity run suites/reference.toml --out runs/base",
        "fidelity run suites/reference.toml --out runs/head",
    ]
}
"""What a page takes as done, where it does not begin at the beginning."""

READERS = {"my_decode": "def my_decode(module, latents):\n    return module.decode(latents)\n"}
"""What a snippet takes from the reader's own code."""

SUITE = {
    "schema": 'schema = "fidelity.suite/1"\n',
    "[suite]": '[suite]\nname = "part"\ngolden = "../golden"\n',
    "[[matrix]]": '[[matrix]]\nmodels = ["reference-kl"]\nlatents = ["photo-pair"]\n',
    "[limits]": '[limits]\nrmse = { max = 1.0, origin = "test" }\n',
}
"""The suite that a part of one is put into, where the part does not say the same."""


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Block:
    """A code block: its page, the line on which it begins, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def path(self) -> str | None:
        """The file of the reader's that this is, if it says so."""
        found = re.match(r"# ([\w./-]+\.\w+)\n", self.text)
        return found[1] if found else None


@dataclass(frozen=True)
class Command:
    """A command line, the exit status that its comment promises, and what the page says that it prints."""

    line: str
    status: int = 0
    prints: tuple[str, ...] = ()


def blocks(page: str) -> list[Block]:
    """Fenced blocks, and those set in by four spaces, which hold commands or YAML."""
    found, lines = [], (ROOT / page).read_text().splitlines()
    fence: tuple[int, str] | None = None
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if fence is None:
            fence = number, line[3:].strip()
        else:
            found.append(Block(page, *fence, "\n".join(lines[fence[0] : number - 1]) + "\n"))
            fence = None
    assert fence is None, f"{page}: a fence is not closed"
    fenced = {line for each in found for line in range(each.line, each.line + each.text.count("\n") + 2)}
    free = [(number, line) for number, line in enumerate(lines, 1) if number not in fenced]
    for indented, group in groupby(free, key=lambda each: each[1].startswith("    ")):
        if indented:
            (first, _), *_ = members = list(group)
            text = "".join(f"{line[4:]}\n" for _, line in members)
            found.append(Block(page, first, "bash" if text.startswith("fidelity ") else "yaml", text))
    return sorted(found, key=lambda block: block.line)


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block, in order; `&&` joins two."""
    text = block.text.replace("\\\n", " ")
    if block.language == "bash":
        for line in text.splitlines():
            yield from _commands(line, ())
        return
    first, *rest = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert first == "", f"{block.page}:{block.line}: a console block begins with `$ `"
    for part in rest:
        line, *prints = part.splitlines()
        yield from _commands(line, tuple(prints))


def _commands(line: str, prints: tuple[str, ...]) -> Iterator[Command]:
    words, _, comment = re.sub(r"\s+", " ", line).strip().partition(" #")
    promised = re.search(r"exit status (\d+)", comment)
    for each in words.split("&&"):
        if each.strip():
            yield Command(each.strip(), int(promised[1]) if promised else 0, prints)


def every(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


# ---------------------------------------------------------------- the lists hold nothing that is gone


def test_every_block_is_of_a_known_language():
    for block in (block for page in PAGES for block in blocks(page)):
        assert block.language in LANGUAGES, f"{block.page}:{block.line}"


def test_what_is_not_run_or_run_shorter_is_in_the_pages():
    shown = {command.line for block in every("bash", "console") for command in commands(block)}
    assert shown >= set(NOT_RUN)
    assert shown >= set(SHORTER)
    code = "".join(block.text for block in every("python"))
    assert all(each in code for each in [*SHORTER_CODE, *READERS])


def test_a_file_of_the_reader_s_is_used_by_its_page():
    for block in every("python"):
        if block.path is not None:
            lines = [
                command.line for other in blocks(block.page) if other.language == "bash" for command in commands(other)
            ]
            assert any(block.path in line or Path(block.path).stem in shlex.split(line) for line in lines), block.path


def test_a_benchmark_that_is_not_run_is_there():
    for line in (line for line in NOT_RUN if line.startswith("python ")):
        name = shlex.split(line)[-1]
        assert (ROOT / name).is_file() or (ROOT / name.replace(".", "/") / "__main__.py").is_file(), line


def test_every_command_of_fidelity_parses():
    lines = [command.line for block in every("bash", "console") for command in commands(block)]
    lines += [line for block in every("yaml") for line in spoken(yaml.safe_load(block.text))]
    assert len(lines) >= 30
    for line in lines:
        program, *words = shlex.split(line)
        command: Any = cli.cli
        while program == "fidelity" and hasattr(command, "commands"):
            assert words[0] in command.commands, line
            command, words = command.commands[words[0]], words[1:]
        if program == "fidelity":
            command.make_context(command.name, words)  # raises on an option that does not exist


def spoken(document: Any) -> Iterator[str]:
    """Every line of a YAML document that calls fidelity."""
    if isinstance(document, str):
        yield from (line.strip() for line in document.splitlines() if line.strip().startswith("fidelity "))
    elif isinstance(document, (dict, list)):
        for each in document.values() if isinstance(document, dict) else document:
            yield from spoken(each)


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_are_there(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target
    if "guide" in page:
        assert len(text.splitlines()) < 120


def test_every_page_is_linked_and_every_picture_shown():
    index = (ROOT / "docs/index.md").read_text()
    assert all(page.removeprefix("docs/") in index for page in PAGES if page.startswith("docs/guide/"))
    shown = "".join((ROOT / page).read_text() for page in PAGES)
    for picture in (ROOT / "docs/guide/images").iterdir():
        assert f"images/{picture.name}" in shown, picture.name
        assert picture.stat().st_size <= 150_000


# ---------------------------------------------------------------- running


@dataclass
class Workspace:
    """A folder like a clone, in which pages are read from top to bottom; a command that was run is not run again."""

    folder: Path
    done: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)

    def read(self, block: Block) -> None:
        if block.path is not None:
            (self.folder / block.path).parent.mkdir(exist_ok=True)
            (self.folder / block.path).write_text(self.code(block) if block.language == "python" else block.text)
        if block.language == "toml":
            self.validate(block)
        elif block.language == "python":
            self.python(block)
        elif block.language == "yaml":
            assert list(spoken(yaml.safe_load(block.text))), f"{block.page}:{block.line}: no command of fidelity"
        elif block.language != "text":
            for command in commands(block):
                self.command(command)

    def command(self, command: Command) -> None:
        if command.line in NOT_RUN:
            return
        line = f"{command.line} {SHORTER.get(command.line, '')}".rstrip()
        done = self.run(line)
        assert done.returncode == command.status, f"{line}\n{done.stdout}{done.stderr}"
        if line == command.line:
            printed = [digits(each) for each in (done.stdout + done.stderr).splitlines()]
            for shown in command.prints:
                pattern = ".*".join(re.escape(part) for part in digits(shown).split("…"))
                assert any(re.fullmatch(pattern, each) for each in printed), (
                    f"{line} does not print: {shown}\n{printed}"
                )

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a command line of fidelity or pytest, once whatever the order of its options."""
        program, *words = shlex.split(line)
        key = " ".join(sorted([program, *words]))
        if key not in self.done:
            assert program in ("fidelity", "pytest"), f"{line}: say in NOT_RUN why it is not run"
            module = ["fidelity.cli"] if program == "fidelity" else ["pytest", "-p", "no:cacheprovider"]
            self.done[key] = self.process("-m", *module, *words)
        return self.done[key]

    def process(self, *words: str) -> subprocess.CompletedProcess[str]:
        github = ("GITHUB_ACTIONS", "GITHUB_SHA", "GITHUB_STEP_SUMMARY", "FIDELITY_SCREENSHOTS", "PYTEST_ADDOPTS")
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={name: value for name, value in os.environ.items() if name not in github},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def validate(self, block: Block) -> None:
        path = block.path
        if path is None:
            path = "suites/part.toml"
            parts = [text for name, text in SUITE.items() if name not in block.text]
            missing = parts if "schema" not in block.text else []
            (self.folder / path).write_text("\n".join([*missing, block.text]))
        done = (
            self.run(f"fidelity validate {path}")
            if block.path
            else self.process("-m", "fidelity.cli", "validate", path)
        )
        assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout}{done.stderr}"

    def python(self, block: Block) -> None:
        if block.path is not None:  # a command of the page uses it
            return
        tests = re.search(r"^def test_", block.text, re.MULTILINE)
        name = "tests/test_snippet.py" if tests else "snippet.py"
        (self.folder / name).write_text(self.code(block))
        done = self.process(*(["-m", "pytest", "-q", "-p", "no:cacheprovider", name] if tests else [name]))
        assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout}{done.stderr}"

    def code(self, block: Block) -> str:
        text = block.text
        for long, short in SHORTER_CODE.items():
            text = text.replace(long, short)
        readers = [code for name, code in READERS.items() if name in text and f"def {name}" not in text]
        return "\n\n".join([*readers, text])


def digits(line: str) -> str:
    """A line without its figures and columns, which differ from machine to machine."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,:e+-]*", "0", line)).strip()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    folder = tmp_path_factory.mktemp("workspace")
    for name in ("suites", "golden"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "docs/examples/my_plugin.py", folder)
    write_latents(folder / "suites/latents.safetensors")
    return Workspace(folder)


def write_latents(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"latents": torch.zeros(1, 4, 16, 16)}, path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_a_page_runs_from_top_to_bottom(page, workspace):
    for line in BEFORE.get(page, ()):
        workspace.command(Command(line))
    for block in blocks(page):
        workspace.read(block)
