"""The one function that computes a packed linear layer stands in only where all is as usual."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import oxytorch
from marks import NEEDS_LIBRARY
from oxytorch._library import functions_in_known_torch
from oxytorch.core.packed import PackedTensor
from oxytorch.core.words import offsets
from oxytorch.ops.linear import PackedLinearWeight
from oxytorch.ops.linear import linear as product_with
from oxytorch.optimize.passes.packed_layers import LinearForward

pytestmark = [
    NEEDS_LIBRARY,
    pytest.mark.skipif(
        functions_in_known_torch() is None or not offsets().tensor,
        reason="this torch or this Python has no such call",
    ),
]

FORMS = [
    (torch.float32, True),
    (torch.float32, False),
    (torch.bfloat16, True),
    (torch.bfloat16, False),
]


def _layer(dtype: torch.dtype, in_panels: bool, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """A layer, and the same one with a packed weight."""
    torch.manual_seed(0)
    stock = nn.Linear(48, 40, bias=bias).to(dtype).eval()
    packed = copy.deepcopy(stock)
    weight = PackedLinearWeight(stock.weight.detach(), in_panels=in_panels)
    packed.weight = weight.as_parameter(requires_grad=True)
    vars(packed)["forward"] = LinearForward(packed)
    return stock, packed


def _quick(layer: nn.Module) -> Any:
    forward: Any = vars(layer)["forward"]
    return forward._quick


def _close(found: Tensor, wanted: Tensor) -> None:
    allowed = 1e-5 if wanted.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=allowed, atol=allowed)


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often the Python behind the function computes."""
    calls: list[int] = []
    before = LinearForward._computed

    def computed(self: Any, *args: Any) -> Tensor:
        calls.append(1)
        return before(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LinearForward, "_computed", computed)
        yield calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "in_panels"), FORMS)
