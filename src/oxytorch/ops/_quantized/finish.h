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
  bool fit;  // rows have no scales, and results, as steps of bytes, are known to be below 2^30
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
  bool fit = false;  // as in ByteOutputs
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

// In place of a type: `other` is of `other_number`, which each vector asks for.
struct AnyNumber {};

// What is added from other[at] on.
template <class T, class Count>
OXY_INLINE f32v load_other(const ByteResult& result, std::int64_t at, Count count) {
  if constexpr (__is_same(T, AnyNumber)) {
    f32v v{};
    with_number(result.other_number,
                [&](auto number) { v = load_other<decltype(number)>(result, at, count); });
    return v;
  } else {
    const T* other = static_cast<const T*>(result.other) + at;
    if constexpr (kIsByte<T>) {
      const i32v whole = load_whole(other, count) - result.other_zero_point;
      return product(__builtin_convertvector(whole, f32v), splat(result.other_scale));
    } else {
      return load(other, count);
    }
  }
}

// A result from its scaled sum; `other`: the place of what is added to it.
template <PanelEpilogue epilogue, class Out, class Other, class Count>
OXY_INLINE f32v finished(const ByteResult& result, f32v v, f32v scale, f32v bias,
                         std::int64_t other, Count count) {
  v = product(v, scale) + bias;
  v = activate_in<epilogue>(result.epilogue, v, typename PrecisionOf<Out>::Type{});
  if constexpr (adds_other(epilogue)) {
    v = total(epilogue, v, load_other<Other>(result, other, count));
  }
  return v;
}

OXY_INLINE f32v load_sums(const std::int32_t* sums) {
  return __builtin_convertvector(load_as<i32v>(sums), f32v);
}

#if defined(__AVX512F__)

// Epilogues for which it pays to know that results fit.
constexpr bool is_cheap(PanelEpilogue epilogue) {
  return epilogue == PanelEpilogue::none || epilogue == PanelEpilogue::relu ||
         epilogue == PanelEpilogue::relu6 || epilogue == PanelEpilogue::add ||
         epilogue == PanelEpilogue::add_relu;
}

// `count` neighbouring vectors of rows, which are finished four at a time.
template <PanelEpilogue epilogue, class Out, class Other, int count, bool fit>
struct ByteVectors {
  const Finishing& job;
  const ByteResult& result;
  Steps<Out> steps;
  f32v scales[count], biases[count];
  std::int64_t first;

  OXY_MEMBER ByteVectors(const Finishing& given, const ByteResult& to, std::int64_t at)
      : job(given), result(to), steps(to.inverse_scale, to.zero_point), first(at) {
    for (int i = 0; i < count; ++i) {
      scales[i] = load(job.scales + first + i * kLanes);
      biases[i] = load(job.biases + first + i * kLanes);
    }
  }

  // Row r, and where its vectors are not four others, each `next` rows behind the one before.
  OXY_MEMBER void finish(std::int64_t r, std::int64_t next) const {
    i32v sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const std::int64_t row = r + i / count * next;
      sums[i] = load_as<i32v>(job.sums + row * job.stride + first + i % count * kLanes);
    }
    finish(sums, r, next);
  }

  OXY_MEMBER void finish(const i32v (&sums)[4], std::int64_t r, std::int64_t next) const {
    f32v v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      v[i] = __builtin_convertvector(sums[i], f32v);
      if (!fit && job.row_scales) v[i] *= job.row_scales[r + i / count * next];
    }
    const std::int64_t at = job.output + first, row = job.row + r;
    const std::int64_t other = row * result.other_stride + at;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      v[i] = finished<epilogue, Out, Other>(
          result, v[i], scales[i % count], biases[i % count],
          other + i / count * next * result.other_stride + i % count * kLanes, Whole{});
    }
    const __m512i bytes = steps.template bytes<fit>(v);
    Out* out = static_cast<Out*>(result.out) + row * result.out_stride + at;
    if constexpr (count == 4) {
      std::memcpy(out, &bytes, sizeof bytes);
    } else if constexpr (count == 1) {
      const __m128i each[] = {_mm512_castsi512_si128(bytes), _mm512_extracti32x4_epi32(bytes, 1),
                              _mm512_extracti32x4_epi32(bytes, 2),
                              _mm512_extracti32x4_epi32(bytes, 3)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) std::memcpy(out + i * next * result.out_stride, &each[i], 16);
    } else {
      const __m256i low = _mm512_castsi512_si256(bytes), high = _mm512_extracti64x4_epi64(bytes, 1);
      std::memcpy(out, &low, sizeof low);
      std::memcpy(out + next * result.out_stride, &high, sizeof high);
    }
  }
};

// As many outputs as fill vectors; they are returned.
template <bool fit, PanelEpilogue epilogue, class Out, class Other>
static std::int64_t finish_byte_vectors(const Finishing& job, const ByteResult& result,
                                        std::int64_t begin, std::int64_t end) {
  std::int64_t first = 0;
  for (; first + 4 * kLanes <= job.outputs; first += 4 * kLanes) {
    const ByteVectors<epilogue, Out, Other, 4, fit> four(job, result, first);
    for (std::int64_t r = begin; r < end; ++r) four.finish(r, 0);
  }
  if (first + 2 * kLanes <= job.outputs) {
    const ByteVectors<epilogue, Out, Other, 2, fit> two(job, result, first);
    std::int64_t r = begin;
    for (; r + 2 <= end; r += 2) two.finish(r, 1);
    if (r < end) two.finish(r, 0);
    first += 2 * kLanes;
  }
  if (first + kLanes <= job.outputs && begin + 4 <= end) {
    const ByteVectors<epilogue, Out, Other, 1, fit> one(job, result, first);
    std::int64_t r = begin;
    for (; r + 4 <= end; r += 4) one.finish(r, 1);
    if (r < end) one.finish(end - 4, 1);
    first += kLanes;
  }
  return first;
}

