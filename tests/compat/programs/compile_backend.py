import intel_extension_for_pytorch as ipex
import torch

model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)
).eval()
data = torch.rand(8, 64)
expected = model(data)

model = ipex.optimize(model, weights_prepack=False)
model = torch.compile(model, backend="ipex")
with torch.no_grad():
    outputs = model(data)
