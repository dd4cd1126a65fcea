#pragma once

#include "core/dispatch.h"
#include "ops/_windows/args.h"
#include "ops/panels/args.h"

namespace oxytorch {

// Lines of a kernel, all dimensions but the last taken together.
inline constexpr std::int64_t kMostKernelLines = 64;

// Items are lines of the result times blocks of `block` channels; blocks of a line follow each
// other.
struct DepthwiseArgs {
  WindowArgs windows;
  const float* weight;     // [*kernel, channels]
  PanelResultArgs result;  // of all channels
  std::int64_t channels;
  std::int64_t block;
};

}  // namespace oxytorch

OXY_KERNEL_OF(depthwise_convolution, depthwise_convolution, DepthwiseArgs)
