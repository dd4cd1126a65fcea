"""Writes a C++ header with the formats and epilogues of weights in panels.

Their lists are Python's: `ops/panels/formats.py` and `ops/panels/epilogues.py`. The build runs this
when one of them changes.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch

PANELS = Path(__file__).parents[1] / "src" / "oxytorch" / "ops" / "panels"

FLOATS = torch.float8_e4m3fn
"""The floating-point numbers of 8 bits that kernels read."""

HEADER = """\
// Written by tools/write_panel_tables.py from ops/panels/formats.py and ops/panels/epilogues.py.
#pragma once

#include <cstdint>

namespace oxytorch {{

// formats.py says what each field means. Codes without a middle have no zero points; tables of
// fewer than 16 values repeat the last one.
struct PanelFormat {{
  const char* name;
  int bits;
  int stored_bits;
  bool has_middle;
  std::int32_t middle;
  bool searches;
  bool has_floats;
  const float* table;
}};

{tables}inline constexpr PanelFormat kPanelFormats[] = {{
{formats}}};

// Of the numbers of formats with floats.
inline constexpr float kLargestFloat8 = {largest_float};

// in_features that may share a scale.
inline constexpr std::int64_t kGroupSizes[] = {{{group_sizes}}};

// What is done with a product and its bias. Those from kFirstSummed on add to an activation, those
// from kFirstGated on multiply the activation of every other panel with the panel behind it.
enum class PanelEpilogue : std::int32_t {{ {epilogues} }};

inline constexpr const char* kPanelEpilogues[] = {{{names}}};

inline constexpr PanelEpilogue kFirstSummed = PanelEpilogue::{first_summed};
inline constexpr PanelEpilogue kFirstGated = PanelEpilogue::{first_gated};

}}  // namespace oxytorch
"""


def _load(name: str) -> ModuleType:
    """The module alone: the package would want the library that is being built."""
    specification = importlib.util.spec_from_file_location(name, PANELS / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def header() -> str:
    """The text of the header."""
    formats, epilogues = _load("formats"), _load("epilogues")
    names = list(epilogues.ACTIVATIONS)
    kinds = [2 * epilogues.is_gated(name) + epilogues.is_summed(name) for name in names]
    if kinds != sorted(kinds):
        raise ValueError(f"epilogues.py: expected sums of activations and gated ones last: {names}")
    tables, rows = "", ""
    for format in formats.FORMATS.values():
        table = "nullptr"
        if format.table is not None:
            if format.stored_bits != 4 or len(format.table) > 16:
                raise ValueError(f"formats.py: expected a table of 4 bits, got {format.name}")
            table = f"k_{format.name}_table"
            values = [*format.table, *[format.table[-1]] * (16 - len(format.table))]
            floats = _joined(f"{value!r}f" for value in map(float, values))
            tables += f"inline constexpr float {table}[16] = {{{floats}}};\n\n"
        if format.floats not in (None, FLOATS):
            raise ValueError(f"formats.py: expected floats {FLOATS}, got {format.name}")
        has_floats = format.floats is not None
        flags = [
            str(flag).lower() for flag in (format.middle is not None, format.searches, has_floats)
        ]
        cells = format.bits, format.stored_bits, flags[0], format.middle or 0, *flags[1:], table
        rows += f'    {{"{format.name}", {_joined(cells)}}},\n'
    return HEADER.format(
        tables=tables,
        formats=rows,
        largest_float=f"{torch.finfo(FLOATS).max!r}f",
        group_sizes=_joined(formats.GROUP_SIZES),
        epilogues=_joined(names),
        names=_joined(f'"{name}"' for name in names),
        first_summed=names[kinds.index(1)],
        first_gated=names[kinds.index(2)],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    target, text = parser.parse_args().target, header()
    # Untouched where nothing changed: else every kernel that reads it would be compiled again.
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
