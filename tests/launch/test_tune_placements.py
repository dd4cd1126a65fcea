"""What `oxytorch tune` tries is a function of the machine and of the options."""

from __future__ import annotations

import pytest
from recorded_machines import HYBRID, LAPTOP, ONE_SOCKET, SNC4, TWO_SOCKETS, Machine

from oxytorch.launch.plan import PlanError, Request, make_plan
from oxytorch.launch.topology import read_topology
from oxytorch.launch.tuning.placements import ALL_THREADS, Axes, Placement, placements

TWO_CORES = Machine(["0-1"], ["0-1"])
# 2 sockets of 32 cores with two threads each
LARGE = Machine(
    ["0-31,64-95", "32-63,96-127"],
    ["0-31,64-95", "32-63,96-127"],
    lambda first: first + 64 if first < 64 else None,
)
ALL_LIBRARIES = Axes(allocators=("default", "tcmalloc", "jemalloc"), openmps=("default", "intel"))


def found(machine, tmp_path, axes=Axes(), request=Request(), **given) -> list[Placement]:  # noqa: B008
    return placements(read_topology(machine.write(tmp_path, **given)), request, axes)


def shapes(listed: list[Placement]) -> list[tuple[int, int]]:
    return [(each.ninstances, each.ncores) for each in listed]


def test_two_cores_have_three_placements(tmp_path):
    assert shapes(found(TWO_CORES, tmp_path)) == [(1, 2), (1, 1), (2, 1)]


def test_two_large_sockets_have_a_few_dozens(tmp_path):
    listed = found(LARGE, tmp_path, ALL_LIBRARIES)
    assert listed[0] == Placement(1, 64)
    assert 30 <= len(listed) <= 50
    assert len(set(listed)) == len(listed)
    plain = {(1, 64), (2, 32), (4, 16), (8, 8), (16, 4), (32, 2), (64, 1), (1, 32), (1, 16), (1, 8)}
    own = [each for each in listed if each.complexity()[0] == 0]
    assert set(shapes(own)) == plain and len(own) == len(plain)
    assert {each.allocator for each in listed} == {"default", "tcmalloc", "jemalloc"}
    assert (2, 64) in shapes([each for each in listed if each.has_all_threads])
    # one change at a time
    assert max(each.complexity()[0] for each in listed) == 1


def test_full_tries_all_combinations(tmp_path):
    axes = Axes((), (32,), (0, ALL_THREADS), ALL_LIBRARIES.allocators, ("default", "intel"), True)
    listed = found(LARGE, tmp_path, axes)
    assert len(listed) == 3 * 2 * 2
    assert listed[-1].complexity()[0] == 3


@pytest.mark.parametrize("machine", [TWO_CORES, LAPTOP, ONE_SOCKET, TWO_SOCKETS, SNC4, HYBRID])
def test_every_placement_is_a_plan_of_oxytorch_run(machine, tmp_path):
    topology = read_topology(machine.write(tmp_path))
    for each in placements(topology, Request(), Axes()):
        request = Request(
            each.ninstances,
            each.ncores,
            use_logical_cores=each.has_all_threads,
            one_node=each.is_within_node,
        )
        plan = make_plan(topology, request)
        assert [len(one.cpus) for one in plan.instances] == [each.ncores] * each.ninstances
        if each.is_within_node:
            assert all(len(one.nodes) == 1 for one in plan.instances)


def test_instances_stay_within_numa_nodes_where_they_fit(tmp_path):
    listed = found(TWO_SOCKETS, tmp_path)
    assert [each for each in listed if not each.is_within_node] == [
        each for each in listed if each.ncores in (56, 112) and each.ninstances == 1
    ]


def test_sockets_of_several_nodes_are_tried_as_a_whole(tmp_path):
    listed = found(SNC4, tmp_path)
    assert {(1, 120), (2, 60), (4, 30), (8, 15)} < set(shapes(listed))
    topology = read_topology(tmp_path)
    plan = make_plan(topology, Request(2, 60))
    assert [one.nodes for one in plan.instances] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_cpuset_and_quota_are_respected(tmp_path):
    assert shapes(found(ONE_SOCKET, tmp_path / "a", allowed="0-3")) == [
        *((1, 4), (1, 2), (1, 1), (2, 2), (4, 1)),
    ]
    files = {"sys/fs/cgroup/cpu.max": "250000 100000", "proc/self/cgroup": "0::/"}
    listed = found(LAPTOP, tmp_path / "b", files=files)
    assert set(shapes(listed)) == {(1, 2), (1, 1), (2, 1)}
    listed = found(LAPTOP, tmp_path / "c", request=Request(cores=(1, 3)))
    assert set(shapes(listed)) == {(1, 2), (1, 1), (2, 1)}


def test_lists_of_the_users_are_taken_as_they_are(tmp_path):
    listed = found(ONE_SOCKET, tmp_path, Axes(ninstances=(1, 3, 40), threads=(0,)))
    assert shapes(listed) == [(1, 16), (3, 5)]
    listed = found(ONE_SOCKET, tmp_path, Axes(ninstances=(2, 4), ncores=(2, 8), threads=(4,)))
    assert shapes(listed) == [(2, 8), (2, 2), (4, 2)]
    assert {each.threads for each in listed} == {4}
    with pytest.raises(PlanError, match="--ninstances, --ncores-per-instance: none"):
        found(ONE_SOCKET, tmp_path, Axes(ninstances=(17,)))


def test_words_and_names_of_a_placement():
    each = Placement(2, 8, 4, False, True, "tcmalloc", "intel")
    assert each.words() == [
        *("--ninstances=2", "--ncores-per-instance=8", "--nthreads-per-instance=4"),
        *("--skip-cross-node-cores", "--memory-allocator=tcmalloc", "--omp-runtime=intel"),
    ]
    assert str(each) == "2 x 8 cores, 4 OpenMP threads, tcmalloc, Intel's OpenMP"
    assert str(Placement(1, 8, has_all_threads=True)) == "1 x 8 threads"
    assert Placement(**each.data()) == each
