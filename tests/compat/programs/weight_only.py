import intel_extension_for_pytorch as ipex
import torch
from intel_extension_for_pytorch.quantization import (
    WoqWeightDtype,
    convert,
    get_weight_only_quant_qconfig_mapping,
    prepare,
)
from program_models import layers

model = layers(128, 256, 64)
data = torch.rand(4, 128)
expected = model(data)

qconfig = get_weight_only_quant_qconfig_mapping(
    weight_dtype=WoqWeightDtype.INT8, lowp_mode=ipex.quantization.WoqLowpMode.NONE
)
prepared = prepare(model, qconfig, inplace=True)
with torch.no_grad():
    outputs = convert(prepared, inplace=True)(data)
