"""`MultiStreamModule`: how cores and batches are split, one copy of weights, errors, threads."""

from __future__ import annotations

import copy
import os
import pickle
import threading

import pytest
import torch
from thread_states import CORES, needs_two_cores, place
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import oxytorch
from oxytorch.runtime import CPUPool, MultiStreamModule, MultiStreamModuleHint, Task, pin
from threads import errors_in_threads

FIRST = CPUPool(CORES[:1])
TWO = CPUPool(CORES[:2])


class Tell(nn.Module):
    """Where a stream runs, in place of a result."""

    def forward(self, x: Tensor) -> tuple[set[int], int, int, int]:
        return *place(), len(x), threading.get_native_id()


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    ).eval()


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 8, 8)


def streams_without_pool(model: object, streams: int, **options: object) -> MultiStreamModule:
    """As many streams as a test asks for, on however few cores."""
    threads = torch.get_num_threads()
    if streams > threads:
        options["cpu_pool"] = pool = CPUPool()
        pool.core_ids = tuple(CORES[index % len(CORES)] for index in range(streams))
    return MultiStreamModule(model, streams, **options)


@needs_two_cores
def test_each_stream_has_cores_of_its_own() -> None:
    before = place()
    told = MultiStreamModule(Tell(), 2, TWO, concat_output=False)(images(5))
    assert [stream[:3] for stream in told] == [({CORES[0]}, 1, 3), ({CORES[1]}, 1, 2)]
    assert len({stream[3] for stream in told} | {threading.get_native_id()}) == 3
    assert place() == before


def test_first_streams_have_more_cores_and_more_of_the_batch() -> None:
    pool = CPUPool()
    pool.core_ids = tuple(CORES[0] for _ in range(5))  # five cores, of which one is there
    told = MultiStreamModule(Tell(), 3, pool, concat_output=False)(images(7))
    assert [stream[1:3] for stream in told] == [(2, 3), (2, 2), (1, 2)]


@needs_two_cores
def test_nothing_is_pinned_without_a_pool() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        told = MultiStreamModule(Tell(), 2, concat_output=False)(images(4))
    finally:
        torch.set_num_threads(threads)
    assert [stream[:3] for stream in told] == [(set(CORES), 1, 2)] * 2


def test_auto_is_one_stream_for_each_core() -> None:
    for auto in ("auto", "AUTO"):
        assert MultiStreamModule(network(), auto, CPUPool()).get_stream_number() == len(CORES)
    assert MultiStreamModule(network()).get_stream_number() == torch.get_num_threads()


def test_more_streams_than_cores_are_as_many_as_cores() -> None:
    with pytest.warns(UserWarning, match="num_streams: expected at most 1, .* got 3"):
        module = MultiStreamModule(network(), 3, FIRST)
    assert module.get_stream_number() == 1


@pytest.mark.parametrize("batch, parts", [(1, [1]), (2, [1, 1]), (3, [1] * 3), (4, [2, 1, 1])])
def test_small_batches_use_as_many_streams_as_they_have_items(batch: int, parts: list[int]) -> None:
    model, x = network(), images(batch)
    for concat in (True, False):
        result = streams_without_pool(model, 3, concat_output=concat)(x)
        if not concat:
            assert [len(part) for part in result] == parts
            result = torch.cat(result)
        torch.testing.assert_close(result, model(x))


def test_empty_batch_is_one_call() -> None:
    result = streams_without_pool(nn.Flatten(), 2, concat_output=False)(images(0))
    assert [part.shape for part in result] == [(0, 192)]


@pytest.mark.parametrize("pool", [None, FIRST], ids=["here", "pool"])
def test_one_stream_is_the_model_itself(pool: CPUPool | None) -> None:
    model, x = network(), images(3)
    torch.testing.assert_close(MultiStreamModule(model, 1, pool)(x), model(x))
    told = MultiStreamModule(Tell(), 1, pool, concat_output=False)(x)
    assert [stream[2] for stream in told] == [3]
    assert (told[0][3] == threading.get_native_id()) == (pool is None)
    assert told[0][0] == ({CORES[0]} if pool else set(CORES))


