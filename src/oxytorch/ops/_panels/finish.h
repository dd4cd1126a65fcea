// From sums of products to the result: scales, bias, epilogue, rounding.
#pragma once

#include "core/vec.h"
#include "ops/_panels/many_rows_args.h"

namespace oxytorch::OXY_LEVEL {

static void finish_chunk(const MultiplyPanelsArgs& args, std::int64_t first_row, std::int64_t rows,
                         std::int64_t first_panel, std::int64_t panels, const float* sums) {
  with_type(args.result.out_dtype, [&](auto element) {
    using T = decltype(element);
    const std::int64_t first = first_panel * kPanelOutputs;
    const std::int64_t left = args.weight.out_features - first;
    const std::int64_t width = left < panels * kPanelOutputs ? left : panels * kPanelOutputs;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t row = first_row + r;
      const float scale = args.prepared.scales ? args.prepared.scales[row] : 1.0f;
      T* out = static_cast<T*>(args.result.out) + row * args.result.out_stride + first;
      const float* from = sums + r * kItemPanels * kPanelOutputs;
      sweep(0, width, [&](std::int64_t i, auto count) {
        f32v v = load(from + i, count) * scale;
        if (args.weight.channel_scales) v *= load(args.weight.channel_scales + first + i, count);
        store(out + i, v, count);
      });
    }
  });
}

}  // namespace oxytorch::OXY_LEVEL
