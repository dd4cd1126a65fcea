"""The program of `before.py` with oxytorch's own functions.

    python examples/migration/after.py

What went: channels-last conversion, autocast, tracing, freezing, and calls to warm up.
"""

import argparse

import torch

import oxytorch

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--save", help="write the outputs to this file")
arguments = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3, padding=1),
    torch.nn.BatchNorm2d(32),
    torch.nn.ReLU(),
    torch.nn.Conv2d(32, 64, 3, stride=2, padding=1),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(4),
    torch.nn.Flatten(),
    torch.nn.Linear(1024, 10),
)
model.eval()
images = torch.rand(16, 3, 32, 32)
calibration_data = [torch.rand(16, 3, 32, 32) for _ in range(8)]
outputs = {}

# bfloat16
fast = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=images)
with torch.inference_mode():
    outputs["bfloat16"] = fast(images).float()

# int8
quantized = oxytorch.quantize(model, calibration_data)
with torch.inference_mode():
    outputs["int8"] = quantized(images)

for name, scores in outputs.items():
    print(f"{name:9} mean {scores.mean():.4f}, deviation {scores.std():.4f}")
if arguments.save:
    torch.save(outputs, arguments.save)
