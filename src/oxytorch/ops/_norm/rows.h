// The arithmetic that the normalizations share. Included by kernel.cpp files only.
#pragma once

#include "core/vec.h"
#include "ops/_norm/args.h"

namespace oxytorch::OXY_LEVEL {

// Between its two sweeps a row is kept in float32 with weight and bias beside it while they fit
// into the first-level cache; a wider row of a sum is kept in its own dtype.
inline constexpr std::int64_t kWideRow = 2 << 10;
inline constexpr std::int64_t kKeptRow = 16 << 10;

// Rows up to this many bytes are asked for into the first-level cache, larger ones into the second.
inline constexpr std::int64_t kNearRow = 3 << 10;

// A row's values v, of which v - shift are looked at, have the mean shift + mean.
struct Moments {
  float shift;
  float mean;
  float inverse;
};

// The first sweep. read(i, count) gives values of the row less `shift`, and zero beyond its end.
//
// The shift is the mean of the first vector: sums of distances from it lose no digits where the
// row's values lie close together. Where it turns out to lie far from the mean of the row, again(i,
// count) is summed around that.
template <bool centered, class Read, class Again>
OXY_INLINE Moments moments(std::int64_t width, float eps, float shift, Read read, Again again) {
  const auto n = static_cast<float>(width);
  f32v total[4] = {};
  f32v squares[4] = {};
  sweep_in_chains(width, [&](std::int64_t i, auto count, int chain) {
    const f32v v = read(i, count);
    if (centered) total[chain] += v;
    squares[chain] += v * v;
  });
  float mean = centered ? sum(total) / n : 0.0f;
  float variance = sum(squares) / n - mean * mean;
  if (centered && mean * mean > variance) {
    f32v rest[4] = {};
    f32v rest_squares[4] = {};
    const float further = mean;
    sweep_in_chains(width, [&](std::int64_t i, auto count, int chain) {
      const f32v v = fill_tail(again(i, count) - further, count, 0.0f);
      rest[chain] += v;
      rest_squares[chain] += v * v;
    });
    const float correction = sum(rest) / n;
    mean = further + correction;
    variance = sum(rest_squares) / n - correction * correction;
  }
  return {shift, mean, 1.0f / __builtin_sqrtf(variance + eps)};
}

// The second sweep: row(i, count) are the values less the shift. When streaming, asks for the next
// rows meanwhile.
template <bool centered, class Row, class T, class Weight>
OXY_INLINE void normalize(const NormArgs& args, const Moments& found, Row row, T* out,
                          const Weight* weight, const Weight* bias, const T* next_x,
                          const T* next_residual) {
  const std::int64_t width = args.width;
  const f32v mean = splat(found.mean);
  const f32v inverse = splat(found.inverse);
  const auto normed = [&](std::int64_t i, auto count) {
    f32v v = row(i, count);
    if (centered) v -= mean;
    v *= inverse;
    if (weight) v *= load(weight + i, count);
    if (bias) v += load(bias + i, count);
    return v;
  };
  if (args.stream && width % kLanes == 0 && is_aligned(out, kLanes * sizeof(T))) {
    const auto streamed = [&](auto ask) {
      for (std::int64_t i = 0; i < width; i += kLanes) {
        ask(next_x + i);
        if (next_residual) ask(next_residual + i);
        stream(out + i, normed(i, Whole{}));
      }
    };
    if (width * std::int64_t{sizeof(T)} <= kNearRow) {
      streamed([](const T* p) { __builtin_prefetch(p, 0, 3); });
    } else {
      streamed([](const T* p) { __builtin_prefetch(p, 0, 2); });
    }
  } else {
    sweep(0, width, [&](std::int64_t i, auto count) { store(out + i, normed(i, count), count); });
  }
}

// Weight or bias in float32, copied to `copy` unless it is that already; null for null.
OXY_INLINE const float* widened(const float* weight, float*, std::int64_t) { return weight; }

template <class Weight>
OXY_INLINE const float* widened(const Weight* weight, float* copy, std::int64_t width) {
  if (!weight) return nullptr;
  sweep(0, width,
        [&](std::int64_t i, auto count) { store(copy + i, load(weight + i, count), count); });
  return copy;
}

template <bool centered, bool added, class T, class Weight>
static void norm_rows(const NormArgs& args, std::int64_t begin, std::int64_t end) {
  constexpr bool widens = !__is_same(T, float);
  alignas(64) float wide_row[added || widens ? kWideRow : 1];
  alignas(64) float wide_weight[widens ? kWideRow : 1];
  alignas(64) float wide_bias[widens ? kWideRow : 1];
  alignas(64) T own_row[added ? kKeptRow : 1];
  const std::int64_t width = args.width;
  if (width == 0) return;
  const auto* weight = static_cast<const Weight*>(args.weight);
  const auto* bias = static_cast<const Weight*>(args.bias);
  const bool is_wide = (added || widens) && width <= kWideRow;
  const float* weight32 = is_wide ? widened(weight, wide_weight, width) : nullptr;
  const float* bias32 = is_wide ? widened(bias, wide_bias, width) : nullptr;

  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    const T* residual =
        added ? static_cast<const T*>(args.residual) + row * args.residual_stride : nullptr;
    T* out = static_cast<T*>(args.out) + row * width;
    T* total = args.total ? static_cast<T*>(args.total) + row * width : nullptr;
    const bool streaming =
        args.stream && total && width % kLanes == 0 && is_aligned(total, kLanes * sizeof(T));
    const auto value = [&](std::int64_t i, auto count) {
      if constexpr (added) {
        return rounded(load(x + i, count) + load(residual + i, count), T{});
      } else {
        return load(x + i, count);
      }
    };
    const auto put_total = [&](std::int64_t i, f32v v, auto count) {
      if constexpr (__is_same(decltype(count), Whole)) {
        if (streaming) return stream(total + i, v);
      }
      if (added && total) store(total + i, v, count);
    };
    float shift = 0.0f;
    if (centered) {
      shift = width < kLanes
                  ? sum(fill_tail(value(0, width), width, 0.0f)) / static_cast<float>(width)
                  : sum(value(0, Whole{})) / kLanes;
    }
    const auto shifted = [&](f32v v, auto count) {
      return centered ? fill_tail(v - shift, count, 0.0f) : v;
    };
    const T* next_x = x + args.x_stride;
    const T* next_residual = added ? residual + args.residual_stride : nullptr;
    if (is_wide) {
      const auto first = [&](std::int64_t i, auto count) {
        const f32v v = value(i, count);
        put_total(i, v, count);
        const f32v distance = shifted(v, count);
        store(wide_row + i, distance, count);
        return distance;
      };
      const auto again = [&](std::int64_t i, auto count) { return load(wide_row + i, count); };
      const Moments found = moments<centered>(width, args.eps, shift, first, again);
      normalize<centered>(args, found, again, out, weight32, bias32, next_x, next_residual);
    } else {
      // A sum that is too wide to be kept apart is kept where it is wanted, or in place of the
      // result.
      T* sums = width <= kKeptRow ? own_row : total ? total : out;
      const T* source = added ? sums : x;
      const auto first = [&](std::int64_t i, auto count) {
        const f32v v = value(i, count);
        if (added) {
          store(sums + i, v, count);
          if (sums != total) put_total(i, v, count);
        }
        return shifted(v, count);
      };
      const auto again = [&](std::int64_t i, auto count) {
        const f32v v = load(source + i, count);
        return centered ? v - shift : v;
      };
      const Moments found = moments<centered>(width, args.eps, shift, first, again);
      normalize<centered>(args, found, again, out, weight, bias, next_x, next_residual);
    }
  }
  if (args.stream) stream_end();
}

template <bool centered, bool added>
static void norm(const NormArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    if (args.weight_dtype == DType::float32) {
      norm_rows<centered, added, T, float>(args, begin, end);
    } else {
      norm_rows<centered, added, T, T>(args, begin, end);
    }
  });
}

}  // namespace oxytorch::OXY_LEVEL
