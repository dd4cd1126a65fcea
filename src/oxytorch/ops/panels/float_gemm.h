// Rows of float32 times panels of float32. An item takes its panels piece by piece along
// in_features. A piece stays in the second cache while all rows meet it, a few at a time, which
// stay in the nearest one; meanwhile the next piece comes from memory.
#pragma once

#include "ops/panels/blocks.h"
#include "ops/panels/finish.h"

namespace oxytorch::OXY_LEVEL {

// in_features of a piece at most: of many rows, of some, and of few. Sums begin again in each,
// because short ones err less: MKL's have some 190, and those for few rows or outputs fewer.
inline constexpr std::int64_t kFloatPiece = 128;
inline constexpr std::int64_t kMiddlePiece = 96;
inline constexpr std::int64_t kShortPiece = 32;
inline constexpr std::int64_t kSomeRows = 48;
inline constexpr std::int64_t kFewRows = 8;
// Panels whose sums lie side by side.
inline constexpr std::int64_t kFloatPanels = 4;
inline constexpr std::int64_t kSumsStride = kFloatPanels * kPanelOutputs;
inline constexpr std::int64_t kLineFloats = 16;
inline constexpr std::int64_t kStep = 4;  // a multiple of all numbers of chains
// Cache lines that are asked for at once: with more, what is needed meanwhile waits behind them.
inline constexpr std::int64_t kFewLines = 12;
// Up to so many lines of panels are asked for at once with those of the next rows.
inline constexpr std::int64_t kLinesWithRows = 4;

// What is left of a piece that is multiplied next, which tiles ask for on their way: panels of
// `rows` cache lines, of the first of them those from `row` on.
struct FloatAhead {
  const float* panel;
  std::int64_t panel_stride;
  std::int64_t panels;
  std::int64_t rows;
  std::int64_t row;

  // Where neighbouring lines begin that the caller asks for; `other` if none is left.
  OXY_MEMBER const float* take(std::int64_t lines, const float* other) {
    if (panels == 0) return other;
    const float* taken = panel + row * kPanelOutputs;
    row += lines;
    if (row >= rows) row = 0, --panels, panel += panel_stride;
    return taken;
  }

