// Convolutions as products: the rows are windows of images, which a thread writes side by side just
// before it multiplies them.
#pragma once

#include "ops/_windows/args.h"
#include "ops/panels/gemm_args.h"

namespace oxytorch {

// What lies in one piece both in an image and in the row of a window.
struct WindowStretch {
  std::int64_t from;  // elements after the window's first one
  std::int64_t to;    // elements after the row's start
  std::int64_t count;
};

// Items are parts of the work, one for a thread. A part takes neighbouring ones of groups times
// chunks of `chunk_rows` rows times ranges of `range_panels` panels, ranges of a chunk first: it
// writes the chunk's windows into its own scratch and multiplies them with the ranges' panels.
struct WindowGemmArgs {
  WindowArgs windows;
  const WindowStretch* stretches;  // of a window that lies within the image
  std::int64_t stretch_count;
  PreparedRows prepared;  // of a chunk, in the scratch of the first part
  std::int64_t scratch_bytes;
  PanelsArgs weight;  // of the first group; those of all groups follow each other
  PanelResultArgs result;
  std::int64_t rows;
  std::int64_t groups;
  std::int64_t chunk_rows;
  std::int64_t chunks;
  std::int64_t range_panels;
  std::int64_t ranges;
  std::int64_t parts;
};

// As WindowGemmArgs, but what a thread writes are the lines of the images that a chunk's windows
// cover, with the zeros around them: neighbouring windows overlap there.
//
// Memory of a chunk: of tiles [blocks of channels, planes, phases, lines, columns, channels of a
// block], else [planes, phases, lines, columns, channels]; with a stride of 2 the second phase has
// every other line. Row r of the product begins at column r * stride; of each line's columns /
// stride rows the first `out_columns` are results.
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
  std::int64_t block;         // channels of a block of tiles
  std::int64_t lines;         // of a chunk's results
  std::int64_t out_columns;   // likewise
  std::int64_t columns;       // of a line in memory
  std::int64_t phase_lines;   // lines of a phase in memory
  const std::int32_t* steps;  // of tiles: bytes from a row's start to each step along the sum
  std::int64_t range_panels;
  std::int64_t parts;
};

}  // namespace oxytorch
