// From sums of products to the result: scales, bias, epilogue, one rounding.
#pragma once

#include "core/pairs.h"
#include "ops/panels/activation.h"
#include "ops/panels/blocks.h"
#include "ops/panels/gemm_args.h"

namespace oxytorch::OXY_LEVEL {

// Sums of neighbouring outputs, scaled and with their bias. `channel`: the first one's place in the
// order of the panels; `output`: in the user's order.
template <class Count>
OXY_INLINE f32v scaled(const PanelsArgs& weight, const PanelResultArgs& result, const float* sums,
                       float row_scale, std::int64_t channel, std::int64_t output, Count count) {
  const f32v v = load(sums) * row_scale;
  const f32v bias = add_from(splat(-0.0f), result.bias, result.bias_dtype, output, count);
  if (!weight.channel_scales) return v + bias;
  return multiply_add(v, load(weight.channel_scales + channel), bias);
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
  if (adds_other(result.epilogue)) {
    const T* other = static_cast<const T*>(result.other) + row * result.other_stride;
    v = total(result.epilogue, v, load(other + output, count));
  }
  store(static_cast<T*>(result.out) + row * result.out_stride + output, v, count);
}

// Factors and summands of an item's outputs, in the order of its panels.
struct OutputNumbers {
  bool has_scales;
  alignas(64) float scales[kItemOutputs];  // if there are any
  alignas(64) float biases[kItemOutputs];
};

static void read_numbers(const PanelsArgs& weight, const PanelResultArgs& result,
                         std::int64_t first_panel, std::int64_t panels, OutputNumbers& numbers) {
  const bool gated = is_gated(result.epilogue);
  numbers.has_scales = weight.channel_scales != nullptr;
  for (std::int64_t p = 0; p < panels; ++p) {
    const std::int64_t panel = first_panel + p;
    const std::int64_t first = (gated ? panel / 2 : panel) * kPanelOutputs;
    const std::int64_t output = first + (gated && panel % 2 ? weight.out_features : 0);
    const std::int64_t left = weight.out_features - first;
    for (std::int64_t i = 0; i < kPanelOutputs; ++i) {
      const std::int64_t at = p * kPanelOutputs + i;
      if (numbers.has_scales) {
        numbers.scales[at] = weight.channel_scales[panel * kPanelOutputs + i];
      }
      numbers.biases[at] = -0.0f;  // which changes no summand
    }
    sweep(0, left < kPanelOutputs ? left : kPanelOutputs, [&](std::int64_t i, auto count) {
      const f32v bias = add_from(splat(-0.0f), result.bias, result.bias_dtype, output + i, count);
      store(numbers.biases + p * kPanelOutputs + i, bias, count);
    });
  }
}

// Sums of some rows times some panels, that is what is to be finished: rows and panels count from
// the first one of the product.
struct SumsBlock {
  std::int64_t first_row;
  std::int64_t rows;
  std::int64_t first_panel;
  std::int64_t panels;
  const float* sums;  // rows are kItemOutputs apart
};

// numbers: of an item that begins with panel `numbers_from`.
template <PanelEpilogue epilogue, bool has_scales, class T>
static void finish_rows(const GemmProduct& product, const SumsBlock& block,
                        const OutputNumbers& numbers, std::int64_t numbers_from) {
  const PanelResultArgs& result = product.result;
  constexpr std::int64_t kStep = is_gated(epilogue) ? 2 : 1;  // panels of a gated weight alternate
  const std::int64_t first = block.first_panel / kStep * kPanelOutputs;
  const std::int64_t left = product.weight.out_features - first;
  const std::int64_t most = block.panels / kStep * kPanelOutputs;
  const std::int64_t count = left < most ? left : most;
  const std::int64_t offset = (block.first_panel - numbers_from) * kPanelOutputs;
  const std::int64_t stride = result.out_stride, other_stride = result.other_stride;
  const std::int64_t rows = block.rows;
  T* const out = static_cast<T*>(result.out) + block.first_row * stride + first;
  const T* const other =
      static_cast<const T*>(result.other) + block.first_row * other_stride + first;
  // Sums, scales and biases are in the panels' order. Pointers, and no vectors that a closure would
  // hold: it would be copied by way of memory.
  const float *const sums = block.sums, *const scales = numbers.scales + offset;
  const float *const biases = numbers.biases + offset, *row_scales = nullptr;
  const PanelEpilogue given = result.epilogue;
  if constexpr (has_scales) {
    const PreparedRows& x = product.prepared;
    if (x.scales) row_scales = x.scales + x.first + block.first_row;
  }
  const auto finished_sum = [=](std::int64_t row, std::int64_t at) __attribute__((always_inline)) {
    f32v v = load(sums + row * kItemOutputs + at);
    if constexpr (has_scales) {
      if (row_scales) v *= row_scales[row];
      return multiply_add(v, load(scales + at), load(biases + at));
    }
    return v + load(biases + at);
  };
  const auto outputs = [=](std::int64_t row, std::int64_t i,
                           auto lanes) __attribute__((always_inline)) {
    const std::int64_t at = i / kPanelOutputs * kStep * kPanelOutputs + i % kPanelOutputs;
    f32v v = activate_in<epilogue>(given, finished_sum(row, at), T{});
    if constexpr (is_gated(epilogue)) v *= finished_sum(row, at + kPanelOutputs);
    if constexpr (adds_other(epilogue)) {
      v = total(epilogue, v, load(other + row * other_stride + i, lanes));
    }
    return v;
  };
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    for (std::int64_t r = 0; r < rows; ++r) {
      store_pair(out + r * stride + i, outputs(r, i, Whole{}), outputs(r, i + kLanes, Whole{}));
    }
  }
  sweep(i, count, [&](std::int64_t at, auto lanes) {
    for (std::int64_t r = 0; r < rows; ++r)
      store(out + r * stride + at, outputs(r, at, lanes), lanes);
  });
}