#endif

template <PanelEpilogue epilogue, class Out, class Other>
static void finish_byte_rows(const Finishing& given, std::int64_t begin, std::int64_t end) {
  // Copies, because what is stored below could otherwise be they.
  const Finishing job = given;
  const ByteResult result = *given.result;
  std::int64_t first = 0;
#if defined(__AVX512F__)
  if constexpr (kIsByte<Out>) {
    if (is_cheap(epilogue) && job.fit) {
      first =
          finish_byte_vectors<is_cheap(epilogue), epilogue, Out, Other>(job, result, begin, end);
    } else {
      first = finish_byte_vectors<false, epilogue, Out, Other>(job, result, begin, end);
    }
  }
#endif
  const Steps<Out> steps(result.inverse_scale, result.zero_point);
  sweep(first, job.outputs, [&](std::int64_t i, auto count) {
    const f32v scale = load(job.scales + i), bias = load(job.biases + i);
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t row = job.row + r, at = job.output + i;
      f32v v = load_sums(job.sums + r * job.stride + i);
      if (job.row_scales) v *= job.row_scales[r];
      v = finished<epilogue, Out, Other>(result, v, scale, bias, row * result.other_stride + at,
                                         count);
      Out* to = static_cast<Out*>(result.out) + row * result.out_stride + at;
      if constexpr (kIsByte<Out>) {
        store_byte_lanes(to, steps.bytes(v), count);
      } else {
        store(to, v, count);
      }
    }
  });
}

template <PanelEpilogue epilogue, class Out>
OXY_INLINE FinishRows finish_with_other(const ByteResult& result) {
  if constexpr (!adds_other(epilogue)) {
    return &finish_byte_rows<epilogue, Out, float>;
  } else if constexpr (is_summed(epilogue)) {
    return &finish_byte_rows<epilogue, Out, AnyNumber>;
  } else {
    FinishRows found = nullptr;
    with_number(result.other_number,
                [&](auto other) { found = &finish_byte_rows<epilogue, Out, decltype(other)>; });
    return found;
  }
}

template <int number = 0>
static FinishRows finish_of(const ByteResult& result) {
  constexpr PanelEpilogue epilogue = static_cast<PanelEpilogue>(number);
  if constexpr (compiled_as(epilogue) == epilogue) {
    if (compiled_as(result.epilogue) == epilogue) {
      FinishRows found = nullptr;
      with_number(result.number,
                  [&](auto out) { found = finish_with_other<epilogue, decltype(out)>(result); });
      return found;
    }
  }
  if constexpr (number + 1 < static_cast<int>(kFirstGated)) return finish_of<number + 1>(result);
  return nullptr;
}

// Whether results are known to fit whose sums before other things are added are below `largest`.
static bool are_known_to_fit(const ByteResult& result, float largest) {
  if (adds_other(result.epilogue)) {
    if (!is_byte(result.other_number)) return false;
    largest += 255.0f * result.other_scale;
  }
  return largest * result.inverse_scale < 0x1p29f && result.inverse_scale < 0x1p29f;
}

// `zero_point`: of x as it is multiplied; `scale`: of x, or 1. `depth`: products of a result where
// x has one scale, or 0.
static void read_outputs(const BytePanels& weight, const ByteResult& result, float scale,
                         std::int32_t zero_point, std::int64_t first_panel, std::int64_t panels,
                         ByteOutputs& outputs, std::int64_t depth = 0) {
  const std::int64_t first = first_panel * kPanelOutputs, left = weight.out_features - first;
  const f32v most = splat(255.0f * 128.0f * static_cast<float>(depth));
  u32v largest{};  // as bits, among which those of NaN are the largest
  for (std::int64_t i = 0; i < panels * kPanelOutputs; i += kLanes) {
    const f32v factors = load(weight.scales + first + i) * scale;
    store(outputs.scales + i, factors);
    f32v bias = splat(-0.0f);  // which changes no summand
    if (result.bias && i < left) {
      bias = i + kLanes <= left ? load(result.bias + first + i)
                                : load(result.bias + first + i, left - i);
    }
    store(outputs.biases + i, bias);
    const u32v bits = bits_of(magnitude(magnitude(factors) * most + magnitude(bias)));
    largest = bits > largest ? bits : largest;
    // Unsigned, because only what remains of all sums has to fit.
    const u32v terms =
        load_as<u32v>(weight.sums + first + i) * static_cast<std::uint32_t>(zero_point);
    const u32v starts = u32v{} - terms;
    std::memcpy(outputs.starts + i, &starts, sizeof starts);
  }
  outputs.fit = depth > 0 && are_known_to_fit(result, __builtin_bit_cast(float, maximum(largest)));
}

}  // namespace oxytorch::OXY_LEVEL
