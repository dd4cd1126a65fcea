import copy
import io

import intel_extension_for_pytorch as ipex
import torch
from program_models import layers, train, training_data

model = layers(16, 32, 4)
stock = copy.deepcopy(model)
plain = copy.deepcopy(model)
batches = training_data()

train(stock, torch.optim.SGD(stock.parameters(), lr=0.1), batches, torch.bfloat16)
expected = torch.cat([p.detach().flatten() for p in stock.parameters()])

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train()
model, optimizer = ipex.optimize(
    model, optimizer=optimizer, dtype=torch.bfloat16, split_master_weight_for_bf16=True
)
assert model[0].weight.dtype == torch.bfloat16
train(model, optimizer, batches, torch.bfloat16)
checkpoint = io.BytesIO()
torch.save(
    {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
    },
    checkpoint,
)
checkpoint.seek(0)
plain.load_state_dict(torch.load(checkpoint)["model_state_dict"])
outputs = torch.cat([p.detach().flatten() for p in plain.parameters()])
assert outputs.dtype == torch.float32