def test_all_streams_share_the_weights() -> None:
    addresses: list[int] = []

    class Note(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            addresses.append(self.weight.data_ptr())
            return super().forward(x)

    model = Note(4, 4)
    module = streams_without_pool(model, 3)
    x = torch.randn(6, 4)
    module(x)
    assert addresses == [model.weight.data_ptr()] * 3
    assert [*module.parameters()] == [*model.parameters()]
    with torch.no_grad():
        model.weight.zero_()
        torch.testing.assert_close(module(x), model.bias.expand(6, 4))
    assert {*module.state_dict()} == {"model.weight", "model.bias"}


@pytest.mark.parametrize("way", ["eager", "optimize", "graph", "trace", "freeze", "script"])
def test_models_of_every_kind_run_in_streams(way: str, pack_small_layers: None) -> None:
    model, x, part = network(), images(7), images(3)
    ready = {
        "eager": lambda: model,
        "optimize": lambda: oxytorch.optimize(model, sample_input=part),
        "graph": lambda: oxytorch.optimize(model, sample_input=part, graph=True),
        "trace": lambda: torch.jit.trace(model, part),
        "freeze": lambda: torch.jit.freeze(torch.jit.trace(model, part)),
        "script": lambda: torch.jit.script(model),
    }[way]()
    expected = model(x).detach()
    for streams in (1, 2, 3):
        module = streams_without_pool(ready, streams)
        with torch.inference_mode():
            for _ in range(3):
                torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("graph", [False, True])
def test_number_of_threads_may_change_after_weights_were_packed(
    graph: bool, pack_small_layers: None
) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).eval()
    x = torch.randn(16, 256)
    expected = model(x).detach()
    ready = oxytorch.optimize(model, sample_input=x, graph=graph)
    number = torch.get_num_threads()
    with torch.inference_mode():
        try:
            for threads in (1, 2, 3, 1):
                torch.set_num_threads(threads)
                torch.testing.assert_close(ready(x), expected, rtol=1e-4, atol=1e-5)
                result = Task(ready, CPUPool()).run_sync(x)
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
                with pin(FIRST):
                    torch.testing.assert_close(ready(x), expected, rtol=1e-4, atol=1e-5)
        finally:
            torch.set_num_threads(number)


def test_modes_of_the_caller_hold_in_streams() -> None:
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    module = streams_without_pool(model, 2)
    assert module(x).requires_grad
    with torch.no_grad():
        assert not module(x).requires_grad
    with torch.inference_mode():
        assert module(x).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == torch.bfloat16
    assert module(x).dtype == torch.float32


def test_gradients_are_those_of_the_whole_batch() -> None:
    model, x = nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)
    model(x).square().sum().backward()
    expected, of_x = model.weight.grad.clone(), x.grad.clone()
    model.zero_grad(), x.grad.zero_()
    streams_without_pool(model, 3)(x).square().sum().backward()
    torch.testing.assert_close(model.weight.grad, expected)
    torch.testing.assert_close(x.grad, of_x)


def test_exception_of_a_stream_is_raised_when_all_have_ended() -> None:
    ended: list[int] = []

    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            number = int(x[0])
            try:
                if number:
                    raise ValueError(f"stream of {number}")
                threading.Event().wait(0.05)
                return x
            finally:
                ended.append(number)

    module = streams_without_pool(Fail(), 3)
    with pytest.raises(ValueError, match="stream of 1"):
        module(torch.arange(3))
    assert sorted(ended) == [0, 1, 2]
    torch.testing.assert_close(module(torch.zeros(3)), torch.zeros(3))


def test_stream_that_cannot_start_is_an_error_and_the_others_end() -> None:
    ended: list[int] = []
    pool = CPUPool()
    pool.core_ids = (CORES[0], 4095)

    def model(x: Tensor) -> Tensor:
        threading.Event().wait(0.05)
        ended.append(len(x))
        return x

    with pytest.raises(RuntimeError, match=r"cannot run on cores \[4095\]"):
        MultiStreamModule(model, 2, pool)(torch.zeros(4))
    assert ended == [2]


