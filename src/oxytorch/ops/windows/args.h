// The windows of a convolution, as entries tell kernels.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace oxytorch {

// Spatial dimensions; a convolution of fewer has sizes of 1 before its own.
inline constexpr int kWindowDims = 3;

// Images of fewer channels are read whatever order they lie in.
inline constexpr std::int64_t kFewChannels = 8;

// A convolution along one spatial dimension.
struct WindowDim {
  std::int64_t size;      // of an image
  std::int64_t out_size;  // of the result
  std::int64_t kernel;
  std::int64_t stride;
  std::int64_t padding;  // zeros before the image
  std::int64_t dilation;
  std::int64_t x_stride;  // elements between neighbours of the image
};

struct WindowArgs {
  const void* x;
  std::int64_t image_stride;    // elements
  std::int64_t channel_stride;  // likewise; 1 but where few channels are read
  std::int64_t channels;        // of a group
  WindowDim dims[kWindowDims];
  DType dtype;
};

// The elements of a kernel that lie within an image, from where its first one is put: [begin, end).
struct Inside {
  std::int64_t begin, end;
};

}  // namespace oxytorch
