"""One model run by several streams, each on its part of the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .caller import is_followed
from .gathering import call_all
from .hints import MultiStreamModuleHint
from .pool import CPUPool, even_sizes, shares, usable_cores
from .splitting import join, split
from .worker import Worker

_FIRST_DIMENSION = MultiStreamModuleHint(0)


class MultiStreamModule(nn.Module):
    """Runs a model in several streams at once, for throughput: each takes a part of the batch.

    All streams share the model and its one copy of weights. Of C cores and S streams each stream
    has C // S, and the first C % S one more; a batch is split in the same way. A batch of fewer
    items than streams uses as many streams as it has items. Calls are made in the caller's grad
    mode, inference mode and autocast; the caller's own thread is not pinned. An exception of a
    stream is raised when all streams have ended. Under tracing, compiling, tensor modes and
    torch.func the calling thread runs the model, on the whole batch.

    Args:
        model: an `nn.Module`, an optimized one, a `ScriptModule`, or anything else to call.
        num_streams: streams, at most one for each core; "auto" is one for each core.
        cpu_pool: cores, of which each stream is pinned to its own. None pins nothing: streams share
            the number of threads that torch has for the thread that makes the module.
        concat_output: whether results are joined; else a call returns a list of those of the
            streams that had a part.
        input_split_hint: along which dimensions the arguments are split; the default splits the
            first positional one along its first dimension. Other arguments that hold tensors need a
            hint.
        output_concat_hint: along which dimensions the results are joined.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        num_streams: int | str = "auto",
        cpu_pool: CPUPool | None = None,
        concat_output: bool = True,
        input_split_hint: MultiStreamModuleHint = _FIRST_DIMENSION,
        output_concat_hint: MultiStreamModuleHint = _FIRST_DIMENSION,
    ) -> None:
        super().__init__()
        _check(model, cpu_pool, input_split_hint, output_concat_hint)
        threads = torch.get_num_threads() if cpu_pool is None else len(cpu_pool)
        self.num_streams = _number(num_streams, threads)
        self.model = model
        self.cpu_pool = cpu_pool
        self.concat_output = concat_output
        self.input_split_hint = input_split_hint
        self.output_concat_hint = output_concat_hint
        self._output = output_concat_hint.of_result()
        everywhere = tuple(usable_cores())
        cores = (
            [everywhere] * self.num_streams
            if cpu_pool is None
            else shares(cpu_pool.core_ids, self.num_streams)
        )
        self._workers = [
            Worker(own, size, f"stream {index}")
            for index, (own, size) in enumerate(
                zip(cores, even_sizes(threads, self.num_streams), strict=True)
            )
        ]

    def get_stream_number(self) -> int:
        """How many streams there are."""
        return self.num_streams

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model for the parts of a batch at once; joins the results."""
        if is_followed() or (self.num_streams == 1 and self.cpu_pool is None):
            results = [self.model(*args, **kwargs)]
        elif self.num_streams == 1:
            results = call_all(self._workers, self.model, [(args, kwargs)])
        else:
            pieces = split(self.input_split_hint, args, kwargs, self.num_streams)
            results = call_all(self._workers, self.model, pieces)
        if not self.concat_output:
            return results
        return results[0] if len(results) == 1 else join(self._output, results)

    def extra_repr(self) -> str:
        """For people: streams and cores."""
        return f"num_streams={self.num_streams}, cpu_pool={self.cpu_pool}"


def _check(model: Any, cpu_pool: Any, *hints: Any) -> None:
    if not callable(model):
        raise TypeError(f"MultiStreamModule: model: expected a model, got {type(model).__name__}")
    if cpu_pool is not None and not isinstance(cpu_pool, CPUPool):
        raise TypeError(
            f"MultiStreamModule: cpu_pool: expected a CPUPool, got {type(cpu_pool).__name__}"
        )
    for name, hint in zip(("input_split_hint", "output_concat_hint"), hints, strict=True):
        if not isinstance(hint, MultiStreamModuleHint):
            raise TypeError(
                f"MultiStreamModule: {name}: expected a MultiStreamModuleHint, "
                f"got {type(hint).__name__}; MultiStreamModuleHint(0) is the default"
            )


def _number(num_streams: int | str, threads: int) -> int:
    if isinstance(num_streams, str):
        if num_streams.lower() == "auto":
            return threads
        raise ValueError(
            f'MultiStreamModule: num_streams: expected an int or "auto", got {num_streams!r}'
        )
    if isinstance(num_streams, bool) or not isinstance(num_streams, int):
        raise TypeError(
            f'MultiStreamModule: num_streams: expected an int or "auto", got {num_streams!r}'
        )
    if num_streams < 1:
        raise ValueError(f"MultiStreamModule: num_streams: expected 1 or more, got {num_streams}")
    if num_streams > threads:
        warnings.warn(
            f"MultiStreamModule: num_streams: expected at most {threads}, one for each core of "
            f"the pool or thread of torch, got {num_streams}; {threads} of them are made",
            UserWarning,
            stacklevel=3,
        )
    return min(num_streams, threads)
