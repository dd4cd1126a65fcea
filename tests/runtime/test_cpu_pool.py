"""Pools: which cores they have, what they refuse, and that making one pins nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from thread_states import CORES, needs_two_cores

from oxytorch.runtime import CPUPool, get_core_list_of_node_id, pool
from oxytorch.runtime.pool import even_sizes, shares

NOWHERE = max(CORES[-1], os.cpu_count() or 1) + 1000


def test_pool_without_arguments_has_the_cores_of_this_thread() -> None:
    assert CPUPool().core_ids == tuple(CORES)
    assert len(CPUPool()) == len(CORES)


@needs_two_cores
def test_pool_respects_the_affinity_of_the_thread() -> None:
    try:
        os.sched_setaffinity(0, CORES[1:])
        assert CPUPool().core_ids == tuple(CORES[1:])
        with pytest.raises(ValueError, match=rf"this thread may use .*got \[{CORES[0]}\]"):
            CPUPool(CORES)
        assert CORES[0] not in CPUPool(node_id=_node_of(CORES[1])).core_ids
    finally:
        os.sched_setaffinity(0, CORES)


@needs_two_cores
def test_pool_keeps_the_order_of_its_cores() -> None:
    assert CPUPool([CORES[1], CORES[0]]).core_ids == (CORES[1], CORES[0])
    assert CPUPool(core_ids=iter(CORES)).core_ids == tuple(CORES)


def test_pool_of_a_node_has_its_usable_cores() -> None:
    node = _node_of(CORES[0])
    listed = get_core_list_of_node_id(node)
    assert CORES[0] in listed
    assert CPUPool(node_id=node).core_ids == tuple(core for core in listed if core in CORES)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"core_ids": [0], "node_id": 0}, ValueError, "core_ids or node_id, got both"),
        ({"core_ids": []}, ValueError, "one core or more, got none"),
        ({"core_ids": [CORES[0]] * 2}, ValueError, rf"once, got \[{CORES[0]}\] more than once"),
        ({"core_ids": [NOWHERE]}, ValueError, rf"may use .*got \[{NOWHERE}\]"),
        ({"core_ids": [-1]}, ValueError, r"may use .*got \[-1\]"),
        ({"core_ids": [0.0]}, TypeError, "core_ids: expected an int, got 0.0"),
        ({"core_ids": ["0"]}, TypeError, "core_ids: expected an int, got '0'"),
        ({"core_ids": [True]}, TypeError, "core_ids: expected an int, got True"),
        ({"node_id": 4096}, ValueError, r"node_id: expected one of \[0.*got 4096"),
        ({"node_id": -1}, ValueError, "node_id: expected one of .*got -1"),
        ({"node_id": "0"}, TypeError, "node_id: expected an int, got '0'"),
    ],
)
def test_pool_refuses(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CPUPool(**arguments)


def test_nodes_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_NODES", tmp_path)
    assert get_core_list_of_node_id(0) == list(range(os.cpu_count() or 1))
    for node, text in {0: "0-2,8-9\n", 2: "4\n", 3: "\n"}.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    assert get_core_list_of_node_id(0) == [0, 1, 2, 8, 9]
    assert get_core_list_of_node_id(2) == [4]
    with pytest.raises(ValueError, match=r"expected one of \[0, 2, 3\], got 1"):
        get_core_list_of_node_id(1)
    with pytest.raises(ValueError, match="a node with cores that this thread may use"):
        CPUPool(node_id=3)


def test_pools_of_the_same_cores_are_equal_and_can_be_pickled() -> None:
    pools = CPUPool(), CPUPool(CORES), pickle.loads(pickle.dumps(CPUPool()))
    assert len(set(pools)) == 1
    assert repr(pools[0]) == f"CPUPool(core_ids={CORES})"


@pytest.mark.parametrize(
    "total, parts, sizes", [(8, 2, [4, 4]), (7, 3, [3, 2, 2]), (3, 3, [1, 1, 1]), (0, 1, [0])]
)
def test_first_parts_have_one_more(total: int, parts: int, sizes: list[int]) -> None:
    assert even_sizes(total, parts) == sizes


def test_streams_share_cores_in_order() -> None:
    assert shares([7, 5, 3, 2, 1], 2) == [(7, 5, 3), (2, 1)]


def _node_of(core: int) -> int:
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
    for node in sorted(int(folder.name[4:]) for folder in nodes):
        if core in get_core_list_of_node_id(node):
            return node
    return 0
