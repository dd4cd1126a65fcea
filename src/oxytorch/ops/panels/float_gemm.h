// Rows of float32 times panels of float32. An item takes the panels piece by piece along
// in_features; a piece of a few panels stays in the nearest cache while all rows meet it.
#pragma once

#include "ops/panels/blocks.h"
#include "ops/panels/finish.h"

namespace oxytorch::OXY_LEVEL {

// in_features of a piece, and panels that take 24 KiB of it. Sums begin anew in each piece, because
// short ones err less; for few rows or outputs PyTorch's are short.
inline constexpr std::int64_t kFloatPiece = 96;
inline constexpr std::int64_t kShortPiece = 32;
inline constexpr std::int64_t kFewRows = 8;
inline constexpr std::int64_t kFloatPanels = 4;
inline constexpr std::int64_t kLineFloats = 16;

// Some rows times some panels: to = from + product.
struct FloatTile {
  const float* x;
  std::int64_t x_stride;
  const float* const* starts;  // or where each row begins, `offset` before what is read; or null
  std::int64_t offset;
  bool asks_ahead;  // rows follow, x_stride apart
  const float* panels;
  std::int64_t panel_stride;
  std::int64_t length;  // along in_features
  const float* from;    // null: zeros
  std::int64_t from_stride;
  float* to;
  std::int64_t to_stride;
};

// Independent sums of a tile, where registers have room for them: additions need not wait for each
// other, and err less. It depends on the rows alone, and so not on how panels are split.
template <int rows>
inline constexpr int kFloatChains = kVectorBytes == 16 ? (rows == 1 ? 2 : 1)
                                    : rows == 1        ? 4
                                    : rows <= 3        ? 2
                                                       : 1;

template <int rows, int panels>
__attribute__((noinline)) static void multiply_float_tile(const FloatTile& given) {
  constexpr int kVectors = panels * kParts;
  constexpr int kSums = kFloatChains<rows>;
  // A copy, because what is stored below could otherwise be the tile.
  const FloatTile tile = given;
  f32v sums[kSums][rows][kVectors] = {};
  const float* x[rows];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
    x[r] = tile.starts ? tile.starts[r] + tile.offset : tile.x + r * tile.x_stride;
  }
  if (tile.asks_ahead) {
    for (int r = 0; r < rows; ++r) {
      for (std::int64_t k = 0; k < tile.length; k += kLineFloats) {
        __builtin_prefetch(x[r] + rows * tile.x_stride + k);
      }
    }
  }
  std::int64_t at = 0;
  const float* panel = tile.panels;
  const auto add = [&](int chain) __attribute__((always_inline)) {
    f32v weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      weights[v] = load(panel + v / kParts * tile.panel_stride + v % kParts * kLanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const auto number = load_as<float>(x[r] + at);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[chain][r][v] += weights[v] * number;
    }
    ++at;
    panel += kPanelOutputs;
  };
  std::int64_t left = tile.length;
  for (; left >= kSums; left -= kSums) {
#pragma GCC unroll 4
    for (int chain = 0; chain < kSums; ++chain) add(chain);
  }
  for (; left > 0; --left) add(0);
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      f32v sum = sums[0][r][v];
#pragma GCC unroll 4
      for (int chain = 1; chain < kSums; ++chain) sum += sums[chain][r][v];
      if (tile.from) sum += load(tile.from + r * tile.from_stride + v * kLanes);
      store(tile.to + r * tile.to_stride + v * kLanes, sum);
    }
  }
}

template <int panels, int rows = kTileRows>
OXY_INLINE void multiply_float_rows(const FloatTile& tile, std::int64_t given) {
  if constexpr (rows > 0) {
    if (given == rows) return multiply_float_tile<rows, panels>(tile);
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
    if (tile.from) tile.from += taken * kPanelOutputs;
    tile.to += taken * kPanelOutputs;
  }
}

// An item: rows and panels from `row` and `panel` on.
struct FloatItem {
  std::int64_t row, rows, panel, panels;
};

// Stores results of some rows from their sums, `stride` apart, which have the bias.
static void finish_float_rows(const FloatGemmArgs& args, const FloatItem& item, const float* sums,
                              std::int64_t stride) {
  const PanelResultArgs& result = args.result;
  const std::int64_t step = is_gated(result.epilogue) ? 2 : 1;
  const std::int64_t first = item.panel / step * kPanelOutputs;
  const std::int64_t left = args.weight.out_features - first;
  const std::int64_t most = item.panels / step * kPanelOutputs;
  for (std::int64_t r = 0; r < item.rows; ++r) {
    const std::int64_t row = item.row + r;
    float* to = static_cast<float*>(result.out) + row * result.out_stride + first;
    const auto* other = static_cast<const float*>(result.other) + row * result.other_stride + first;
    sweep(0, left < most ? left : most, [&](std::int64_t i, auto count) {
      // Panels of a gated weight alternate.
      const float* from =
          sums + r * stride + (i / kPanelOutputs * step) * kPanelOutputs + i % kPanelOutputs;
      f32v v = activate(result.epilogue, load(from), float{});
      if (step == 2) v *= load(from + kPanelOutputs);
      if (result.other) v = total(result.epilogue, v, load(other + i, count));
      store(to + i, v, count);
    });
  }
}

