// The paths of a gemv: in float32 at any level, in pairs of bfloat16, or in digits of integers.
#pragma once

#include "ops/panels/codecs.h"
#include "ops/panels/gemv_args.h"
#include "ops/panels/prepare_rows.h"

namespace oxytorch::OXY_LEVEL {

// Rows that are multiplied at once; the others find the panel in the nearest caches.
inline constexpr int kChunkRows = OXY_HAS_VECTORS_512 ? 4 : 2;
// Sums that registers hold. With 128 bits it is more than they do: 4 vectors fill a row of a panel.
inline constexpr int kRegisterSums = kVectorBytes == 16 ? 32 : OXY_HAS_VECTORS_512 ? 16 : 8;

// Bytes between what is read and what is asked for; panels follow each other, so that it is the
// thread's next panel at the end of one.
inline constexpr std::int64_t kAhead = 4096;

OXY_INLINE void ask_ahead(const std::uint8_t* row) { __builtin_prefetch(row + kAhead); }

// Independent sums for each row and part: additions need not wait for each other, and err less.
template <int rows>
inline constexpr int kChains = rows * kParts * 4 <= kRegisterSums   ? 4
                               : rows * kParts * 2 <= kRegisterSums ? 2
                                                                    : 1;

// A block of in_features of one panel and some rows.
struct Block {
  const std::uint8_t* panel;
  std::int64_t length;
  std::int64_t begin = 0;  // of in_features
  std::int64_t index = 0;
  std::int64_t row;                           // the first
  const std::uint8_t* zero_points = nullptr;  // of 16 outputs; null: `middle`
  std::int32_t middle;
};

OXY_INLINE i32v zero_point_of(const Block& block, int part) {
  if (!block.zero_points) return i32v{} + block.middle;
  u8v values;
  std::memcpy(&values, block.zero_points + part * kLanes, sizeof values);
  return reinterpret_cast<i32v>(zero_extend(values));
}

OXY_INLINE std::int64_t group_length(const GemvArgs& args) {
  return args.weight.group_scales ? args.in_features / args.weight.groups : args.depth;
}

template <class Path>
OXY_INLINE std::int64_t block_length(const GemvArgs& args) {
  const std::int64_t group = group_length(args);
  return group < Path::kMostBlock ? group : Path::kMostBlock;
}

// A path stages rows of x, and multiplies blocks of them: `multiply` gives sums of products of x
// and the weight without its scales. kMostBlock: in_features of a block.

OXY_INLINE float* row_of_floats(const GemvArgs& args, std::int64_t row) {
  return static_cast<float*>(args.staged.values) + row * args.depth;
}

// Numbers of the weight become float32; exact for x of any dtype.
struct Float32Path {
  static constexpr std::int64_t kMostBlock = 64;
  template <class Codec>
  static constexpr bool kTakes = true;

  template <class T>
  static void stage(const GemvArgs& args, std::int64_t row, const T* x) {
    float* to = row_of_floats(args, row);
    const float top = args.rounds_to_int8 ? largest(x, args.in_features) : 0.0f;
    sweep(0, args.in_features, [&](std::int64_t i, auto count) {
      f32v v = load(x + i, count);
      if (args.rounds_to_int8) v = nearest(v * 127.0f / (top > 0.0f ? top : 1.0f)) * (top / 127.0f);
      store(to + i, v, count);
    });
    for (std::int64_t i = args.in_features; i < args.depth; ++i) to[i] = 0.0f;
  }

  template <int rows, class Codec>
  OXY_INLINE void multiply(Codec codec, const GemvArgs& args, const Block& block,
                           f32v (&products)[rows][kParts]) {
    constexpr int kSums = kChains<rows>;
    f32v sums[kSums][rows][kParts] = {};
    i32v zero_points[kParts];
    for (int part = 0; part < kParts; ++part) {
      zero_points[part] = zero_point_of(block, part);
    }
    const float* x = row_of_floats(args, block.row) + block.begin;
    const std::uint8_t* row = block.panel;
    constexpr int kRows = kSums > Codec::kNumbers ? kSums / Codec::kNumbers : 1;
    for (std::int64_t k = 0; k < block.length; k += kRows * Codec::kNumbers) {
      for (int n = 0; n < kRows; ++n, row += 64) {
        ask_ahead(row);
        for (int part = 0; part < kParts; ++part) {
          const u32v words = load_as<u32v>(row + part * sizeof(u32v));
          for (int i = 0; i < Codec::kNumbers; ++i) {
            const f32v value = codec.value(words, i, zero_points[part]);
            for (int r = 0; r < rows; ++r) {
              sums[(n * Codec::kNumbers + i) % kSums][r][part] +=
                  x[r * args.depth + k + n * Codec::kNumbers + i] * value;
            }
          }
        }
      }
    }
    for (int r = 0; r < rows; ++r) {
      for (int part = 0; part < kParts; ++part) {
        f32v sum = sums[0][r][part];
        for (int chain = 1; chain < kSums; ++chain) sum += sums[chain][r][part];
        products[r][part] = sum;
      }
    }
  }
};

#if OXY_HAS_FAST_BF16_DOT

// Values of a table as pairs of bfloat16: of each word of a row, once shifted, a table gives the
// number of the lowest 4 bits. So 8 neighbours of in_features come in the order 0 2 4 6 1 3 5 7.
// The table is there twice, because it is asked with 5 bits; `lost` is what bfloat16 loses of the
// numbers.
struct PairTables {
  __m512i main, lost;

