// A block of some rows of x times a block of some panels, in vector registers.
#pragma once

#include "ops/panels/clamped.h"
#include "ops/panels/units.h"

namespace oxytorch::OXY_LEVEL {

// Rows and panels of a product's tile, as many as registers allow.
inline constexpr int kTileRows = kVectorBytes == 16 ? 3 : 6;
template <class Dot>
inline constexpr int kBlockRows = kTileRows / kDigits<Dot>;
inline constexpr int kTilePanels = OXY_HAS_VECTORS_512 ? 4 : 1;
inline constexpr std::int64_t kItemOutputs = kItemPanels * kPanelOutputs;

// Lines of stored panels that are unpacked next, which come from memory while others are
// multiplied.
struct StoredLines {
  const std::uint8_t* panels;  // or null
  std::int64_t panel_bytes;    // between panels
  std::int64_t lines;          // of each panel
  std::int64_t asked;          // of the first panel

  OXY_MEMBER void ask(std::int64_t count) {
    for (; count > 0; --count) {
      __builtin_prefetch(panels + asked * 64, 0, 2);
      if (++asked == lines) panels += panel_bytes, asked = 0;
    }
  }
};

// One block of some rows times one block of some panels, added to the rows' sums.
struct Tile {
  const std::uint8_t* rows;
  std::int64_t row_bytes;      // between rows
  std::int64_t digit_bytes;    // between the digits of a row
  const std::int32_t* starts;  // where each row begins, in bytes from `rows` on; null: as above
  // Where runs of `run_units` of a row begin, in bytes, `units` in all; null: they follow each
  // other. Not for tiles of AMX.
  const std::int32_t* runs;
  std::int64_t run_units;
  std::int64_t step_bytes;    // that a tile of AMX takes of a row
  const std::int32_t* steps;  // where these lie, in bytes from `rows` on; null: side by side
  const std::uint8_t* panels;
  std::int64_t panel_bytes;  // between panels
  std::int64_t units;        // along in_features
  const std::int32_t* row_sums;
  const float* row_scales;          // of sums of integers; null: 1
  const std::int32_t* zero_points;  // of 16 outputs of each panel; null: all are `middle`
  std::int32_t middle;
  const float* scales;  // likewise; null: 1
  float* sums;          // rows are kItemOutputs apart
  // Sums are not there yet, and are finished after this block. In registers of AMX only those of
  // bfloat16 without scales.
  bool begins, ends;
  const std::uint8_t* ahead;  // panels that are multiplied next, or null
  StoredLines stored;         // likewise, where these are unpacked first; not for tiles of AMX
  // Where results go that are finished as soon as their sums are complete, of bfloat16 alone.
  ClampedResults clamped;
};

// What a row's products with the codes have too much, for outputs `first` and on, negated.
OXY_INLINE i32v minus_zero_points(const Tile& tile, std::int64_t row, int first) {
  if (!tile.zero_points) return i32v{} - tile.middle * tile.row_sums[row];
  const i32v zero_points = load_as<i32v>(tile.zero_points + first);
  return i32v{} - zero_points * (i32v{} + tile.row_sums[row]);
}

// The sum of a row's products from those of its digits.
OXY_INLINE i32v sum_of_digits(i32v high, i32v low) { return (high << 7) + low; }

// A row's sums of a block and some outputs, with its scale.
template <class V>
OXY_INLINE f32v scaled_sum(const Tile& tile, std::int64_t row, V sum) {
  const f32v value = __builtin_convertvector(sum, f32v);
  if constexpr (__is_same(V, i32v)) {
    if (tile.row_scales) return value * tile.row_scales[row];
  }
  return value;
}

// The loops over rows and vectors are unrolled early, so that sums stay in registers throughout.
// Sums of a second digit follow those of all first ones.
template <class Dot, int rows, int panels>
__attribute__((noinline)) static void multiply_tile(const Tile& given) {
  constexpr int kVectors = panels * kParts;
  // A copy, because what is stored below could otherwise be the tile.
  const Tile tile = given;
  using Sum = typename Dot::Sum;
  constexpr int kRows = rows * kDigits<Dot>;
  Sum sums[kRows][kVectors];
  // Not in float32: a sum over all of in_features would err more than PyTorch's.
  const bool stay = !Dot::kIsInteger && Dot::kDepth == 2 && !tile.scales;
  const bool continues = stay && !tile.begins;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kKeepsZeroPoint<Dot>) {
        sums[r][v] = r < rows ? minus_zero_points(tile, r, v * kLanes) : i32v{};
      } else if constexpr (Dot::kIsInteger) {
        sums[r][v] = i32v{};
      } else {
        sums[r][v] = continues ? load(tile.sums + r * kItemOutputs + v * kLanes) : f32v{};
      }
    }
  }
  const std::uint8_t* x[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
    x[r] = tile.rows + (tile.starts ? tile.starts[r] : r * tile.row_bytes);
    if constexpr (kDigits<Dot> == 2) x[rows + r] = x[r] + tile.digit_bytes;
  }
  const std::uint8_t* panel = tile.panels;
  const std::int64_t ahead = tile.ahead - panel;
  const std::int64_t run = (tile.runs ? tile.run_units : tile.units) * 4;
  std::int64_t at = 0;
  const std::int32_t* begin = tile.runs;
  for (std::int64_t left = tile.units * 4; left > 0; left -= run) {
    if (begin) at = *begin++;
    for (const std::int64_t end = at + run; at < end; at += 4, panel += 64) {
      // Else GCC counts up a pointer for each row.
      asm("" : "+r"(at));
      __builtin_prefetch(panel + ahead, 0, 2);
      Sum weights[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        weights[v] = load_as<Sum>(panel + v / kParts * tile.panel_bytes + v % kParts * sizeof(Sum));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto unit = load_as<typename Dot::Unit>(x[r] + at);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = Dot::multiply(sums[r][v], weights[v], unit);
        }
      }
    }
  }
  if constexpr (!Dot::kIsInteger && Dot::kDepth == 2) {
    if (tile.ends && tile.clamped.out) {
      return store_clamped<bf16, rows, kVectors>(given.clamped, sums);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const f32v scale = tile.scales ? load(tile.scales + v * kLanes) : splat(1.0f);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      float* to = tile.sums + r * kItemOutputs + v * kLanes;
      Sum whole = sums[r][v];
      if constexpr (kDigits<Dot> == 2) whole = sum_of_digits(sums[rows + r][v], whole);
      const f32v sum = scaled_sum(tile, r, whole);
      if (stay) {
        store(to, sum);
      } else {
        store(to, multiply_add(sum, scale, tile.begins ? f32v{} : load(to)));
      }
    }
  }
}

