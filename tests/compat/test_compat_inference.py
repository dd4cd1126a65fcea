"""The matrix of the predecessor's inference examples: imperative, TorchScript and TorchDynamo; a
residual network and BERT; float32 and bfloat16. Outputs are those of stock float32."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

OLD = "intel_extension_for_pytorch"
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""The largest difference over the norm of the stock outputs."""


class Residual(nn.Module):
    """The parts of a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.inner = nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = (self.inner(x) + x).relu()
        return self.head(x.mean((2, 3)))


def network() -> tuple[nn.Module, Tensor]:
    model = Residual().eval()
    nn.init.uniform_(model.norm.running_mean)  # type: ignore[arg-type]
    nn.init.uniform_(model.norm.running_var, 0.5, 2)  # type: ignore[arg-type]
    data = torch.rand(4, 3, 16, 16).to(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), data


def bert() -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=128, return_dict=False,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False).eval(), torch.randint(
        64, (2, 12)
    )


def outputs_of(model: Any, data: Tensor) -> Tensor:
    found = model(data)
    outputs: Tensor = found if isinstance(found, Tensor) else found[0]
    return outputs.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [network, bert])
@pytest.mark.parametrize("way", ["imperative", "TorchScript", "TorchDynamo"])
def test_documented_inference_gives_the_stock_outputs(
    way: str, make: Any, dtype: torch.dtype, installed: None
) -> None:
    ipex = importlib.import_module(OLD)
    model, data = make()
    with torch.no_grad():
        expected = outputs_of(model, data)
    is_narrow = dtype == torch.bfloat16
    keywords = {"weights_prepack": False} if way == "TorchDynamo" else {}
    fast = ipex.optimize(model, dtype=dtype, **keywords)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_narrow):
        if way == "TorchScript":
            fast = torch.jit.trace(fast, data, check_trace=False, strict=False)
            fast = torch.jit.freeze(fast)
        elif way == "TorchDynamo":
            fast = torch.compile(fast, backend="ipex")
        for _ in range(2):
            found = outputs_of(fast, data)
    assert (found - expected).norm() <= LIMITS[dtype] * expected.norm()
