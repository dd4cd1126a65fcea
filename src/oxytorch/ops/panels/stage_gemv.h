// Rows of x as a gemv multiplies them, on one of its paths: in float32 at any level, in pairs of
// bfloat16, or in digits of integers.
#pragma once

#include "ops/panels/codecs.h"
#include "ops/panels/gemv_args.h"
#include "ops/panels/prepare_rows.h"

namespace oxytorch::OXY_LEVEL {

OXY_INLINE std::int64_t group_length(const GemvArgs& args) {
  return args.weight.group_scales ? args.in_features / args.weight.groups : args.depth;
}

template <class Path>
OXY_INLINE std::int64_t block_length(const GemvArgs& args) {
  const std::int64_t group = group_length(args);
  return group < Path::kMostBlock ? group : Path::kMostBlock;
}

// A path says how rows of x are staged, and in gemv.h how blocks of them are multiplied.
// kMostBlock: in_features of a block. kScalesRows: results are multiplied with a scale of the row.

OXY_INLINE float* row_of_floats(const GemvArgs& args, std::int64_t row) {
  return static_cast<float*>(args.staged.values) + row * args.depth;
}

// Numbers of the weight become float32; exact for x of any dtype.
struct Float32Path {
  static constexpr std::int64_t kMostBlock = 64;
  static constexpr bool kScalesRows = false;
  template <class Codec>
  static constexpr bool kTakes = true;

  template <class T>
  static void stage(const GemvArgs& args, std::int64_t row, const T* x) {
    float* to = row_of_floats(args, row);
    const float top = args.rounds_to_int8 ? largest_magnitude(x, args.in_features) : 0.0f;
    sweep(0, args.in_features, [&](std::int64_t i, auto count) {
      f32v v = load(x + i, count);
      if (args.rounds_to_int8) v = nearest(v * 127.0f / (top > 0.0f ? top : 1.0f)) * (top / 127.0f);
      store(to + i, v, count);
    });
    for (std::int64_t i = args.in_features; i < args.depth; ++i) to[i] = 0.0f;
  }
};

#if OXY_HAS_FAST_BF16_DOT

// bfloat16 x as it is, and the weight's numbers as bfloat16.
struct Bf16PairPath {
  static constexpr std::int64_t kMostBlock = INT64_MAX;
  static constexpr bool kScalesRows = false;
  template <class Codec>
  static constexpr bool kTakes = !Codec::kIsInteger && !__is_same(Codec, Float32Codec);

  OXY_INLINE std::uint32_t* row_of_pairs(const GemvArgs& args, std::int64_t row) {
    return static_cast<std::uint32_t*>(args.staged.values) + row * args.depth / 2;
  }

  static void stage(const GemvArgs& args, std::int64_t row, const bf16* x) {
    auto* to = reinterpret_cast<std::uint16_t*>(row_of_pairs(args, row));
    std::memcpy(to, x, sizeof(bf16) * args.in_features);
    std::memset(to + args.in_features, 0, sizeof(bf16) * (args.depth - args.in_features));
    if (args.weight.codec != PanelCodec::table) return;
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m512i orders = _mm512_broadcast_i32x4(order);
    for (std::int64_t i = 0; i < args.depth; i += 32) {
      const __m512i values = _mm512_loadu_si512(to + i);
      _mm512_storeu_si512(to + i, _mm512_shuffle_epi8(values, orders));
    }
  }
};

#endif

#if OXY_HAS_VECTORS_256

#if OXY_HAS_INT8_DOT
using Digit = Int8Quad;
#else
using Digit = Int16Pair;
#endif

// x as integers of 15 bits in units of its largest magnitude in a block of in_features, or
// of 8 bits in units of the row's. Four neighbours are two digits of 4 bytes each: with
// instructions for bytes the numbers' multiples of 128 and the rest, else the neighbours 0, 2 and
// 1, 3.
template <bool narrow_numbers>
struct Int8DotPath {
  static constexpr std::int64_t kMostBlock = kDigitBlock;
  static constexpr bool kScalesRows = narrow_numbers;
  template <class Codec>
  static constexpr bool kTakes = Codec::kIsInteger;

  static constexpr bool kBytes = Digit::kDepth == 4;
  static constexpr int kDigits = kBytes && narrow_numbers ? 1 : 2;

