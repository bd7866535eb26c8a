"""Configures the project's own tests; the plugin itself registers by its entry point."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Workers of pytest-xdist share the cores. Threads that wait for one another on a core that another worker has spin, and
# a decode of two seconds takes ninety; OpenMP reads this when torch is first imported.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _EACH = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _EACH)))

SHARED = Path(__file__).resolve().parent.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared weights and images; skips where it is absent, as on a user's machine."""
    if not SHARED.is_dir():
        pytest.skip(f"shared data is absent: {SHARED.name}/ is not beside the checkout")
    return SHARED
