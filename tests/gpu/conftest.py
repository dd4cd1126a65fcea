"""Images of the sample kernels, compiled once for all tests."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sample_kernels import SAMPLES

from oxytorch import config
from oxytorch.gpu import build, images, launch
from oxytorch.gpu.devices import parse


@pytest.fixture(scope="session")
def compiled_samples(tmp_path_factory) -> Path:
    """A folder with the samples' images for four devices; not to be changed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    folder: Path = tmp_path_factory.mktemp("samples")
    sys.path.insert(0, str(Path(__file__).parent))
    result = build.build(SAMPLES, parse("sm_80,sm_90,gfx942"), folder)
    assert result.failures == []
    assert result.compiled == 8
    return folder


@pytest.fixture
def samples(compiled_samples, tmp_path) -> Path:
    """A copy of the samples' images."""
    return Path(shutil.copytree(compiled_samples, tmp_path / "images"))


@pytest.fixture
def fresh(monkeypatch, tmp_path) -> Iterator[None]:
    """Nothing loaded, nothing remembered, and folders of the user's under `tmp_path`."""
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setattr(launch, "_failures", {})
    images.collection.cache_clear()
    images._changed.cache_clear()
    settings = dataclasses.replace(
        config.current,
        gpu="",
        aot_devices=None,
        use_aot_devices=None,
        cache_home=str(tmp_path / "cache"),
        data_home=str(tmp_path / "data"),
    )
    monkeypatch.setattr(config, "current", settings)
    yield
    images.collection.cache_clear()
    images._changed.cache_clear()
