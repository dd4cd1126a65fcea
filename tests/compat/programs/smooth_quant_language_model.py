import os
import tempfile

import intel_extension_for_pytorch as ipex
import torch
from program_models import language_model

model = language_model("LlamaForCausalLM", use_cache=False)
input_ids = torch.randint(128, size=[1, 16])
with torch.no_grad():
    expected = model(input_ids).logits

qconfig = ipex.quantization.get_smooth_quant_qconfig_mapping(alpha=0.5)
prepared = ipex.quantization.prepare(model, qconfig, example_inputs=input_ids, inplace=False)
with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    for _ in range(4):
        prepared(torch.randint(128, size=[1, 16]))
    path = os.path.join(folder, "qconfig.json")
    prepared.save_qconf_summary(qconf_summary=path)
    prepared.load_qconf_summary(qconf_summary=path)
    outputs = ipex.quantization.convert(prepared)(input_ids).logits
