"""Levels: which exist, how one is chosen, and what nonsense leads to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from marks import NEEDS_LIBRARY
from oxytorch import isa, ops

pytestmark = NEEDS_LIBRARY

SUPPORTED = [level.name for level in isa.levels() if level.supported]
BUILT = [level.name for level in isa.levels() if level.built]


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OXYTORCH_ISA", "ATEN_CPU_CAPABILITY")
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


SHOW = "from oxytorch import isa; print(isa.active(), '|', isa.why())"


def test_levels_are_named_once_and_imply_earlier_ones() -> None:
    names = [level.name for level in isa.levels()]
    assert len(set(names)) == len(names)
    assert names[0] == "generic"
    for position, level in enumerate(isa.levels()):
        assert all(names.index(other) < position for other in level.implies)


def test_supported_level_supports_what_it_implies_as_far_as_that_is_built() -> None:
    for level in isa.levels():
        if level.supported:
            assert level.built
            assert set(level.implies) & set(BUILT) <= set(SUPPORTED)


def test_generic_and_the_best_level_are_always_built() -> None:
    assert BUILT[0] == "generic" and set(SUPPORTED) <= set(BUILT)


def test_level_that_is_not_built_is_named_with_what_to_do() -> None:
    absent = [level.name for level in isa.levels() if not level.built]
    if not absent:
        pytest.skip("this library has every level")
    message = f"level '{absent[0]}' is not built into this library; it has: generic.*make test"
    with pytest.raises(ValueError, match=message), isa.use(absent[0]):
        pass


def test_levels_agree_with_the_system() -> None:
    """Linux names the processor's features; ours come from cpuid."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = set(next(line for line in file if line.startswith("flags")).split())
    except (OSError, StopIteration):
        pytest.skip("this system does not list processor flags")
    needed = {
        "avx2": {"avx2", "fma", "f16c", "bmi2"},
        "avx512": {"avx512f", "avx512vl", "avx512bw", "avx512dq"},
        "avx512_bf16": {"avx512_bf16"},
        "avx512_fp16": {"avx512_fp16"},
    }
    for level, names in needed.items():
        assert level not in BUILT or (level in SUPPORTED) == (names <= flags), level
    # A system may hide the tile registers from programs although the processor has them.
    assert "amx" not in SUPPORTED or {"amx_tile", "amx_int8", "amx_bf16"} <= flags


def _capabilities() -> list[str]:
    """Every capability that a level has, in the order of the list."""
    found = {name for level in isa.levels() for name in level.capabilities}
    order = ("vectors_256", "vectors_512", "int8_dot", "bf16_dot", "fast_bf16_dot", "tiles")
    assert found <= set(order)
    return list(order)


def test_levels_have_the_capabilities_of_what_they_imply_but_where_they_are_measured_slow() -> None:
    has = {level.name: set(level.capabilities) for level in isa.levels()}
    if "amx" not in has:
        pytest.skip("this processor's architecture has one level")
    for level in isa.levels():
        missing = set().union(*(has[other] for other in level.implies)) - has[level.name]
        assert missing <= {"fast_bf16_dot"}, level.name
    assert {"vectors_512", "int8_dot", "fast_bf16_dot"} <= has["avx512_bf16"]
    assert "bf16_dot" in has["avx512_fp16"] and "fast_bf16_dot" not in has["avx512_fp16"]
    assert "tiles" in has["amx"] and "fast_bf16_dot" not in has["amx"]
    assert "vectors_256" in has["avx2"] and not has["generic"]


def test_capabilities_are_those_of_the_active_level() -> None:
    for level in isa.levels():
        if level.supported:
            with isa.use(level.name):
                assert [name for name in _capabilities() if isa.has(name)] == list(
                    level.capabilities
                )
    with pytest.raises(ValueError, match=r"isa\.has: expected a capability from .*, got 'amx'"):
        isa.has("amx")


def test_use_activates_and_restores() -> None:
    before = isa.active()
    with isa.use("generic"):
        assert isa.active() == "generic"
        with isa.use(SUPPORTED[-1]):
            assert isa.active() == SUPPORTED[-1]
        assert isa.active() == "generic"
    assert isa.active() == before


def test_use_restores_after_an_error() -> None:
    before = isa.active()
    with pytest.raises(KeyError), isa.use("generic"):
        raise KeyError
    assert isa.active() == before


def test_unknown_level_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"unknown level 'sse9'.*generic"), isa.use("sse9"):
        pass


def test_unsupported_level_lists_the_choices() -> None:
    absent = [level.name for level in isa.levels() if level.built and not level.supported]
    if not absent:
        pytest.skip("this processor supports every level that is built")
    with pytest.raises(ValueError, match=f"does not support level '{absent[0]}'.*generic"):
        isa._activate(absent[0], "test")


@pytest.mark.parametrize("level", SUPPORTED)
def test_level_that_runs_is_the_one_asked_for(level: str) -> None:
    x = torch.randn(4, 40)
    with isa.use(level):
        isa.forget_last_called()
        ops.rms_norm(x)
        assert isa.last_called() == level


def test_best_level_is_the_default() -> None:
    assert _run(SHOW).stdout.split()[0] == SUPPORTED[-1]


@pytest.mark.parametrize("level", SUPPORTED)
def test_environment_chooses_a_level(level: str) -> None:
    assert _run(SHOW, OXYTORCH_ISA=level).stdout == f"{level} | OXYTORCH_ISA={level}\n"


@pytest.mark.parametrize(
    ("variable", "message"),
    [("OXYTORCH_ISA", "unknown level 'nonsense'"), ("ATEN_CPU_CAPABILITY", "'nonsense'")],
)
def test_nonsense_in_the_environment_raises_and_lists_the_choices(
    variable: str, message: str
) -> None:
    result = _run(SHOW, **{variable: "nonsense"})
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert message in last and variable in last and "generic" in last


@pytest.mark.parametrize("bound", ["default", "avx2", "avx512", "avx512_vnni", "amx"])
def test_torch_capability_is_an_upper_bound(bound: str) -> None:
    top = next(level for level in isa.levels() if level.name == bound.replace("default", "generic"))
    allowed = [name for name in SUPPORTED if name == top.name or name in top.implies]
    assert _run(SHOW, ATEN_CPU_CAPABILITY=bound).stdout.split()[0] == allowed[-1]


def test_own_variable_wins_over_the_bound() -> None:
    result = _run(SHOW, ATEN_CPU_CAPABILITY="default", OXYTORCH_ISA=SUPPORTED[-1])
    assert result.stdout.split()[0] == SUPPORTED[-1]
