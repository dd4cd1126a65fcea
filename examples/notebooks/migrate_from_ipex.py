# %% [markdown]
# # From Intel Extension for PyTorch to oxytorch
#
# Three steps, each of which works by itself: run the program as it is; replace the import; use
# oxytorch's own functions. `examples/migration` has a whole program before and after. All names and
# arguments: docs/migrate.md.

# %%
import torch
from torch import nn

import oxytorch

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(2048, 10),
).eval()  # fmt: skip
images = torch.rand(16, 3, 32, 32)
with torch.no_grad():
    expected = model(images)


def difference(outputs):
    return ((outputs.float() - expected).norm() / expected.norm()).item()


# %% [markdown]
# ## 1. As it is
#
# A script runs unmodified by `python -m oxytorch.compat script.py`. In a notebook, `install()`
# before the import does the same.

# %%
import oxytorch.compat

oxytorch.compat.install()

import intel_extension_for_pytorch as ipex

fast = ipex.optimize(model, dtype=torch.bfloat16)
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    traced = torch.jit.freeze(torch.jit.trace(fast, images))
    outputs = traced(images)
print(f"as it is: difference {difference(outputs):.1e}")
assert difference(outputs) < 2e-2

# %% [markdown]
# `uninstall()` takes it back.

# %%
oxytorch.compat.uninstall()

# %% [markdown]
# ## 2. Another import
#
# Nothing else in the process changes: `torch.jit` is PyTorch's own.

# %%
import oxytorch.compat.ipex as ipex

fast = ipex.optimize(model, dtype=torch.bfloat16)
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    outputs = fast(images)
print(f"import replaced: difference {difference(outputs):.1e}")

prepared = ipex.quantization.prepare(
    model, ipex.quantization.default_static_qconfig_mapping, example_inputs=images
)
with torch.no_grad():
    for _ in range(4):
        prepared(torch.rand(16, 3, 32, 32))
    outputs = ipex.quantization.convert(prepared)(images)
print(f"int8: difference {difference(outputs):.1e}")
assert difference(outputs) < 4e-2

# %% [markdown]
# What has no counterpart says what to use.

# %%
try:
    ipex.fast_bert(model)
except oxytorch.compat.NotServedError as error:
    print(error)

# %% [markdown]
# ## 3. oxytorch's own functions
#
# Shorter, and they report what they did.

# %%
fast = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=images)
quantized = oxytorch.quantize(model, [torch.rand(16, 3, 32, 32) for _ in range(4)])
with torch.inference_mode():
    print(f"bfloat16: difference {difference(fast(images)):.1e}")
    print(f"int8: difference {difference(quantized(images)):.1e}")

# %%
print(oxytorch.explain(fast))
