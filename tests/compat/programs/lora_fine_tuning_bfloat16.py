import copy

import intel_extension_for_pytorch as ipex
import torch
from program_models import language_model
from torch.nn import functional


class Adapter(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.A = torch.nn.Linear(base.in_features, 4, bias=False)
        self.B = torch.nn.Linear(4, base.out_features, bias=False)
        torch.nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.base(x) + self.B(self.A(x))


model = language_model("LlamaForCausalLM", 64).train().requires_grad_(False)
for layer in model.model.layers:
    layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
    layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
stock = copy.deepcopy(model)
input_ids = torch.randint(64, size=[4, 16])


def adapters(model):
    return [p for p in model.parameters() if p.requires_grad]


def train(model, optimizer):
    model.train()
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids).logits
        loss = functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), input_ids[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


expected = train(stock, torch.optim.AdamW(adapters(stock), lr=1e-2))
optimizer = torch.optim.AdamW(adapters(model), lr=1e-2)
model.train()
model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
outputs = train(model, optimizer)
assert outputs[-1] < outputs[0]