  OXY_INLINE std::uint32_t* row_of_digits(const GemvArgs& args, std::int64_t row) {
    return static_cast<std::uint32_t*>(args.staged.values) + row * args.depth;
  }

  template <class T>
  static void stage(const GemvArgs& args, std::int64_t row, const T* x) {
    constexpr float kMost = narrow_numbers ? kMostByte : kMostOfDigits;
    const StagedRows& staged = args.staged;
    float* scales = staged.scales + row * staged.blocks;
    auto* sums = staged.sums + row * staged.blocks;
    const std::int64_t length = block_length<Int8DotPath>(args);
    float top = narrow_numbers ? largest_magnitude(x, args.in_features) : 0.0f;
    for (std::int64_t begin = 0; begin < args.in_features; begin += length) {
      const std::int64_t left = args.in_features - begin;
      const std::int64_t width = left < length ? left : length;
      if (!narrow_numbers) top = largest_magnitude(x + begin, width);
      const float divisor = divisor_of(top);
      const float factor = kMost / divisor;
      std::uint32_t* to = row_of_digits(args, row) + begin / 4 * kDigits;
      i32v total{};
      std::int64_t i = 0;
      const auto put = [&](f32v v) {
        // Divided where the reference says which number is the nearest.
        const f32v numbers = nearest(narrow_numbers ? v * kMost / divisor : v * factor);
        const i32v whole = __builtin_convertvector(numbers, i32v);
        total += whole;
        put_digits(to + i / 4 * kDigits, whole);
      };
      for (; i + kLanes <= width; i += kLanes) put(load(x + begin + i));
      if (i < width) {
        put(load(x + begin + i, width - i));
        i += kLanes;
      }
      const std::int64_t room = args.depth - begin;
      for (; i < (room < length ? room : length); i += kLanes) put(f32v{});
      *scales++ = top / kMost;
      *sums++ = sum_of(total);
    }
  }

  OXY_INLINE void put_digits(std::uint32_t* to, i32v whole) {
    if constexpr (!kBytes) {
      std::int16_t numbers[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        numbers[i / 4 * 4 + (i % 4 % 2 * 2 + i % 4 / 2)] = static_cast<std::int16_t>(whole[i]);
      }
      std::memcpy(to, numbers, sizeof numbers);
    } else if constexpr (narrow_numbers) {
      const u8v bytes = truncate_8_bits(reinterpret_cast<u32v>(whole) & 0xff);
      std::memcpy(to, &bytes, sizeof bytes);
    } else {
      const u8v highs = truncate_8_bits(reinterpret_cast<u32v>(high_digits(whole)) & 0xff);
      const u8v lows = truncate_8_bits(reinterpret_cast<u32v>(low_digits(whole)) & 0xff);
#if defined(__AVX512F__)
      const auto a = reinterpret_cast<__m128i>(highs), b = reinterpret_cast<__m128i>(lows);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + 1, _mm_unpackhi_epi32(a, b));
#else
      const auto a = _mm_cvtsi64_si128(reinterpret_cast<long long>(highs));
      const auto b = _mm_cvtsi64_si128(reinterpret_cast<long long>(lows));
#endif
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi32(a, b));
    }
  }
};

#endif

// Calls body(path) with the path on which this level multiplies x and the weight of the call.
template <class Body>
OXY_INLINE void with_path(const GemvArgs& args, Body body) {
#if OXY_HAS_VECTORS_256
  if (is_integer(args.weight.codec)) {
    if (args.rounds_to_int8) return body(Int8DotPath<true>{});
    if (args.dtype == DType::bfloat16) return body(Int8DotPath<false>{});
    return body(Float32Path{});
  }
#endif
#if OXY_HAS_FAST_BF16_DOT
  const bool has_pairs = args.weight.codec != PanelCodec::fp32;
  if (args.dtype == DType::bfloat16 && has_pairs) return body(Bf16PairPath{});
#endif
  return body(Float32Path{});
}

static void stage_gemv(const GemvArgs& args, std::int64_t begin, std::int64_t end) {
  with_path(args, [&](auto path) {
    with_type(args.dtype, [&](auto element) {
      const auto* x = static_cast<const decltype(element)*>(args.x);
      if constexpr (requires { path.stage(args, begin, x); }) {
        for (std::int64_t row = begin; row < end; ++row) {
          path.stage(args, row, x + row * args.x_stride);
        }
      }
    });
  });
}

}  // namespace oxytorch::OXY_LEVEL
