"""Channel shuffles: every spelling is one operator, each way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from seen import Seen
from torch import Tensor, nn

import oxytorch
from oxytorch.program.backend import compile_graph

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("everything_is_packed"),
]
GROUPS = 4


def _split(x: Tensor) -> Tensor:
    return x.view(x.shape[0], GROUPS, x.shape[1] // GROUPS, *x.shape[2:])


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: _split(x).transpose(1, 2).contiguous().view(x.shape),
    "reshape": lambda x: _split(x).transpose(2, 1).reshape(x.shape),
    "permute": lambda x: _split(x).permute(0, 2, 1, 3, 4).contiguous().view(x.shape),
    "flatten": lambda x: torch.flatten(_split(x).swapaxes(1, 2), 1, 2),
    "unflatten": lambda x: x.unflatten(1, (GROUPS, -1)).movedim(2, 1).clone().reshape(x.shape),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "other dimensions": lambda x: _split(x).transpose(2, 3).reshape(x.shape),
    "another size": lambda x: _split(x).transpose(1, 2).reshape(x.shape[0], -1),
    "three parts": lambda x: x.view(len(x), 2, 2, 4, -1).transpose(1, 2).reshape(x.shape),
}


class Shuffled(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def _made(function: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Shuffled(function).eval(), torch.randn(2, 8, 6, 5)


def _assert_one(text: str, is_one: bool = True) -> None:
    assert text.count("aten::native_channel_shuffle") == is_one, text
    assert ("aten::clone" in text) is not is_one, text


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_shuffle_is_one_step_behind_torch_compile(name: str, seen: Seen) -> None:
    model, x = _made(SPELLINGS[name])
    run = torch.compile(model, backend=compile_graph, fullgraph=True)
    torch.testing.assert_close(run(x), model(x))
    _assert_one(seen.text)


def test_another_compiler_is_given_the_views() -> None:
    """Which it joins with what is before and behind them."""
    model, x = _made(SPELLINGS["view"])
    given: list[str] = []

    def then(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        given.append(graph.code)
        return graph

    run = torch.compile(model, backend=compile_graph, options={"then": then})
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert "transpose" in given[0] and "channel_shuffle" not in given[0]


def test_a_shuffle_of_any_batch_is_one_step(seen: Seen) -> None:
    model, x = _made(SPELLINGS["view"])
    run = torch.compile(model, backend=compile_graph, fullgraph=True, dynamic=True)
    for batch in (x, torch.randn(5, 8, 7, 9)):
        torch.testing.assert_close(run(batch), model(batch))
    assert seen.text.count("aten::native_channel_shuffle") == 1, seen.text


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_shuffle_of_exported_and_recorded_models_is_one_step(name: str) -> None:
    model, x = _made(SPELLINGS[name])
    program = oxytorch.optimize(torch.export.export(model, (x,)))
    torch.testing.assert_close(program(x), model(x))
    _assert_one(program.program.text)
    optimized = oxytorch.optimize(model, sample_input=x, passes=["program"])
    torch.testing.assert_close(optimized(x), model(x))
    (recorded,) = optimized.forward.programs()
    _assert_one(str(recorded))


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_shuffle_is_right_in_torchscript(name: str) -> None:
    model, x = _made(SPELLINGS[name])
    optimized = oxytorch.optimize(torch.jit.trace(model, x), sample_input=x)
    torch.testing.assert_close(optimized(x), model(x))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_shuffle_stays(name: str) -> None:
    function = OTHERS[name]
    x = torch.randn(2, 8, 6, 6)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    program = oxytorch.optimize(torch.export.export(Model(), (x,)))
    assert torch.equal(program(x), function(x))
    _assert_one(program.program.text, is_one=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_results_lie_as_torchs(dtype: torch.dtype, order: torch.memory_format) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return SPELLINGS["reshape"](x)

    x = torch.randn(2, 8, 6, 5).to(dtype).contiguous(memory_format=order)
    program = oxytorch.optimize(torch.export.export(Model(), (x,)))
    found, expected = program(x), Model()(x)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
