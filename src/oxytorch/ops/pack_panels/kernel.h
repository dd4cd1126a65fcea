#pragma once

#include "ops/panels/args.h"

namespace oxytorch {

// Items are panels. Values are [out_features, in_features]: float32, bfloat16, or codes of a byte.
struct PackPanelsArgs {
  std::uint8_t* values;
  std::uint8_t* panels;
  std::int64_t out_features;
  std::int64_t in_features;
  std::int64_t panel_count;
  std::int64_t panel_bytes;
  PanelCodec codec;
  bool gated;  // panels alternate between the upper and the lower half of the outputs
};

}  // namespace oxytorch

OXY_KERNEL(pack_panels, PackPanelsArgs)
OXY_KERNEL_OF(pack_panels, unpack_panels, PackPanelsArgs)
