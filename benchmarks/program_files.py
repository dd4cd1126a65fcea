"""Time to the first result of a saved BERT-base in fresh processes, beyond `import torch`.

python benchmarks/program_files.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 7
CODE = """
import sys, time
import torch
x = torch.ones(1, 16, dtype=torch.long)
began = time.perf_counter()
import oxytorch
model = oxytorch.load(sys.argv[1])
loaded = time.perf_counter()
model(input_ids=x, attention_mask=x)
first = time.perf_counter()
model(input_ids=x, attention_mask=x)
print(loaded - began, first - began, time.perf_counter() - first)
"""


def main() -> None:
    """Export, save, and open in fresh processes; print medians."""
    import torch
    from transformers import BertConfig, BertModel

    import oxytorch

    model = BertModel(BertConfig()).eval()
    x = torch.ones(2, 16, dtype=torch.long)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=512)}
    names = ("input_ids", "attention_mask")
    exported = torch.export.export(
        model, (), dict.fromkeys(names, x), dynamic_shapes=dict.fromkeys(names, sizes)
    )
    began = time.perf_counter()
    program = oxytorch.optimize(exported)
    made = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bert.oxy"
        oxytorch.save(program, path)
        print(f"optimize {made - began:.2f} s, save {time.perf_counter() - made:.2f} s, "
              f"{path.stat().st_size / 1e6:.0f} MB")  # fmt: skip
        runs = []
        for _ in range(RUNS):
            command = [sys.executable, "-c", CODE, str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs.append([float(word) for word in done.stdout.split()])
    for name, times in zip(("import and load", "to the first result", "second call"),
                           zip(*runs, strict=True), strict=True):  # fmt: skip
        print(f"{name}: {statistics.median(times):.3f} s, least {min(times):.3f} s")


if __name__ == "__main__":
    main()
