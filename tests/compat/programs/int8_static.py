import intel_extension_for_pytorch as ipex
import torch
from intel_extension_for_pytorch.quantization import convert, prepare
from program_models import image_network

model = image_network(classes=32)
data = torch.rand(8, 3, 16, 16)
expected = model(data)

qconfig_mapping = ipex.quantization.default_static_qconfig_mapping
prepared_model = prepare(model, qconfig_mapping, example_inputs=data, inplace=False)
with torch.no_grad():
    for _ in range(4):
        prepared_model(torch.rand(8, 3, 16, 16))
    converted_model = convert(prepared_model)
    outputs = converted_model(data)