// The bias in the order of an item's panels.
static void arrange_bias(const FloatGemmArgs& args, const FloatItem& item, float* to) {
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

// Some rows and panels of an item times a piece of in_features.
struct FloatPiece {
  FloatItem rows_and_panels;
  std::int64_t begin, length;
  bool is_last;
  bool asks_ahead;
};

static void multiply_float_piece(const FloatGemmArgs& args, const FloatPiece& piece,
                                 const float* bias, float* sums, std::int64_t stride) {
  const FloatItem& item = piece.rows_and_panels;
  const PanelResultArgs& result = args.result;
  const std::int64_t panel_stride = args.weight.panel_bytes / 4;
  const auto* panels = reinterpret_cast<const float*>(args.weight.panels);
  FloatTile tile{
      .x = args.x + item.row * args.x_stride + piece.begin,
      .x_stride = args.x_stride,
      .starts = nullptr,
      .offset = 0,
      .asks_ahead = piece.asks_ahead,
      .panels = panels + item.panel * panel_stride + piece.begin * kPanelOutputs,
      .panel_stride = panel_stride,
      .length = piece.length,
      .from = piece.begin == 0 ? bias : sums,
      .from_stride = piece.begin == 0 ? 0 : stride,
      .to = sums,
      .to_stride = stride,
  };
  const std::int64_t end = (item.panel + item.panels) * kPanelOutputs;
  const bool is_done = result.epilogue == PanelEpilogue::none && end <= args.weight.out_features;
  if (piece.is_last && is_done) {
    tile.to =
        static_cast<float*>(result.out) + item.row * result.out_stride + item.panel * kPanelOutputs;
    tile.to_stride = result.out_stride;
  }
  multiply_float_panels(tile, item.rows, item.panels);
  if (piece.is_last && !is_done) finish_float_rows(args, item, sums, stride);
}

// Some panels of an item times a piece of in_features, all rows.
static void multiply_float_rows_of(const FloatGemmArgs& args, const FloatItem& item, std::int64_t p,
                                   std::int64_t begin, std::int64_t length, const float* bias,
                                   float* sums) {
  const std::int64_t stride = item.panels * kPanelOutputs;
  const std::int64_t left = args.in_features - begin, panels_left = item.panels - p;
  const bool is_last = left <= length;
  for (std::int64_t r = 0; r < item.rows; r += kTileRows) {
    const std::int64_t rows_left = item.rows - r;
    const FloatPiece piece{
        .rows_and_panels = {item.row + r, rows_left < kTileRows ? rows_left : kTileRows,
                            item.panel + p,
                            panels_left < kFloatPanels ? panels_left : kFloatPanels},
        .begin = begin,
        .length = is_last ? left : length,
        .is_last = is_last,
        .asks_ahead = p == 0 && rows_left >= 2 * kTileRows,
    };
    // Sums of the only piece are finished at once, so that all take the same place.
    const std::int64_t at = begin == 0 && is_last ? 0 : r * stride;
    multiply_float_piece(args, piece, args.result.bias ? bias + p * kPanelOutputs : nullptr,
                         sums + at + p * kPanelOutputs, stride);
  }
}

static void multiply_float_item(const FloatGemmArgs& args, const FloatItem& item, float* sums) {
  alignas(64) float bias[kMostFloatPanels * kPanelOutputs];
  if (args.result.bias) arrange_bias(args, item, bias);
  const bool is_short = args.weight.panel_count == 1 || args.rows <= kFewRows;
  const std::int64_t length = is_short ? kShortPiece : kFloatPiece;
  const std::int64_t width = args.in_features;
  if (item.rows <= kTileRows) {  // panels are read once, from end to end
    for (std::int64_t p = 0; p < item.panels; p += kFloatPanels) {
      for (std::int64_t begin = 0; begin < width; begin += length) {
        multiply_float_rows_of(args, item, p, begin, length, bias, sums);
      }
    }
    return;
  }
  for (std::int64_t begin = 0; begin < width; begin += length) {
    for (std::int64_t p = 0; p < item.panels; p += kFloatPanels) {
      multiply_float_rows_of(args, item, p, begin, length, bias, sums);
    }
  }
}

static void float_gemm(const FloatGemmArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) float sums[kFloatItem * kPanelOutputs];
  const std::int64_t groups = (args.weight.panel_count + args.item_panels - 1) / args.item_panels;
  for (std::int64_t i = begin; i < end; ++i) {
    FloatItem item{.row = i / groups * args.chunk_rows,
                   .rows = args.chunk_rows,
                   .panel = i % groups * args.item_panels,
                   .panels = args.item_panels};
    if (item.rows > args.rows - item.row) item.rows = args.rows - item.row;
    if (item.panels > args.weight.panel_count - item.panel) {
      item.panels = args.weight.panel_count - item.panel;
    }
    multiply_float_item(args, item, sums);
  }
}

}  // namespace oxytorch::OXY_LEVEL
