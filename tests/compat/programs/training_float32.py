import copy

import intel_extension_for_pytorch as ipex
import torch
from program_models import layers, train, training_data

model = layers(16, 32, 4)
stock = copy.deepcopy(model)
batches = training_data()

train(stock, torch.optim.SGD(stock.parameters(), lr=0.1, momentum=0.9), batches)
expected = torch.cat([p.detach().flatten() for p in stock.parameters()])

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model.train()
model, optimizer = ipex.optimize(model, optimizer=optimizer)
train(model, optimizer, batches)
outputs = torch.cat([p.detach().flatten() for p in model.parameters()])
