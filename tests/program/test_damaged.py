"""Saved programs that are altered at random end no process, and give no results that vary."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from marks import NEEDS_LIBRARY

pytestmark = [NEEDS_LIBRARY, pytest.mark.slow]
FILES, SECONDS = (20_000, 300) if os.environ.get("SLOW") else (500, 60)


def test_altered_files_are_refused_or_run() -> None:
    command = [sys.executable, str(Path(__file__).with_name("damaged.py"))]
    command += ["--files", str(FILES), "--seconds", str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert '"refused"' in last and '"ran"' in last
