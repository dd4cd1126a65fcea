"""Compile GPU kernels ahead of time for a list of devices, on a machine that needs none of them.

Builds what one optimizer needs for each device, checks the images, and shows how a program on
another machine finds them.

    python examples/build_gpu_kernels.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EPILOG = """\
examples:
  python examples/build_gpu_kernels.py                               AdamW for sm_90 and gfx942
  python examples/build_gpu_kernels.py --devices h100,b200,mi300x    names of products serve too
  python examples/build_gpu_kernels.py --kernels clip_grad_norm_     a few seconds
  python examples/build_gpu_kernels.py --out shipped                 keep what was built, then
  XDG_DATA_HOME=shipped python train.py                              where a program finds it

in a wheel: OXYTORCH_AOT_DEVLIST=sm_90,gfx942 pip wheel --no-deps .
docs/gpu.md says how kernels are loaded; `oxytorch aot build --help` lists the devices.

needs: pip install 'oxytorch[aot]'; for Intel's devices ocloc (intel-opencl-icd)"""


def aot(*words: str, **environment: str) -> str:
    """What `oxytorch aot WORDS` prints; its progress goes to the terminal."""
    command = [sys.executable, "-m", "oxytorch", "aot", *words]
    print("oxytorch aot", *words, file=sys.stderr, flush=True)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.rpartition("\n\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", default="sm_90,gfx942", help="(default: sm_90,gfx942)")
    parser.add_argument("--kernels", default="adamw", help="optimizers or functions; all: ''")
    parser.add_argument("--jobs", default="2", help="compilers at once (default: 2)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the images here")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    with tempfile.TemporaryDirectory() as scratch:
        data = options.out or Path(scratch)
        # Below a data folder, images lie where oxytorch looks for those of a user.
        images = data / "oxytorch" / "images"
        chosen = ["--kernels", options.kernels] if options.kernels else []
        built = ["--devices", options.devices, *chosen, "--jobs", options.jobs]
        print(aot("build", *built, "--out", str(images)))
        print(aot("check", "--from", str(images)))

        # On the other machine: the folder was copied, and XDG_DATA_HOME names it.
        found: dict[str, Any] = json.loads(aot("list", "--json", XDG_DATA_HOME=str(data)))
        print("a program that runs with XDG_DATA_HOME set to the folder finds")
        for one in found["collections"]:
            if Path(one["folder"]) == images:
                size = one["compressed"] / 2**10
                print(f"  {one['device']:12}{one['images']:>4} images{size:>8.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
