from __future__ import annotations

import pytest

from tests.optimizations.small import build


@pytest.fixture(scope="package")
def shared_module():
    """One instance for many tests: whatever they do, they must leave it as it was."""
    return build()


@pytest.fixture
def module(shared_module):
    """The shared instance, held to its fingerprint after the test."""
    from fidelity.optimizations import state
    from tests.optimizations.small import MODEL

    before = state.fingerprint(shared_module, MODEL.family)
    yield shared_module
    assert state.leaks(before, state.fingerprint(shared_module, MODEL.family)) == []
