import intel_extension_for_pytorch as ipex
import torch

from tiny import tiny_llama

model = tiny_llama(vocab_size=128)
input_ids = torch.randint(128, size=[1, 12])
with torch.no_grad():
    expected = model(input_ids).logits

qconfig = ipex.quantization.get_weight_only_quant_qconfig_mapping(
    weight_dtype=ipex.quantization.WoqWeightDtype.INT4,
    lowp_mode=ipex.quantization.WoqLowpMode.BF16,
    group_size=32,
)
model = ipex.llm.optimize(
    model, dtype=torch.bfloat16, quantization_config=qconfig, low_precision_checkpoint=None
)
with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
    outputs = model(input_ids).logits
    assert model.generate(input_ids, max_new_tokens=4, num_beams=2).shape == (1, 16)
