import intel_extension_for_pytorch as ipex
import torch
from program_models import image_network

model = image_network()
data = torch.rand(2, 3, 16, 16)
expected = model(data)

model = ipex.optimize(model, dtype=torch.bfloat16)
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    model = torch.jit.trace(model, torch.rand(2, 3, 16, 16))
    model = torch.jit.freeze(model)
    for _ in range(3):
        outputs = model(data)