  OXY_MEMBER explicit PairTables(f32v values) {
    const u16v half = narrow(values, bf16{});
    const u16v rest = narrow(values - widen(half, bf16{}), bf16{});
    main = _mm512_broadcast_i64x4(reinterpret_cast<__m256i>(half));
    lost = _mm512_broadcast_i64x4(reinterpret_cast<__m256i>(rest));
  }

  OXY_INLINE u32v find(__m512i table, u32v row, int shift) {
    const __m512i words = _mm512_srli_epi16(reinterpret_cast<__m512i>(row), shift);
    return reinterpret_cast<u32v>(_mm512_permutexvar_epi16(words, table));
  }
};

// bfloat16 x as it is, and the weight's numbers as bfloat16.
struct Bf16PairPath {
  static constexpr std::int64_t kMostBlock = INT64_MAX;
  template <class Codec>
  static constexpr bool kTakes = !Codec::kIsInteger && !__is_same(Codec, Float32Codec);

  OXY_INLINE std::uint32_t* row_of_pairs(const GemvArgs& args, std::int64_t row) {
    return static_cast<std::uint32_t*>(args.staged.values) + row * args.depth / 2;
  }

  static void stage(const GemvArgs& args, std::int64_t row, const bf16* x) {
    auto* to = reinterpret_cast<std::uint16_t*>(row_of_pairs(args, row));
    std::memcpy(to, x, sizeof(bf16) * args.in_features);
    std::memset(to + args.in_features, 0, sizeof(bf16) * (args.depth - args.in_features));
    if (args.weight.codec == PanelCodec::bf16) return;
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m512i orders = _mm512_broadcast_i32x4(order);
    for (std::int64_t i = 0; i < args.depth; i += 32) {
      const __m512i values = _mm512_loadu_si512(to + i);
      _mm512_storeu_si512(to + i, _mm512_shuffle_epi8(values, orders));
    }
  }

  template <int rows, class Codec>
  OXY_INLINE void multiply(Codec codec, const GemvArgs& args, const Block& block,
                           f32v (&products)[rows][kParts]) {
    f32v sums[4][rows] = {};
    const std::uint32_t* x = row_of_pairs(args, block.row) + block.begin / 2;
    const std::uint8_t* row = block.panel;
    const auto add = [&](int chain, u32v numbers) {
      for (int r = 0; r < rows; ++r) {
        sums[chain][r] =
            Bf16Pair::multiply(sums[chain][r], from_bits(numbers), x[r * args.depth / 2 + chain]);
      }
    };
    if constexpr (__is_same(Codec, Bf16Codec)) {
      for (std::int64_t k = 0; k < block.length; k += 8, x += 4) {
        for (int i = 0; i < 4; ++i, row += kPanelRowBytes) {
          ask_ahead(row);
          add(i, load_as<u32v>(row));
        }
      }
    } else {
      const PairTables tables(codec.values);
      for (std::int64_t k = 0; k < block.length; k += 8, x += 4, row += kPanelRowBytes) {
        ask_ahead(row);
        const u32v words = load_as<u32v>(row);
        for (int i = 0; i < 4; ++i) {
          add(i, PairTables::find(tables.main, words, 4 * i));
          add(i, PairTables::find(tables.lost, words, 4 * i));
        }
      }
    }
    for (int r = 0; r < rows; ++r) {
      products[r][0] = (sums[0][r] + sums[1][r]) + (sums[2][r] + sums[3][r]);
    }
  }
};

#endif

#if defined(__AVX2__)

#if OXY_HAS_INT8_DOT
using Digit = Int8Quad;
#else
using Digit = Int16Pair;
#endif

// x as whole numbers of 15 bits in units of its largest magnitude in a block of in_features, or
// of 8 bits in units of the row's. Four neighbours are two digits of 4 bytes each: with
// instructions for bytes the numbers' multiples of 128 and the rest, else the neighbours 0, 2 and
// 1, 3.
template <bool narrow_numbers>
struct Int8DotPath {
  static constexpr std::int64_t kMostBlock = kStagedBlock;
  template <class Codec>
  static constexpr bool kTakes = Codec::kIsInteger;

