// Rows of x in the order and precision in which they are multiplied.
#pragma once

#include "ops/panels/units.h"

namespace oxytorch::OXY_LEVEL {

OXY_INLINE void put(float* to, f32v v) { store(to, v); }
OXY_INLINE void put(bf16* to, f32v v) { store(to, v); }

OXY_INLINE void put(std::int16_t* to, f32v v) {
  const u32v bits = reinterpret_cast<u32v>(__builtin_convertvector(v, i32v));
  store_raw(to, truncate(bits & 0xffff), Whole{});
}

OXY_INLINE void put(std::int8_t* to, f32v v) {
  const u32v bits = reinterpret_cast<u32v>(__builtin_convertvector(v, i32v));
  store_raw(to, truncate_8_bits(bits & 0xff), Whole{});
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

template <class Dot, class T>
static void prepare_row(const PrepareRowsArgs& args, std::int64_t item) {
  using Element = typename Dot::Element;
  const PreparedRows& to = args.prepared;
  const std::int64_t from = args.order ? args.order[item] : item;
  const T* x = static_cast<const T*>(args.x) + from * args.x_stride;
  constexpr float kMost = 127.0f;
  // A row of smaller numbers is taken for zero.
  constexpr float kLeast = 0x1p-100f;
  float divisor = 1.0f;
  if constexpr (Dot::kIsInteger) {
    const float top = largest_magnitude(x, to.in_features);
    to.scales[item] = top / kMost;
    divisor = top < kLeast ? 1.0f : top;
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
        v = nearest(v * kMost / divisor);
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

static void prepare_rows(const PrepareRowsArgs& args, std::int64_t begin, std::int64_t end) {
  with_dot(args.prepared.type, [&](auto dot) {
    with_type(args.x_dtype, [&](auto element) {
      for (std::int64_t item = begin; item < end; ++item) {
        prepare_row<decltype(dot), decltype(element)>(args, item);
      }
    });
  });
}

}  // namespace oxytorch::OXY_LEVEL
