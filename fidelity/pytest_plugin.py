"""`pytest suites/reference.toml` collects one item per case; the `fidelity` fixture checks a decode of one's own.

Verdicts and ids are those of `fidelity run`: an expected failure that fails as expected is xfailed, a case that cannot
apply is skipped with its reason, every surprise fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fidelity.errors import FidelityError, RequestError

if TYPE_CHECKING:
    from fidelity.records import Case

SCHEMA = b"fidelity.suite/"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fidelity")
    group.addoption("--fidelity-device", default="cpu", help="device of the decodes: cpu, cuda, cuda:N")
    group.addoption("--fidelity-model", metavar="NAME[=PATH]",
                    help="evaluate the autoencoder at PATH as NAME; without PATH a registered one")  # fmt: skip
    group.addoption("--fidelity-plugin", action="append", default=[], metavar="MODULE", help="import MODULE first")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> SuiteFile | None:
    if file_path.suffix == ".toml" and SCHEMA in file_path.read_bytes():
        return SuiteFile.from_parent(parent, path=file_path)
    return None


class SuiteFile(pytest.File):
    """A suite: its cases as items, judged by one worker process that is started with the first of them."""

    def collect(self) -> Iterator[CaseItem]:
        from fidelity import registry, runs, suite
        from fidelity.models.load import from_path

        config = self.config
        plugins = tuple(config.getoption("--fidelity-plugin"))
        substitute, model = None, config.getoption("--fidelity-model")
        if model:
            name, _, path = model.partition("=")
            substitute = (name, path)
        try:
            registry.load_plugins(plugins)
            loaded = suite.load(self.path, registry, substitute=from_path(*substitute) if substitute else None)
            loaded = suite.on(loaded, config.getoption("--fidelity-device"))
        except RequestError as error:
            raise self.CollectError(str(error)) from None
        options = runs.Options(
            device=config.getoption("--fidelity-device"), plugins=plugins, path=(os.getcwd(),), substitute=substitute
        )
        self.suite, self.options = loaded, options
        for case in loaded.cases:
            yield CaseItem.from_parent(self, name=case.id, case=case)

    def setup(self) -> None:
        from fidelity import runs

        self.bench = runs.Bench(self.suite, self.options)

    def teardown(self) -> None:
        self.bench.close()


class CaseItem(pytest.Item):
    """One case."""

    def __init__(self, *, case: Case, **about: Any):
        super().__init__(**about)
        self.case = case

    def runtest(self) -> None:
        from fidelity.api import explain

        if self.case.not_applicable:
            pytest.skip(self.case.not_applicable)
        assert isinstance(self.parent, SuiteFile)
        result = self.parent.bench.judge(self.case)
        self.user_properties += [(name, one.value) for name, one in result.measurements.items()]
        if result.surprise:
            raise Surprise(explain(result), result.reproduce)
        if result.verdict != "pass":
            pytest.xfail(f"as expected: {', '.join(result.diagnosis) or result.verdict} ({result.expected_reason})")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, Surprise):
            return f"{excinfo.value.args[0]}\n  reproduce: {excinfo.value.args[1]}"
        if isinstance(excinfo.value, FidelityError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class Surprise(Exception):
    """A case that did not end as its suite expects: what is wrong, and the command that shows it again."""


@pytest.fixture(scope="session")
def fidelity() -> Any:
    """The package: `fidelity.check(my_decode, model=…, latents=…, limits=…)`, `fidelity.evaluate(suite, case=…)`."""
    import fidelity as package

    return package
