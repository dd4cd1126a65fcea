#include "ops/rms_norm/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

template <class T>
static float mean_square(const T* x, std::int64_t width) {
  f32v total[4] = {};
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) {
      const f32v v = load(x + i + k * kLanes);
      total[k] += v * v;
    }
  }
  sweep(i, width, [&](std::int64_t j, auto count) {
    const f32v v = load(x + j, count);
    total[0] += v * v;
  });
  return sum((total[0] + total[1]) + (total[2] + total[3])) / static_cast<float>(width);
}

template <class T, class Weight>
static void rows(const RmsNormArgs& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t width = args.width;
  const auto* weight = static_cast<const Weight*>(args.weight);
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* out = static_cast<T*>(args.out) + row * width;
    const f32v scale = splat(1.0f / __builtin_sqrtf(mean_square(x, width) + args.eps));
    const auto normed = [&](std::int64_t i, auto count) {
      const f32v v = load(x + i, count) * scale;
      return weight ? v * load(weight + i, count) : v;
    };
    if (args.stream && width % kLanes == 0 && is_aligned(out, kLanes * sizeof(T))) {
      for (std::int64_t i = 0; i < width; i += kLanes) stream(out + i, normed(i, Whole{}));
    } else {
      sweep(0, width, [&](std::int64_t i, auto count) { store(out + i, normed(i, count), count); });
    }
  }
  if (args.stream) stream_end();
}

static void rms_norm(const RmsNormArgs& args, std::int64_t begin, std::int64_t end) {
  const bool wide_weight = args.weight_dtype == DType::float32;
  switch (args.dtype) {
    case DType::float32:
      return rows<float, float>(args, begin, end);
    case DType::bfloat16:
      return wide_weight ? rows<bf16, float>(args, begin, end) : rows<bf16, bf16>(args, begin, end);
    case DType::float16:
      return wide_weight ? rows<f16, float>(args, begin, end) : rows<f16, f16>(args, begin, end);
  }
}

}  // namespace oxytorch::OXY_LEVEL
