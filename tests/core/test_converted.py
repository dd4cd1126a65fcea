"""Values with their floating-point tensors converted, and models that are given structures."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import oxytorch
from oxytorch.core.converted import Conversion, converted, floating_tensors

WIDTH = 128


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Fields:
    a: Tensor
    b: Tensor
    name: str = "x"
    others: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    a: Tensor
    b: Tensor


def _default(a: Tensor, b: Tensor) -> Any:
    made: Any = defaultdict(list)
    made.update(a=a, b=b)
    return made


STRUCTURES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, "b": b},
    "OrderedDict": lambda a, b: OrderedDict(a=a, b=b),
    "defaultdict": _default,
    "UserDict": lambda a, b: UserDict(a=a, b=b),
    "named tuple": Pair,
    "data class": Fields,
    "frozen": Frozen,
    "nested": lambda a, b: ({"a": [a]}, Fields(a, b, others=[b]))[1],
}


def _both(value: Any) -> tuple[Tensor, Tensor]:
    if isinstance(value, tuple | list):
        return value[0], value[1]
    if isinstance(value, dict | UserDict):
        return value["a"], value["b"]
    return value.a, value.b


class Mixed(nn.Module):
    """Layers, a weight of its own, and a recurrent layer, on two inputs in one structure."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 16)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, given: Any) -> Tensor:
        a, b = _both(given)
        result: Tensor = self.gru(self.linear(a) + b @ self.weight)[0]
        return result


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_keep_their_type_and_what_is_no_float(name: str) -> None:
    a, b = torch.randn(2, 3), torch.arange(3)
    given = STRUCTURES[name](a, b)
    found = converted(given, torch.bfloat16)
    assert type(found) is type(given)
    first, second = _both(found)
    assert first.dtype == torch.bfloat16 and second is b
    assert _both(given)[0] is a, "the one that was given is as before"
    assert converted(found, torch.bfloat16) is found
    assert [t.dtype for t in floating_tensors(given)] == [torch.float32]


def test_equal_arguments_stay_equal_and_those_of_few_dimensions_stay_as_they_are() -> None:
    a, angle = torch.randn(2, 3), torch.randn(3)
    (x, y, z), kwargs = Conversion(torch.bfloat16, 2).arguments((a, a, angle), {"k": (a, angle)})
    assert x is y is kwargs["k"][0] and z is angle and kwargs["k"][1] is angle


def test_what_holds_itself_is_looked_into_once() -> None:
    held: list[Any] = [torch.randn(2)]
    held.append(held)
    assert converted(held, torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("integers", [False, True])
def test_packed_sequences(integers: bool) -> None:
    x = torch.randint(9, (2, 4)) if integers else torch.randn(2, 4, 3)
    given = pack_padded_sequence(x, torch.tensor([4, 2]), batch_first=True)
    found = converted(given, torch.bfloat16)
    assert type(found) is PackedSequence
    assert found.data.dtype == (torch.int64 if integers else torch.bfloat16)


def test_what_is_done_to_a_list_or_dictionary_reaches_the_one_that_was_given() -> None:
    a, b, new = torch.randn(2), torch.randn(2), torch.zeros(1)
    for change in (lambda v: v.append(new), lambda v: v.pop(0), lambda v: v.reverse(), list.clear):
        given, wanted = [a, b], [a, b]
        change(wanted)
        conversion = Conversion(torch.bfloat16)
        change(conversion(given))
        conversion.write_back()
        assert list(map(id, given)) == list(map(id, wanted))
    table = {"a": a, "b": b}
    conversion = Conversion(torch.bfloat16)
    made = conversion(table)
    del made["a"]
    made["c"] = new
    conversion.write_back()
    assert list(table) == ["b", "c"] and table["b"] is b and table["c"] is new


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("with_sample", [False, True])
@torch.no_grad()
def test_models_in_bfloat16_take_inputs_in_structures(name: str, with_sample: bool) -> None:
    torch.manual_seed(0)
    model = Mixed().eval()
    a, b = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    given = STRUCTURES[name](a, b)
    sample = {"sample_input": (given,)} if with_sample else {}
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16, **sample)
    expected = model(given)
    for _ in range(2):
        torch.testing.assert_close(optimized(given).float(), expected, atol=0.02, rtol=0.02)
    assert _both(given)[0] is a and a.dtype == torch.float32


class Collector(nn.Module):
    """Puts what it computes into the list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        x = self.layer(x) + seen[0]
        seen.append(x)
        return x


@torch.no_grad()
def test_a_list_that_a_model_adds_to_is_the_users() -> None:
    model = Collector().eval()
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16)
    seen = [torch.randn(2, WIDTH)]
    first = seen[0]
    result = optimized(torch.randn(2, WIDTH), seen)
    assert len(seen) == 2 and seen[0] is first
    torch.testing.assert_close(seen[1].float(), result.float())


class Tagger(nn.Module):
    """Packed sequences through a recurrent layer."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.layer = kind(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        given = pack_padded_sequence(
            self.table(ids), lengths, batch_first=True, enforce_sorted=False
        )
        result: Tensor = self.head(pad_packed_sequence(self.layer(given)[0], batch_first=True)[0])
        return result


@pytest.mark.parametrize("rules", [torch.bfloat16, "layer"], ids=["whole", "layer in float32"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_packed_sequences_are_trained_in_bfloat16(kind: Any, rules: Any) -> None:
    torch.manual_seed(0)
    model = Tagger(kind)
    ids, lengths = torch.randint(50, (4, 7)), torch.tensor([3, 5, 7, 2])
    expected = model(ids, lengths)
    expected.square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    dtype = {"": torch.bfloat16, rules: torch.float32} if rules == "layer" else rules
    optimizer = torch.optim.AdamW(model.parameters())
    trained, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=dtype)
    result = trained(ids, lengths)
    torch.testing.assert_close(result.float(), expected.detach(), atol=0.03, rtol=0.03)
    result.float().square().sum().backward()
    for own, other in zip(trained.parameters(), wanted, strict=True):
        assert own.grad is not None
        assert (own.grad.float() - other).norm() < 0.1 * other.norm() + 1e-3
    optimizer.step()


@pytest.mark.parametrize("name", ["tensor", "list", "dictionary"])
@pytest.mark.parametrize("rule", ["all", "part"])
def test_new_inputs_of_the_same_form_are_not_compiled_again(name: str, rule: str) -> None:
    """Torch's compiler takes `id(x)` for a constant, and compiled code for that of one tensor."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, given: Any) -> Tensor:
            x = given if name == "tensor" else given[0] if name == "list" else given["x"]
            found: Tensor = self.head(self.layer(x))
            return found

    torch._dynamo.reset()
    model = Summed()
    dtype = {"": torch.bfloat16, **({"head": torch.float32} if rule == "part" else {})}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=dtype)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(4):
        x = torch.randn(8, WIDTH)
        given = {"tensor": x, "list": [x], "dictionary": {"x": x}}[name]
        compiled(given).float().sum().backward()
        optimizer.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
