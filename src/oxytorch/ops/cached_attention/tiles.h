// The products of a block in the tile registers of AMX, for 16 query rows side by side.
#pragma once

#include "core/tile.h"
#include "ops/_attention/turn.h"
#include "ops/cached_attention/block.h"

namespace oxytorch::OXY_LEVEL {

#if OXY_HAS_TILES

// Quantized rows have to be made bfloat16 first: with fewer query rows integers are faster.
inline constexpr std::int64_t kLeastTileRowsOfCodes = 32;

template <class Operands, int lanes>
inline constexpr bool kInTiles = __is_same(Operands, Bf16Operands) && lanes == 16;

// The values of a block, two keys in a unit, zero where there is no key; dims as `interleave`
// leaves them.
struct ValuePairs {
  alignas(64) std::uint32_t units[kKeys / 2 * kDim];
};

static void pair_values(const bf16* values, std::int64_t stride, std::int64_t keys,
                        std::int64_t width, ValuePairs& pairs) {
  for (std::int64_t k = 0; k < round_up(keys, 32); k += 2) {
    const bf16* row = values + k * stride;
    std::uint32_t* to = pairs.units + k / 2 * width;
    for (std::int64_t i = 0; i < width; i += 2 * kLanes) {
      i32v two[2] = {};
      const i32v first = k < keys ? load_as<i32v>(row + i) : i32v{};
      const i32v second = k + 1 < keys ? load_as<i32v>(row + stride + i) : i32v{};
      interleave(first, second, two);
      std::memcpy(to + i, two, sizeof two);
    }
  }
}

// As score_block. The rows of keys go on with zeros to a multiple of 16.
static void score_in_tiles(const std::uint32_t* queries, const bf16* rows, std::int64_t stride,
                           std::int64_t keys, std::int64_t width, const float* row_scales,
                           const float* key_scales, float* scores) {
  finish_stores(queries);
  for (std::int64_t k = 0; k < keys; k += 16) {
    _tile_zero(0);
    for (std::int64_t i = 0; i < width; i += 32) {
      _tile_loadd(4, rows + k * stride + i, stride * 2);
      _tile_loadd(5, queries + i / 2 * 16, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, scores + k * 16, 64);
  }
  const f32v scale = load(row_scales);
  for (std::int64_t k = 0; k < keys; ++k) {
    const f32v factor = key_scales ? scale * key_scales[k] : scale;
    store(scores + k * 16, load(scores + k * 16) * factor);
  }
  if (keys % 2) store(scores + keys * 16, splat(kMinusInfinity));
}

// As add_values.
static void add_in_tiles(const std::uint32_t* weights, const ValuePairs& pairs, std::int64_t keys,
                         const Factors& factors, float* sums, std::int64_t rows,
                         std::int64_t width) {
  alignas(64) std::uint32_t turned[16 * kKeys / 2];
  alignas(64) float found[2][16 * 16];
  const std::int64_t given = (keys + 1) / 2, steps = (keys + 31) / 32;
  for (std::int64_t step = 0; step < steps; ++step) {
    __m512i units[16];
    for (std::int64_t i = 0; i < 16; ++i) {
      const std::int64_t unit = step * 16 + i;
      units[i] = unit < given ? _mm512_loadu_si512(weights + unit * 16) : _mm512_setzero_si512();
    }
    turn(units);
    for (int lane = 0; lane < 16; ++lane) {
      _mm512_store_si512(turned + (step * 16 + lane) * 16, units[lane]);
    }
  }
  finish_stores(turned);
  for (std::int64_t i = 0; i < width; i += 32) {
    _tile_zero(0);
    _tile_zero(1);
    for (std::int64_t step = 0; step < steps; ++step) {
      const std::uint32_t* values = pairs.units + step * 16 * width + i;
      _tile_loadd(4, turned + step * 256, 64);
      _tile_loadd(5, values, width * 4);
      _tile_loadd(6, values + 16, width * 4);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, found[0], 64);
    _tile_stored(1, found[1], 64);
    for (std::int64_t r = 0; r < rows; ++r) {
      f32v ordered[2];
      unshuffled(load(found[0] + r * 16), load(found[1] + r * 16), ordered);
      for (int v = 0; v < 2; ++v) {
        float* to = sums + r * width + i + v * kLanes;
        store(to, load(to) * factors.before[r] + ordered[v] * factors.block[r]);
      }
    }
  }
}

#else

template <class Operands, int lanes>
inline constexpr bool kInTiles = false;

#endif

}  // namespace oxytorch::OXY_LEVEL
