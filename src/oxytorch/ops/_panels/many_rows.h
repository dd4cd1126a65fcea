// Many rows of x times a weight in panels. A work item takes a few panels: block by block along
// in_features it unpacks them into the nearest caches and multiplies them with all its rows.
#pragma once

#include "ops/_panels/unpack.h"

namespace oxytorch::OXY_LEVEL {

// Rows and panels of a product's tile, as many as registers allow.
#if defined(__AVX512F__)
inline constexpr int kTileRows = 6;
inline constexpr int kTilePanels = 4;
#elif defined(__AVX2__)
inline constexpr int kTileRows = 6;
inline constexpr int kTilePanels = 1;
#else
inline constexpr int kTileRows = 3;
inline constexpr int kTilePanels = 1;
#endif
inline constexpr std::int64_t kItemOutputs = kItemPanels * kPanelOutputs;

// One block of some rows times one block of some panels, added to the rows' sums.
struct Tile {
  const std::uint8_t* rows;
  std::int64_t row_bytes;  // between rows
  const std::uint8_t* panels;
  std::int64_t panel_bytes;  // between panels
  std::int64_t units;        // along in_features
  const std::int32_t* row_sums;
  const std::int32_t* zero_points;  // of 16 outputs of each panel
  const float* scales;              // likewise; null: 1
  float* sums;                      // rows are kItemOutputs apart
};

template <class Form, int rows, int panels>
__attribute__((noinline)) static void multiply_tile(const Tile& tile) {
  constexpr int kVectors = panels * kParts;
  typename Form::Sum sums[rows][kVectors];
  const bool continues = !kIsInteger<Form> && !tile.scales;
  for (int v = 0; v < kVectors; ++v) {
    for (int r = 0; r < rows; ++r) {
      if constexpr (kKeepsZeroPoint<Form>) {
        const i32v zero_point = reinterpret_cast<i32v>(load_words(tile.zero_points + v * kLanes));
        sums[r][v] = i32v{} - zero_point * (i32v{} + tile.row_sums[r]);
      } else if constexpr (kIsInteger<Form>) {
        sums[r][v] = i32v{};
      } else {
        sums[r][v] = continues ? load(tile.sums + r * kItemOutputs + v * kLanes) : f32v{};
      }
    }
  }
  const std::uint8_t* row = tile.rows;
  const std::uint8_t* panel = tile.panels;
  for (std::int64_t k = 0; k < tile.units; ++k, row += 4, panel += 64) {
    u32v weights[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      weights[v] = load_words(panel + v / kParts * tile.panel_bytes + v % kParts * sizeof(u32v));
    }
    for (int r = 0; r < rows; ++r) {
      std::uint32_t unit;
      std::memcpy(&unit, row + r * tile.row_bytes, sizeof unit);
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Form::multiply(sums[r][v], unit, weights[v]);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = tile.sums + r * kItemOutputs + v * kLanes;
      f32v sum;
      if constexpr (kIsInteger<Form>) {
        sum = __builtin_convertvector(sums[r][v], f32v);
      } else {
        sum = sums[r][v];
      }
      if (tile.scales) sum *= load(tile.scales + v * kLanes);
      store(to, continues ? sum : load(to) + sum);
    }
  }
}

template <class Form, int panels, int rows = kTileRows>
OXY_INLINE void multiply_rest(const Tile& tile, std::int64_t left) {
  if constexpr (rows > 0) {
    if (left == rows) return multiply_tile<Form, rows, panels>(tile);
    multiply_rest<Form, panels, rows - 1>(tile, left);
  }
}

template <class Form, int panels>
static void multiply_rows(Tile tile, std::int64_t rows) {
  for (; rows > 0; rows -= kTileRows) {
    if (rows >= kTileRows) {
      multiply_tile<Form, kTileRows, panels>(tile);
    } else {
      multiply_rest<Form, panels>(tile, rows);
    }
    tile.rows += kTileRows * tile.row_bytes;
    tile.row_sums += kTileRows;
    tile.sums += kTileRows * kItemOutputs;
  }
}

// A block of in_features of a work item; what a level multiplies by other means specializes it.
template <class Form>
static void multiply_block(Tile tile, std::int64_t rows, std::int64_t panels) {
  while (panels > 0) {
    const std::int64_t taken = panels >= kTilePanels ? kTilePanels : 1;
    if (taken == kTilePanels) {
      multiply_rows<Form, kTilePanels>(tile, rows);
    } else {
      multiply_rows<Form, 1>(tile, rows);
    }
    panels -= taken;
    tile.panels += taken * tile.panel_bytes;
    tile.zero_points += taken * kPanelOutputs;
    if (tile.scales) tile.scales += taken * kPanelOutputs;
    tile.sums += taken * kPanelOutputs;
  }
}

// Zero points and scales of a group of some panels, as the tiles read them.
struct GroupNumbers {
  alignas(64) std::int32_t zero_points[kItemOutputs];
  alignas(64) float scales[kItemOutputs];
};

constexpr std::int32_t middle_code(PanelFormat format) {
  return format == PanelFormat::int8 ? 128 : format == PanelFormat::int4 ? 8 : 0;
}

static void read_group(const PanelsArgs& weight, std::int64_t first, std::int64_t panels,
                       std::int64_t group, GroupNumbers& numbers) {
  for (std::int64_t p = 0; p < panels; ++p) {
    const std::int64_t at = ((first + p) * weight.groups + group) * kPanelOutputs;
    for (std::int64_t i = 0; i < kPanelOutputs; ++i) {
      numbers.zero_points[p * kPanelOutputs + i] =
          weight.zero_points ? weight.zero_points[at + i] : middle_code(weight.format);
    }
    if (!weight.group_scales) continue;
    for (int part = 0; part < kParts; ++part) {
      store(numbers.scales + p * kPanelOutputs + part * kLanes,
            load(weight.group_scales + at + part * kLanes));
    }
  }
}

// Products of a chunk of rows with kItemPanels panels, before the channels' scales.
template <class Form, class Stored>
static void multiply_chunk(const MultiplyPanelsArgs& args, std::int64_t first_row,
                           std::int64_t rows, std::int64_t first_panel, std::int64_t panels,
                           float* sums) {
  constexpr std::int64_t kUnits = kPanelBlock / Form::kDepth;
  constexpr bool unpacks = !kReadsPanels<Form, Stored>;
  alignas(64) std::uint8_t unpacked[unpacks ? kItemPanels * kUnits * 64 : 64];
  GroupNumbers numbers;
  const PreparedRows& x = args.prepared;
  const std::int64_t stored_bytes = panel_bytes(args.weight.format, x.depth);
  const std::int64_t row_bytes = x.block / Form::kDepth * 4;
  std::memset(sums, 0, sizeof(float) * kItemOutputs * rows);
  for (std::int64_t block = 0; block < x.blocks; ++block) {
    const std::int64_t begin = block * x.block;
    const std::int64_t length = x.depth - begin < x.block ? x.depth - begin : x.block;
    const std::int64_t units = length / Form::kDepth;
    if (block == 0 || args.weight.groups > 1) {
      read_group(args.weight, first_panel, panels, args.weight.groups > 1 ? block : 0, numbers);
    }
    const std::uint8_t* stored =
        args.weight.panels + first_panel * stored_bytes + begin / Stored::kNumbers * 64;
    if constexpr (unpacks) {
      for (std::int64_t p = 0; p < panels; ++p) {
        unpack_panel(Form{}, Stored{}, stored + p * stored_bytes, length / Stored::kNumbers,
                     numbers.zero_points + p * kPanelOutputs, unpacked + p * kUnits * 64);
      }
    }
    const Tile tile{
        .rows =
            static_cast<const std::uint8_t*>(x.values) + (block * x.rows + first_row) * row_bytes,
        .row_bytes = row_bytes,
        .panels = unpacks ? unpacked : stored,
        .panel_bytes = unpacks ? kUnits * 64 : stored_bytes,
        .units = units,
        .row_sums = x.sums + block * x.rows + first_row,
        .zero_points = numbers.zero_points,
        .scales = args.weight.group_scales ? numbers.scales : nullptr,
        .sums = sums,
    };
    multiply_block<Form>(tile, rows, panels);
  }
}

}  // namespace oxytorch::OXY_LEVEL
