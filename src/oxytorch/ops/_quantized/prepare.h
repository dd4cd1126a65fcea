// Rows of x as bytes are multiplied at a level, and tensors to bytes and back.
#pragma once

#include "ops/_quantized/units.h"

namespace oxytorch::OXY_LEVEL {

// Numbers in memory as `bytes` says.
OXY_INLINE void put_whole(std::uint8_t* row, std::int64_t i, i32v v, bool in_pairs) {
  if (in_pairs) {
    const u16v numbers = truncate(reinterpret_cast<u32v>(v) & 0xffff);
    std::memcpy(row + 2 * i, &numbers, sizeof numbers);
  } else {
    const u8v bytes = lowest_bytes(v);
    std::memcpy(row + i, &bytes, sizeof bytes);
  }
}

template <class T>
static void prepare_row_of_bytes(const PrepareBytesArgs& args, std::int64_t item) {
  const T* x = static_cast<const T*>(args.x) + item * args.x_stride;
  std::uint8_t* to = args.values + item * args.row_bytes;
  const bool in_pairs = args.bytes == Bytes::pairs;
  const std::int64_t width = args.in_features;
  i32v added{};
  if constexpr (kIsByte<T>) {
    if (in_pairs) added = i32v{} - args.zero_point;
    if (args.bytes == Bytes::unsigned_bytes && __is_same(T, std::int8_t)) added = i32v{} + 128;
    sweep(0, width, [&](std::int64_t i, auto count) {
      put_whole(to, i, load_whole(x + i, count) + added, in_pairs);
    });
  } else {
    // A row of smaller numbers is taken for zero.
    constexpr float kMost = 127.0f, kLeast = 0x1p-100f;
    const float top = largest_magnitude(x, width);
    const float factor = kMost / (top < kLeast ? 1.0f : top);
    // A row with an infinity has no steps.
    args.scales[item] = (top - top) + top / kMost;
    if (args.bytes == Bytes::unsigned_bytes) added = i32v{} + 128;
    sweep(0, width, [&](std::int64_t i, auto count) {
      put_whole(to, i, nearest_whole(load(x + i, count) * factor) + added, in_pairs);
    });
  }
  const std::int64_t used = width * (in_pairs ? 2 : 1);
  std::memset(to + used, 0, static_cast<std::size_t>(args.row_bytes - used));
}

static void prepare_bytes(const PrepareBytesArgs& args, std::int64_t begin, std::int64_t end) {
  with_number(args.number, [&](auto number) {
    for (std::int64_t item = begin; item < end; ++item) {
      prepare_row_of_bytes<decltype(number)>(args, item);
    }
  });
}

template <class To, class From>
static void quantize(const QuantizeArgs& args, std::int64_t first, std::int64_t count) {
  const From* x = static_cast<const From*>(args.x) + first;
  To* out = static_cast<To*>(args.out) + first;
  if constexpr (kIsByte<To>) {
    const Steps<To> steps(args.scale, args.zero_point);
    std::int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
      const f32v v[] = {load(x + i), load(x + i + kLanes), load(x + i + 2 * kLanes),
                        load(x + i + 3 * kLanes)};
      _mm512_storeu_si512(out + i, steps.bytes(v));
    }
#endif
    sweep(i, count, [&](std::int64_t at, auto left) {
      store_byte_lanes(out + at, steps.bytes(load(x + at, left)), left);
    });
  } else {
    sweep(0, count, [&](std::int64_t i, auto left) {
      const i32v whole = load_whole(x + i, left) - args.zero_point;
      store(out + i, __builtin_convertvector(whole, f32v) * args.scale, left);
    });
  }
}

static void quantize_stretches(const QuantizeArgs& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t first = begin * args.stretch;
  const std::int64_t last = end * args.stretch < args.count ? end * args.stretch : args.count;
  with_number(args.x_number, [&](auto from) {
    with_number(args.out_number, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      if constexpr (kIsByte<From> != kIsByte<To>) quantize<To, From>(args, first, last - first);
    });
  });
}

}  // namespace oxytorch::OXY_LEVEL
