import intel_extension_for_pytorch as ipex
import torch

from tiny import tiny

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
model = tiny("BertModel", vocab_size=128, num_hidden_layers=2, **sizes)
data = torch.randint(128, size=[2, 16])
with torch.no_grad():
    expected = model(data).last_hidden_state

model = ipex.optimize(model, dtype=torch.bfloat16, sample_input=data)
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    for _ in range(2):
        outputs = model(data).last_hidden_state
