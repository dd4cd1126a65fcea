// How operands are kept in memory: to float32 and back, a block at a time. Plain loops, which the
// compiler turns into vectors; results are the same bits at every level.
#pragma once

#include "core/vec.h"
#include "ops/optimizer_step/kernel.h"

namespace oxytorch::OXY_LEVEL {

OXY_INLINE std::uint32_t float_bits(float v) { return __builtin_bit_cast(std::uint32_t, v); }
OXY_INLINE float bits_float(std::uint32_t v) { return __builtin_bit_cast(float, v); }

// A random number for element `index`: every bit of the result depends on every bit of the input
// (Wellons, Prospecting for Hash Functions, 2018: lowbias32).
OXY_INLINE std::uint32_t random_bits(std::uint32_t index, std::uint32_t key) {
  std::uint32_t x = index ^ key;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// The same between 0 and 1.
OXY_INLINE float random_fraction(std::uint32_t index, std::uint32_t key) {
  return static_cast<float>(static_cast<std::int32_t>(random_bits(index, key) >> 8)) * 0x1p-24f;
}

template <class T>
static void unpack_16_bits(const T* data, std::int64_t count, float* out) {
  sweep(0, count, [&](std::int64_t i, auto rest) { store(out + i, load(data + i, rest), rest); });
}

template <class T>
static void pack_16_bits(T* data, std::int64_t count, const float* values) {
  sweep(0, count,
        [&](std::int64_t i, auto rest) { store(data + i, load(values + i, rest), rest); });
}

static void unpack_split(const std::uint16_t* __restrict upper, const std::uint16_t* __restrict low,
                         std::int64_t count, float* __restrict out) {
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = bits_float(std::uint32_t{upper[i]} << 16 | low[i]);
  }
}

static void pack_split(std::uint16_t* __restrict upper, std::uint16_t* __restrict low,
                       std::int64_t count, const float* __restrict values) {
  for (std::int64_t i = 0; i < count; ++i) {
    upper[i] = static_cast<std::uint16_t>(float_bits(values[i]) >> 16);
    low[i] = static_cast<std::uint16_t>(float_bits(values[i]));
  }
}

static void pack_stochastic(std::uint16_t* __restrict data, std::int64_t offset, std::int64_t count,
                            std::uint32_t key, const float* __restrict values) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = float_bits(values[i]);
    const std::uint32_t noise = random_bits(static_cast<std::uint32_t>(offset + i), key) & 0xffff;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    data[i] = static_cast<std::uint16_t>((is_nan ? bits | 0x400000 : bits + noise) >> 16);
  }
}

// Codes stand for value = scale sign(c) c^2 and value = scale c^4: steps are finer near zero, where
// most values lie. The scale is chosen so that the largest magnitude of a block gets the last code.

inline constexpr float kLastSigned = 127.0f;
inline constexpr float kLastUnsigned = 255.0f;

static void unpack_signed(const std::int8_t* __restrict codes, float scale, std::int64_t count,
                          float* __restrict out) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto c = static_cast<float>(codes[i]);
    out[i] = c * __builtin_fabsf(c) * scale;
  }
}

static void unpack_unsigned(const std::uint8_t* __restrict codes, float scale, std::int64_t count,
                            float* __restrict out) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto c = static_cast<float>(codes[i]);
    out[i] = (c * c) * (c * c) * scale;
  }
}

// The largest magnitude; NaN counts as larger than any.
static float largest(const float* values, std::int64_t count) {
  std::uint32_t found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = float_bits(values[i]) & 0x7fffffff;
    found = found > bits ? found : bits;
  }
  return bits_float(found);
}

// Rounded up or down at random so that the mean of the code is right.
static void pack_signed(std::int8_t* __restrict codes, float* scale, std::int64_t offset,
                        std::int64_t count, std::uint32_t key, const float* __restrict values) {
  const float top = largest(values, count);
  *scale = top / (kLastSigned * kLastSigned);
  const float inverse = top > 0.0f ? kLastSigned * kLastSigned / top : 0.0f;
  for (std::int64_t i = 0; i < count; ++i) {
    const float dither = random_fraction(static_cast<std::uint32_t>(offset + i), key);
    const float root = __builtin_sqrtf(__builtin_fabsf(values[i]) * inverse) + dither;
    const auto c = static_cast<std::int32_t>(root < kLastSigned ? root : kLastSigned);
    codes[i] = static_cast<std::int8_t>(values[i] < 0.0f ? -c : c);
  }
}

