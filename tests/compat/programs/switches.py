import intel_extension_for_pytorch as ipex
import torch

linear = torch.nn.Linear(256, 256).eval()
data = torch.rand(64, 256)
expected = linear(data)

ipex.enable_onednn_fusion(True)
ipex.enable_auto_channels_last()
assert ipex.get_fp32_math_mode() == ipex.FP32MathMode.FP32
ipex.set_fp32_math_mode(mode=ipex.FP32MathMode.BF32, device="cpu")
model = ipex.optimize(linear)
with torch.no_grad(), ipex.verbose(ipex.verbose.VERBOSE_ON):
    outputs = model(data)
ipex.set_fp32_math_mode(ipex.FP32MathMode.FP32)
assert ipex.get_fp32_math_mode() == ipex.FP32MathMode.FP32
