"""Torch's threads of one Python thread: how many there are, who they are, where they may run.

Each thread that calls operators has a team of its own in OpenMP. Threads of a team that are made
later may run where the thread that calls may.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

_Piece = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)

_number = threading.Lock()  # while torch's number for new threads is another one
_forked = 0  # the thread that has lived since before this process was forked, if it was


def _after_fork() -> None:
    global _number, _forked
    _number, _forked = threading.Lock(), threading.get_native_id()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def set_own_number(threads: int) -> None:
    """Sets how many threads operators use that this thread calls, and for no other thread."""
    torch.get_num_threads()  # else this thread would take torch's number later, in place of its own
    for set_number in _numbers_of_a_thread():
        set_number(threads)
    if not _numbers_of_a_thread() or torch.get_num_threads() != threads:
        _set_and_set_back(threads)


@functools.cache
def _numbers_of_a_thread() -> tuple[Callable[[int], object], ...]:
    """What torch.set_num_threads calls for the calling thread, of OpenMP and of MKL; none of them
    where one cannot be found.

    OpenMP is looked for where torch's own calls lead: in a library that was loaded before it too.
    """
    libraries = [ctypes.CDLL(None), _torch_library()]
    names = ["omp_set_num_threads"]
    if torch._C.has_mkl:
        names.append("MKL_Set_Num_Threads_Local")
    found = [[getattr(each, name) for each in libraries if hasattr(each, name)] for name in names]
    return tuple(functions[0] for functions in found) if all(found) else ()


def _set_and_set_back(threads: int) -> None:
    """The same by torch.set_num_threads, which also sets what a thread takes that has no number.

    Only such a thread can tell that number, so that new ones read it and set it back.
    """
    with _number:
        for_new_threads = in_new_thread(torch.get_num_threads)
        try:
            torch.set_num_threads(threads)
        finally:
            in_new_thread(lambda: torch.set_num_threads(for_new_threads))


def team() -> list[int]:
    """The system's numbers of the threads of this thread's team, this one included; starts them.

    Raises:
        RuntimeError: this thread's team stayed behind in the process that this one was forked from.
    """
    found: list[int] = []  # append is atomic
    size = torch.get_num_threads()
    if size > 1 and _forked == threading.get_native_id():
        raise RuntimeError(
            "oxytorch.runtime: this process was forked, and torch's threads of its first thread "
            "may have stayed behind; use a Task or a new thread, or start processes by spawn"
        )
    piece = _Piece(lambda begin, end, context: found.append(threading.get_native_id()))
    if _parallel_for()(0, size, 1, piece, None):
        raise RuntimeError(f"torch's parallel_for failed with {size} threads")
    return found


def allow(cores: Collection[int], threads: Iterable[int] = (0,)) -> None:
    """Lets threads run on these cores alone; by default the calling thread.

    Raises:
        RuntimeError: the system does not let this process use any of the cores.
    """
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cores)
        except OSError as error:
            raise RuntimeError(
                f"cannot run on cores {sorted(cores)}: {error}; this process's cpuset may have "
                "changed, make the pool again"
            ) from error


def _torch_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@functools.cache
def _parallel_for() -> Any:
    """The function of torch's stable C interface that splits a range among its threads."""
    try:
        function = _torch_library().torch_parallel_for
    except AttributeError:
        raise RuntimeError(
            f"oxytorch.runtime needs torch 2.10 or newer, got {torch.__version__}; upgrade torch"
        ) from None
    function.argtypes = [*[ctypes.c_int64] * 3, _Piece, ctypes.c_void_p]
    return function


def in_new_thread(function: Callable[[], _T]) -> _T:
    """What a function returns on a thread that ends with it."""
    results: list[_T] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]
