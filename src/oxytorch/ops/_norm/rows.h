// The arithmetic that the normalizations share. Included by kernel.cpp files only.
#pragma once

#include "core/vec.h"
#include "ops/_norm/args.h"

namespace oxytorch::OXY_LEVEL {

// A row of x + residual is kept here between the passes, if it fits.
inline constexpr std::int64_t kNormScratchBytes = 32 << 10;

// Writes round(x + residual) to `kept`, and to `total` unless that is null or `kept` itself.
template <class T>
static void add_row(const T* x, const T* residual, T* kept, T* total, std::int64_t width,
                    bool streaming) {
  const auto added = [&](std::int64_t i, auto count) {
    return load(x + i, count) + load(residual + i, count);
  };
  if (!total || total == kept) {
    sweep(0, width, [&](std::int64_t i, auto count) { store(kept + i, added(i, count), count); });
  } else if (streaming) {
    for (std::int64_t i = 0; i < width; i += kLanes) {
      const f32v v = added(i, Whole{});
      store(kept + i, v);
      stream(total + i, v);
    }
  } else {
    sweep(0, width, [&](std::int64_t i, auto count) {
      const f32v v = added(i, count);
      store(kept + i, v, count);
      store(total + i, v, count);
    });
  }
}

// The mean if `centered`, else zero; and 1 / sqrt(mean((x - mean)^2) + eps).
struct Moments {
  float mean;
  float inverse;
};

template <bool centered, class T>
static Moments moments(const T* x, std::int64_t width, float eps) {
  const auto n = static_cast<float>(width);
  float mean = 0.0f;
  if (centered) {
    mean =
        sum(accumulate(width, [&](std::int64_t i, auto count) { return load(x + i, count); })) / n;
  }
  const f32v centre = splat(mean);
  const float squares = sum(accumulate(width, [&](std::int64_t i, auto count) {
    f32v v = load(x + i, count);
    if (centered) v = fill_tail(v - centre, count, 0.0f);
    return v * v;
  }));
  return {mean, 1.0f / __builtin_sqrtf(squares / n + eps)};
}

template <bool centered, bool added, class T, class Weight>
static void norm_rows(const NormArgs& args, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kScratch = added ? kNormScratchBytes / std::int64_t{sizeof(T)} : 1;
  alignas(64) T scratch[kScratch];
  const std::int64_t width = args.width;
  const auto* weight = static_cast<const Weight*>(args.weight);
  const auto* bias = static_cast<const Weight*>(args.bias);
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* out = static_cast<T*>(args.out) + row * width;
    const bool streaming =
        args.stream && width % kLanes == 0 && is_aligned(out, kLanes * sizeof(T));
    if constexpr (added) {
      const T* residual = static_cast<const T*>(args.residual) + row * args.residual_stride;
      T* total = args.total ? static_cast<T*>(args.total) + row * width : nullptr;
      T* kept = width <= kScratch ? scratch : total ? total : out;
      add_row(x, residual, kept, total, width, streaming && is_aligned(total, kLanes * sizeof(T)));
      x = kept;
    }
    const Moments found = moments<centered>(x, width, args.eps);
    const f32v mean = splat(found.mean);
    const f32v inverse = splat(found.inverse);
    const auto normed = [&](std::int64_t i, auto count) {
      f32v v = load(x + i, count);
      if (centered) v -= mean;
      v *= inverse;
      if (weight) v *= load(weight + i, count);
      if (bias) v += load(bias + i, count);
      return v;
    };
    if (streaming) {
      for (std::int64_t i = 0; i < width; i += kLanes) stream(out + i, normed(i, Whole{}));
    } else {
      sweep(0, width, [&](std::int64_t i, auto count) { store(out + i, normed(i, count), count); });
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
