"""A program for Intel Extension for PyTorch, as its users wrote them: bfloat16, and static int8.

    python -m oxytorch.compat examples/migration/before.py       runs it unmodified

`after.py` is the same program with oxytorch's own functions.
"""

import argparse

import intel_extension_for_pytorch as ipex
import torch
from intel_extension_for_pytorch.quantization import convert, prepare

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
model = model.to(memory_format=torch.channels_last)
images = images.to(memory_format=torch.channels_last)
fast = ipex.optimize(model, dtype=torch.bfloat16)
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    traced = torch.jit.trace(fast, images)
    traced = torch.jit.freeze(traced)
    traced(images)
    traced(images)
    outputs["bfloat16"] = traced(images).float()

# int8
qconfig_mapping = ipex.quantization.default_static_qconfig_mapping
prepared = prepare(model, qconfig_mapping, example_inputs=images, inplace=False)
with torch.no_grad():
    for batch in calibration_data:
        prepared(batch)
    converted = convert(prepared)
    outputs["int8"] = converted(images)

for name, scores in outputs.items():
    print(f"{name:9} mean {scores.mean():.4f}, deviation {scores.std():.4f}")
if arguments.save:
    torch.save(outputs, arguments.save)
