// Results that are finished in the registers of their sums: those whose activation does no more
// than to keep numbers between two others.
#pragma once

#include "core/pairs.h"
#include "ops/panels/activation.h"

namespace oxytorch::OXY_LEVEL {

// Whether an activation keeps numbers between two others, behind what is added.
OXY_INLINE bool clamps(PanelEpilogue epilogue, float& least, float& most) {
  const bool is_plain = epilogue == PanelEpilogue::none || epilogue == PanelEpilogue::add;
  least = is_plain ? kMinusInfinity : 0.0f;
  most = epilogue == PanelEpilogue::relu6 ? 6.0f : -kMinusInfinity;
  return is_plain || epilogue == PanelEpilogue::relu || epilogue == PanelEpilogue::relu6 ||
         epilogue == PanelEpilogue::add_relu;
}

// NaN stays NaN.
OXY_INLINE f32v clamp(f32v v, float least, float most) {
  return minimum(splat(most), maximum(splat(least), v));
}

// Where the results of a tile go, from its first row and output on.
struct ClampedResults {
  std::uint8_t* out;          // null: they are finished elsewhere
  const std::uint8_t* other;  // which is added, or null
  std::int64_t out_stride;    // bytes from a row to the next
  std::int64_t other_stride;
  const float* bias;
  std::int64_t outputs;  // that there are
  float least, most;

  OXY_MEMBER void skip_rows(std::int64_t rows) {
    if (!out) return;
    out += rows * out_stride;
    if (other) other += rows * other_stride;
  }
  OXY_MEMBER void skip_outputs(std::int64_t count, std::int64_t element_bytes) {
    if (!out) return;
    out += count * element_bytes;
    if (other) other += count * element_bytes;
    bias += count;
    outputs -= count;
  }
};

// The results of rows from `row` on of outputs from `first` on, whose biases are at `bias`, if they
// can be finished like that.
OXY_INLINE ClampedResults clamped_results(const PanelResultArgs& result, std::int64_t row,
                                          std::int64_t first, std::int64_t outputs,
                                          const float* bias) {
  ClampedResults found{};
  if (!clamps(result.epilogue, found.least, found.most)) return found;
  const std::int64_t size = size_of(result.out_dtype);
  found.out_stride = result.out_stride * size;
  found.other_stride = result.other_stride * size;
  found.out = static_cast<std::uint8_t*>(result.out) + row * found.out_stride + first * size;
  if (adds_other(result.epilogue)) {
    found.other =
        static_cast<const std::uint8_t*>(result.other) + row * found.other_stride + first * size;
  }
  found.bias = bias;
  found.outputs = outputs - first;
  return found;
}

// Stores a tile of sums as numbers of type T.
template <class T, int rows, int vectors>
OXY_INLINE void store_clamped(const ClampedResults& given, const f32v (&sums)[rows][vectors]) {
  const ClampedResults to = given;
  const auto finished = [&](int r, int v, auto count) __attribute__((always_inline)) {
    f32v value = sums[r][v] + load(to.bias + v * kLanes);
    if (to.other) {
      value += load(reinterpret_cast<const T*>(to.other + r * to.other_stride) + v * kLanes, count);
    }
    return clamp(value, to.least, to.most);
  };
  const auto at = [&](int r, int v) __attribute__((always_inline)) {
    return reinterpret_cast<T*>(to.out + r * to.out_stride) + v * kLanes;
  };
  if (to.outputs >= vectors * kLanes) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v + 1 < vectors; v += 2) {
        store_pair(at(r, v), finished(r, v, Whole{}), finished(r, v + 1, Whole{}));
      }
      if constexpr (vectors % 2 == 1) {
        store(at(r, vectors - 1), finished(r, vectors - 1, Whole{}));
      }
    }
    return;
  }
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    const std::int64_t left = to.outputs - v * kLanes;
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      if (left >= kLanes) {
        store(at(r, v), finished(r, v, Whole{}));
      } else if (left > 0) {
        store(at(r, v), finished(r, v, left), left);
      }
    }
  }
}

}  // namespace oxytorch::OXY_LEVEL
