// Convolutions as products: the rows are windows of images, which a thread writes side by side just
// before it multiplies them.
#pragma once

#include "ops/_windows/args.h"
#include "ops/panels/gemm_args.h"

namespace oxytorch {

// Items are parts of the work, one for a thread. A part takes neighbouring ones of groups times
// chunks of `chunk_rows` rows times ranges of `range_panels` panels, ranges of a chunk first: it
// writes the chunk's windows into its own scratch and multiplies them with the ranges' panels.
struct WindowGemmArgs {
  WindowArgs windows;
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

}  // namespace oxytorch