  OXY_MEMBER void ask(std::int64_t lines) {
    for (; lines > 0 && panels > 0; --lines) {
      __builtin_prefetch(panel + row * kPanelOutputs, 0, 2);
      if (++row == rows) row = 0, --panels, panel += panel_stride;
    }
  }
};

// Some rows times some panels, added to `sums`, or to the bias in place of them; then so many rows
// after them, `tiles` times in all.
struct FloatTile {
  std::int64_t tiles;
  const float* x;
  std::int64_t x_stride;
  const float* const* starts;  // or where each row begins, `offset` before what is read; or null
  std::int64_t offset;
  // Where runs of `block` elements of a row begin, `length` in all; null: they follow each other.
  const std::int64_t* runs;
  bool asks_ahead;  // for the rows of the next tile, which follow x_stride apart
  const float* panels;
  std::int64_t panel_stride;
  std::int64_t length;  // along in_features
  bool begins;
  const float* bias;       // null: zeros
  float* sums;             // rows are kSumsStride apart
  std::int64_t sums_step;  // from a tile to the next
  FloatAhead* ahead;
  // Lines are asked for one by one, for each of in_features; else
  bool is_steady;
  std::int64_t asked;  // so many, each time after `block` in_features,
  std::int64_t block;  // a multiple of kStep
  // Tiles of kTileRows rows ask for lines of the next rows, which follow x_stride apart, each time
  // with them: all at once would fill the queue between the first cache and the second.
  bool is_spread;
  // Where results go that are finished with their sums, which end with this piece; its bias is not
  // in the sums yet.
  ClampedResults clamped;
};

// Independent sums of a tile, where registers have room for them: additions need not wait for each
// other, and err less. It depends on the rows alone, and so not on how panels are split.
template <int rows>
inline constexpr int kFloatChains = kVectorBytes == 16 ? (rows == 1 ? 2 : 1)
                                    : rows == 1        ? 4
                                    : rows <= 3        ? 2
                                                       : 1;

// is_spread: as the tile's; its own code, because asking for each of in_features takes time too.
template <int rows, int panels, bool is_spread>
__attribute__((noinline)) static void multiply_float_tiles(const FloatTile& tile) {
  constexpr int kVectors = panels * kParts;
  constexpr int kSums = kFloatChains<rows>;
  // Copies, because what is stored below could otherwise be the tile. One by one: a copy of the
  // whole would wait for what has just been written to it.
  const std::int64_t stride = tile.panel_stride, x_stride = tile.x_stride, asked = tile.asked;
  const std::int64_t length = tile.length;
  const bool begins = tile.begins, is_steady = tile.is_steady;
  const std::int64_t* const runs = tile.runs;
  const std::int64_t block = is_spread ? kLineFloats : is_steady && !runs ? length : tile.block;
  const float* const first = tile.panels;
  const float* const bias = tile.bias;
  const float* const* starts = tile.starts;
  const float* from = tile.x;
  float* to = tile.sums;
  FloatAhead* ahead = tile.ahead;
  ClampedResults clamped = tile.clamped;
  for (std::int64_t left_tiles = tile.tiles; left_tiles > 0; --left_tiles) {
    f32v sums[kSums][rows][kVectors] = {};
    const float* x[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) x[r] = starts ? starts[r] + tile.offset : from + r * x_stride;
    if (!is_spread && tile.asks_ahead && left_tiles > 1) {
      for (int r = 0; r < rows; ++r) {
        for (std::int64_t k = 0; k < length; k += kLineFloats) {
          __builtin_prefetch(x[r] + rows * x_stride + k);
        }
      }
    }
    std::int64_t at = 0;
    const float* panel = first;
    // Otherwise it asks for what it reads.
    const std::int64_t lead = !is_spread && is_steady ? ahead->take(length, first) - first : 0;
    const std::int64_t next = left_tiles > 1 ? rows * x_stride : 0;
    const auto add = [&](int chain) __attribute__((always_inline)) {
      f32v weights[kVectors];
      if constexpr (!is_spread) __builtin_prefetch(panel + lead, 0, 2);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        weights[v] = load(panel + v / kParts * stride + v % kParts * kLanes);
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        const auto number = load_as<float>(x[r] + at);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[chain][r][v] += weights[v] * number;
      }
      ++at;
      // Else GCC counts up a pointer for each row.
      asm("" : "+r"(at));
      panel += kPanelOutputs;
    };
    // One loop for all: with several GCC keeps sums in memory between them.
    const std::int64_t* run = runs;
    for (std::int64_t left = length; left > 0; left -= block) {
      if (is_spread) {
        ahead->ask(asked);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) __builtin_prefetch(x[r] + next + at);
      } else if (runs) {
        at = *run++;
      } else if (!is_steady) {
        ahead->ask(asked);
      }
      std::int64_t count = left < block ? left : block;
#pragma GCC unroll 4
      for (; count >= kSums; count -= kSums) {
#pragma GCC unroll 4
        for (int chain = 0; chain < kSums; ++chain) add(chain);
      }
      if constexpr (kSums > 1) {
        for (; count > 0; --count) add(0);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
        for (int chain = 1; chain < kSums; ++chain) sums[0][r][v] += sums[chain][r][v];
      }
    }
    const auto add_all = [&](const auto& begin) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[0][r][v] += begin(r, v);
      }
    };
    if (!begins) {
      add_all([&](int r, int v) __attribute__((always_inline)) {
        return load(to + r * kSumsStride + v * kLanes);
      });
    } else if (bias) {
      add_all([&](int, int v) __attribute__((always_inline)) { return load(bias + v * kLanes); });
    }
    if (clamped.out) {
      store_clamped<float, rows, kVectors>(clamped, sums[0]);
      clamped.skip_rows(rows);
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) store(to + r * kSumsStride + v * kLanes, sums[0][r][v]);
      }
    }
    to += tile.sums_step;
    from += rows * x_stride;
    if (starts) starts += rows;
  }
}

