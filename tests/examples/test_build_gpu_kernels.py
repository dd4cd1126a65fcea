"""The example that compiles GPU kernels for a list of devices, with one kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

import build_gpu_kernels


@pytest.mark.slow
def test_images_are_built_checked_and_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--devices", "h100,gfx942", "--kernels", "norm", "--jobs", "1"]
    assert build_gpu_kernels.main([*words, "--out", str(tmp_path / "shipped")]) == 0
    shown = capsys.readouterr().out
    assert "3 images checked, 0 loaded, 0 faults" in shown
    found = shown.partition("set to the folder finds")[2].split()
    assert {"compute_80", "sm_90", "gfx942"} <= {*found}
    assert (tmp_path / "shipped" / "oxytorch" / "images" / "sm_90.json").exists()


def test_unknown_device_ends_with_its_mistake(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        build_gpu_kernels.main(["--devices", "voodoo", "--out", str(tmp_path)])
    assert ended.value.code == 2
