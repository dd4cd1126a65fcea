import intel_extension_for_pytorch as ipex
import torch
from transformers import BertConfig, BertModel

config = BertConfig(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
)
model = BertModel(config)
model.eval()
data = torch.randint(128, size=[2, 16])
with torch.no_grad():
    expected = model(data).last_hidden_state

model = ipex.optimize(model, dtype=torch.bfloat16, sample_input=data)
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    for _ in range(2):
        outputs = model(data).last_hidden_state
