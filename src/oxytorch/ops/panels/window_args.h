// Convolutions as products, whose rows are windows of images.
#pragma once

#include "ops/panels/gemm_args.h"
#include "ops/windows/args.h"

namespace oxytorch {

// Items are parts of the work, one for a thread. A part takes neighbouring ones of groups times
// chunks of results times ranges of `range_panels` panels, ranges of a chunk first: it writes the
// lines of the images that the chunk's windows cover, with the zeros around them, into its own
// scratch, and multiplies them with the ranges' panels. A row of the product begins where its
// window does; neighbouring rows overlap.
//
// Memory of a chunk: [blocks of channels, planes, phases, lines, columns, channels of a block];
// with a stride of 2 the second phase has every other line. Without tiles there is one block.
struct LineGemmArgs {
  WindowArgs windows;
  std::uint8_t* scratch;  // of the first part
  std::int64_t scratch_bytes;
  RowType type;
  bool in_tiles;
  PanelsArgs weight;  // of the first group; those of all groups follow each other
  PanelResultArgs result;
  std::int64_t images;
  std::int64_t groups;
  std::int64_t channels;      // in memory, at least those of a group
  std::int64_t block;         // of these channels
  std::int64_t lines;         // of a chunk's results
  std::int64_t out_columns;   // likewise
  std::int64_t columns;       // of a line in memory
  std::int64_t phase_lines;   // lines of a phase in memory
  const std::int32_t* steps;  // of tiles: bytes from a row's start to each step along the sum
  std::int64_t step_units;    // of tiles
  std::int64_t range_panels;
  std::int64_t parts;
};

}  // namespace oxytorch
