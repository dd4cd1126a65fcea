# %% [markdown]
# # An image CNN from float32 to 8-bit integers
#
# Three steps: train a network, calibrate it, compare. `examples/quantize_cnn.py` is the same as a
# program, with more options. About the method: docs/int8.md.

# %%
import time

import torch
from torch import nn
from torch.nn import functional

import oxytorch

torch.manual_seed(0)
print(oxytorch.__version__, torch.__version__, oxytorch.isa.active())

# %% [markdown]
# ## Images
#
# Ten glyphs of 8 x 8 random pixels, moved about in images of 24 x 24, with noise. They stand for
# images of yours.

# %%
glyphs = (torch.rand(10, 8, 8) > 0.5).float()


def make_images(count):
    labels = torch.randint(10, (count,))
    images = 0.3 * torch.randn(count, 1, 24, 24)
    for image, label in zip(images, labels, strict=True):
        y, x = torch.randint(16, (2,))
        image[0, y : y + 8, x : x + 8] += glyphs[label]
    return images, labels


images, labels = make_images(2000)
test_images, test_labels = make_images(500)

# %% [markdown]
# ## A network in float32

# %%
model = nn.Sequential(
    nn.Conv2d(1, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
    nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128), nn.ReLU(),
    nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(128, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(3):
    for rows in torch.randperm(len(images)).split(50):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")
model = model.eval()


# %%
@torch.inference_mode()
def accuracy(model):
    return (model(test_images).argmax(1) == test_labels).float().mean().item()


print(f"float32: {accuracy(model):.1%}")

# %% [markdown]
# ## 8-bit integers
#
# `oxytorch.quantize` runs the model on typical inputs to find the ranges of its activations, and
# returns a copy whose convolutions and linear layers multiply integers.

# %%
quantized = oxytorch.quantize(model, images[:512].split(64))
print(f"int8: {accuracy(quantized):.1%}")
assert abs(accuracy(quantized) - accuracy(model)) < 0.02

# %% [markdown]
# Where accuracy is lost, if it is: the report lists layers from the worst on.

# %%
print(oxytorch.quantization.report(model, quantized, test_images.split(100)))


# %% [markdown]
# ## Time


# %%
@torch.inference_mode()
def milliseconds(model):
    durations = []
    for _ in range(10):
        begun = time.perf_counter()
        model(test_images[:64])
        durations.append(1000 * (time.perf_counter() - begun))
    return min(durations)


for name, each in {"float32": model, "int8": quantized}.items():
    print(f"{name:8}{milliseconds(each):8.2f} ms for 64 images")

# %% [markdown]
# `oxytorch.save(quantized, "model.oxy", sample_input=images[:64])` writes it to a file, which
# `oxytorch.load` opens in any process, and `oxytorch serve` serves.
