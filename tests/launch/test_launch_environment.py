"""Which libraries are preloaded and which variables set; the user's own stay."""

from __future__ import annotations

import pytest

from oxytorch.launch.environment import MissingLibraryError, make_environment


@pytest.fixture
def folder(tmp_path):
    for name in ("libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libiomp5.so"):
        (tmp_path / name).touch()
    return str(tmp_path)


def test_openmp_is_torchs_own_unless_asked(folder):
    found = make_environment({}, folders=[folder])
    assert (found.allocator, found.openmp) == ("tcmalloc", "default")
    assert "libiomp5" not in found.variables_of(6)["LD_PRELOAD"]


def test_auto_takes_tcmalloc_and_intels_openmp(folder):
    found = make_environment({}, folders=[folder], openmp="auto")
    assert (found.allocator, found.openmp) == ("tcmalloc", "intel")
    assert found.variables_of(6) == {
        "OMP_NUM_THREADS": "6",
        "LD_PRELOAD": f"{folder}/libtcmalloc_minimal.so.4:{folder}/libiomp5.so",
        "KMP_BLOCKTIME": "1",
    }


def test_auto_without_libraries_is_the_default_and_says_so(tmp_path):
    found = make_environment({}, folders=[str(tmp_path)])
    assert (found.allocator, found.openmp) == ("default", "default")
    assert found.variables_of(2) == {"OMP_NUM_THREADS": "2"}
    assert found.notes == ("neither tcmalloc nor jemalloc found: the C library's allocator",)


@pytest.mark.parametrize("keeps", [False, True])
def test_jemalloc_keeps_freed_memory_with_benchmark(keeps, folder):
    options = {"allocator": "jemalloc", "openmp": "default", "benchmark": keeps}
    variables = make_environment({}, folders=[folder], **options).variables_of(1)
    assert ("dirty_decay_ms:-1" in variables["MALLOC_CONF"]) is keeps
    assert variables["LD_PRELOAD"] == f"{folder}/libjemalloc.so.2"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("allocator", "jemalloc", "--memory-allocator: libjemalloc.so .* apt install libjemalloc2"),
        ("allocator", "tcmalloc", "--memory-allocator: libtcmalloc.so .* gperftools"),
        ("openmp", "intel", "--omp-runtime: libiomp5.so .* pip install intel-openmp"),
    ],
)
def test_missing_library_names_its_packages(option, value, message, tmp_path):
    with pytest.raises(MissingLibraryError, match=message):
        make_environment({}, folders=[str(tmp_path)], **{option: value})


def test_number_of_threads_is_that_of_processors_unless_given(folder):
    assert make_environment({}, folders=[folder]).variables_of(6)["OMP_NUM_THREADS"] == "6"
    found = make_environment({}, folders=[folder], threads=3)
    assert found.variables_of(6)["OMP_NUM_THREADS"] == "3"


def test_values_of_the_users_stay_and_are_named(folder):
    own = {"OMP_NUM_THREADS": "3", "KMP_BLOCKTIME": "200", "MALLOC_CONF": "narenas:1", "HOME": "/"}
    found = make_environment(own, folders=[folder], allocator="jemalloc", unbuffered=True)
    variables = found.variables_of(8)
    assert sorted(variables) == ["LD_PRELOAD", "PYTHONUNBUFFERED"]
    assert set(found.kept) == {"OMP_NUM_THREADS", "KMP_BLOCKTIME", "MALLOC_CONF"}


def test_preloaded_libraries_of_the_users_come_first_and_are_not_doubled(folder):
    found = make_environment({"LD_PRELOAD": "/x/libmine.so"}, folders=[folder], openmp="default")
    expected = f"/x/libmine.so:{folder}/libtcmalloc_minimal.so.4"
    assert found.variables_of(1)["LD_PRELOAD"] == expected
    own = {"LD_PRELOAD": "/x/libjemalloc.so.2 /y/libiomp5.so"}
    found = make_environment(own, folders=[folder])
    assert (found.allocator, found.openmp) == ("jemalloc", "intel")
    assert "LD_PRELOAD" not in found.variables_of(1)
    found = make_environment(own, folders=[folder], allocator="default")
    assert (found.allocator, found.openmp) == ("jemalloc", "intel")
    with pytest.raises(MissingLibraryError, match="unset LD_PRELOAD"):
        make_environment(own, folders=[folder], allocator="tcmalloc")


def test_python_environments_own_libraries_come_before_the_systems(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtcmalloc.so").touch()
    found = make_environment({"CONDA_PREFIX": str(tmp_path)}, openmp="default")
    assert found.variables_of(1)["LD_PRELOAD"] == f"{tmp_path}/lib/libtcmalloc.so"
