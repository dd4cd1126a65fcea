// Rows of query, key and value: norm, rotation, and the way into the cache.
#pragma once

#include "ops/_rotary/rotate.h"
#include "ops/cached_attention/operands.h"

namespace oxytorch::OXY_LEVEL {

// Calls body(pointer) with the factor's elements, float32 or T.
template <class T, class Body>
OXY_INLINE void with_elements(const CachedFactor& factor, std::int64_t offset, T, Body body) {
  if (factor.dtype == DType::float32) {
    body(static_cast<const float*>(factor.data) + offset);
  } else {
    body(static_cast<const T*>(factor.data) + offset);
  }
}

template <class T>
static void normalize_row(const CachedFactor& weight, T type, float* row, std::int64_t dim,
                          float eps) {
  f32v squares[4] = {};
  sweep_in_chains(dim, [&](std::int64_t i, auto count, int chain) {
    const f32v v = load(row + i, count);
    squares[chain] += v * v;
  });
  const float inverse = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(dim) + eps);
  with_elements(weight, 0, type, [&](auto elements) {
    sweep(0, dim, [&](std::int64_t i, auto count) {
      store(row + i, load(row + i, count) * inverse * load(elements + i, count), count);
    });
  });
}

// Row `position` of `batch` as it takes part: normalized and rotated, float32.
template <class T>
static void prepare_row(const CachedAttentionArgs& args, const T* from, const CachedFactor& norm,
                        std::int64_t batch, std::int64_t position, float* to) {
  alignas(64) float normed[kDim];
  float* plain = args.cos.data ? normed : to;
  sweep(0, args.dim,
        [&](std::int64_t i, auto count) { store(plain + i, load(from + i, count), count); });
  if (norm.data) normalize_row(norm, T{}, plain, args.dim, args.eps);
  if (!args.cos.data) return;
  const auto offset = [&](const CachedFactor& angles) {
    return batch * angles.strides[0] + position * angles.strides[1];
  };
  const auto put = [&](std::int64_t i, f32v v, auto count) { store(to + i, v, count); };
  with_elements(args.cos, offset(args.cos), T{}, [&](auto cos) {
    const auto* sin = static_cast<decltype(cos)>(args.sin.data) + offset(args.sin);
    if (args.interleaved) {
      rotate_neighbours(plain, cos, sin, args.rotary_dim, put);
    } else {
      rotate_halves(plain, cos, sin, args.rotary_dim / 2, put);
    }
  });
  std::memcpy(to + args.rotary_dim, plain + args.rotary_dim,
              sizeof(float) * (args.dim - args.rotary_dim));
}

static float largest_magnitude(const float* row, std::int64_t dim) {
  f32v largest{};
  sweep(0, dim, [&](std::int64_t i, auto count) {
    largest = maximum(magnitude(load(row + i, count)), largest);
  });
  return maximum(largest);
}

static void put_codes(const float* row, std::int64_t dim, std::int8_t* codes, float* scale) {
  const float largest = largest_magnitude(row, dim);
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  *scale = largest / 127.0f;
  sweep(0, dim, [&](std::int64_t i, auto count) {
    const i32v whole = __builtin_convertvector(nearest(load(row + i, count) * inverse), i32v);
    const u8v bytes = truncate_8_bits(reinterpret_cast<u32v>(whole) & 0xff);
    store_raw(reinterpret_cast<std::uint8_t*>(codes) + i, bytes, count);
  });
}

static void put_row(const CachedAttentionArgs& args, const CachedTensor& tensor, const float* row,
                    std::int64_t cache_row, std::int64_t head, std::int64_t at) {
  const AttentionStrides& strides = tensor.cache_strides;
  const std::int64_t offset = cache_row * strides.batch + head * strides.head + at * strides.row;
  const auto put = [&](auto* to) {
    sweep(0, args.dim,
          [&](std::int64_t i, auto count) { store(to + i, load(row + i, count), count); });
  };
  switch (args.cache_type) {
    case CacheType::float32:
      return put(static_cast<float*>(tensor.cache) + offset);
    case CacheType::bfloat16:
      return put(static_cast<bf16*>(tensor.cache) + offset);
    case CacheType::int8:
      return put_codes(row, args.dim, static_cast<std::int8_t*>(tensor.cache) + offset,
                       tensor.scales + cache_row * tensor.scale_strides[0] +
                           head * tensor.scale_strides[1] + at);
  }
}

// Writes key and value of one position and kv head into the cache.
static void write_position(const CachedAttentionArgs& args, std::int64_t batch, std::int64_t head,
                           std::int64_t position) {
  alignas(64) float row[kDim];
  const CachedSequence& sequence = args.sequences[batch];
  const std::int64_t at = sequence.start + position;
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    const auto rows_of = [&](const CachedTensor& tensor) {
      const AttentionStrides& strides = tensor.strides;
      return static_cast<const T*>(tensor.rows) + batch * strides.batch + head * strides.head +
             position * strides.row;
    };
    prepare_row(args, rows_of(args.key), args.key_norm, batch, position, row);
    put_row(args, args.key, row, sequence.row, head, at);
    const T* value = rows_of(args.value);
    sweep(0, args.dim,
          [&](std::int64_t i, auto count) { store(row + i, load(value + i, count), count); });
    put_row(args, args.value, row, sequence.row, head, at);
  });
}

// Query rows as units, `lanes` rows side by side: rows[unit * lanes] is unit `unit` of this one.
// Returns the factor of the row's scores.

OXY_INLINE float take_query(Float32Operands, const float* row, std::int64_t width,
                            std::int64_t lanes, float* units) {
  for (std::int64_t i = 0; i < width; ++i) units[i * lanes] = row[i];
  return 1.0f;
}

#if OXY_HAS_BF16_DOT
OXY_INLINE float take_query(Bf16Operands, const float* row, std::int64_t width, std::int64_t lanes,
                            std::uint32_t* units) {
  alignas(64) std::uint32_t pairs[kDim / 2];
  for (std::int64_t i = 0; i < width; i += kLanes) {
    store(reinterpret_cast<bf16*>(pairs) + i, load(row + i));
  }
  for (std::int64_t i = 0; i < width / 2; ++i) units[i * lanes] = pairs[i];
  return 1.0f;
}
#endif

OXY_INLINE float take_query(CodeOperands, const float* row, std::int64_t width, std::int64_t lanes,
                            std::uint32_t* units) {
  const float largest = largest_magnitude(row, width);
  const float inverse = largest > 0.0f ? 32767.0f / largest : 0.0f;
  alignas(64) std::int32_t whole[kDim];
  for (std::int64_t i = 0; i < width; i += kLanes) {
    const i32v codes = __builtin_convertvector(nearest(load(row + i) * inverse), i32v);
    std::memcpy(whole + i, &codes, sizeof codes);
  }
  for (std::int64_t i = 0; i < width / 2; ++i) {
    units[i * lanes] = (static_cast<std::uint32_t>(whole[2 * i]) & 0xffff) |
                       static_cast<std::uint32_t>(whole[2 * i + 1]) << 16;
  }
  return largest / 32767.0f;
}

}  // namespace oxytorch::OXY_LEVEL
