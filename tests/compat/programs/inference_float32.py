import intel_extension_for_pytorch as ipex
import torch

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1),
    torch.nn.BatchNorm2d(16),
    torch.nn.ReLU(),
    torch.nn.Dropout(),
    torch.nn.AdaptiveAvgPool2d(4),
    torch.nn.Flatten(),
    torch.nn.Linear(256, 10),
)
model.eval()
data = torch.rand(4, 3, 32, 32)
expected = model(data)

model = model.to(memory_format=torch.channels_last)
data = data.to(memory_format=torch.channels_last)
model = ipex.optimize(model)
with torch.no_grad():
    outputs = model(data)
