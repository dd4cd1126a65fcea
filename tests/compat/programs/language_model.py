import intel_extension_for_pytorch as ipex
import torch

from tiny import tiny_llama

model = tiny_llama(vocab_size=128)
input_ids = torch.randint(128, size=[1, 12])
with torch.no_grad():
    expected = model(input_ids).logits
    stock_tokens = model.generate(input_ids, max_new_tokens=6, do_sample=False)

fast = ipex.llm.optimize(model, dtype=torch.float, deployment_mode=True)
with torch.inference_mode():
    tokens = fast.generate(input_ids, max_new_tokens=6, do_sample=False, num_beams=1)
assert tokens.tolist() == stock_tokens.tolist()

model = ipex.llm.optimize(model, dtype=torch.bfloat16, inplace=True, deployment_mode=True)
with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
    outputs = model(input_ids).logits
    assert model.generate(input_ids, max_new_tokens=6, do_sample=False).shape == (1, 18)
