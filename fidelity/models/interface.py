"""What a diffusers class offers, read from its source without importing it: methods, their parameters, attributes.

`validate` must know before anything is decoded, and at once, whether a class has the call that a check is about.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Interface:
    """Of one class and the bases that lie beside it: the parameters of each method, what it returns, what is set."""

    calls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: frozenset[str] = frozenset()
    returns: Mapping[str, str] = field(default_factory=dict)
    """What each method is annotated to return."""


@cache
def interface(cls: str) -> Interface:
    """The interface of an autoencoder of the installed diffusers; an empty one where it has no such class."""
    found = _definition(cls)
    if found is None:
        return Interface()
    bases = [interface(base.id) for base in found.bases if isinstance(base, ast.Name)]
    calls: dict[str, tuple[str, ...]] = {}
    returns: dict[str, str] = {}
    attributes: set[str] = set()
    for base in reversed(bases):
        calls |= base.calls
        returns |= base.returns
        attributes |= base.attributes
    for method in found.body:
        if isinstance(method, ast.FunctionDef):
            calls[method.name] = tuple(each.arg for each in (*method.args.args[1:], *method.args.kwonlyargs))
            returns[method.name] = ast.unparse(method.returns) if method.returns is not None else ""
            attributes |= _set_on_self(method) if method.name == "__init__" else set()
    return Interface(calls, frozenset(attributes), returns)


def _set_on_self(method: ast.FunctionDef) -> set[str]:
    nodes = list(ast.walk(method))
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    return {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def _definition(cls: str) -> ast.ClassDef | None:
    wanted = re.compile(rf"^class {re.escape(cls)}\b", re.MULTILINE)
    for path, text in _sources().items():
        if wanted.search(text):
            tree = ast.parse(text, filename=path)
            return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    return None


@cache
def _sources() -> dict[str, str]:
    """The files of diffusers' autoencoders. Finding a package does not import it."""
    spec = importlib.util.find_spec("diffusers")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    folder = Path(places[0]) / "models" / "autoencoders" if places else None
    return {str(path): path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))} if folder else {}
