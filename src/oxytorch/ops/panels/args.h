// A weight in panels and the result of a product with it, as entries tell kernels.
#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"
#include "core/sizes.h"
#include "oxytorch_panel_tables.h"

namespace oxytorch {

inline constexpr std::int64_t kPanelOutputs = 16;
inline constexpr std::int64_t kPanelRowBytes = 64;
// in_features are padded to a multiple of this.
inline constexpr std::int64_t kPanelDepth = 64;

// How a kernel reads the numbers of a weight; formats are more than codecs. ops/panels/layout.py
// tells the order within a panel.
enum class PanelCodec : std::int32_t { fp32, bf16, bytes, nibbles, table, float8 };

// Whether the codec gives integers, which have zero points.
constexpr bool is_integer(PanelCodec codec) {
  return codec == PanelCodec::bytes || codec == PanelCodec::nibbles;
}

// Whether another tensor is added to an activation.
constexpr bool is_summed(PanelEpilogue epilogue) {
  return epilogue >= kFirstSummed && epilogue < kFirstGated;
}

constexpr bool adds_other(PanelEpilogue epilogue) {
  return epilogue == PanelEpilogue::add || epilogue == PanelEpilogue::add_relu ||
         is_summed(epilogue);
}

// The epilogue whose code computes this one: all sums of activations have one, which asks for the
// activation while it runs, as that costs little beside what it is followed by.
constexpr PanelEpilogue compiled_as(PanelEpilogue epilogue) {
  return is_summed(epilogue) ? kFirstSummed : epilogue;
}

constexpr bool is_gated(PanelEpilogue epilogue) { return epilogue >= kFirstGated; }

// A weight [out_features, in_features] in panels.
struct PanelsArgs {
  const std::uint8_t* panels;
  const float* channel_scales;      // [padded out_features]; null for fp32 and bf16
  const void* group_scales;         // [panels, groups, 16]; null: one scale per output
  const std::uint8_t* zero_points;  // [panels, groups, 16]; null: `middle`
  const float* table;               // the 16 values of codes of codec table
  std::int64_t panel_count;
  std::int64_t panel_bytes;
  std::int64_t groups;
  std::int64_t out_features;  // of the result: half of the weight's where panels are gated
  std::int32_t middle;
  DType group_dtype;  // of group_scales: float16 or float32
  PanelCodec codec;
};

// Where a result goes: out[row * out_stride + output], of bias[output] and other[row, output].
struct PanelResultArgs {
  void* out;
  const void* bias;   // [out_features]; gated: [2 out_features], the gate's first; or null
  const void* other;  // null unless the epilogue adds it
  std::int64_t out_stride;
  std::int64_t other_stride;
  DType out_dtype;
  DType bias_dtype;
  PanelEpilogue epilogue;
};

}  // namespace oxytorch
