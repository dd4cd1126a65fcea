// Blocks of a product in the tile registers of AMX: 16 rows of x, left, times the 16 outputs of a
// panel, right.
#pragma once

#include "core/tile.h"
#include "ops/panels/blocks.h"

#if OXY_HAS_TILES

namespace oxytorch::OXY_LEVEL {

// The operands of tile instructions are part of the instruction, so loops cannot number them.

template <bool second_rows, bool second_panel>
OXY_INLINE void clear_sums() {
  _tile_zero(0);
  if constexpr (second_panel) _tile_zero(1);
  if constexpr (second_rows) _tile_zero(2);
  if constexpr (second_rows && second_panel) _tile_zero(3);
}

template <bool second_rows, bool second_panel>
OXY_INLINE void load_sums(const float* sums) {
  constexpr std::int64_t kStride = kItemOutputs * 4;
  _tile_loadd(0, sums, kStride);
  if constexpr (second_panel) _tile_loadd(1, sums + 16, kStride);
  if constexpr (second_rows) _tile_loadd(2, sums + 16 * kItemOutputs, kStride);
  if constexpr (second_rows && second_panel) {
    _tile_loadd(3, sums + 16 * kItemOutputs + 16, kStride);
  }
}

template <bool second_rows, bool second_panel>
OXY_INLINE void store_sums(void* to, std::int64_t stride) {
  std::uint8_t* sums = static_cast<std::uint8_t*>(to);
  _tile_stored(0, sums, stride);
  if constexpr (second_panel) _tile_stored(1, sums + 64, stride);
  if constexpr (second_rows) _tile_stored(2, sums + 16 * stride, stride);
  if constexpr (second_rows && second_panel) _tile_stored(3, sums + 16 * stride + 64, stride);
}

// Left operands in register `left`, times register `right`.
#define OXY_MULTIPLY_TILES(sums, left, right) \
  if constexpr (Dot::kIsInteger) {            \
    _tile_dpbsud(sums, left, right);          \
  } else {                                    \
    _tile_dpbf16ps(sums, left, right);        \
  }

// Rows of two tiles, one below the other.
inline constexpr std::int64_t kTwoTiles = 2 * kTileHeight;

// Rows of x that two tiles hold, one below the other or one for each digit.
template <class Dot>
inline constexpr std::int64_t kPairRows = kTwoTiles / kDigits<Dot>;

// `second_bytes`: from the first tile of rows to the second one. `asked`: lines of both panels,
// from `ahead` on, that the second cache gets meanwhile.
template <class Dot, bool second_rows, bool second_panel, int asked>
OXY_INLINE void multiply_step(const std::uint8_t* rows, std::int64_t row_bytes,
                              std::int64_t second_bytes, const std::uint8_t* panels,
                              std::int64_t panel_bytes, const std::uint8_t* ahead) {
  _tile_loadd(6, panels, 64);
  _tile_loadd(4, rows, row_bytes);
  OXY_MULTIPLY_TILES(0, 4, 6)
  if constexpr (second_panel) {
    _tile_loadd(7, panels + panel_bytes, 64);
    OXY_MULTIPLY_TILES(1, 4, 7)
  }
#pragma GCC unroll 16
  for (int line = 0; line < asked; ++line) {
    _mm_prefetch(ahead + line * 64, _MM_HINT_T1);
    if constexpr (second_panel) _mm_prefetch(ahead + panel_bytes + line * 64, _MM_HINT_T1);
  }
  if constexpr (second_rows) {
    _tile_loadd(5, rows + second_bytes, row_bytes);
    OXY_MULTIPLY_TILES(2, 5, 6)
    if constexpr (second_panel) {
      OXY_MULTIPLY_TILES(3, 5, 7)
    }
  }
}

#undef OXY_MULTIPLY_TILES

// Sums of two tiles of rows and two panels that have left the registers. They are scaled and added
// while the next ones are multiplied.
struct WaitingSums {
  alignas(64) std::uint8_t values[kTwoTiles * 128];
  Tile tile;
  std::int64_t rows;
  int panels = 0;
};

template <class Dot>
static void add_sums(WaitingSums& waiting) {
  const Tile tile = waiting.tile;
  for (int p = 0; p < waiting.panels; ++p) {
    const f32v scales = tile.scales ? load(tile.scales + p * kPanelOutputs) : splat(1.0f);
    for (std::int64_t r = 0; r < waiting.rows; ++r) {
      const std::uint8_t* from = waiting.values + r * 128 + p * 64;
      const u32v words = load_as<u32v>(from);
      f32v sum;
      if constexpr (Dot::kIsInteger) {
        i32v whole = reinterpret_cast<i32v>(words) + minus_zero_points(tile, r, p * kPanelOutputs);
        if constexpr (kDigits<Dot> == 2) {
          whole = sum_of_digits(load_as<i32v>(from + kPairRows<Dot> * 128), whole);
        }
        sum = scaled_sum(tile, r, whole);
      } else {
        sum = from_bits(words);
      }
      float* to = tile.sums + r * kItemOutputs + p * kPanelOutputs;
      store(to, multiply_add(sum, scales, load(to)));
    }
  }
  waiting.panels = 0;
}

// What blocks of up to kPairRows rows and two panels share. Vectors finish one whose sums are
// complete, a few rows after each step of the next block, while tiles multiply.
template <class Finish>
struct TileBlocks {
  const Finish& finish;
  std::int64_t step;     // units
  std::int64_t pace;     // rows that are finished after a step
  WaitingSums& waiting;  // of integers, or with scales
  const float* sums;     // of the block that is finished
  std::int64_t panel, panels, row;
  std::int64_t rows;   // that are left of it
  std::int64_t place;  // of the next sums, where none are added to them

