"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a snippet in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, env=os.environ | environment, timeout=120,
    )  # fmt: skip


def printed(code: str, **environment: str) -> str:
    """What a snippet prints, which must end well."""
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
