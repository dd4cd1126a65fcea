"""`Task`: where calls are made, in which modes, and how results and errors come back."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from thread_states import CORES, needs_two_cores, place
from torch import nn

import oxytorch
from oxytorch.runtime import CPUPool, Future, Task
from oxytorch.runtime.threads import in_new_thread
from threads import errors_in_threads

FIRST = CPUPool(CORES[:1])
ALL = CPUPool(CORES)


def modes(*_: object) -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)).eval()


def test_calls_are_made_on_the_cores_of_the_pool() -> None:
    before = place()
    assert Task(place, FIRST).run_sync() == ({CORES[0]}, 1)
    assert Task(place, ALL)().get() == (set(CORES), len(CORES))
    assert place() == before


def test_call_returns_a_future_at_once() -> None:
    go_on = threading.Event()
    future = Task(lambda: go_on.wait(20), FIRST)()
    assert isinstance(future, Future) and not future.done()
    with pytest.raises(concurrent.futures.TimeoutError):
        future.get(0.01)
    go_on.set()
    assert future.get() is True and future.result() is True and future.exception() is None
    assert future.done()


def test_arguments_and_results_are_passed_as_they_are() -> None:
    x = torch.ones(2)
    result = Task(lambda *args, **kwargs: (args, kwargs), FIRST)(x, None, more=x).get()
    assert result[0][0] is x and result[0][1] is None and result[1]["more"] is x


def test_calls_of_a_task_are_made_in_order() -> None:
    made: list[int] = []
    task = Task(made.append, FIRST)
    futures = [task(number) for number in range(50)]
    assert concurrent.futures.wait(futures, 20).not_done == set()
    assert made == list(range(50))


def test_a_call_that_has_not_begun_can_be_cancelled() -> None:
    go_on = threading.Event()
    task = Task(lambda event: event.wait(20), FIRST)
    first, second = task(go_on), task(go_on)
    assert second.cancel()
    go_on.set()
    assert first.get() is True
    with pytest.raises(concurrent.futures.CancelledError):
        second.get()
    assert task.run_sync(go_on) is True


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    ],
    ids=["no_grad", "enable_grad", "inference_mode", "bfloat16", "float16"],
)
def test_modes_of_the_caller_hold(mode) -> None:
    task = Task(modes, FIRST)
    plain = modes()
    assert task.run_sync() == plain
    with mode():
        inside = modes()
        future = task()
    assert future.get() == inside
    assert task.run_sync() == plain


def test_modes_that_a_call_leaves_behind_end_with_it() -> None:
    task = Task(lambda: torch.set_grad_enabled(False) and None, FIRST)
    task.run_sync()
    task.function = modes
    assert task.run_sync()[0] is True


def test_gradients_flow_through_a_call() -> None:
    model, x = network(), torch.randn(4, 32)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    Task(model, ALL)(x).get().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_exceptions_reach_the_caller() -> None:
    def fail(error: BaseException) -> None:
        raise error

    task = Task(fail, FIRST)
    for error in (ValueError("of the model"), KeyboardInterrupt(), SystemExit(3)):
        future = task(error)
        with pytest.raises(type(error)) as raised:
            future.get()
        assert raised.value is error and future.exception() is error
        assert any(entry.name == "fail" for entry in raised.traceback)


def test_errors_and_arguments_are_no_garbage_for_the_collector() -> None:
    """Memory of a failed call is free when its error is."""

    def fail(x: torch.Tensor) -> None:
        raise ValueError("of the model")

    task, x = Task(fail, FIRST), torch.ones(3)
    seen = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError):
            task.run_sync(x)
        task.function = int
        task.run_sync()
        del x
        assert seen() is None
    finally:
        gc.enable()


def test_idle_task_keeps_no_arguments_and_no_results() -> None:
    task = Task(lambda x: x * 2, FIRST)
    x = torch.ones(3)
    result = task.run_sync(x)
    refs = weakref.ref(x), weakref.ref(result)
    del x, result
    task.function = int
    task.run_sync()
    assert [ref() for ref in refs] == [None, None]


def test_call_that_waits_for_its_own_task_is_an_error() -> None:
    task = Task(lambda: task.run_sync(), FIRST)
    with pytest.raises(RuntimeError, match="use another Task"):
        task.run_sync()
    other = Task(lambda: 1, FIRST)
    assert Task(lambda: other.run_sync(), FIRST).run_sync() == 1
    del task.function


def test_many_threads_share_a_task() -> None:
    model, task_model = network(), network()
    task_model.load_state_dict(model.state_dict())
    task = Task(task_model, ALL)

    def check(seed: int) -> None:
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed))
        for _ in range(10):
            torch.testing.assert_close(task.run_sync(x), model(x))

    assert errors_in_threads(check, range(6)) == []


@needs_two_cores
def test_tasks_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=20)
    tasks = [Task(meeting.wait, CPUPool([core])) for core in CORES[:2]]
    futures = [task() for task in tasks]
    assert sorted(future.get() for future in futures) == [0, 1]


def test_number_for_new_threads_stays_while_a_task_lives() -> None:
    default = in_new_thread(torch.get_num_threads)
    tasks = [Task(place, FIRST) for _ in range(4)]
    assert [task.run_sync()[1] for task in tasks] == [1] * 4
    assert in_new_thread(torch.get_num_threads) == default
    assert torch.get_num_threads() == default


def test_thread_ends_with_its_task_after_its_calls() -> None:
    made: list[int] = []
    go_on = threading.Event()

    def call(number: int) -> str:
        go_on.wait(20)
        made.append(number)
        return threading.current_thread().name

    before = set(threading.enumerate())
    task = Task(call, FIRST)
    assert set(threading.enumerate()) == before  # it starts with the first call
    futures = [task(number) for number in range(3)]
    (thread,) = set(threading.enumerate()) - before
    del task
    go_on.set()
    assert [future.get() for future in futures] == ["oxytorch Task"] * 3
    thread.join(20)
    assert not thread.is_alive()


def test_copies_have_threads_of_their_own() -> None:
    task = Task(torch.sin, FIRST)
    task.run_sync(torch.ones(1))
    for other in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        assert other.cpu_pool == FIRST
        torch.testing.assert_close(other.run_sync(torch.ones(1)), torch.ones(1).sin())


def test_a_thread_that_cannot_be_pinned_is_an_error_each_time() -> None:
    pool = CPUPool()
    pool.core_ids = (4095,)
    task = Task(place, pool)
    before = threading.active_count()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot run on cores"):
            task()
    for thread in threading.enumerate():
        if thread.name == "oxytorch Task":
            thread.join(20)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3, FIRST), "function: expected a model or a function, got int"),
        ((network(), [0]), "cpu_pool: expected a CPUPool, got list"),
    ],
)
def test_task_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Task(*arguments)


@pytest.mark.parametrize("way", ["eager", "optimize", "graph", "trace", "script"])
def test_models_of_every_kind_run_in_tasks(way: str) -> None:
    model, x = network(), torch.randn(4, 32)
    expected = model(x).detach()
    ready = {
        "eager": lambda: model,
        "optimize": lambda: oxytorch.optimize(model, sample_input=x),
        "graph": lambda: oxytorch.optimize(model, sample_input=x, graph=True),
        "trace": lambda: torch.jit.trace(model, x),
        "script": lambda: torch.jit.script(model),
    }[way]()
    with torch.inference_mode():
        futures = [Task(ready, pool)(x) for pool in (FIRST, ALL)]
        for future in futures:
            torch.testing.assert_close(future.get(), expected, rtol=1e-4, atol=1e-5)
