#include "ops/global_norm/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

typedef double f64v __attribute__((vector_size(kVectorBytes)));

// Half of a vector in float64.
OXY_INLINE f64v widen_half(const f32v& v, int half) {
  const auto* p = reinterpret_cast<const char*>(&v) + half * (kVectorBytes / 2);
#if defined(__AVX512F__)
  __m256 part;
  std::memcpy(&part, p, sizeof part);
  return reinterpret_cast<f64v>(_mm512_cvtps_pd(part));
#elif defined(__AVX2__)
  __m128 part;
  std::memcpy(&part, p, sizeof part);
  return reinterpret_cast<f64v>(_mm256_cvtps_pd(part));
#else
  float part[kLanes / 2];
  std::memcpy(part, p, sizeof part);
  f64v result;
  for (int i = 0; i < kLanes / 2; ++i) result[i] = part[i];
  return result;
#endif
}

// 32 sums whatever the level: element i goes to sum i % 32, so that every level gets the same bits.
// Squares are exact in float64.
inline constexpr int kSums = 32;

template <class T>
OXY_INLINE double sum_of_squares(const T* data, std::int64_t count) {
  constexpr int kParts = kSums / kLanes;
  f64v sums[2 * kParts] = {};
  const auto add = [&](const T* p, auto rest, int part) __attribute__((always_inline)) {
    const f32v v = load(p, rest);
    for (int half = 0; half < 2; ++half) {
      const f64v wide = widen_half(v, half);
      sums[2 * part + half] += wide * wide;
    }
  };
  std::int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int part = 0; part < kParts; ++part) add(data + i + part * kLanes, Whole{}, part);
  }
  for (int part = 0; i < count; ++part, i += kLanes) {
    if (count - i >= kLanes) {
      add(data + i, Whole{}, part);
    } else {
      add(data + i, count - i, part);
    }
  }
  double lanes[kSums];
  std::memcpy(lanes, sums, sizeof lanes);
  for (int step = kSums / 2; step > 0; step /= 2) {
    for (int lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
  }
  return lanes[0];
}

static void global_norm(const GlobalNormArgs& args, std::int64_t begin, std::int64_t end) {
  // The last tensor that starts at or before the first item; empty ones have no item.
  std::int64_t low = 0;
  std::int64_t high = args.tensor_count;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (args.tensors[middle].first_item <= begin ? low : high) = middle;
  }
  const NormTensor* tensor = args.tensors + low;
  const NormTensor* last = args.tensors + args.tensor_count - 1;
  for (std::int64_t item = begin; item < end; ++item) {
    while (tensor < last && tensor[1].first_item <= item) ++tensor;
    const std::int64_t offset = (item - tensor->first_item) * kNormBlock;
    const std::int64_t left = tensor->count - offset;
    const std::int64_t count = left < kNormBlock ? left : kNormBlock;
    with_type(tensor->dtype, [&](auto type) {
      const auto* data = static_cast<const decltype(type)*>(tensor->data) + offset;
      args.sums[item] = sum_of_squares(data, count);
    });
  }
}

}  // namespace oxytorch::OXY_LEVEL