template <int panels, int rows = kTileRows>
OXY_INLINE void multiply_float_rows(const FloatTile& tile, std::int64_t given) {
  if constexpr (rows > 0) {
    constexpr bool kIsWhole = rows == kTileRows;
    if (given == rows && kIsWhole && tile.is_spread) {
      return multiply_float_tiles<rows, panels, kIsWhole>(tile);
    }
    if (given == rows) return multiply_float_tiles<rows, panels, false>(tile);
    multiply_float_rows<panels, rows - 1>(tile, given);
  }
}

// At most kTileRows rows times at most kFloatPanels panels.
static void multiply_float_panels(FloatTile tile, std::int64_t rows, std::int64_t panels) {
  while (panels > 0) {
    std::int64_t taken = 1;
    if (kTilePanels >= 4 && panels >= 4) {
      multiply_float_rows<kTilePanels >= 4 ? 4 : 1>(tile, rows);
      taken = 4;
    } else if (kTilePanels >= 2 && panels >= 2) {
      multiply_float_rows<kTilePanels >= 2 ? 2 : 1>(tile, rows);
      taken = 2;
    } else {
      multiply_float_rows<1>(tile, rows);
    }
    panels -= taken;
    tile.panels += taken * tile.panel_stride;
    if (tile.bias) tile.bias += taken * kPanelOutputs;
    tile.sums += taken * kPanelOutputs;
    tile.clamped.skip_outputs(taken * kPanelOutputs, 4);
  }
}

// An item: rows and panels from `row` and `panel` on.
struct FloatItem {
  std::int64_t row, rows, panel, panels;
};

// Stores results of some rows and at most kFloatPanels panels from their sums, which have the bias.
template <PanelEpilogue epilogue>
static void finish_float_block(const FloatGemmArgs& args, const FloatItem& item,
                               const float* sums) {
  const PanelResultArgs& result = args.result;
  constexpr std::int64_t kStep = is_gated(epilogue) ? 2 : 1;  // panels of a gated weight alternate
  const std::int64_t first = item.panel / kStep * kPanelOutputs;
  const std::int64_t left = args.weight.out_features - first;
  const std::int64_t most = item.panels / kStep * kPanelOutputs;
  const std::int64_t outputs = left < most ? left : most, rows = item.rows;
  const std::int64_t stride = result.out_stride, other_stride = result.other_stride;
  const PanelEpilogue given = result.epilogue;
  float* to = static_cast<float*>(result.out) + item.row * stride + first;
  const auto* other = static_cast<const float*>(result.other) + item.row * other_stride + first;
  for (std::int64_t r = 0; r < rows; ++r) {
    sweep(0, outputs, [&](std::int64_t i, auto count) __attribute__((always_inline)) {
      const float* sum = sums + (i / kPanelOutputs * kStep) * kPanelOutputs + i % kPanelOutputs;
      f32v v = activate_in<epilogue>(given, load(sum), float{});
      if constexpr (is_gated(epilogue)) v *= load(sum + kPanelOutputs);
      if constexpr (adds_other(epilogue)) v = total(epilogue, v, load(other + i, count));
      store(to + i, v, count);
    });
    sums += kSumsStride, to += stride, other += other_stride;
  }
}

static void finish_float_rows(const FloatGemmArgs& args, const FloatItem& item, const float* sums) {
  with_epilogue(args.result.epilogue, [&](auto epilogue) {
    finish_float_block<decltype(epilogue)::value>(args, item, sums);
  });
}

// The bias in the order of an item's panels; without one, what changes no sum.
static void arrange_bias(const FloatGemmArgs& args, const FloatItem& item, float* to) {
  if (!args.result.bias) {
    sweep(0, item.panels * kPanelOutputs,
          [&](std::int64_t i, auto count) { store(to + i, splat(-0.0f), count); });
    return;
  }
  const bool gated = is_gated(args.result.epilogue);
  const std::int64_t outputs = args.weight.out_features;
  for (std::int64_t p = 0; p < item.panels; ++p, to += kPanelOutputs) {
    const std::int64_t panel = item.panel + p;
    const std::int64_t first = (gated ? panel / 2 : panel) * kPanelOutputs;
    const auto* bias = static_cast<const float*>(args.result.bias) + first;
    if (gated && panel % 2 == 1) bias += outputs;
    const std::int64_t left = outputs - first;
    sweep(0, left < kPanelOutputs ? left : kPanelOutputs,
          [&](std::int64_t i, auto count) { store(to + i, load(bias + i, count)); });
  }
}

