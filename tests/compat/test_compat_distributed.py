"""The predecessor's distributed training: its launcher, DDP and `ipex.optimize`, two processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

PROGRAM = """
import sys

import intel_extension_for_pytorch as ipex
import torch
import torch.distributed as dist

dist.init_process_group(backend="gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
data, target = torch.rand(4, 8, 8), torch.randint(2, (4, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model.train()
model, optimizer = ipex.optimize(model, optimizer=optimizer)
model = torch.nn.parallel.DistributedDataParallel(model)
for batch, labels in zip(data, target):
    rows = slice(rank * 4, rank * 4 + 4)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(batch[rows]), labels[rows]).backward()
    optimizer.step()
if ipex.distributed.get_rank() == 0:
    torch.save(model.module.state_dict(), sys.argv[1])
ipex.distributed.barrier()
dist.destroy_process_group()
"""


def expected() -> dict[str, torch.Tensor]:
    """One stock process with the whole batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    data, target = torch.rand(4, 8, 8), torch.randint(2, (4, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch, labels in zip(data, target, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.slow
def test_two_ranks_of_ipexrun_train_as_one_stock_process(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "trained.pt"
    script.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["--nnodes", "1", "--nprocs-per-node", "2", "--master-port", port]
    done = subprocess.run(
        [sys.executable, "-m", "oxytorch", "ipexrun", *words, str(script), str(file)],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    torch.testing.assert_close(torch.load(file), expected())
