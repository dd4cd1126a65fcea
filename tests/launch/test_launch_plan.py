"""Which instance gets which cores, on recorded machines."""

from __future__ import annotations

import itertools

import pytest
from recorded_machines import FOUR_SOCKETS, HYBRID, LAPTOP, ONE_SOCKET, SNC4, TWO_SOCKETS, Machine

from oxytorch.core.system_files import ranges
from oxytorch.launch.plan import PlanError, Request, make_plan
from oxytorch.launch.topology import read_topology


@pytest.fixture
def plan_of(tmp_path):
    def plan_of(machine: Machine, allowed=None, memory=None, quota=None, **options):
        files = {"sys/fs/cgroup/cpu.max": quota, "proc/self/cgroup": "0::/"} if quota else {}
        root = machine.write(tmp_path, allowed=allowed, memory=memory, files=files)
        return make_plan(read_topology(root), Request(**options))

    return plan_of


def cores(plan) -> list[str]:
    return [ranges(one.cpus) for one in plan.instances]


@pytest.mark.parametrize(
    ("machine", "options", "expected"),
    [
        (LAPTOP, {}, ["0-3"]),
        (ONE_SOCKET, {}, ["0-15"]),
        (ONE_SOCKET, {"use_logical_cores": True}, ["0-31"]),
        (ONE_SOCKET, {"use_logical_cores": True, "ninstances": 2}, ["0-7,16-23", "8-15,24-31"]),
        (TWO_SOCKETS, {}, ["0-55"]),
        (TWO_SOCKETS, {"mode": "throughput"}, ["0-27", "28-55"]),
        (TWO_SOCKETS, {"ninstances": 1, "ncores_per_instance": 10}, ["0-9"]),
        (TWO_SOCKETS, {"nodes": (1,)}, ["28-55"]),
        (TWO_SOCKETS, {"cores": (0, 56, 3)}, ["0,3,56"]),
        (TWO_SOCKETS, {"ninstances": 4}, ["0-13", "14-27", "28-41", "42-55"]),
        (TWO_SOCKETS, {"ncores_per_instance": 28}, ["0-27", "28-55"]),
        (TWO_SOCKETS, {"ninstances": 3}, ["0-17", "18-27,46-53", "28-45"]),
        (TWO_SOCKETS, {"ninstances": 3, "one_node": True}, ["0-13", "14-27", "28-41"]),
        (
            TWO_SOCKETS,
            {"ninstances": 3, "one_node": True, "ncores_per_instance": -1},
            ["0-13", "14-27", "28-55"],
        ),
        (FOUR_SOCKETS, {"mode": "throughput"}, [ranges(range(s, 32, 4)) for s in range(4)]),
        (HYBRID, {}, ["0,2,4,6,8,10,12,14"]),
        (HYBRID, {"use_e_cores": True}, ["0,2,4,6,8,10,12,14,16-23"]),
        (HYBRID, {"use_e_cores": True, "use_logical_cores": True}, ["0-23"]),
        (HYBRID, {"ninstances": 3}, ["0,2", "4,6", "8,10"]),
        (HYBRID, {"ninstances": 3, "ncores_per_instance": -1}, ["0,2,4", "6,8,10", "12,14"]),
    ],
)
def test_plan_gives_these_cores(machine, options, expected, plan_of):
    assert cores(plan_of(machine, **options)) == expected


def test_throughput_mode_has_an_instance_for_each_node_of_snc(plan_of):
    plan = plan_of(SNC4, mode="throughput")
    assert [one.nodes for one in plan.instances] == [(node,) for node in range(8)]
    assert {len(one.cpus) for one in plan.instances} == {15}


def test_latency_mode_has_four_cores_each_and_says_what_is_left(plan_of):
    plan = plan_of(SNC4, mode="latency", one_node=True)
    assert len(plan.instances) == 8 * 3
    assert all(len(one.cpus) == 4 and len(one.nodes) == 1 for one in plan.instances)
    assert any(note.startswith("24 cores unused: 12-14,") for note in plan.notes)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("scatter", ["0-9", "28-37"]), ("close", ["0-9", "10-19"])],
)
def test_strategy_decides_where_a_part_of_the_cores_lies(strategy, expected, plan_of):
    options = {"ninstances": 2, "ncores_per_instance": 10, "strategy": strategy}
    assert cores(plan_of(TWO_SOCKETS, **options)) == expected


def test_close_says_which_instance_spans_nodes(plan_of):
    plan = plan_of(TWO_SOCKETS, ninstances=3, ncores_per_instance=18, strategy="close")
    assert cores(plan) == ["0-17", "18-35", "36-53"]
    assert "instance 1 spans NUMA nodes; --skip-cross-node-cores avoids that" in plan.notes


