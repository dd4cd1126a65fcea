import intel_extension_for_pytorch as ipex
import torch

model = torch.nn.Sequential(
    torch.nn.LayerNorm(64), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)
).eval()
data = torch.randn(8, 64)
expected = model(data)

qconfig_mapping = ipex.quantization.get_smooth_quant_qconfig_mapping(alpha=0.5)
prepared = ipex.quantization.prepare(model, qconfig_mapping, example_inputs=data, inplace=False)
with torch.no_grad():
    for _ in range(4):
        prepared(torch.randn(8, 64))
    outputs = ipex.quantization.convert(prepared)(data)