// A piece of an item's panels.
static FloatAhead float_piece(const FloatGemmArgs& args, const FloatItem& item, std::int64_t begin,
                              std::int64_t length) {
  const std::int64_t stride = args.weight.panel_bytes / 4, left = args.in_features - begin;
  const auto* panels = reinterpret_cast<const float*>(args.weight.panels);
  return {
      .panel = panels + item.panel * stride + begin * kPanelOutputs,
      .panel_stride = stride,
      .panels = item.panels,
      .rows = left < length ? left : length,
      .row = 0,
  };
}

// Some rows of an item times a piece of its panels. `tile`: of the first few of these; sums of the
// next few are `next_sums` after theirs.
static void multiply_float_part(const FloatGemmArgs& args, const FloatItem& part, FloatTile tile,
                                bool finishes, std::int64_t next_sums) {
  for (std::int64_t p = 0; p < part.panels; p += kFloatPanels) {
    const std::int64_t left = part.panels - p, panels = left < kFloatPanels ? left : kFloatPanels;
    const std::int64_t whole = part.rows / kTileRows, rest = part.rows % kTileRows;
    tile.tiles = whole;
    if (whole > 0) multiply_float_panels(tile, kTileRows, panels);
    if (rest > 0) {
      FloatTile last = tile;
      last.tiles = 1;
      last.x += whole * kTileRows * tile.x_stride;
      last.sums += whole * tile.sums_step;
      last.clamped.skip_rows(whole * kTileRows);
      multiply_float_panels(last, rest, panels);
    }
    if (finishes) finish_float_rows(args, {part.row, part.rows, part.panel + p, panels}, tile.sums);
    tile.panels += kFloatPanels * tile.panel_stride;
    if (tile.bias) tile.bias += kSumsStride;
    tile.clamped.skip_outputs(kSumsStride, 4);
    tile.sums += next_sums;
  }
}

// Has so many tiles ask for all of what is ahead, little by little.
OXY_INLINE void set_pace(FloatTile& tile, std::int64_t tiles) {
  const FloatAhead& ahead = *tile.ahead;
  const std::int64_t each = tile.length, of_panel = (ahead.rows + each - 1) / each;
  const std::int64_t lines = ahead.panels * ahead.rows;
  const std::int64_t blocks = tiles * ((each + kLineFloats - 1) / kLineFloats);
  tile.is_spread = tile.asks_ahead && lines <= kLinesWithRows * blocks;
  tile.is_steady = !tile.is_spread && ahead.panels * of_panel <= tiles;
  if (tile.is_spread) {
    tile.asked = (lines + blocks - 1) / blocks;
    tile.block = kLineFloats;
    return;
  }
  const std::int64_t times = lines / (tiles * kFewLines) + 1;
  tile.asked = lines / (tiles * times) + 1;
  tile.block = (tile.length / times + kStep) / kStep * kStep;
}