  OXY_MEMBER void finish_rows(std::int64_t count) {
    if (rows == 0) return;
    const std::int64_t some = rows < count ? rows : count;
    finish(panel, panels, row, some, sums);
    row += some, rows -= some, sums += some * kItemOutputs;
  }
};

template <class Dot, bool second_rows, bool second_panel, int asked, class Blocks>
static void multiply_tiles(const Tile& tile, std::int64_t rows, Blocks& blocks) {
  const bool continues = !Dot::kIsInteger && !tile.scales;
  const std::int64_t second_bytes =
      kDigits<Dot> == 2 ? tile.digit_bytes : kTileHeight * tile.row_bytes;
  finish_stores(tile.panels);
  if (continues && !tile.begins) {
    load_sums<second_rows, second_panel>(tile.sums);
  } else {
    clear_sums<second_rows, second_panel>();
  }
  const auto multiply = [&](const std::uint8_t* row, std::int64_t k)
                            __attribute__((always_inline)) {
                              multiply_step<Dot, second_rows, second_panel, asked>(
                                  row, tile.row_bytes, second_bytes, tile.panels + k * 64,
                                  tile.panel_bytes, tile.ahead + k * 64);
                              blocks.finish_rows(blocks.pace);
                            };
  const std::int64_t step = blocks.step;
  if (tile.steps) {
    const std::int32_t* at = tile.steps;
    for (std::int64_t k = 0; k < tile.units; k += step) multiply(tile.rows + *at++, k);
  } else {
    const std::uint8_t* row = tile.rows;
    for (std::int64_t k = 0; k < tile.units; k += step, row += tile.step_bytes) multiply(row, k);
  }
  if (continues) {
    store_sums<second_rows, second_panel>(tile.sums, kItemOutputs * 4);
    return;
  }
  WaitingSums& waiting = blocks.waiting;
  add_sums<Dot>(waiting);
  store_sums<second_rows, second_panel>(waiting.values, 128);
  waiting.tile = tile;
  waiting.rows = rows;
  waiting.panels = second_panel ? 2 : 1;
}

template <class Dot, bool second_panel, int asked, class Blocks>
OXY_INLINE void multiply_tile_pair(const Tile& tile, std::int64_t rows, Blocks& blocks) {
  if (kDigits<Dot> == 2 || rows > kTileHeight) {
    multiply_tiles<Dot, true, second_panel, asked>(tile, rows, blocks);
  } else {
    multiply_tiles<Dot, false, second_panel, asked>(tile, rows, blocks);
  }
}

// Rows of the block that begins with row `first`.
template <class Dot>
OXY_INLINE std::int64_t block_rows(std::int64_t first, std::int64_t rows, bool is_exact) {
  const std::int64_t left = rows - first;
  if (left >= kPairRows<Dot>) return kPairRows<Dot>;
  // Two tiles would begin before the first row.
  return is_exact && first == 0 && left > kTileHeight ? kTileHeight : left;
}

// The panels ahead are asked for a quarter at a time, if the rows are that many. `is_exact`: no
// rows of x lie behind the last one, so that the last block may begin with rows of the one before.
// Sums to which none are added take turns at two places, of which one is finished meanwhile.
template <class Dot, bool second_panel, class Blocks>
static void multiply_tile_rows(const Tile& given, std::int64_t rows, std::int64_t panel,
                               bool is_exact, Blocks& blocks) {
  constexpr int kLines = 16, kQuarter = kLines / 4;
  const bool by_quarters = rows > 3 * kPairRows<Dot>, stay = given.begins && given.ends;
  Tile tile = given;
  int asked = tile.ahead ? kLines : 0;
  for (std::int64_t first = 0, taken = 0; first < rows; first += taken) {
    taken = block_rows<Dot>(first, rows, is_exact);
    const std::int64_t whole = taken > kTileHeight ? kTwoTiles : kTileHeight;
    const std::int64_t again = is_exact ? whole - taken : 0;
    tile.rows = given.rows + (first - again) * tile.row_bytes;
    if (given.row_sums) tile.row_sums = given.row_sums + first;
    if (given.row_scales) tile.row_scales = given.row_scales + first;
    tile.sums = given.sums + (stay ? (blocks.place ^= kItemOutputs / 2) : first * kItemOutputs);
    if (asked == 0) {
      multiply_tile_pair<Dot, second_panel, 0>(tile, taken, blocks);
    } else if (by_quarters) {
      multiply_tile_pair<Dot, second_panel, kQuarter>(tile, taken, blocks);
      tile.ahead += kQuarter * 64;
      asked -= kQuarter;
    } else {
      multiply_tile_pair<Dot, second_panel, kLines>(tile, taken, blocks);
      asked = 0;
    }
    if (!tile.ends) continue;
    blocks.finish_rows(kTwoTiles);
    blocks.sums = tile.sums + again * kItemOutputs;
    blocks.panel = panel, blocks.panels = second_panel ? 2 : 1;
    blocks.row = first, blocks.rows = taken;
  }
}

// As multiply_block, with registers configured for the units of a step; there is room for sums of
// as many rows as tiles have. Blocks that are finished have up to kPairRows rows and two panels;
// is_exact: see multiply_tile_rows.
template <class Dot, class Finish>
static void multiply_block_in_tiles(Tile tile, std::int64_t rows, std::int64_t panels,
                                    bool is_exact, const Finish& finish) {
  constexpr std::int64_t kLeastPace = 6;  // fewer take as long to begin as to finish
  const std::int64_t step = tile.step_bytes / 4, steps = tile.units / step;
  const std::int64_t pace = (kTwoTiles + steps - 1) / steps;
  const bool stay = tile.begins && tile.ends;
  WaitingSums waiting;
  TileBlocks<Finish> blocks{.finish = finish,
                            .step = step,
                            .pace = pace < kLeastPace ? kLeastPace : pace,
                            .waiting = waiting,
                            .sums = nullptr,
                            .panel = 0,
                            .panels = 0,
                            .row = 0,
                            .rows = 0,
                            .place = 0};
  for (std::int64_t first = 0; first < panels; first += 2) {
    const std::int64_t taken = panels - first > 1 ? 2 : 1;
    if (taken == 2) {
      multiply_tile_rows<Dot, true>(tile, rows, first, is_exact, blocks);
    } else {
      multiply_tile_rows<Dot, false>(tile, rows, first, is_exact, blocks);
    }
    tile.panels += taken * tile.panel_bytes;
    if (tile.ahead) tile.ahead += taken * tile.panel_bytes;
    if (tile.zero_points) tile.zero_points += taken * kPanelOutputs;
    if (tile.scales) tile.scales += taken * kPanelOutputs;
    if (!stay) tile.sums += taken * kPanelOutputs;
  }
  add_sums<Dot>(waiting);
  blocks.finish_rows(kTwoTiles);
}

}  // namespace oxytorch::OXY_LEVEL

#endif
