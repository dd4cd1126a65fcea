import intel_extension_for_pytorch as ipex
import torch

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1),
    torch.nn.BatchNorm2d(16),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(4096, 10),
).eval()
data = torch.rand(2, 3, 16, 16)
expected = model(data)

model = ipex.optimize(model, dtype=torch.bfloat16)
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    model = torch.jit.trace(model, torch.rand(2, 3, 16, 16))
    model = torch.jit.freeze(model)
    for _ in range(3):
        outputs = model(data)
