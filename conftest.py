"""Configures the project's own tests; the plugin itself registers by its entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared weights and images; skips where it is absent, as on a user's machine."""
    if not SHARED.is_dir():
        pytest.skip(f"shared data is absent: {SHARED.name}/ is not beside the checkout")
    return SHARED
