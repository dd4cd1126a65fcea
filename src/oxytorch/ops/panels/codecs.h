// A block of a panel from its stored numbers to rows of dot-product units. Integers keep their
// scale: they are exact in every unit.
#pragma once

#include "ops/panels/float8.h"
#include "ops/panels/units.h"

namespace oxytorch::OXY_LEVEL {

// How numbers are stored. A row of 64 bytes of a panel holds kNumbers of each output; value and
// integer: number `number` of these, for a vector of outputs. kMostChains: sums of a product of
// float32 that leave enough registers to the numbers' own way.

struct Float32Codec {
  static constexpr int kNumbers = 1;
  static constexpr bool kIsInteger = false;
  static constexpr int kMostChains = 4;
  OXY_INLINE f32v value(u32v row, int, i32v) { return from_bits(row); }
};

struct Bf16Codec {
  static constexpr int kNumbers = 2;
  static constexpr bool kIsInteger = false;
  static constexpr int kMostChains = 4;
  OXY_INLINE f32v value(u32v row, int number, i32v) {
    return from_bits(number == 0 ? row << 16 : row & 0xffff0000);
  }
};

template <class Codes>
struct IntegerCodec {
  static constexpr int kNumbers = Codes::kNumbers;
  static constexpr bool kIsInteger = true;
  static constexpr int kMostChains = 4;
  OXY_INLINE i32v integer(u32v row, int number, i32v zero_point) {
    return reinterpret_cast<i32v>(Codes::code(row, number)) - zero_point;
  }
  OXY_INLINE f32v value(u32v row, int number, i32v zero_point) {
    return __builtin_convertvector(integer(row, number, zero_point), f32v);
  }
};

struct Bytes {
  static constexpr int kNumbers = 4;
  OXY_INLINE u32v code(u32v row, int number) { return row >> 8 * number & 0xff; }
};

struct Nibbles {
  static constexpr int kNumbers = 8;
  OXY_INLINE u32v code(u32v row, int number) {
    return row >> (number < 4 ? 8 * number : 8 * number - 28) & 0xf;
  }
};

using ByteCodec = IntegerCodec<Bytes>;
using NibbleCodec = IntegerCodec<Nibbles>;

// Nibbles that stand for the 16 values of a table.
struct TableCodec {
  static constexpr int kNumbers = 8;
  static constexpr bool kIsInteger = false;
  static constexpr int kMostChains = 4;

#if defined(__AVX512F__)
  f32v values;
  OXY_MEMBER explicit TableCodec(const float* table) : values(load(table)) {}
#else
  const float* values;
  OXY_MEMBER explicit TableCodec(const float* table) : values(table) {}
#endif

  OXY_MEMBER f32v value(u32v row, int number, i32v) const {
    const u32v code = Nibbles::code(row, number);
#if defined(__AVX512F__)
    return reinterpret_cast<f32v>(
        _mm512_permutexvar_ps(reinterpret_cast<__m512i>(code), reinterpret_cast<__m512>(values)));
#elif defined(__AVX2__)
    return reinterpret_cast<f32v>(_mm256_i32gather_ps(values, reinterpret_cast<__m256i>(code), 4));
#else
    f32v result;
    for (int i = 0; i < kLanes; ++i) result[i] = values[code[i]];
    return result;
#endif
  }
};

struct Float8Codec {
  static constexpr int kNumbers = 4;
  static constexpr bool kIsInteger = false;
  static constexpr int kMostChains = OXY_HAS_VECTORS_512 ? 4 : 2;
  OXY_INLINE u32v pair(u32v row, int index) {
    const Float8Pairs pairs = float8_pairs(row);
    return index == 0 ? pairs.first : pairs.last;
  }
  OXY_INLINE f32v value(u32v row, int number, i32v zero_point) {
    return Bf16Codec::value(pair(row, number / 2), number % 2, zero_point);
  }
};

// Scales of a group for a vector of outputs, from number `at` on.
OXY_INLINE f32v group_scales_of(const PanelsArgs& weight, std::int64_t at) {
  if (weight.group_dtype == DType::float32) {
    return load(static_cast<const float*>(weight.group_scales) + at);
  }
  return load(static_cast<const f16*>(weight.group_scales) + at);
}

// Calls body(codec) with the codec of the weight.
template <class Body>
OXY_INLINE void with_codec(const PanelsArgs& weight, Body body) {
  switch (weight.codec) {
    case PanelCodec::fp32:
      return body(Float32Codec{});
    case PanelCodec::bf16:
      return body(Bf16Codec{});
    case PanelCodec::bytes:
      return body(ByteCodec{});
    case PanelCodec::nibbles:
      return body(NibbleCodec{});
    case PanelCodec::table:
      return body(TableCodec{weight.table});
    case PanelCodec::float8:
      return body(Float8Codec{});
  }
}

// The unit `index` of the units that a row of the panel holds of each output.

template <class Codec>
OXY_INLINE u32v unit_of(Float32Unit, Codec codec, u32v row, int index, i32v zero_point) {
  return bits_of(codec.value(row, index, zero_point));
}

template <class Codec>
OXY_INLINE u32v unit_of(Int16Pair, Codec, u32v row, int index, i32v zero_point) {
  const u32v low = reinterpret_cast<u32v>(Codec::integer(row, 2 * index, zero_point));
  const u32v high = reinterpret_cast<u32v>(Codec::integer(row, 2 * index + 1, zero_point));
  return (low & 0xffff) | high << 16;
}

#if OXY_HAS_BF16_DOT

// A table's values are rounded; all others have no more digits than bfloat16.
template <class Codec>
OXY_INLINE u32v unit_of(Bf16Pair, Codec codec, u32v row, int index, i32v zero_point) {
  const f32v low = codec.value(row, 2 * index, zero_point);
  const f32v high = codec.value(row, 2 * index + 1, zero_point);
  return bits_of(low) >> 16 | (bits_of(high) & 0xffff0000);
}

OXY_INLINE u32v unit_of(Bf16Pair, Bf16Codec, u32v row, int, i32v) { return row; }

OXY_INLINE u32v unit_of(Bf16Pair, Float8Codec codec, u32v row, int index, i32v) {
  return codec.pair(row, index);
}

// Looks the numbers up: `table` has bfloat16 numbers for indexes of 5 bits, negative ones included.
OXY_INLINE u32v look_up(u32v row, int index, u32v zero_points, __m512i table) {
  const u32v shifted = index < 2 ? row : row >> 4;
  const __m512i codes = _mm512_sub_epi8(reinterpret_cast<__m512i>(shifted & 0x0f0f0f0f),
                                        reinterpret_cast<__m512i>(zero_points));
  const int byte = 2 * (index & 1);
  const __m512i spread =
      _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(_mm_setr_epi8(
                                     byte, -1, byte + 1, -1, byte + 4, -1, byte + 5, -1, byte + 8,
                                     -1, byte + 9, -1, byte + 12, -1, byte + 13, -1)));
  return reinterpret_cast<u32v>(_mm512_permutexvar_epi16(spread, table));
}