def test_memory_is_bound_where_asked(plan_of):
    plan = plan_of(TWO_SOCKETS, ninstances=2, one_node=True, bind_memory=True)
    assert [one.memory_nodes for one in plan.instances] == [(0,), (1,)]
    assert all(not one.memory_nodes for one in plan_of(TWO_SOCKETS, ninstances=2).instances)


def test_instance_idx_leaves_one_with_its_number_and_cores(plan_of):
    (one,) = plan_of(TWO_SOCKETS, ninstances=4, instance_idx=2).instances
    assert (one.index, ranges(one.cpus)) == (2, "28-41")


def test_container_of_odd_cores_uses_the_thread_that_it_has(plan_of):
    odd = ",".join(str(n) for n in range(1, 24, 2))
    assert cores(plan_of(HYBRID, allowed=odd)) == ["1,3,5,7,9,11,13,15"]
    # second threads alone, of cores 1, 3 and 5
    assert cores(plan_of(ONE_SOCKET, allowed="17,19,21", ninstances=3)) == ["17", "19", "21"]


def test_container_of_efficiency_cores_uses_them(plan_of):
    plan = plan_of(HYBRID, allowed="18-19")
    assert cores(plan) == ["18-19"]
    assert "there are efficiency cores only" in plan.notes


@pytest.mark.parametrize(("quota", "count"), [("150000 100000", 1), ("50000 100000", 1)])
def test_quota_limits_the_cores(quota, count, plan_of):
    plan = plan_of(ONE_SOCKET, quota=quota)
    assert len(plan.instances[0].cpus) == count
    assert any("the container grants" in note for note in plan.notes)
    with pytest.raises(PlanError, match=r"--ninstances: .* got 2.*; the container grants"):
        plan_of(ONE_SOCKET, quota=quota, ninstances=2)


def test_cores_that_are_named_may_exceed_the_quota(plan_of):
    plan = plan_of(ONE_SOCKET, quota="150000 100000", cores=(0, 1, 2))
    assert cores(plan) == ["0-2"]
    assert any("held up" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ninstances": 17}, "--ninstances: expected at most 16.*got 17; --use-logical-cores"),
        ({"ncores_per_instance": 17}, "--ncores-per-instance: 1 x 17 cores do not fit"),
        ({"ninstances": 3, "ncores_per_instance": 6}, "3 x 6 cores do not fit"),
        ({"nodes": (2,)}, r"--nodes-list: .*\(0\), got 2"),
        ({"cores": (3, 32)}, r"--cores-list: .*\(0-31\), got 32"),
        ({"cores": (3, 3)}, "--cores-list: expected each core once, got 3 twice"),
        ({"ninstances": 2, "instance_idx": 2}, "--instance-idx: .* below 2"),
        ({"ninstances": 2, "instance_idx": -1}, "--instance-idx: .* below 2"),
    ],
)
def test_what_does_not_fit_names_the_option(options, message, plan_of):
    with pytest.raises(PlanError, match=message):
        plan_of(ONE_SOCKET, **options)


def test_what_lies_outside_the_cpuset_is_refused(plan_of):
    with pytest.raises(PlanError, match=r"core 5 is not among those .* 0-3"):
        plan_of(TWO_SOCKETS, allowed="0-3", cores=(5,))
    with pytest.raises(PlanError, match="no core of NUMA node 1, only cores 0-3"):
        plan_of(TWO_SOCKETS, allowed="0-3", nodes=(1,))
    with pytest.raises(PlanError, match="no memory on NUMA node 0, only on 1"):
        plan_of(TWO_SOCKETS, allowed="0-3", memory="1", one_node=True, bind_memory=True)


@pytest.mark.parametrize("machine", [ONE_SOCKET, TWO_SOCKETS, SNC4, FOUR_SOCKETS, HYBRID])
def test_no_core_belongs_to_two_instances(machine, tmp_path):
    topology = read_topology(machine.write(tmp_path))
    choices = itertools.product(
        (0, 1, 2, 3, 4), (0, -1, 1, 2), (False, True), ("scatter", "close"), (False, True)
    )
    for count, each, one_node, strategy, logical in choices:
        plan = make_plan(
            topology,
            Request(
                ninstances=count,
                ncores_per_instance=each,
                one_node=one_node,
                strategy=strategy,
                use_logical_cores=logical,
            ),
        )
        used = [number for one in plan.instances for number in one.cpus]
        assert len(used) == len(set(used))
        assert all(one.cpus for one in plan.instances)
        assert count in (0, len(plan.instances))
        if one_node:
            assert all(len(one.nodes) == 1 for one in plan.instances)
        if each > 0:
            assert {len(one.cpus) for one in plan.instances} == {each}
