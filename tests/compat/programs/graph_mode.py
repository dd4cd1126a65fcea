import intel_extension_for_pytorch as ipex
import torch

model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
).eval()
data = torch.rand(8, 64)
expected = model(data)

model = ipex.optimize(model, graph_mode=True)
with torch.no_grad():
    for _ in range(3):
        outputs = model(data)
