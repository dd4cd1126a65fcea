"""Run a program for Intel Extension for PyTorch before and after its migration, and compare.

`before.py` imports intel_extension_for_pytorch and runs by `python -m oxytorch.compat`; `after.py`
has oxytorch's own functions. Both start from the same random numbers.

    python examples/migration/compare.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
EPILOG = """\
examples:
  python examples/migration/compare.py              about ten seconds
  python examples/migration/compare.py --diff       also show what changed

for a program of yours
  python -m oxytorch.compat script.py               runs it as it is
  import oxytorch.compat.ipex as ipex               in place of its import
docs/migrate.md has the table of all names and arguments."""
LIMITS = {"bfloat16": 2e-2, "int8": 4e-2}
"""The largest difference of both outputs, over the norm of the second."""


def run(name: str, *before: str) -> dict[str, torch.Tensor]:
    """The outputs of one of the programs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outputs.pt"
        command = [sys.executable, *before, str(HERE / name), "--save", str(file)]
        print(f"{name}: python {' '.join([*before, name])}", flush=True)
        subprocess.run(command, check=True)
        outputs: dict[str, torch.Tensor] = torch.load(file)
    return outputs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.rpartition("\n\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--diff", action="store_true", help="show the lines that changed")
    if parser.parse_args().diff:
        import difflib

        texts = [(HERE / name).read_text().splitlines() for name in ("before.py", "after.py")]
        print("\n".join(difflib.unified_diff(*texts, "before.py", "after.py", n=1, lineterm="")))
    before = run("before.py", "-m", "oxytorch.compat")
    after = run("after.py")
    status = 0
    for name, limit in LIMITS.items():
        difference = float((before[name] - after[name]).norm() / after[name].norm())
        is_right = difference <= limit
        print(f"{name:9} difference {difference:.1e}: {'right' if is_right else 'WRONG'}")
        status |= not is_right
    return status


if __name__ == "__main__":
    sys.exit(main())
