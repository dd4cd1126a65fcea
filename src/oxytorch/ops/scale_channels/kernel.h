#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// Items are stretches of so many pixels of an image, whose channels lie side by side.
struct ScaleChannelsArgs {
  const void* x;
  const void* factors;  // [images, channels]
  void* out;
  std::int64_t channels;
  std::int64_t pixels;    // of an image
  std::int64_t x_stride;  // elements from a pixel to the next, of the next image too
  std::int64_t stretch;
  DType dtype;
};

}  // namespace oxytorch

OXY_KERNEL(scale_channels, ScaleChannelsArgs)
