# %% [markdown]
# # Training in bfloat16 with split weights
#
# Products of bfloat16 are faster, but a weight of bfloat16 cannot take a small update: its 8
# significant bits swallow it. `oxytorch.optimize` splits each float32 weight: the layer computes
# with the upper 16 bits, the optimizer keeps the lower 16 bits, and no bit is lost.
# `examples/train_bfloat16.py` is the same as a program. About details: docs/training.md.

# %%
import copy

import torch
from torch import nn
from torch.nn import functional

import oxytorch

torch.manual_seed(0)
print(oxytorch.__version__, torch.__version__, oxytorch.isa.active())

# %% [markdown]
# ## A task
#
# The class of a point is what a small random network, the teacher, says.

# %%
first, second = torch.randn(32, 12) / 32**0.5, torch.randn(12, 8)


def batch(rows):
    points = torch.randn(rows, 32)
    return points, (torch.tanh(2 * points @ first) @ second).argmax(1)


batches = [batch(256) for _ in range(150)]
test_points, test_classes = batch(2000)

start = nn.Sequential(
    nn.Linear(32, 512), nn.GELU(), nn.LayerNorm(512),
    nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 8),
)  # fmt: skip

# %% [markdown]
# ## Three ways to train, with the same start and batches


# %%
def train(model, optimizer, dtype):
    for points, classes in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(points.to(dtype)).float(), classes)
        loss.backward()
        optimizer.step()


def accuracy(model):
    """Of a stock float32 model that loads the checkpoint."""
    plain = copy.deepcopy(start)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        return (plain(test_points).argmax(1) == test_classes).float().mean().item()


LR = 1e-4
found = {}

model = copy.deepcopy(start)
train(model, torch.optim.AdamW(model.parameters(), lr=LR), torch.float32)
found["float32"] = accuracy(model)

model = copy.deepcopy(start).bfloat16()
train(model, torch.optim.AdamW(model.parameters(), lr=LR), torch.bfloat16)
found["bfloat16, plain"] = accuracy(model)

# %% [markdown]
# The third one is `oxytorch.optimize` with the optimizer; the loop stays as it is.

# %%
model = copy.deepcopy(start)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
model, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
train(model, optimizer, torch.float32)
found["bfloat16, split"] = accuracy(model)

for name, value in found.items():
    print(f"{name:18}{value:.1%}")
assert found["bfloat16, split"] > found["float32"] - 0.02

# %% [markdown]
# ## What a split weight is
#
# The layer sees bfloat16. The checkpoint is float32, so that stock PyTorch goes on from it.

# %%
print("in the layer:     ", model[0].weight.dtype)
print("in the checkpoint:", model.state_dict()["0.weight"].dtype)

# %% [markdown]
# Memory, bytes for each weight: both halves of the weight, and two float32 states of AdamW.

# %%
for kind, size in optimizer.memory_report().items():
    print(f"{kind:12}{size:6.2f}")

# %% [markdown]
# `oxytorch.optim.AdamW(..., state_dtype=torch.int8)` takes 2 bytes for both states in place of 8.
