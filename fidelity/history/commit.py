"""Which commit was run: what CI says, else what git says of the folder the command was given in."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

WAIT_SECONDS = 10.0


def commit(folder: Path | None = None) -> str | None:
    """GITHUB_SHA, else the commit of the checkout around `folder` (default: here); None where there is none.

    Where tracked files were edited, `-dirty` stands behind it: what ran is then not what the commit holds.
    """
    given = os.environ.get("GITHUB_SHA", "")
    if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", given):
        return given
    command = ["git", "describe", "--always", "--abbrev=64", "--exclude=*", "--dirty"]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=quiet, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here, or one that waits for somebody
        return None
    said = done.stdout.strip()
    return said if done.returncode == 0 and re.fullmatch("[0-9a-f]{7,64}(-dirty)?", said) else None
