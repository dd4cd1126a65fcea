"""The list of devices: every name that users write finds its device, others get the list."""

from __future__ import annotations

import pytest

from oxytorch.gpu import devices
from oxytorch.gpu.devices import DEVICES, parse, usable_images


def _names(text: str) -> list[str]:
    return [device.name for device in parse(text)]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_device_is_found_by_each_of_its_names(device):
    for name in (device.name, *device.aliases, *device.compiler_names):
        assert device in parse(name), name


def test_names_are_given_to_one_device_each():
    names = [name for device in DEVICES for name in (device.name, *device.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() and " " not in name for name in names)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h100", ["compute_80", "sm_90"]),
        ("H200, a100", ["compute_80", "sm_80", "sm_90"]),
        ("b200,sm_100,gb200", ["compute_80", "sm_100"]),
        ("mi300x", ["gfx942"]),
        ("Ponte Vecchio", ["spirv", "pvc"]),
        ("acm-g10,dg2-g10-c0,ats-m150", ["spirv", "ats-m150"]),
        ("sm_80,sm_90,sm_100,gfx942,pvc,ats-m150", None),
        (" , ,", []),
        ("", []),
    ],
)
def test_list_names_each_device_once_with_the_fallback_of_its_vendor(text, expected):
    if expected is None:
        expected = ["compute_80", "sm_80", "sm_90", "sm_100", "gfx942", "spirv", "pvc", "ats-m150"]
    assert _names(text) == expected


def test_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown device 'sm_20', 'voodoo2'") as caught:
        parse("sm_90,sm_20,voodoo2", "USE_AOT_DEVLIST")
    assert str(caught.value).startswith("USE_AOT_DEVLIST: ")
    for device in DEVICES:
        assert device.name in str(caught.value)


def test_default_devices_are_known():
    assert parse(",".join((*devices.DEFAULT_NVIDIA, *devices.DEFAULT_INTEL)))


def test_images_of_an_older_chip_of_the_same_generation_are_usable():
    assert [device.name for device in usable_images("sm_89")] == ["sm_89", "sm_86", "sm_80"]
    assert [device.name for device in usable_images("sm_90")] == ["sm_90"]
    assert usable_images("sm_103")[0].name == "sm_103"
    assert usable_images("compute_80") == []
    assert usable_images("sm_75") == []
