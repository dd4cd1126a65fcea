"""Threads end with the interpreter; pools work in forked processes, or say why not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEGIN = """
import os, sys, threading, time
import torch
from oxytorch.runtime import CPUPool, MultiStreamModule, Task, pin

def in_child(function):
    child = os.fork()
    if not child:
        try:
            function()
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0

x = torch.randn(1 << 16)
"""

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def run(code: str) -> str:
    done = subprocess.run(
        [
            *[sys.executable, "-W", "error::ResourceWarning"],
            *["-W", "ignore:This process:DeprecationWarning", "-c", BEGIN + code],  # of os.fork
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_interpreter_ends_while_tasks_are_idle_or_at_work() -> None:
    shown = run("""
def slow(text):
    for _ in range(20):
        (x + 1).exp_()
    time.sleep(0.2)
    print(text)

idle, busy = Task(torch.sin, CPUPool()), Task(slow, CPUPool())
streams = MultiStreamModule(torch.sin, cpu_pool=CPUPool())
idle.run_sync(x), streams(x)
busy("first"), busy("second")
print("end")
""")
    assert shown.split() == ["end", "first", "second"]


def test_interpreter_ends_after_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + "t = Task(torch.sin, CPUPool()); t(x).get(); 1 / 0"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_call_at_the_end_is_an_error() -> None:
    shown = run("""
import atexit
task = Task(torch.sin, CPUPool())

def late():
    import oxytorch.runtime.worker
    try:
        task(x)
    except RuntimeError as error:
        print(error)

import oxytorch.runtime.worker as worker
atexit.unregister(worker._end_all)
atexit.register(late)
atexit.register(worker._end_all)
""")
    assert shown == "Task: the interpreter is about to end; call before that\n"


@needs_fork
def test_tasks_and_streams_work_in_forked_processes() -> None:
    shown = run("""
def last(x):  # the threads of workers make the only operators that are split
    return x.sin().exp()[-4:]

task = Task(last, CPUPool())
streams = MultiStreamModule(last, "auto", CPUPool())
with torch.inference_mode():
    expected = task.run_sync(x).tolist()
    assert streams(x)[-4:].tolist() == expected

def child():
    with torch.inference_mode():
        assert task.run_sync(x).tolist() == expected
        assert streams(x)[-4:].tolist() == expected
        assert Task(last, CPUPool())(x).get().tolist() == expected
    print("child")

in_child(child)
assert task.run_sync(x).tolist() == expected
in_child(lambda: in_child(child))
print("parent")
""")
    assert shown.split() == ["child", "child", "parent"]


@needs_fork
def test_call_of_the_parent_is_an_error_in_a_forked_process() -> None:
    shown = run("""
go_on = threading.Event()
task = Task(lambda: go_on.wait(20), CPUPool())
done, future = Task(torch.sin, CPUPool())(x), task()
done.get()

def child():
    done.get()
    for ask in (future.get, future.exception):
        try:
            ask()
        except RuntimeError as error:
            print(error)

in_child(child)
go_on.set()
assert future.get() is True
""")
    left = "Future: this call was left behind in the process that this one was forked from"
    assert shown == f"{left}; make it again\n" * 2


@needs_fork
def test_pin_in_a_forked_process_says_what_is_possible() -> None:
    shown = run("""
(x + 1).exp_()
torch.set_num_threads(2)
before = os.sched_getaffinity(0)
pool = CPUPool([min(before)])
two = CPUPool()
two.core_ids = (min(before),) * 2

def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def child():
    try:
        with pin(two):
            pass
    except RuntimeError as error:
        print(error)
    assert os.sched_getaffinity(0) == before
    def other():
        with pin(two):
            (x + 1).exp_()
        print("thread")
    in_thread(other)

in_child(child)
""")
    assert "use a Task or a new thread, or start processes by spawn" in shown
    assert shown.endswith("thread\n")
