import intel_extension_for_pytorch as ipex
import torch
from program_models import layers

model = layers(64, 128, 64)
data = torch.rand(8, 64)
expected = model(data)

model = ipex.optimize(model, weights_prepack=False)
model = torch.compile(model, backend="ipex")
with torch.no_grad():
    outputs = model(data)