OXY_INLINE u32v unit_of(Bf16Pair, NibbleCodec, u32v row, int index, i32v zero_point) {
  alignas(64) std::uint16_t table[32];
  for (int i = 0; i < 32; ++i) {
    const float value = static_cast<float>(i < 16 ? i : i - 32);
    table[i] = static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, value) >> 16);
  }
  const u32v zero_points = reinterpret_cast<u32v>(zero_point) * 0x01010101u;
  return look_up(row, index, zero_points, _mm512_load_si512(table));
}

OXY_INLINE u32v unit_of(Bf16Pair, TableCodec codec, u32v row, int index, i32v) {
  const u16v values = narrow(codec.values, bf16{});
  const __m512i table = _mm512_castsi256_si512(reinterpret_cast<__m256i>(values));
  return look_up(row, index, u32v{}, table);
}

#endif

#if OXY_HAS_INT8_DOT

OXY_INLINE u32v unit_of(Int8Quad, ByteCodec, u32v row, int, i32v) { return row; }

OXY_INLINE u32v unit_of(Int8Quad, NibbleCodec, u32v row, int index, i32v) {
  return (index == 0 ? row : row >> 4) & 0x0f0f0f0f;
}

#endif

// Whether numbers of the codec can become units.
template <class Dot, class Codec>
inline constexpr bool kFits =
    (Codec::kIsInteger || !Dot::kIsInteger) && Codec::kNumbers >= Dot::kDepth;

// Whether the rows of units are those of the panel, so that there is nothing to unpack.
template <class Dot, class Codec>
inline constexpr bool kReadsPanels = Codec::kNumbers == Dot::kDepth;

// `rows` rows of 64 bytes of a panel into kNumbers / kDepth times as many.
template <class Dot, class Codec>
static void unpack_panel(Dot dot, Codec codec, const std::uint8_t* from, std::int64_t rows,
                         const std::int32_t* zero_points, std::uint8_t* to) {
  constexpr int kUnits = Codec::kNumbers / Dot::kDepth;
  for (int part = 0; part < kParts; ++part) {
    constexpr std::int64_t kBytes = sizeof(u32v);
    const auto zero_point = load_as<i32v>(zero_points + part * kLanes);
    for (std::int64_t r = 0; r < rows; ++r) {
      const u32v row = load_as<u32v>(from + r * 64 + part * kBytes);
      for (int unit = 0; unit < kUnits; ++unit) {
        const u32v units = unit_of(dot, codec, row, unit, zero_point);
        std::memcpy(to + (r * kUnits + unit) * 64 + part * kBytes, &units, sizeof units);
      }
    }
  }
}

}  // namespace oxytorch::OXY_LEVEL