// A positive value never becomes zero: it stands in denominators.
static void pack_unsigned(std::uint8_t* __restrict codes, float* scale, std::int64_t offset,
                          std::int64_t count, std::uint32_t key, const float* __restrict values) {
  constexpr float kTop = kLastUnsigned * kLastUnsigned * kLastUnsigned * kLastUnsigned;
  const float top = largest(values, count);
  *scale = top / kTop;
  const float inverse = top > 0.0f ? 1.0f / top : 0.0f;
  for (std::int64_t i = 0; i < count; ++i) {
    const float dither = random_fraction(static_cast<std::uint32_t>(offset + i), key);
    const float root =
        __builtin_sqrtf(__builtin_sqrtf(values[i] * inverse)) * kLastUnsigned + dither;
    const auto c = static_cast<std::int32_t>(root < kLastUnsigned ? root : kLastUnsigned);
    codes[i] = static_cast<std::uint8_t>(values[i] > 0.0f && c < 1 ? 1 : c);
  }
}

// Calls body(code_block, begin, count) for every block of codes within a block of elements.
template <class Body>
OXY_INLINE void for_code_blocks(std::int64_t offset, std::int64_t count, Body body) {
  for (std::int64_t i = 0; i < count; i += kCodeBlock) {
    const std::int64_t rest = count - i;
    body((offset + i) / kCodeBlock, i, rest < kCodeBlock ? rest : kCodeBlock);
  }
}

// Elements [offset, offset + count) of an operand, as float32; offset is a multiple of kBlock.
static void unpack(const Operand& operand, std::int64_t offset, std::int64_t count, float* out) {
  const auto* halves = static_cast<const std::uint16_t*>(operand.data) + offset;
  switch (operand.format) {
    case Format::float32:
      return;
    case Format::bfloat16:
    case Format::stochastic:
      return unpack_16_bits(reinterpret_cast<const bf16*>(halves), count, out);
    case Format::float16:
      return unpack_16_bits(reinterpret_cast<const f16*>(halves), count, out);
    case Format::split:
      return unpack_split(halves, static_cast<const std::uint16_t*>(operand.extra) + offset, count,
                          out);
    case Format::signed_codes:
      return for_code_blocks(offset, count, [&](std::int64_t block, std::int64_t i, auto size) {
        unpack_signed(static_cast<const std::int8_t*>(operand.data) + offset + i,
                      static_cast<const float*>(operand.extra)[block], size, out + i);
      });
    case Format::unsigned_codes:
      return for_code_blocks(offset, count, [&](std::int64_t block, std::int64_t i, auto size) {
        unpack_unsigned(static_cast<const std::uint8_t*>(operand.data) + offset + i,
                        static_cast<const float*>(operand.extra)[block], size, out + i);
      });
  }
}

static void pack(const Operand& operand, std::int64_t offset, std::int64_t count,
                 const float* values) {
  auto* halves = static_cast<std::uint16_t*>(operand.data) + offset;
  switch (operand.format) {
    case Format::float32:
      return;
    case Format::bfloat16:
      return pack_16_bits(reinterpret_cast<bf16*>(halves), count, values);
    case Format::float16:
      return pack_16_bits(reinterpret_cast<f16*>(halves), count, values);
    case Format::stochastic:
      return pack_stochastic(halves, offset, count, operand.key, values);
    case Format::split:
      return pack_split(halves, static_cast<std::uint16_t*>(operand.extra) + offset, count, values);
    case Format::signed_codes:
      return for_code_blocks(offset, count, [&](std::int64_t block, std::int64_t i, auto size) {
        pack_signed(static_cast<std::int8_t*>(operand.data) + offset + i,
                    static_cast<float*>(operand.extra) + block, offset + i, size, operand.key,
                    values + i);
      });
    case Format::unsigned_codes:
      return for_code_blocks(offset, count, [&](std::int64_t block, std::int64_t i, auto size) {
        pack_unsigned(static_cast<std::uint8_t*>(operand.data) + offset + i,
                      static_cast<float*>(operand.extra) + block, offset + i, size, operand.key,
                      values + i);
      });
  }
}

}  // namespace oxytorch::OXY_LEVEL
