"""`oxytorch serve` as a process beside an example, on a free port."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def served(*words: str) -> Iterator[str]:
    """The address of `oxytorch serve WORDS`, which is ended afterwards.

    Raises RuntimeError with the server's last lines where it ends before it is ready.
    """
    command = [sys.executable, "-m", "oxytorch", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield _address(process)
        process.terminate()
        # Reads what the server says to the end, so that it never waits for a full pipe.
        process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("{"):
            event = json.loads(line)
            if event["event"] == "ready":
                return str(event["url"])
    raise RuntimeError(f"oxytorch serve ended with {process.wait()}: {''.join(lines[-5:])}")
