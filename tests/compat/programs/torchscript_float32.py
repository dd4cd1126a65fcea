import intel_extension_for_pytorch as ipex
import torch
from program_models import image_network

model = image_network()
data = torch.rand(2, 3, 16, 16)
expected = model(data)

model = ipex.optimize(model)
with torch.no_grad():
    d = torch.rand(2, 3, 16, 16)
    model = torch.jit.trace(model, d)
    model = torch.jit.freeze(model)
    for _ in range(3):
        outputs = model(data)
