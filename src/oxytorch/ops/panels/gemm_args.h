// Products of many rows with a weight in panels: what the entries tell the two kernels.
//
// First `prepare_rows` writes x as it is multiplied: float32, bfloat16, or integers of 8 bits with
// a scale per row. Then `gemm` takes blocks of outputs times blocks of rows. bfloat16 that lies
// well is read from x itself: each thread then reads what others have written once, not twice.
#pragma once

#include "ops/panels/args.h"

namespace oxytorch {

// What becomes of x before it is multiplied. A level without instructions for bfloat16 takes
// float32 for it, and one without instructions for bytes takes integers of 16 bits. digits:
// integers of 15 bits in two bytes, in units of their own for each block of in_features, as a gemv
// has them: up to kMostDigitRows rows of bfloat16 times codes have the sums that each has alone.
enum class RowType : std::int32_t { float32, bfloat16, int8, digits };

// in_features that are unpacked at once, and those whose rows of x lie side by side.
inline constexpr std::int64_t kPanelBlock = 256;
inline constexpr std::int64_t kLongPanelBlock = 1024;
// More rows are multiplied as bfloat16, whose sums are finished with less work. As measured.
inline constexpr std::int64_t kMostDigitRows = 32;
// The least in_features of a group for which a gemm takes integers of 15 bits.
inline constexpr std::int64_t kLeastDigitGroup = 64;
// The most in_features that share a unit where x becomes integers of 15 bits.
inline constexpr std::int64_t kDigitBlock = 128;
// Panels and rows of one work item.
inline constexpr std::int64_t kItemPanels = 4;
inline constexpr std::int64_t kItemRows = 288;
// Rows of a tile of AMX, and bytes of each.
inline constexpr std::int64_t kTileHeight = 16;
inline constexpr std::int64_t kTileBytes = 64;

// Units of 4 bytes that each of the fewest tiles along a row takes: whole ones where they fill it,
// else what divides it, since tiles never take what is not theirs, which might be NaN.
constexpr std::int64_t tile_step(std::int64_t units) {
  std::int64_t step = units < kTileBytes / 4 ? units : kTileBytes / 4;
  while (units % step != 0) --step;
  return step;
}

// Numbers along the sum that tiles take of a panel before the next panels: in a few parts of about
// one size, of which two panels stay in the nearest cache. `step`: what they are multiples of.
constexpr std::int64_t tile_piece(std::int64_t numbers, std::int64_t step) {
  constexpr std::int64_t kMost = 576;
  const std::int64_t parts = (numbers + kMost - 1) / kMost;
  return ((numbers + parts - 1) / parts + step - 1) / step * step;
}

// x in the order of the product: blocks along in_features, in each block the rows one below the
// other, `block` elements apart. In the last block they are padded with zeros up to `depth`.
struct PreparedRows {
  std::uint8_t* values;
  float* scales;        // [rows]; int8 only
  float* block_scales;  // [blocks, rows]; digits only
  std::int32_t* sums;   // [blocks, rows]: the sum of a block's integers; int8 and digits
  std::int64_t rows;    // between the starts of two blocks
  std::int64_t first;   // row that a product begins with
  std::int64_t block;   // elements of a block; the last one may be shorter
  std::int64_t blocks;
  std::int64_t in_features;
  std::int64_t depth;        // in_features, padded
  std::int64_t digit_bytes;  // between the two digits of a number
  RowType type;
  bool in_tiles;  // tiles of AMX are loaded along whole rows, which are all of one group
  // Bytes between rows in tiles, or that lie where they are; 0: those of a block.
  std::int64_t row_bytes;
  // Whether there are more rows than a product's, so that its last tile is whole. If not, a product
  // in tiles has at least kTileHeight of them.
  bool is_padded;
};

// Items are rows. Row i of the prepared rows is row `order[i]` of x, or row i where that is null.
struct PrepareRowsArgs {
  const void* x;
  const std::int64_t* order;
  std::int64_t x_stride;  // elements between rows
  DType x_dtype;
  PreparedRows prepared;
};

// One product: `row_count` prepared rows, from prepared.first on, times a weight. Its items are
// groups of kItemPanels panels times chunks of `chunk_rows` rows; all groups of a chunk follow each
// other, so that its rows stay in the caches.
struct GemmProduct {
  PreparedRows prepared;
  PanelsArgs weight;
  PanelResultArgs result;
  std::int64_t row_count;
  std::int64_t chunk_rows;
  std::int64_t chunks;
  std::int64_t items;
};

// Items are those of all products, one product after the other.
struct GemmArgs {
  const GemmProduct* products;
};

// How panels are cut into groups of neighbours: all have a multiple of `step`, the last one aside,
// and about as many.
struct PanelGroups {
  std::int64_t count;
  std::int64_t step;
};

// float32 x times panels of float32, both as they are. Items are groups of panels times chunks of
// `chunk_rows` rows, as above; their product is at most kFloatItem.
struct FloatGemmArgs {
  const float* x;         // may be misaligned
  std::int64_t x_stride;  // elements between rows
  std::int64_t rows;
  std::int64_t in_features;
  PanelsArgs weight;
  PanelResultArgs result;  // float32, as are its bias and other
  std::int64_t chunk_rows;
  PanelGroups groups;
};

inline constexpr std::int64_t kFloatItem = 2304;
inline constexpr std::int64_t kMostFloatPanels = 8;

}  // namespace oxytorch
