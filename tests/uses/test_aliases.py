"""Aliases and copies of packed weights: as of plain ones, only the weight's values are shared."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda w: w.t_(),
    "transpose_": lambda w: w.transpose_(0, 1),
    "swapaxes_": lambda w: w.swapaxes_(0, 1),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "resize_": lambda w: w.resize_(16, 8),
    "as_strided_": lambda w: w.as_strided_((8, 8), (2, 1)),
    "set_": lambda w: w.set_(torch.ones(512, 512, dtype=w.dtype)),
}


def packed(dtype: torch.dtype | None = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh()).eval()
    x = torch.randn(64, 512)
    optimized: Any = oxytorch.optimize(model, dtype=dtype, sample_input=x)
    with torch.no_grad():
        optimized(x)
    assert type(optimized[0].weight) is not nn.Parameter, "the test needs a packed weight"
    return optimized, x


@pytest.mark.parametrize("alias", ["data", "detach"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, alias: str) -> None:
    """An alias that gets another form, or other memory, leaves the layer as it is."""
    model, x = packed()
    weight = model[0].weight
    with torch.no_grad():
        before, values = model(x), weight.clone()
        other = weight.data if alias == "data" else weight.detach()
        FORMS[form](other)
        stock = values.clone()
        FORMS[form](stock)
        assert other.shape == stock.shape
        torch.testing.assert_close(other.to(torch.float32), stock.to(torch.float32), rtol=0, atol=0)
        assert torch.equal(weight, values)
        torch.testing.assert_close(model(x), before)


def test_writes_through_another_form() -> None:
    """The memory stays the weight's: what is written to a transposed alias is used."""
    model, x = packed()
    with torch.no_grad():
        values = model[0].weight.clone()
        alias = model[0].weight.detach()
        alias.t_()
        alias.mul_(2)
        assert torch.equal(model[0].weight, values * 2)
        expected = torch.tanh(nn.functional.linear(x.bfloat16(), values * 2, model[0].bias))
        torch.testing.assert_close(model(x).float(), expected.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "made",
    [
        lambda w: w.clone(),
        lambda w: w.detach().clone(),
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: w.data.clone(),
        lambda w: w,
    ],
    ids=["clone", "detached clone", "detached", "data", "clone of data", "weight"],
)
def test_saved(made: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """A file of any of them loads where oxytorch is not imported."""
    model, _ = packed()
    with torch.no_grad():
        torch.save(
            {"w": made(model[0].weight), "plain": model[0].weight.float()}, tmp_path / "w.pt"
        )
    code = (
        f"import sys, torch; found = torch.load({str(tmp_path / 'w.pt')!r}); "
        "assert torch.equal(found['w'].float(), found['plain']); "
        "assert 'oxytorch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plain_module_with_a_packed_weight(tmp_path: Path) -> None:
    model, _ = packed()
    other = nn.Linear(512, 512).bfloat16()
    other.weight = model[0].weight
    torch.save(other.state_dict(), tmp_path / "w.pt")
    assert torch.equal(torch.load(tmp_path / "w.pt")["weight"], model[0].weight)


def test_copies_are_plain() -> None:
    """A copy is no weight of a layer: it may be resized, and its class is a tensor's."""
    model, _ = packed()
    with torch.no_grad():
        for copy in (model[0].weight.clone(), model[0].weight.detach().clone()):
            assert type(copy) is Tensor
            assert copy.resize_(512, 100).shape == (512, 100)


class Special(Tensor):
    pass


def test_subclass_of_a_packed_weight() -> None:
    model, _ = packed()
    with torch.no_grad():
        assert torch.equal(
            model[0].weight.as_subclass(Special).as_subclass(Tensor), model[0].weight
        )


def test_attributes_in_pickles() -> None:
    model, _ = packed()
    model[0].weight.is_frozen_by_user = True
    assert pickle.loads(pickle.dumps(model))[0].weight.is_frozen_by_user


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)))


def test_tied_again_by_data() -> None:
    """A plain head gets the memory of the packed embedding again."""
    ids, results = torch.arange(64).view(4, 16), []
    for optimized in (False, True):
        torch.manual_seed(0)
        model: Any = Tied().eval()
        model = oxytorch.optimize(model, sample_input=ids) if optimized else model
        with torch.no_grad():
            model(ids)
            model.head.weight = nn.Parameter(model.head.weight.clone() * 2)
            model(ids)
            model.head.weight.data = model.embedding.weight.data
            results.append(model(ids))
            model.embedding.weight.mul_(2)
            results.append(model(ids))
    torch.testing.assert_close(results[2], results[0])
    torch.testing.assert_close(results[3], results[1])