def test_computes_after_the_first_call(
    dtype: torch.dtype, in_panels: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, packed = _layer(dtype, in_panels, bias)
    with torch.inference_mode(), _counted(monkeypatch) as calls:
        for size in ((48,), (1, 48), (7, 48), (2, 3, 48)):
            x = torch.randn(size, dtype=dtype)
            found = packed(x)
            _close(found, stock(x))
            assert found.is_inference() and type(found) is Tensor
    assert _quick(packed) and len(calls) == 1
    with torch.no_grad():
        x = torch.randn(96, 5, dtype=dtype).t()[:, ::2]
        found = packed(x)
        _close(found, stock(x))
        assert not found.is_inference() and not found.requires_grad
    assert len(calls) == 1


def _write(layer: nn.Linear) -> None:
    layer.weight.mul_(3.0)


def _write_data(layer: nn.Linear) -> None:
    layer.weight.data.add_(0.5)


def _load(layer: nn.Linear) -> None:
    layer.load_state_dict({n: v * 2 for n, v in layer.state_dict().items()})


def _replace_weight(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().clone() * 2)


def _assign_data(layer: nn.Linear) -> None:
    layer.weight.data = torch.ones_like(layer.weight.data)


def _other_size(layer: nn.Linear) -> None:
    layer.weight.data = torch.ones(8, 48, dtype=layer.weight.dtype)
    layer.bias.data = torch.ones(8, dtype=layer.bias.dtype)


def _write_bias(layer: nn.Linear) -> None:
    layer.bias.add_(1.0)


def _bias_data(layer: nn.Linear) -> None:
    layer.bias.data = torch.zeros(40, dtype=layer.bias.dtype)


def _replace_bias(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.full_like(layer.bias, 2.0))


def _no_bias(layer: nn.Linear) -> None:
    layer.bias = None


def _to_double(layer: nn.Linear) -> None:
    layer.to(torch.float64)


CHANGES: list[Callable[[nn.Linear], None]] = [
    _write, _write_data, _load, _replace_weight, _assign_data, _other_size, _write_bias,
    _bias_data, _replace_bias, _no_bias, _to_double,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize(("dtype", "in_panels"), FORMS)
def test_changes_are_followed(
    dtype: torch.dtype, in_panels: bool, change: Callable[[nn.Linear], None]
) -> None:
    stock, packed = _layer(dtype, in_panels)
    x = torch.randn(3, 48, dtype=dtype)
    with torch.no_grad():
        for _ in range(2):
            _close(packed(x), stock(x))
        assert _quick(packed)
        for layer in (stock, packed):
            change(layer)
        x = x.to(stock.weight.dtype)
        for _ in range(3):
            _close(packed(x), stock(x))


def test_a_replaced_forward_or_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(nn.Linear):
        pass

    _, packed = _layer(torch.float32, True)
    packed.__class__ = Layer
    vars(packed)["forward"] = LinearForward(packed)
    x = torch.randn(3, 48)
    with torch.no_grad():
        for _ in range(2):
            packed(x)
        assert _quick(packed)
        with monkeypatch.context() as patch:
            patch.setattr(nn.functional, "linear", lambda *_: "replaced")
            assert packed(x) == "replaced"
        assert isinstance(packed(x), Tensor) and isinstance(packed(x), Tensor)
        Layer.forward = lambda self, x: "of the class"  # type: ignore[assignment, method-assign]
        assert packed(x) == "of the class"


class Subclass(Tensor):
    pass


INPUTS: dict[str, Callable[[], Any]] = {
    "subclass": lambda: torch.randn(3, 48).as_subclass(Subclass),
    "parameter": lambda: nn.Parameter(torch.randn(3, 48)),
    "other dtype": lambda: torch.randn(3, 48, dtype=torch.float64),
    "integers": lambda: torch.ones(3, 48, dtype=torch.int64),
    "meta": lambda: torch.randn(3, 48, device="meta"),
    "no rows": lambda: torch.randn(0, 48),
    "too narrow": lambda: torch.randn(3, 47),
    "scalar": lambda: torch.tensor(1.0),
    "sparse": lambda: torch.eye(48).to_sparse(),
    "negated view": lambda: torch._neg_view(torch.randn(3, 48)),
    "imaginary part": lambda: torch.randn(3, 48, dtype=torch.complex64).conj().imag,
    "no tensor": lambda: [1.0],
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("in_panels", [True, False])
def test_unusual_inputs_are_as_in_stock(name: str, in_panels: bool) -> None:
    stock, packed = _layer(torch.float32, in_panels)
    x = INPUTS[name]()
    with torch.no_grad():
        for _ in range(2):
            packed(torch.randn(2, 48))
        try:
            wanted = stock(x)
        except Exception as error:
            with pytest.raises(type(error)) as raised:
                packed(x)
            assert str(raised.value) == str(error)
            return
        found = packed(x)
    assert type(found) is type(wanted)
    if wanted.device.type == "meta":
        assert found.shape == wanted.shape
        return
    _close(found, wanted)
    with torch.no_grad():
        assert _quick(packed)


@pytest.mark.parametrize(("in_panels"), [True, False])
def test_other_modes_run_the_layers_own_code(
    in_panels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, packed = _layer(torch.float32, in_panels)
    x = torch.randn(3, 48)
    with torch.no_grad():
        packed(x)
    assert _quick(packed)
    found = packed(x)
    assert found.requires_grad
    found.sum().backward()
    stock(x).sum().backward()
    for name, parameter in stock.named_parameters():
        _close(dict(packed.named_parameters())[name].grad, parameter.grad)  # type: ignore[arg-type]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert packed(x).dtype == torch.bfloat16
    with torch.no_grad():
        batched = torch.func.vmap(packed)(x)
        _close(batched, stock(x))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            tangent = forward_ad.unpack_dual(packed(dual)).tangent
            wanted = forward_ad.unpack_dual(stock(dual)).tangent
            assert tangent is not None
            _close(tangent, wanted)
        traced = torch.jit.trace(packed, (x,), check_trace=False)
        _close(traced(2 * x), stock(2 * x))


def test_a_profiler_sees_the_operator() -> None:
    _, packed = _layer(torch.float32, True)
    x = torch.randn(3, 48)
    with torch.inference_mode():
        packed(x)
        with torch.profiler.profile() as profile:
            packed(x)
    assert any("linear_panels" in event.key for event in profile.key_averages())


def test_notes_of_calls_tell_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    _, packed = _layer(torch.float32, True)
    x = torch.randn(3, 48)
    with torch.inference_mode():
        packed(x)
        with oxytorch.verbose() as calls:
            packed(x)
    assert "linear_panels" in str(calls) + capsys.readouterr().out


def test_many_threads_write_and_call() -> None:
    _, packed = _layer(torch.float32, True)
    x = torch.ones(1, 48)
    stop = threading.Event()

    def call() -> int:
        count = 0
        with torch.no_grad():
            while not stop.is_set():
                found = packed(x)
                # A write multiplies weights and bias never: results are multiples of the first.
                assert bool(found.isfinite().all())
                count += 1
        return count

    with ExitStack() as around:
        pool = around.enter_context(ThreadPoolExecutor(3))
        around.callback(stop.set)
        running = [pool.submit(call) for _ in range(3)]
        with torch.no_grad():
            for number in range(200):
                packed.weight.fill_(float(number % 3))
        stop.set()
        assert all(each.result() > 0 for each in running)
    with torch.no_grad():
        packed.weight.fill_(1.0)
        _close(packed(x), 48 + packed.bias.expand(1, -1))


def test_copies_and_files_have_calls_of_their_own() -> None:
    stock, packed = _layer(torch.float32, True)
    x = torch.randn(3, 48)
    with torch.no_grad():
        packed(x)
        for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
            assert not _quick(other)
            other.weight.mul_(2.0)
            for _ in range(2):
                _close(other(x), 2 * (stock(x) - stock.bias) + stock.bias)
            _close(packed(x), stock(x))
            assert _quick(packed)


def test_nothing_is_kept_alive() -> None:
    _, packed = _layer(torch.float32, True)
    with torch.no_grad():
        packed(torch.randn(3, 48))
    assert _quick(packed)
    packed.weight.layer = packed  # type: ignore[assignment]
    gone = weakref.ref(packed.weight), weakref.ref(packed)
    del packed
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_the_compiler_sees_the_layers_own_code(fullgraph: bool) -> None:
    stock, packed = _layer(torch.float32, True)
    x = torch.randn(3, 48)
    with torch.no_grad():
        packed(x)
        compiled = torch.compile(packed, backend="eager", fullgraph=fullgraph)
        _close(compiled(x), stock(x))
    assert isinstance(packed.weight, PackedTensor)


def test_few_and_many_rows_take_their_own_ways() -> None:
    stock, packed = _layer(torch.float32, True)
    weight: Any = packed.weight
    weight.keep_plain_below(4, stock.weight.detach())
    weight.most_rows, weight.has_other_order = 16, True
    weight.repack(stock.weight.detach())
    weight.cell.tick()
    with torch.no_grad():
        for rows in (8, 1, 3, 4, 16, 17, 8):
            x = torch.randn(rows, 48)
            _close(packed(x), stock(x))
            _close(packed(x), product_with(x, weight, packed.bias))
    assert _quick(packed)


def _swapped(layer: Any) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.ones_like(layer.weight) * 0.1))


def _swapped_bias(layer: Any) -> None:
    torch.utils.swap_tensors(layer.bias, nn.Parameter(torch.ones_like(layer.bias)))


def _scalar_bias(layer: Any) -> None:
    layer.bias = nn.Parameter(torch.tensor(0.7, dtype=layer.bias.dtype))


class _Doubled(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


def _bias_of_a_class(layer: Any) -> None:
    layer._parameters["bias"] = layer.bias.detach().as_subclass(_Doubled)


class _Property(nn.Linear):
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        found = self._parameters["weight"]
        assert found is not None
        return found * 5


def _other_class(layer: Any) -> None:
    layer.__class__ = _Property


UNUSUAL = [_swapped, _swapped_bias, _scalar_bias, _bias_of_a_class, _other_class]


@pytest.mark.parametrize("change", UNUSUAL, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize(("dtype", "in_panels"), FORMS)
def test_unusual_changes_are_followed(
    change: Callable[[Any], None], dtype: torch.dtype, in_panels: bool
) -> None:
    stock, packed = _layer(dtype, in_panels)
    x = torch.randn(4, 48, dtype=dtype)
    with torch.no_grad():
        packed(x)
        packed(x)
        assert _quick(packed)
        for layer in (stock, packed):
            change(layer)
        for _ in range(3):
            _close(packed(x), stock(x))


@pytest.mark.parametrize(("dtype", "in_panels"), FORMS)
def test_a_write_beside_calls_of_another_thread_is_seen(
    dtype: torch.dtype, in_panels: bool
) -> None:
    """A call packs again what was written; it must not do so before the writer holds the memory."""
    stock, packed = _layer(dtype, in_panels)
    x, before = torch.randn(4, 48, dtype=dtype), stock.weight.detach().clone()
    ended = threading.Event()

    def call() -> None:
        with torch.inference_mode():
            while not ended.is_set():
                packed(x)

    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        calling = pool.submit(call)
        try:
            for number in range(300):
                for layer in (stock, packed):
                    layer.weight.copy_(before * (1 + number % 7))
                _close(packed(x), stock(x))
                assert torch.equal(packed.weight, stock.weight)
        finally:
            ended.set()
        calling.result()
