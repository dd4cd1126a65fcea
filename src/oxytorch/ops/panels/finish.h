// From sums of products to the result: scales, bias, epilogue, one rounding.
#pragma once

#include "core/vec.h"
#include "ops/_gated/gelu.h"
#include "ops/panels/gemm_args.h"

namespace oxytorch::OXY_LEVEL {

// The activation of an epilogue, as accurate as a result of type T needs.
template <class T>
OXY_INLINE f32v activate(PanelEpilogue epilogue, f32v v, T) {
  switch (epilogue) {
    case PanelEpilogue::none:
    case PanelEpilogue::add:
      return v;
    case PanelEpilogue::gelu:
    case PanelEpilogue::gelu_mul:
      return gelu(v, T{});
    case PanelEpilogue::gelu_tanh:
    case PanelEpilogue::gelu_tanh_mul:
      return gelu_tanh(v, T{});
    case PanelEpilogue::silu:
    case PanelEpilogue::silu_mul:
      return v * sigmoid(v, T{});
    case PanelEpilogue::relu:
      return v < 0.0f ? f32v{} : v;
    case PanelEpilogue::tanh:
      return hyperbolic_tangent(v, T{});
    case PanelEpilogue::sigmoid:
      return sigmoid(v, T{});
    case PanelEpilogue::hardswish:
      return v * maximum(splat(0.0f), minimum(splat(6.0f), v + 3.0f)) * (1.0f / 6.0f);
  }
  return v;
}

// v + from[i]; nothing where `from` is null.
template <class Count>
OXY_INLINE f32v add_from(f32v v, const void* from, DType dtype, std::int64_t i, Count count) {
  if (!from) return v;
  with_type(dtype, [&](auto element) {
    v += load(static_cast<const decltype(element)*>(from) + i, count);
  });
  return v;
}

// Sums of neighbouring outputs, scaled and with their bias. `channel`: the first one's place in the
// order of the panels; `output`: in the user's order.
template <class Count>
OXY_INLINE f32v scaled(const PanelsArgs& weight, const PanelResultArgs& result, const float* sums,
                       float row_scale, std::int64_t channel, std::int64_t output, Count count) {
  f32v v = load(sums) * row_scale;
  if (weight.channel_scales) v *= load(weight.channel_scales + channel);
  return add_from(v, result.bias, result.bias_dtype, output, count);
}

// Stores outputs `output` and on of row `row`; `up`: the sums that a gated epilogue multiplies
// with.
template <class T, class Count>
OXY_INLINE void finish_outputs(const PanelsArgs& weight, const PanelResultArgs& result,
                               std::int64_t row, float row_scale, std::int64_t channel,
                               std::int64_t output, const float* sums, const float* up,
                               Count count) {
  f32v v = scaled(weight, result, sums, row_scale, channel, output, count);
  v = activate(result.epilogue, v, T{});
  if (is_gated(result.epilogue)) {
    v *= scaled(weight, result, up, row_scale, channel + kPanelOutputs,
                weight.out_features + output, count);
  }
  if (result.epilogue == PanelEpilogue::add) {
    const T* other = static_cast<const T*>(result.other) + row * result.other_stride;
    v += load(other + output, count);
  }
  store(static_cast<T*>(result.out) + row * result.out_stride + output, v, count);
}

template <class T>
static void finish_rows(const GemmProduct& product, std::int64_t first_row, std::int64_t rows,
                        std::int64_t first_panel, std::int64_t panels, const float* sums) {
  const PreparedRows& x = product.prepared;
  const std::int64_t step = is_gated(product.result.epilogue) ? 2 : 1;
  const std::int64_t first = first_panel / step * kPanelOutputs;
  const std::int64_t left = product.weight.out_features - first;
  const std::int64_t most = panels / step * kPanelOutputs;
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t row = first_row + r;
    const float scale = x.scales ? x.scales[x.first + row] : 1.0f;
    const float* from = sums + r * kItemPanels * kPanelOutputs;
    sweep(0, left < most ? left : most, [&](std::int64_t i, auto count) {
      // Panels of a gated weight alternate.
      const std::int64_t at = (i / kPanelOutputs * step) * kPanelOutputs + i % kPanelOutputs;
      finish_outputs<T>(product.weight, product.result, row, scale,
                        first_panel * kPanelOutputs + at, first + i, from + at,
                        from + at + kPanelOutputs, count);
    });
  }
}

static void finish_chunk(const GemmProduct& product, std::int64_t first_row, std::int64_t rows,
                         std::int64_t first_panel, std::int64_t panels, const float* sums) {
  with_type(product.result.out_dtype, [&](auto element) {
    finish_rows<decltype(element)>(product, first_row, rows, first_panel, panels, sums);
  });
}

}  // namespace oxytorch::OXY_LEVEL
