#pragma once

#include "core/dispatch.h"
#include "ops/panels/args.h"
#include "ops/windows/args.h"

namespace oxytorch {

// Lines of a kernel, all dimensions but the last taken together.
inline constexpr std::int64_t kMostKernelLines = 64;

// The least columns of a result in blocks.
inline constexpr std::int64_t kBlockColumns = 7;

// Channels of an item.
inline constexpr std::int64_t kBlockChannels = 64;

// Items are `lines` neighbouring lines of the result times kBlockChannels channels; channels of
// the same lines follow each other.
struct DepthwiseArgs {
  WindowArgs windows;
  const float* weight;     // [*kernel, channels]
  PanelResultArgs result;  // of all channels
  std::int64_t channels;
  std::int64_t lines;
  bool is_square;  // a kernel that blocks of columns are made for
};

}  // namespace oxytorch

OXY_KERNEL_OF(depthwise_convolution, depthwise_convolution, DepthwiseArgs)
