// From whole sums to the result: scales, bias, epilogue, one rounding.
#pragma once

#include "ops/_quantized/units.h"
#include "ops/panels/activation.h"

namespace oxytorch::OXY_LEVEL {

inline constexpr std::int64_t kItemOutputs = kItemPanels * kPanelOutputs;

// Of the outputs of an item, in the order of its panels.
struct ByteOutputs {
  alignas(64) float scales[kItemOutputs];  // times x's, if all rows have the same
  alignas(64) float biases[kItemOutputs];
  alignas(64) std::int32_t starts[kItemOutputs];  // of sums: what x's zero point adds, negated
};

// Sums of some rows and neighbouring outputs that wait for what becomes of them.
struct Finishing {
  const ByteResult* result;
  const float* scales;      // of the first output
  const float* biases;      // likewise
  const float* row_scales;  // of the first row, or null
  const std::int32_t* sums;
  std::int64_t stride;  // of the sums of rows
  std::int64_t row;     // the first one's place in the result
  std::int64_t output;  // likewise
  std::int64_t outputs;
};

// Finishes rows [begin, end).
using FinishRows = void (*)(const Finishing&, std::int64_t begin, std::int64_t end);

// How an activation is computed whose result is T. A byte is rounded from what float32 gives.
template <class T>
struct PrecisionOf {
  using Type = T;
};
template <>
struct PrecisionOf<std::int8_t> {
  using Type = float;
};
template <>
struct PrecisionOf<std::uint8_t> {
  using Type = float;
};

template <class T, class Count>
OXY_INLINE f32v load_other(const ByteResult& result, std::int64_t at, Count count) {
  const T* other = static_cast<const T*>(result.other) + at;
  if constexpr (kIsByte<T>) {
    const i32v whole = load_whole(other, count) - result.other_zero_point;
    return product(__builtin_convertvector(whole, f32v), splat(result.other_scale));
  } else {
    return load(other, count);
  }
}

template <PanelEpilogue epilogue, class Out, class Other>
static void finish_byte_rows(const Finishing& given, std::int64_t begin, std::int64_t end) {
  // A copy, because what is stored below could otherwise be it.
  const Finishing job = given;
  const ByteResult result = *given.result;
  const Steps<Out> steps(result.inverse_scale, result.zero_point);
  for (std::int64_t r = begin; r < end; ++r) {
    const std::int32_t* sums = job.sums + r * job.stride;
    Out* out = static_cast<Out*>(result.out) + (job.row + r) * result.out_stride + job.output;
    const std::int64_t other = (job.row + r) * result.other_stride + job.output;
    sweep(0, job.outputs, [&](std::int64_t i, auto count) {
      f32v v = __builtin_convertvector(load_as<i32v>(sums + i), f32v);
      if (job.row_scales) v *= job.row_scales[r];
      v = product(v, load(job.scales + i)) + load(job.biases + i);
      v = activate(epilogue, v, typename PrecisionOf<Out>::Type{});
      if constexpr (adds_other(epilogue)) {
        v = total(epilogue, v, load_other<Other>(result, other + i, count));
      }
      if constexpr (kIsByte<Out>) {
        store_byte_lanes(out + i, steps.bytes(v), count);
      } else {
        store(out + i, v, count);
      }
    });
  }
}

template <PanelEpilogue epilogue, class Out>
OXY_INLINE FinishRows finish_with_other(const ByteResult& result) {
  if constexpr (!adds_other(epilogue)) {
    return &finish_byte_rows<epilogue, Out, float>;
  } else {
    FinishRows found = nullptr;
    with_number(result.other_number, [&](auto other) {
      found = &finish_byte_rows<epilogue, Out, decltype(other)>;
    });
    return found;
  }
}

template <int number = 0>
static FinishRows finish_of(const ByteResult& result) {
  constexpr PanelEpilogue epilogue = static_cast<PanelEpilogue>(number);
  if (result.epilogue == epilogue) {
    FinishRows found = nullptr;
    with_number(result.number, [&](auto out) {
      found = finish_with_other<epilogue, decltype(out)>(result);
    });
    return found;
  }
  if constexpr (number + 1 < static_cast<int>(kFirstGated)) return finish_of<number + 1>(result);
  return nullptr;
}

// `zero_point`: of x as it is multiplied; `scale`: of x, or 1.
static void read_outputs(const BytePanels& weight, const ByteResult& result, float scale,
                         std::int32_t zero_point, std::int64_t first_panel, std::int64_t panels,
                         ByteOutputs& outputs) {
  const std::int64_t first = first_panel * kPanelOutputs, left = weight.out_features - first;
  for (std::int64_t i = 0; i < panels * kPanelOutputs; i += kLanes) {
    store(outputs.scales + i, load(weight.scales + first + i) * scale);
    f32v bias = splat(-0.0f);  // which changes no summand
    if (result.bias && i < left) {
      bias = i + kLanes <= left ? load(result.bias + first + i)
                                : load(result.bias + first + i, left - i);
    }
    store(outputs.biases + i, bias);
    // Unsigned, because only what remains of all sums has to fit.
    const u32v terms = load_as<u32v>(weight.sums + first + i) * static_cast<std::uint32_t>(zero_point);
    const u32v starts = u32v{} - terms;
    std::memcpy(outputs.starts + i, &starts, sizeof starts);
  }
}

}  // namespace oxytorch::OXY_LEVEL
