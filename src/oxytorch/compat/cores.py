"""The predecessor's `cpu.runtime`, with its defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .. import runtime
from ..runtime import MultiStreamModuleHint
from ..runtime.pool import usable_cores

_FIRST = MultiStreamModuleHint(0)


class CPUPool(runtime.CPUPool):
    """Cores to run on; those that this thread may not use are left out.

    core_ids, node_id: one of both, or neither for all cores that this thread may use. Raises
    RuntimeError where none is left.
    """

    __slots__ = ()

    def __init__(self, core_ids: Iterable[int] | None = None, node_id: int | None = None) -> None:
        wanted: list[int] | None = None
        if node_id is not None and core_ids is None:
            wanted = runtime.get_core_list_of_node_id(node_id)
        elif core_ids is not None and node_id is None:
            wanted = [*core_ids]
        if wanted is None:
            super().__init__(core_ids, node_id)
            return
        usable = usable_cores()
        found = [core for core in dict.fromkeys(wanted) if core in usable]
        if not found:
            raise RuntimeError(
                f"CPUPool: expected cores that this thread may use, one of {usable}, got {wanted}"
            )
        super().__init__(found)


class MultiStreamModule(runtime.MultiStreamModule):
    """`oxytorch.runtime.MultiStreamModule`, on all cores that this thread may use by default."""

    def __init__(
        self,
        model: Callable[..., Any],
        num_streams: int | str = "AUTO",
        cpu_pool: runtime.CPUPool | None = None,
        concat_output: bool = True,
        input_split_hint: MultiStreamModuleHint = _FIRST,
        output_concat_hint: MultiStreamModuleHint = _FIRST,
    ) -> None:
        super().__init__(
            model,
            num_streams,
            CPUPool() if cpu_pool is None else cpu_pool,
            concat_output,
            input_split_hint,
            output_concat_hint,
        )


def is_runtime_ext_enabled() -> bool:
    """True: no OpenMP library has to be preloaded."""
    return True


def get_default_num_streams(cpu_pool: runtime.CPUPool) -> int:
    """How many streams "AUTO" is: one for each core."""
    return len(cpu_pool)