// All rows of an item times a piece of its panels. Sums of all rows and a few panels follow those
// of the few before.
static void multiply_float_piece(const FloatGemmArgs& args, const FloatItem& item,
                                 std::int64_t begin, std::int64_t length, const float* bias,
                                 float* sums, FloatAhead ahead) {
  const FloatAhead piece = float_piece(args, item, begin, length);
  const bool is_last = begin + piece.rows == args.in_features;
  // Sums of the only piece are finished at once, so that all take the same place.
  const bool keeps_sums = begin > 0 || !is_last;
  const ClampedResults clamped = clamped_results(args.result, item.row, item.panel * kPanelOutputs,
                                                 args.weight.out_features, bias);
  FloatTile tile{
      .tiles = 1,
      .x = args.x + item.row * args.x_stride + begin,
      .x_stride = args.x_stride,
      .starts = nullptr,
      .offset = 0,
      .runs = nullptr,
      .asks_ahead = true,
      .panels = piece.panel,
      .panel_stride = piece.panel_stride,
      .length = piece.rows,
      .begins = begin == 0,
      .bias = clamped.out ? nullptr : bias,
      .sums = sums,
      .sums_step = keeps_sums ? kTileRows * kSumsStride : 0,
      .ahead = &ahead,
      .is_steady = false,
      .asked = 0,
      .block = 0,
      .is_spread = false,
      .clamped = is_last ? clamped : ClampedResults{},
  };
  set_pace(tile, ((item.rows + kTileRows - 1) / kTileRows) *
                     ((item.panels + kTilePanels - 1) / kTilePanels));
  const std::int64_t next_sums = keeps_sums ? item.rows * kSumsStride : 0;
  if (!is_last || clamped.out) {  // a few panels stay in the nearest cache for all rows
    return multiply_float_part(args, item, tile, false, next_sums);
  }
  for (std::int64_t r = 0; r < item.rows; r += kTileRows) {
    const std::int64_t left = item.rows - r, rows = left < kTileRows ? left : kTileRows;
    multiply_float_part(args, {item.row + r, rows, item.panel, item.panels}, tile, true, next_sums);
    tile.x += kTileRows * args.x_stride;
    tile.sums += tile.sums_step;
  }
}

// in_features of a piece: equal ones. It depends on sizes alone, and so not on how they are split.
static std::int64_t piece_length(const FloatGemmArgs& args) {
  const bool is_short = args.weight.panel_count == 1 || args.rows <= kFewRows;
  const bool is_middle = args.rows <= kSomeRows;
  const std::int64_t most = is_short ? kShortPiece : is_middle ? kMiddlePiece : kFloatPiece;
  const std::int64_t pieces = (args.in_features + most - 1) / most;
  return ((args.in_features + pieces - 1) / pieces + 3) / 4 * 4;
}

// `next`: the item after this one, or one without panels.
static void multiply_float_item(const FloatGemmArgs& args, const FloatItem& item,
                                const FloatItem& next, float* sums) {
  alignas(64) float biases[kMostFloatPanels * kPanelOutputs];
  arrange_bias(args, item, biases);
  const std::int64_t length = piece_length(args);
  for (std::int64_t begin = 0; begin < args.in_features; begin += length) {
    const std::int64_t end = begin + length;
    multiply_float_piece(args, item, begin, length, biases, sums,
                         end < args.in_features ? float_piece(args, item, end, length)
                                                : float_piece(args, next, 0, length));
  }
}

static FloatItem float_item(const FloatGemmArgs& args, std::int64_t i) {
  const std::int64_t count = args.groups.count, step = args.groups.step, group = i % count;
  const std::int64_t panels = args.weight.panel_count, steps = (panels + step - 1) / step;
  const std::int64_t row = i / count * args.chunk_rows, left = args.rows - row;
  const std::int64_t begin = group * steps / count * step, end = (group + 1) * steps / count * step;
  return {.row = row,
          .rows = left < args.chunk_rows ? left : args.chunk_rows,
          .panel = begin,
          .panels = (end < panels ? end : panels) - begin};
}

// A few panels of an item.
static FloatItem few_panels(const FloatItem& item, std::int64_t panel) {
  const std::int64_t left = item.panels - panel;
  return {item.row, item.rows, item.panel + panel, left < kFloatPanels ? left : kFloatPanels};
}

static void float_gemm(const FloatGemmArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) float sums[kFloatItem * kPanelOutputs];
  for (std::int64_t i = begin; i < end; ++i) {
    const FloatItem item = float_item(args, i);
    const FloatItem next = i + 1 < end ? float_item(args, i + 1) : FloatItem{};
    if (item.rows > kTileRows && args.rows > kSomeRows) {
      multiply_float_item(args, item, next, sums);
      continue;
    }
    // For few rows panels are read from end to end, a few at a time.
    for (std::int64_t p = 0; p < item.panels; p += kFloatPanels) {
      const bool is_last = p + kFloatPanels >= item.panels;
      multiply_float_item(args, few_panels(item, p),
                          is_last ? few_panels(next, 0) : few_panels(item, p + kFloatPanels), sums);
    }
  }
}

}  // namespace oxytorch::OXY_LEVEL