  static constexpr bool kBytes = Digit::kDepth == 4;
  static constexpr int kDigits = kBytes && narrow_numbers ? 1 : 2;

  OXY_INLINE std::uint32_t* row_of_digits(const GemvArgs& args, std::int64_t row) {
    return static_cast<std::uint32_t*>(args.staged.values) + row * args.depth;
  }

  template <class T>
  static void stage(const GemvArgs& args, std::int64_t row, const T* x) {
    constexpr float kMost = narrow_numbers ? 127.0f : 16256.0f;
    // Below, kMost / top would be infinite; products with so small numbers are taken for zero.
    constexpr float kLeast = 0x1p-100f;
    const StagedRows& staged = args.staged;
    float* scales = staged.scales + row * staged.blocks;
    auto* sums = staged.sums + row * staged.blocks;
    const std::int64_t length = block_length<Int8DotPath>(args);
    float top = narrow_numbers ? largest(x, args.in_features) : 0.0f;
    for (std::int64_t begin = 0; begin < args.in_features; begin += length) {
      const std::int64_t left = args.in_features - begin;
      const std::int64_t width = left < length ? left : length;
      if (!narrow_numbers) top = largest(x + begin, width);
      const float divisor = top < kLeast ? 1.0f : top;
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

  OXY_INLINE std::int32_t sum_of(i32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(v));
#else
    std::int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += v[i];
    return sum;
#endif
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
      const i32v high = (whole + 64) >> 7;
      const u8v highs = truncate_8_bits(reinterpret_cast<u32v>(high) & 0xff);
      const u8v lows = truncate_8_bits(reinterpret_cast<u32v>(whole - (high << 7)) & 0xff);
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

  // Bytes of the weight that belong to a digit.
  OXY_INLINE u32v operand(u32v quads, int digit) {
    return kBytes ? quads : (digit == 0 ? quads : quads >> 8) & 0x00ff00ff;
  }

  template <int rows, class Codec>
  OXY_INLINE void multiply(Codec codec, const GemvArgs& args, const Block& block,
                           f32v (&products)[rows][kParts]) {
    constexpr bool kHalves = __is_same(Codec, NibbleCodec);
    // Two quads of neighbours a turn; each has sums of its own where registers allow.
    constexpr int kSums = rows * kParts * kDigits * 2 <= kRegisterSums ? 2 : 1;
    i32v sums[kSums][kDigits][rows][kParts] = {};
    const std::uint32_t* x = row_of_digits(args, block.row) + block.begin / 4 * kDigits;
    const std::uint8_t* row = block.panel;
    for (std::int64_t k = 0; k < block.length; k += 8, x += 2 * kDigits) {
      ask_ahead(row);
      if (!kHalves) ask_ahead(row + 64);
      for (int part = 0; part < kParts; ++part) {
        const std::uint8_t* at = row + part * sizeof(u32v);
        const u32v first = load_as<u32v>(at);
        const u32v second = kHalves ? first >> 4 : load_as<u32v>(at + 64);
        const u32v mask = u32v{} + (kHalves ? 0x0f0f0f0fu : 0xffffffffu);
        const u32v quads[2] = {first & mask, second & mask};
        for (int i = 0; i < 2; ++i) {
          for (int digit = 0; digit < kDigits; ++digit) {
            const auto numbers = reinterpret_cast<i32v>(operand(quads[i], digit));
            for (int r = 0; r < rows; ++r) {
              i32v& sum = sums[i % kSums][digit][r][part];
              sum = Digit::multiply(sum, numbers, x[r * args.depth + i * kDigits + digit]);
            }
          }
        }
      }
      row += kHalves ? 64 : 128;
    }
    for (int part = 0; part < kParts; ++part) {
      for (int r = 0; r < rows; ++r) {
        i32v digits[2] = {};
        for (int digit = 0; digit < kDigits; ++digit) {
          for (int i = 0; i < kSums; ++i) digits[digit] += sums[i][digit][r][part];
        }
        i32v whole = kBytes && kDigits == 2 ? (digits[0] << 7) + digits[1] : digits[0] + digits[1];
        const std::int64_t at = (block.row + r) * args.staged.blocks + block.index;
        const std::int32_t sum = args.staged.sums[at];
        if (block.zero_points) {
          whole -= zero_point_of(block, part) * sum;
        } else {
          whole -= block.middle * sum;
        }
        products[r][part] = __builtin_convertvector(whole, f32v) * args.staged.scales[at];
      }
    }
  }
};

#endif

// Calls body(path) with the path on which this level multiplies x and the weight of the call.
template <class Body>
OXY_INLINE void with_path(const GemvArgs& args, Body body) {
#if defined(__AVX2__)
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

}  // namespace oxytorch::OXY_LEVEL
