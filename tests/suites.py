"""Small suites for tests that really decode: one photograph pair or drawn latents of the embedded model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIMITS = """
[limits]
nonfinite_share = { max = 0.0, origin = "test" }
rmse            = { max = 6.0, origin = "test" }
"""


def write_suite(folder: Path, matrix: str, rest: str = LIMITS, *, name: str = "small") -> Path:
    """A suite file with one matrix block over drawn latents; its goldens go beside it."""
    path = folder / f"{name}.toml"
    path.write_text(
        f'schema = "fidelity.suite/1"\n[suite]\nname = "{name}"\ngolden = "golden"\n'
        f'[[matrix]]\nmodels = ["reference-kl"]\nlatents = ["ramp"]\n{matrix}\n{rest}'
    )
    return path


def fidelity(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "fidelity.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
