"""What Linux says of a machine is read as it is meant, in containers too."""

from __future__ import annotations

import os

import pytest
from recorded_machines import FOUR_SOCKETS, HYBRID, LAPTOP, ONE_SOCKET, SNC4, TWO_SOCKETS

from oxytorch.core.system_files import numbers, ranges
from oxytorch.launch.topology import read_quota, read_topology

CGROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("machine", "sockets", "nodes", "cores", "threads"),
    [
        (LAPTOP, 1, 1, 4, 4),
        (ONE_SOCKET, 1, 1, 16, 32),
        (TWO_SOCKETS, 2, 2, 56, 112),
        (SNC4, 2, 8, 120, 120),
        (FOUR_SOCKETS, 4, 4, 32, 64),
        (HYBRID, 1, 1, 16, 24),
    ],
)
def test_topology_counts_sockets_nodes_cores_and_threads(
    machine, sockets, nodes, cores, threads, tmp_path
):
    found = read_topology(machine.write(tmp_path))
    counts = [len({getattr(cpu, name) for cpu in found.cpus}) for name in ("socket", "node")]
    assert [*counts, len({cpu.core for cpu in found.cpus})] == [sockets, nodes, cores]
    assert len(found.cpus) == len(found.allowed) == threads
    assert found.quota is None


def test_topology_finds_efficiency_cores_by_list_or_by_frequency(tmp_path):
    listed = read_topology(HYBRID.write(tmp_path / "listed"))
    assert [cpu.number for cpu in listed.cpus if cpu.is_efficient] == list(range(16, 24))
    kilohertz = {
        f"sys/devices/system/cpu/cpu{n}/cpufreq/cpuinfo_max_freq": "5100000" if n < 2 else "3300000"
        for n in range(4)
    }
    measured = read_topology(LAPTOP.write(tmp_path / "measured", files=kilohertz))
    assert [cpu.number for cpu in measured.cpus if cpu.is_efficient] == [2, 3]


def test_topology_keeps_to_the_cpuset_and_its_memory(tmp_path):
    found = read_topology(TWO_SOCKETS.write(tmp_path, allowed="29,31,85", memory="1"))
    assert found.allowed == {29, 31, 85}
    assert found.memory_nodes == {1}


def test_topology_without_any_description_is_one_core(tmp_path):
    found = read_topology(tmp_path)
    assert [(cpu.number, cpu.core, cpu.socket, cpu.node) for cpu in found.cpus] == [(0, 0, 0, 0)]


def test_topology_of_this_machine_has_the_cores_of_this_process():
    assert read_topology().allowed == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "1000"}, None),
        # the path is the host's, which the container does not see
        (
            "4:cpu,cpuacct:/docker/77",
            {"cpu,cpuacct/cpu.cfs_quota_us": "150000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            1.5,
        ),
    ],
)
def test_quota_is_the_least_of_all_cgroups_above(cgroup, files, quota, tmp_path):
    tree = {f"{CGROUP}/{path}": text for path, text in files.items()}
    LAPTOP.write(tmp_path, files={**tree, "proc/self/cgroup": cgroup})
    assert read_quota(tmp_path) == quota


def test_lists_of_numbers_are_those_of_linux():
    assert numbers("0-2,8\n") == [0, 1, 2, 8]
    assert ranges([8, 2, 1, 0]) == "0-2,8"
    for wrong in ("2-1", "a", "-1", "1-", "0-99999999999"):
        with pytest.raises(ValueError, match="expected numbers"):
            numbers(wrong)
