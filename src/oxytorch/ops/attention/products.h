// Products of blocks: of queries with keys, and of exponentials with values.
#pragma once

#include "core/dot_unit.h"
#include "core/sizes.h"
#include "core/tile.h"

namespace oxytorch::OXY_LEVEL {

// Rows and vectors of a product's tile, as many as registers allow.
inline constexpr int kTileRows = OXY_HAS_VECTORS_512 ? 6 : 4;
inline constexpr int kTileVectors = OXY_HAS_VECTORS_512 ? 4 : 2;

// What a product of elements T multiplies.
template <class T>
struct DotOf {
  using Dot = Float32Unit;
};

#if OXY_HAS_BF16_DOT
template <>
struct DotOf<bf16> {
  using Dot = Bf16Pair;
};
#endif

// c[rows, vectors] (+)= a[rows, depth] b[depth, vectors], one tile.
template <class Dot, int vectors, bool add>
OXY_INLINE void tile(const typename Dot::Unit* a, std::int64_t a_stride,
                     const typename Dot::Unit* b, std::int64_t b_stride, float* c,
                     std::int64_t c_stride, std::int64_t depth) {
  f32v sums[kTileRows][vectors];
  for (int r = 0; r < kTileRows; ++r) {
    for (int v = 0; v < vectors; ++v) {
      sums[r][v] = add ? load(c + r * c_stride + v * kLanes) : f32v{};
    }
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    for (int r = 0; r < kTileRows; ++r) {
      for (int v = 0; v < vectors; ++v) {
        sums[r][v] = Dot::multiply(sums[r][v], load_as<f32v>(b + k * b_stride + v * kLanes),
                                   a[r * a_stride + k]);
      }
    }
  }
  for (int r = 0; r < kTileRows; ++r) {
    for (int v = 0; v < vectors; ++v) store(c + r * c_stride + v * kLanes, sums[r][v]);
  }
}

#if OXY_HAS_TILES

// Whether products run in the tile registers of AMX, which `configure_tiles` has prepared.
template <class Dot>
inline constexpr bool kInTiles = __is_same(Dot, Bf16Pair);

// 16 or 32 rows of as many columns. Registers 0 and 1 are those of the first 16 rows.
template <bool two_rows, bool two_columns, bool add>
OXY_INLINE void tile_product(const std::uint32_t* a, std::int64_t a_stride, const std::uint32_t* b,
                             std::int64_t b_stride, float* c, std::int64_t c_stride,
                             std::int64_t depth) {
  float* below = c + 16 * c_stride;
  if constexpr (add) {
    _tile_loadd(0, c, c_stride * 4);
    if constexpr (two_columns) _tile_loadd(1, c + 16, c_stride * 4);
    if constexpr (two_rows) _tile_loadd(2, below, c_stride * 4);
    if constexpr (two_rows && two_columns) _tile_loadd(3, below + 16, c_stride * 4);
  } else {
    _tile_zero(0);
    if constexpr (two_columns) _tile_zero(1);
    if constexpr (two_rows) _tile_zero(2);
    if constexpr (two_rows && two_columns) _tile_zero(3);
  }
  for (std::int64_t k = 0; k < depth; k += 16) {
    _tile_loadd(4, a + k, a_stride * 4);
    _tile_loadd(6, b + k * b_stride, b_stride * 4);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (two_columns) {
      _tile_loadd(7, b + k * b_stride + 16, b_stride * 4);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (two_rows) {
      _tile_loadd(5, a + 16 * a_stride + k, a_stride * 4);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (two_rows && two_columns) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_stride * 4);
  if constexpr (two_columns) _tile_stored(1, c + 16, c_stride * 4);
  if constexpr (two_rows) _tile_stored(2, below, c_stride * 4);
  if constexpr (two_rows && two_columns) _tile_stored(3, below + 16, c_stride * 4);
}

template <bool add>
static void product_in_tiles(const std::uint32_t* a, std::int64_t a_stride, const std::uint32_t* b,
                             std::int64_t b_stride, float* c, std::int64_t c_stride,
                             std::int64_t rows, std::int64_t columns, std::int64_t depth) {
  finish_stores(a);
  for (std::int64_t column = 0; column < columns; column += 32) {
    const bool two_columns = column + 16 < columns;
    for (std::int64_t row = 0; row < rows; row += 32) {
      const bool two_rows = row + 16 < rows;
      const auto run =
          two_rows ? two_columns ? tile_product<true, true, add> : tile_product<true, false, add>
          : two_columns ? tile_product<false, true, add>
                        : tile_product<false, false, add>;
      run(a + row * a_stride, a_stride, b + column, b_stride, c + row * c_stride + column, c_stride,
          depth);
    }
  }
}

#else

template <class Dot>
inline constexpr bool kInTiles = false;

#endif

// Rows, and units along the sum, to which operands go on: these with zeros.
template <class Dot>
inline constexpr std::int64_t kRowsTogether = kInTiles<Dot> ? 16 : kTileRows;
template <class Dot>
inline constexpr std::int64_t kUnitsTogether = kInTiles<Dot> ? 16 : 1;

// c[rows, columns] (+)= a[rows, depth] b[depth, columns]. Rows are rounded up to
// kRowsTogether, columns to vectors: there is room for both.
template <class Dot, bool add>
static void product(const typename Dot::Unit* a, std::int64_t a_stride, const typename Dot::Unit* b,
                    std::int64_t b_stride, float* c, std::int64_t c_stride, std::int64_t rows,
                    std::int64_t columns, std::int64_t depth) {
#if OXY_HAS_TILES
  if constexpr (kInTiles<Dot>) {
    return product_in_tiles<add>(a, a_stride, b, b_stride, c, c_stride, rows, columns, depth);
  }
#endif
  std::int64_t column = 0;
  for (; column + kTileVectors * kLanes <= columns; column += kTileVectors * kLanes) {
    for (std::int64_t row = 0; row < rows; row += kTileRows) {
      tile<Dot, kTileVectors, add>(a + row * a_stride, a_stride, b + column, b_stride,
                                   c + row * c_stride + column, c_stride, depth);
    }
  }
  for (; column < columns; column += kLanes) {
    for (std::int64_t row = 0; row < rows; row += kTileRows) {
      tile<Dot, 1, add>(a + row * a_stride, a_stride, b + column, b_stride,
                        c + row * c_stride + column, c_stride, depth);
    }
  }
}

}  // namespace oxytorch::OXY_LEVEL