template <class Dot, int panels, int rows = kBlockRows<Dot>>
OXY_INLINE void multiply_rest(const Tile& tile, std::int64_t left) {
  if constexpr (rows > 0) {
    if (left == rows) return multiply_tile<Dot, rows, panels>(tile);
    multiply_rest<Dot, panels, rows - 1>(tile, left);
  }
}

// What finishes blocks of some panels.
template <class Finish>
struct BlockFinish {
  const Finish& finish;
  std::int64_t first_panel, panels;

  OXY_MEMBER void operator()(std::int64_t row, std::int64_t rows, const float* sums) const {
    finish(first_panel, panels, row, rows, sums);
  }
  OXY_MEMBER void ask(std::int64_t row, std::int64_t rows) const {
    finish.ask(first_panel, panels, row, rows);
  }
};

template <class Dot, int panels, class Finish>
static void multiply_rows(Tile tile, std::int64_t rows, const Finish& finish) {
  constexpr int kRows = kBlockRows<Dot>;
  const std::uint8_t* ahead = rows > (panels - 1) * kRows ? tile.ahead : nullptr;
  const std::int64_t tiles = (rows + kRows - 1) / kRows;
  const std::int64_t asked = tile.stored.panels ? (panels * tile.stored.lines - 1) / tiles + 1 : 0;
  int panel = 0;
  for (std::int64_t first = 0, taken = 0; first < rows; first += taken) {
    const std::int64_t left = rows - first;
    // A tile of few rows waits for its own sums, so the last ones are of about one size.
    taken = left >= 2 * kRows ? kRows : left > kRows ? (left + 1) / 2 : left;
    // The first few tiles ask for a panel each, line by line.
    const bool asks = ahead && panel < panels;
    tile.ahead = asks ? ahead + panel++ * tile.panel_bytes : tile.panels;
    tile.stored.ask(asked);
    if (tile.ends) finish.ask(first, taken);
    if (taken == kRows) {
      multiply_tile<Dot, kRows, panels>(tile);
    } else {
      multiply_rest<Dot, panels>(tile, taken);
    }
    if (tile.ends && !tile.clamped.out) finish(first, taken, tile.sums);
    tile.clamped.skip_rows(taken);
    if (tile.starts) {
      tile.starts += taken;
    } else {
      tile.rows += taken * tile.row_bytes;
    }
    if (tile.row_sums) tile.row_sums += taken;
    if (tile.row_scales) tile.row_scales += taken;
    if (!tile.begins || !tile.ends) tile.sums += taken * kItemOutputs;
  }
}

// Whether blocks are finished as soon as they are multiplied: panels of a gated weight go in pairs,
// of which narrow vectors multiply one at a time.
OXY_INLINE bool finishes_blocks(PanelEpilogue epilogue) {
  return kTilePanels > 1 || !is_gated(epilogue);
}

// Where the tile ends, `finish(first_panel, panels, first_row, rows, sums)` is called for blocks of
// some rows and panels whose sums are complete; where no others are added to them, the next ones
// take their place.
template <class Dot, class Finish>
static void multiply_block(Tile tile, std::int64_t rows, std::int64_t panels,
                           const Finish& finish) {
  const std::uint8_t* ahead = tile.ahead;
  for (std::int64_t first = 0, taken = 0; first < panels; first += taken) {
    const std::int64_t left = panels - first;
    taken = left >= kTilePanels ? kTilePanels : left > 1 ? 2 : 1;
    const BlockFinish<Finish> finish_rows{finish, first, taken};
    tile.ahead = first + taken < panels ? tile.panels + taken * tile.panel_bytes : ahead;
    if (taken == kTilePanels) {
      multiply_rows<Dot, kTilePanels>(tile, rows, finish_rows);
    } else if (taken == 2) {
      multiply_rows<Dot, kTilePanels == 1 ? 1 : 2>(tile, rows, finish_rows);
    } else {
      multiply_rows<Dot, 1>(tile, rows, finish_rows);
    }
    tile.panels += taken * tile.panel_bytes;
    if (tile.stored.panels) tile.stored.panels += taken * tile.stored.panel_bytes;
    tile.clamped.skip_outputs(taken * kPanelOutputs, 2);
    if (tile.zero_points) tile.zero_points += taken * kPanelOutputs;
    if (tile.scales) tile.scales += taken * kPanelOutputs;
    tile.sums += taken * kPanelOutputs;
  }
}

}  // namespace oxytorch::OXY_LEVEL