def test_stream_that_calls_its_own_module_is_an_error() -> None:
    modules: list[MultiStreamModule] = []
    module = streams_without_pool(lambda x: modules[0](x), 2)
    modules.append(module)
    with pytest.raises(RuntimeError, match="would wait for the one that makes it"):
        module(torch.zeros(2))
    modules.clear()


def test_modules_can_be_nested() -> None:
    inner = streams_without_pool(nn.Flatten(), 2)
    x = images(4)
    torch.testing.assert_close(streams_without_pool(inner, 2)(x), x.flatten(1))


def test_many_threads_share_a_module() -> None:
    model = network()
    module = streams_without_pool(model, 3)

    @torch.inference_mode()
    def check(batch: int) -> None:
        x = torch.randn(batch, 3, 8, 8)
        expected = model(x)
        for _ in range(10):
            torch.testing.assert_close(module(x), expected)

    assert errors_in_threads(check, range(1, 7)) == []


def test_copies_of_a_module_work() -> None:
    module, x = streams_without_pool(network(), 2), images(4)
    expected = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.model is not module.model
        torch.testing.assert_close(other(x), expected)


def test_modes_that_look_at_operators_see_those_of_the_model() -> None:
    """Other threads do not have them, so that this one runs the model."""
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    module = streams_without_pool(model, 2)
    with FlopCounterMode(display=False) as counter:
        module(x)
    assert counter.get_total_flops() == 6 * 4 * 4 * 2
    traced = torch.jit.trace(module, x)
    torch.testing.assert_close(traced(x[:3]), model(x[:3]))
    torch.testing.assert_close(torch.func.vmap(module)(x[:, None])[:, 0], model(x))
    assert len(streams_without_pool(model, 2, concat_output=False)(x)) == 2


@pytest.mark.parametrize("graph", [False, True])
def test_optimizing_a_module_with_streams_keeps_its_answers(graph: bool) -> None:
    x = images(6)
    module = streams_without_pool(network(), 2).eval()
    expected = module(x).detach()
    optimized = oxytorch.optimize(module, sample_input=x, graph=graph)
    with torch.inference_mode():
        torch.testing.assert_close(optimized(x), expected, rtol=1e-4, atol=1e-5)
        other = images(6)
        torch.testing.assert_close(optimized(other), module(other), rtol=1e-4, atol=1e-5)


def test_threads_end_with_the_module() -> None:
    before = set(threading.enumerate())
    module = streams_without_pool(network(), 2)
    assert set(threading.enumerate()) == before
    module(images(2))
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"oxytorch stream 0", "oxytorch stream 1"}
    del module
    for thread in threads:
        thread.join(20)
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"num_streams": 0}, ValueError, "num_streams: expected 1 or more, got 0"),
        ({"num_streams": "many"}, ValueError, "an int or \"auto\", got 'many'"),
        ({"num_streams": 1.0}, TypeError, 'an int or "auto", got 1.0'),
        ({"num_streams": True}, TypeError, 'an int or "auto", got True'),
        ({"cpu_pool": [0]}, TypeError, "cpu_pool: expected a CPUPool, got list"),
        ({"input_split_hint": 0}, TypeError, "input_split_hint: .* got int"),
        ({"output_concat_hint": None}, TypeError, "output_concat_hint: .* got NoneType"),
        ({"model": 3}, TypeError, "model: expected a model, got int"),
    ],
)
def test_module_refuses(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiStreamModule(**{"model": nn.Flatten(), **options})
    assert os.sched_getaffinity(0) == set(CORES)


def test_hint_of_a_tuple_and_a_dict_is_refused() -> None:
    with pytest.raises(ValueError, match="of a tuple or of a dict, got both"):
        MultiStreamModule(nn.Flatten(), output_concat_hint=MultiStreamModuleHint(0, name=0))
