import intel_extension_for_pytorch as ipex
import torch
from intel_extension_for_pytorch.quantization import convert, prepare

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3, padding=1),
    torch.nn.BatchNorm2d(32),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(4),
    torch.nn.Flatten(),
    torch.nn.Linear(512, 32),
)
model.eval()
data = torch.rand(8, 3, 16, 16)
expected = model(data)

qconfig_mapping = ipex.quantization.default_static_qconfig_mapping
prepared_model = prepare(model, qconfig_mapping, example_inputs=data, inplace=False)
with torch.no_grad():
    for _ in range(4):
        prepared_model(torch.rand(8, 3, 16, 16))
    converted_model = convert(prepared_model)
    outputs = converted_model(data)