template <PanelEpilogue epilogue>
struct EpilogueConstant {
  static constexpr PanelEpilogue value = epilogue;
};

// Calls body(EpilogueConstant<compiled_as(epilogue)>{}).
template <int number = 0, class Body>
OXY_INLINE void with_epilogue(PanelEpilogue epilogue, Body body) {
  using Constant = EpilogueConstant<static_cast<PanelEpilogue>(number)>;
  if constexpr (compiled_as(Constant::value) == Constant::value) {
    if (compiled_as(epilogue) == Constant::value) return body(Constant{});
  }
  constexpr int kCount = sizeof(kPanelEpilogues) / sizeof(kPanelEpilogues[0]);
  if constexpr (number + 1 < kCount) with_epilogue<number + 1>(epilogue, body);
}

// Results of bfloat16 that vectors finish with their sums, from a row and a panel on. numbers: of
// an item that begins with that panel.
template <class Dot>
OXY_INLINE ClampedResults clamped_results_of(const GemmProduct& product, std::int64_t row,
                                             std::int64_t panel, const OutputNumbers& numbers) {
  const bool is_clamped = !Dot::kIsInteger && Dot::kDepth == 2 && !numbers.has_scales &&
                          product.result.out_dtype == DType::bfloat16;
  if (!is_clamped) return {};
  return clamped_results(product.result, row, panel * kPanelOutputs, product.weight.out_features,
                         numbers.biases);
}

// What finishes blocks of a product.
using FinishRows = void (*)(const GemmProduct&, const SumsBlock&, const OutputNumbers&,
                            std::int64_t);

static FinishRows finish_of(const PanelResultArgs& result, bool has_scales) {
  FinishRows found = nullptr;
  with_type(result.out_dtype, [&](auto element) {
    with_epilogue(result.epilogue, [&](auto epilogue) {
      constexpr PanelEpilogue kEpilogue = decltype(epilogue)::value;
      using T = decltype(element);
      found = has_scales ? finish_rows<kEpilogue, true, T> : finish_rows<kEpilogue, false, T>;
    });
  });
  return found;
}

// Asks for the lines of rows that results are written to, and of what is added to them: stores wait
// for lines that other threads or the last cache have.
static void ask_for_results(const GemmProduct& product, std::int64_t first_row, std::int64_t rows,
                            std::int64_t first_panel, std::int64_t panels) {
  const PanelResultArgs& result = product.result;
  const std::int64_t step = is_gated(result.epilogue) ? 2 : 1, size = size_of(result.out_dtype);
  const std::int64_t first = first_panel / step * kPanelOutputs;
  const std::int64_t left = product.weight.out_features - first;
  const std::int64_t most = panels / step * kPanelOutputs;
  const std::int64_t bytes = (left < most ? left : most) * size;
  for (std::int64_t row = first_row; row < first_row + rows; ++row) {
    const auto* out = static_cast<const std::uint8_t*>(result.out);
    const auto* other = static_cast<const std::uint8_t*>(result.other);
    out += (row * result.out_stride + first) * size;
    other += (row * result.other_stride + first) * size;
    for (std::int64_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(out + i, 1);
      if (adds_other(result.epilogue)) __builtin_prefetch(other + i);
    }
  }
}

// Finishes blocks of a chunk, whose rows and panels count from those of the chunk.
struct ChunkFinish {
  const GemmProduct& product;
  const OutputNumbers& numbers;
  std::int64_t first_row, first_panel;
  FinishRows finish = finish_of(product.result, numbers.has_scales);

  OXY_MEMBER void operator()(std::int64_t panel, std::int64_t panels, std::int64_t row,
                             std::int64_t rows, const float* sums) const {
    finish(product, {first_row + row, rows, first_panel + panel, panels, sums}, numbers,
           first_panel);
  }
  OXY_MEMBER void ask(std::int64_t panel, std::int64_t panels, std::int64_t row,
                      std::int64_t rows) const {
    ask_for_results(product, first_row + row, rows, first_panel + panel, panels);
  }
};

}  // namespace oxytorch::OXY_LEVEL
