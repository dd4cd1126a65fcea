// Rows of x in the order and precision in which they are multiplied.
#pragma once

#include "ops/panels/units.h"

namespace oxytorch::OXY_LEVEL {

OXY_INLINE void put(float* to, f32v v) { store(to, v); }
OXY_INLINE void put(bf16* to, f32v v) { store(to, v); }

OXY_INLINE void put(std::int16_t* to, i32v v) {
  store_raw(to, truncate(reinterpret_cast<u32v>(v) & 0xffff), Whole{});
}

OXY_INLINE void put(std::int8_t* to, i32v v) {
  store_raw(to, truncate_8_bits(reinterpret_cast<u32v>(v) & 0xff), Whole{});
}

OXY_INLINE void put(std::int16_t* to, f32v v) { put(to, __builtin_convertvector(v, i32v)); }
OXY_INLINE void put(std::int8_t* to, f32v v) { put(to, __builtin_convertvector(v, i32v)); }

OXY_INLINE std::int32_t sum_of(i32v v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(v));
#else
  std::int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

// kLanes numbers as they are; after `count` of them zeros.
template <class T>
OXY_INLINE void copy(T* to, const T* from, Whole) {
  std::memcpy(to, from, kLanes * sizeof(T));
}

template <class T>
OXY_INLINE void copy(T* to, const T* from, std::int64_t count) {
  put(to, load(from, count));
}

// The largest integers that stand for the largest magnitude of some numbers.
inline constexpr float kMostByte = 127.0f;
inline constexpr float kMostOfDigits = 16256.0f;

// What the integers are divided by. Numbers below it are taken for zero: the quotient would be
// infinite.
OXY_INLINE float divisor_of(float top) { return top < 0x1p-100f ? 1.0f : top; }

template <class Dot, class T>
static void prepare_row(const PrepareRowsArgs& args, std::int64_t item) {
  using Element = typename Dot::Element;
  const PreparedRows& to = args.prepared;
  const std::int64_t from = args.order ? args.order[item] : item;
  const T* x = static_cast<const T*>(args.x) + from * args.x_stride;
  float divisor = 1.0f;
  if constexpr (Dot::kIsInteger) {
    const float top = largest_magnitude(x, to.in_features);
    to.scales[item] = top / kMostByte;
    divisor = divisor_of(top);
  }
  for (std::int64_t block = 0; block < to.blocks; ++block) {
    const std::int64_t begin = block * to.block;
    const std::int64_t padded = to.depth - begin < to.block ? to.depth - begin : to.block;
    const std::int64_t left = to.in_features - begin;
    Element* values = reinterpret_cast<Element*>(to.values) + (block * to.rows + item) * to.block;
    f32v sums{};
    const auto take = [&](std::int64_t i, auto count) {
      f32v v = load(x + begin + i, count);
      if constexpr (Dot::kIsInteger) {
        // Divided where the reference says which number is the nearest.
        v = nearest(v * kMostByte / divisor);
        sums += v;
      }
      put(values + i, v);
    };
    const std::int64_t width = left < 0 ? 0 : left < padded ? left : padded;
    if constexpr (__is_same(T, Element)) {
      sweep(0, width, [&](std::int64_t i, auto count) { copy(values + i, x + begin + i, count); });
    } else {
      sweep(0, width, take);
    }
    for (std::int64_t i = (width + kLanes - 1) / kLanes * kLanes; i < padded; i += kLanes) {
      put(values + i, f32v{});
    }
    if constexpr (Dot::kIsInteger) {
      to.sums[block * to.rows + item] = static_cast<std::int32_t>(sum(sums));
    }
  }
}

// The digits of integers, as bytes in the lowest bits: multiples of 128, and what is added to them.
OXY_INLINE i32v high_digits(i32v whole) { return (whole + 64) >> 7; }
OXY_INLINE i32v low_digits(i32v whole) { return whole - (high_digits(whole) << 7); }

#if OXY_HAS_INT8_DOT

template <class T>
static void prepare_digits(const PrepareRowsArgs& args, std::int64_t item) {
  const PreparedRows& to = args.prepared;
  const std::int64_t from = args.order ? args.order[item] : item;
  const T* x = static_cast<const T*>(args.x) + from * args.x_stride;
  for (std::int64_t block = 0; block < to.blocks; ++block) {
    const std::int64_t begin = block * to.block, at = block * to.rows + item;
    const std::int64_t padded = to.depth - begin < to.block ? to.depth - begin : to.block;
    const std::int64_t left = to.in_features - begin, width = left < padded ? left : padded;
    auto* low = reinterpret_cast<std::int8_t*>(to.values) + at * to.block;
    auto* high = low + to.digit_bytes;
    const float top = largest_magnitude(x + begin, width);
    const float factor = kMostOfDigits / divisor_of(top);
    i32v total{};
    sweep(0, width, [&](std::int64_t i, auto count) {
      const f32v numbers = nearest(load(x + begin + i, count) * factor);
      const i32v whole = __builtin_convertvector(numbers, i32v);
      total += whole;
      put(low + i, low_digits(whole));
      put(high + i, high_digits(whole));
    });
    for (std::int64_t i = (width + kLanes - 1) / kLanes * kLanes; i < padded; i += kLanes) {
      put(low + i, i32v{});
      put(high + i, i32v{});
    }
    to.block_scales[at] = top / kMostOfDigits;
    to.sums[at] = sum_of(total);
  }
}

#endif

static void prepare_rows(const PrepareRowsArgs& args, std::int64_t begin, std::int64_t end) {
  with_dot(args.prepared.type, [&](auto dot) {
    with_type(args.x_dtype, [&](auto element) {
      using T = decltype(element);
      for (std::int64_t item = begin; item < end; ++item) {
        if constexpr (kDigits<decltype(dot)> == 2) {
          prepare_digits<T>(args, item);
        } else {
          prepare_row<decltype(dot), T>(args, item);
        }
      }
    });
  });
}

}  // namespace oxytorch::OXY_LEVEL
