"""The model of torch's allocator, and our core under its policies, beside what torch reserved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import made_traces
import pytest
import torch

from oxytorch.memory import replay
from oxytorch.memory import trace as traces
from oxytorch.memory.replay import by_stock
from oxytorch.memory.stock import OutOfMemory, Settings, StockAllocator

DATA = Path(__file__).parent / "data"
RECORDED = sorted(DATA.glob("*.trace"))
MiB = 1 << 20
NAMES_OF_SETTINGS = (
    "expandable_segments",
    "max_split_size_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_replay_reserves_what_torch_reserved(path: Path) -> None:
    trace = traces.load(path)
    # Recorded before traces had the limit: set_per_process_memory_fraction(0.22).
    limit = int(0.22 * trace.about.total_memory) if path.stem.endswith("-gc") else None
    model = by_stock(trace, Settings.parse(trace.about.settings, limit), "model")
    if path.stem == "resnet-split":
        # Five streams; one segment of 313 differs.
        assert abs(model.peak_reserved / trace.about.peak_reserved - 1) < 0.01
        return
    assert model.peak_reserved == trace.about.peak_reserved
    calls = model.calls["grant" if trace.about.is_expandable else "allocate"]
    assert trace.about.is_expandable or calls == trace.about.device_allocations
    if trace.about.settings in ("", "expandable_segments:True"):
        name = "expandable" if trace.about.is_expandable else "native-policy"
        [core] = replay(trace, [name])
        assert core.peak_reserved == trace.about.peak_reserved


@pytest.mark.parametrize("name", ["native-policy", "expandable"])
@pytest.mark.parametrize("make", [made_traces.training, made_traces.serving])
def test_core_and_model_reserve_the_same(make, name: str) -> None:
    for seed in range(4):
        trace = make(seed=seed)
        [core] = replay(trace, [name])
        model = by_stock(trace, Settings(is_expandable=name == "expandable"), name)
        assert core.peak_reserved == model.peak_reserved
        assert [point.reserved for point in core.timeline] == [
            point.reserved for point in model.timeline
        ]


def test_segments_have_the_sizes_of_torchs() -> None:
    for size, reserved in ((1, 2), (1 * MiB, 2), (MiB + 1, 20), (10 * MiB, 10), (11 * MiB + 1, 12)):
        allocator = StockAllocator()
        allocator.allocate(size)
        assert allocator.reserved == reserved * MiB


def test_sizes_are_rounded_by_divisions_of_powers_of_two() -> None:
    allocator = StockAllocator(Settings.parse("roundup_power2_divisions:4"))
    assert [allocator.rounded(size) for size in (1, 600, 1200 * 1024, 2 * MiB, 2 * MiB + 1)] == [
        512,
        1024,
        1280 * 1024,
        2 * MiB,
        2 * MiB + MiB // 2,
    ]


def test_blocks_above_the_split_limit_stay_whole() -> None:
    whole = StockAllocator(Settings.parse("max_split_size_mb:32"))
    usual = StockAllocator()
    for allocator in (whole, usual):
        allocator.free(allocator.allocate(64 * MiB))
        allocator.allocate(12 * MiB)
    assert usual.reserved == 64 * MiB
    assert whole.reserved == 76 * MiB


def test_cached_blocks_are_given_back_before_memory_runs_out() -> None:
    allocator = StockAllocator(Settings(limit=100 * MiB))
    allocator.free(allocator.allocate(60 * MiB))
    allocator.allocate(80 * MiB)
    assert allocator.calls.release == 1
    assert allocator.reserved == 80 * MiB
    with pytest.raises(OutOfMemory):
        allocator.allocate(30 * MiB)


def test_old_blocks_are_collected_above_the_threshold() -> None:
    allocator = StockAllocator(Settings.parse("garbage_collection_threshold:0.5", 200 * MiB))
    allocator.free(allocator.allocate(50 * MiB))
    allocator.free(allocator.allocate(60 * MiB))
    allocator.allocate(70 * MiB)
    assert allocator.calls.release == 1
    assert allocator.reserved == 130 * MiB


def test_expandable_segments_give_back_whole_pages() -> None:
    allocator = StockAllocator(Settings(is_expandable=True))
    blocks = [allocator.allocate(15 * MiB) for _ in range(4)]
    assert allocator.reserved == 60 * MiB
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    allocator.empty_cache()
    assert allocator.reserved == 40 * MiB
    allocator.allocate(30 * MiB)
    assert allocator.reserved == 60 * MiB


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backend:native", "expected settings out of expandable_segments, max_split_size_mb"),
        ("max_split_size_mb:lots", "max_split_size_mb cannot be 'lots'"),
        ("expandable_segments:yes", "expandable_segments cannot be 'yes'; expected True or False"),
        ("max_split_size_mb:19", "expected an integer of at least 20"),
        ("garbage_collection_threshold:1", "expected a number above 0 and below 1"),
        ("garbage_collection_threshold:nan", "expected a number above 0 and below 1"),
        ("roundup_power2_divisions:3", "expected a power of 2"),
        ("roundup_power2_divisions:0", "expected a power of 2"),
    ],
)
def test_setting_that_is_not_modelled_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.parse(text)


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"), reason="an older torch"
)
def test_settings_that_torch_refuses_are_refused() -> None:
    def refuses(take: Callable[[str], object], text: str) -> bool:
        try:
            take(text)
        except (ValueError, RuntimeError, IndexError):
            return True
        return False

    values = ("", "x", "0", "1", "3", "4", "19", "20", "21", "128", "0.5", "1.0", "nan", "True")
    refused = []
    try:
        for name in NAMES_OF_SETTINGS:
            for value in values:
                text = f"{name}:{value}"
                if refuses(torch._C._accelerator_setAllocatorSettings, text):
                    refused.append(text)
                    assert refuses(Settings.parse, text), text
                elif value.isdecimal() or value in ("0.5", "True"):
                    assert not refuses(Settings.parse, text) or "." in value, text
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert len(refused) > len(values)
