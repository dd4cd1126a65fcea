"""Convolutions whose kernels have one element along a dilated dimension, on images of one column.

oneDNN ends the process for some of them in bfloat16 with channels last, which torch's own order
does not meet. So they run in a process of their own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = """
import sys
import torch
from torch import nn
import oxytorch

way = sys.argv[1]
CASES = [
    (nn.Conv2d(8, 16, 1, stride=3, padding=2, dilation=3), (1, 8, 6, 1)),
    (nn.Conv2d(2, 2, (10, 1), stride=2, padding=(5, 1), dilation=(1, 3)), (1, 2, 24, 1)),
    (nn.Conv2d(32, 16, 1, stride=2, padding=5, dilation=(2, 3)), (1, 32, 7, 1)),
]
for layer, size in CASES:
    for wide in (False, True):
        model = nn.Sequential(layer, nn.ReLU()).bfloat16().eval()
        x = torch.randn(size).bfloat16()
        sample = torch.randn(*size[:2], 32, 32).bfloat16() if wide else x
        with torch.no_grad():
            expected = model(x)
            if way == "compile":
                ours = torch.compile(model, backend="oxytorch")
            else:
                more = {} if way == "default" else {"sample_input": sample}
                ours = oxytorch.optimize(model, graph=way == "graph", **more)
            for _ in range(2):
                torch.testing.assert_close(ours(x), expected, rtol=0.05, atol=0.05)
print("done")
"""


@pytest.mark.parametrize("way", ["default", "sample", "graph", "compile"])
def test_narrow_images(way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, way],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-2000:]
