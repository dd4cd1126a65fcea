// Lines of images in the memory of a chunk, and where the positions of a kernel lie there.
#pragma once

#include "ops/windows/args.h"

namespace oxytorch {

#define OXY_BOTH static inline __attribute__((always_inline))

// Every `stride`th line follows another one; the rest are phases of their own.
OXY_BOTH std::int64_t phases_of(const WindowDim& dim) { return dim.kernel == 1 ? 1 : dim.stride; }

// Lines of a phase that kernels which begin at `lines` neighbouring results cover.
OXY_BOTH std::int64_t phase_lines_of(const WindowDim& dim, std::int64_t lines) {
  return lines + (dim.kernel - 1) * dim.dilation / dim.stride;
}

// Elements along the sum that lie side by side, where all channels of a pixel do.
OXY_BOTH std::int64_t run_of(const WindowDim& last, std::int64_t channels) {
  return channels * (last.dilation == 1 ? last.kernel : 1);
}

// Calls body(pixel) for each position of a kernel, or where `by_lines` for the first one of each
// line: its place in a chunk of [planes, phases, phase_lines, columns], from a window's start on.
template <class Body>
OXY_BOTH void each_position(const WindowDim* dims, std::int64_t phase_lines, std::int64_t columns,
                            bool by_lines, Body body) {
  const WindowDim &outer = dims[0], &inner = dims[1], &last = dims[2];
  for (std::int64_t p = 0; p < outer.kernel; ++p) {
    for (std::int64_t i = 0; i < inner.kernel; ++i) {
      const std::int64_t down = i * inner.dilation;
      const std::int64_t line =
          (p * phases_of(inner) + down % inner.stride) * phase_lines + down / inner.stride;
      for (std::int64_t j = 0; j < last.kernel; j += by_lines ? last.kernel : 1) {
        body(line * columns + j * last.dilation);
      }
    }
  }
}

#undef OXY_BOTH

}  // namespace oxytorch
