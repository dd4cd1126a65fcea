import copy

import intel_extension_for_pytorch as ipex
import torch
from program_models import layers, training_data

model = layers(16, 32, 4)
stock = copy.deepcopy(model)
batches = training_data()
criterion = torch.nn.CrossEntropyLoss()


def train(model, optimizer):
    model.train()
    for data, target in batches:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


expected = train(stock, torch.optim.SGD(stock.parameters(), lr=0.1, momentum=0.9))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model.train()
model, optimizer = ipex.optimize(model, optimizer=optimizer)
outputs = train(model, optimizer)
