"""The public names, who may import whom, and what the quick commands import."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fidelity

PACKAGE = Path(fidelity.__file__).parent
LAYERS = (
    {"errors", "lazy"},
    {"records", "trend", "wording", "admission"},
    {"registry", "environment", "signal", "residency", "tensorfile", "photographs"},
    {"models", "latents", "optimizations", "memory", "simulation", "metrics", "detectors", "gates", "attribution"},
    {
        "runner",
        "conversion",
        "response",
        "oracles",
        "frames",
        "naming",
        "checks",
        "sweep",
        "stub",
        "coverage",
        "scaling",
        "drawn",
        "tiles",
        "snippet",
        "noise",
        "golden",
        "certificate",
        "images",
        "plans",
        "standings",
        "exhaustion",
        "stages",
        "rules",
        "estimate",
        "grammar",
        "suite",
        "comparison",
        "compare",
        "differences",
        "history",
    },
    {"verdicts", "prediction"},
    {"measuring"},
    {"plain", "overflow", "why", "reach", "encoding"},
    {"references"},
    {"predict", "extent"},
    {"shortage", "capacity"},
    {"intermediates", "evaluator", "worker", "inspection", "concurrency", "roofline"},
    {"pool"},
    {"runs"},
    {
        "goldens",
        "calibrate",
        "folders",
        "report",
        "upstream",
        "offers",
        "recommend",
        "explain",
        "proposals",
        "receptive",
    },
    {"api"},
    {"cli", "pytest_plugin"},
)
ONLY = {
    "diffusers": {"models", "optimizations"},
    "accelerate": {"models", "optimizations"},
    "lpips": {"metrics.perceptual"},
    "jinja2": {"report.html"},
    "pytest": {"pytest_plugin"},
}
NO_TORCH = ("gates", "report", "suite", "plans", "rules", "grammar", "records", "registry", "cli", "compare",
            "comparison", "differences", "history", "trend", "upstream", "standings",
            "explain", "exhaustion", "stages")  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "data":
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """Dotted names imported at run time: at module level or within functions, not under TYPE_CHECKING."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                walk(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(ast.parse(path.read_text()))
    return found


def layer(top: str) -> int:
    return next(index for index, names in enumerate(LAYERS) if top in names)


def test_every_module_has_a_layer():
    tops = {name.split(".")[0] for name in modules()} - {""}
    assert tops == set().union(*LAYERS) & tops


@pytest.mark.parametrize("name", sorted(set(modules()) - {""}))
def test_imports_point_downwards(name):
    own = name.split(".")[0]
    for imported in imports(modules()[name]):
        if not imported.startswith("fidelity."):
            continue
        other = imported.split(".")[1]
        if other in ("__version__", own) or not any(other in names for names in LAYERS):
            continue
        assert layer(other) <= layer(own), f"{name} imports {imported}, which lies above it"
        if layer(other) == layer(own) == 3:
            pytest.fail(f"{name} imports its sibling {imported}")


@pytest.mark.parametrize("library", ONLY)
def test_libraries_stay_where_they_belong(library):
    users = {name for name, path in modules().items() if any(i.split(".")[0] == library for i in imports(path))}
    strays = {user for user in users if user not in ONLY[library] and user.split(".")[0] not in ONLY[library]}
    assert not strays


@pytest.mark.parametrize("name", NO_TORCH)
def test_deciders_and_renderers_do_not_import_torch(name):
    for module, path in modules().items():
        if module.split(".")[0] == name:
            used = {i for i in imports(path) if i.split(".")[0] == "torch" or i == "fidelity.lazy.torch"}
            assert not used, f"{module} imports torch"


def test_exported_names():
    assert fidelity.__all__ == sorted(
        [
            "CaseResult", "DecodePlan", "EvaluationError", "FidelityError", "Geometry", "Latents", "Limit",
            "Measurement", "Model", "Reason", "RequestError", "RunResult", "Scaling", "Tiling", "__version__",
            "check", "decoder", "detector", "evaluate", "metric", "optimization", "weights",
        ]
    )  # fmt: skip
    for name in fidelity.__all__:
        assert getattr(fidelity, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'evalute'"):
        _ = fidelity.evalute


def test_no_module_shadows_a_public_name():
    for name in set(modules()) - {""}:
        top = name.split(".")[0]
        assert top not in fidelity.__all__, f"importing fidelity.{top} would hide fidelity.{top}()"


HEAVY = {"torch", "diffusers", "accelerate", "transformers", "lpips", "torchmetrics", "skimage", "numpy", "jinja2"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *(["ls", kind] for kind in ("models", "latents", "optimizations", "metrics", "detectors", "checks", "suites")),
        ["validate", "suites/reference.toml"],
        ["tiles", "wan21", "--size", "480x832", "--tile", "32"],
    ],
    ids=" ".join,
)
def test_quick_commands_import_nothing_heavy(arguments):
    code = (
        "import sys\nfrom fidelity.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"print('HEAVY', sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_every_module_imports():
    for name in set(modules()) - {""}:
        importlib.import_module(f"fidelity.{name}")
