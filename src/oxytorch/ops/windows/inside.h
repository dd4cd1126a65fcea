// Where a kernel lies within an image.
#pragma once

#include "core/vec.h"
#include "ops/windows/args.h"

namespace oxytorch::OXY_LEVEL {

// `first`: where the kernel's first element is put.
OXY_INLINE Inside inside(const WindowDim& dim, std::int64_t first) {
  if (dim.dilation == 1) {  // divisions take their time
    const std::int64_t before = first < 0 ? -first : 0, room = dim.size - first;
    const std::int64_t end = room < dim.kernel ? (room > 0 ? room : 0) : dim.kernel;
    return {before < end ? before : end, end};
  }
  const std::int64_t before = first < 0 ? (-first + dim.dilation - 1) / dim.dilation : 0;
  const std::int64_t room = dim.size - first;
  const std::int64_t fits = room > 0 ? (room + dim.dilation - 1) / dim.dilation : 0;
  const std::int64_t end = fits < dim.kernel ? fits : dim.kernel;
  return {before < end ? before : end, end};
}

}  // namespace oxytorch::OXY_LEVEL
