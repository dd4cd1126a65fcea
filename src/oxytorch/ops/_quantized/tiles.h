// Rows of x times panels in the tile registers of AMX. While the last tiles of a block are
// multiplied, the sums of the block before become results: tiles and vectors have units of their
// own.
#pragma once

#include "core/tile.h"
#include "ops/_quantized/blocks.h"

#if OXY_HAS_TILES

namespace oxytorch::OXY_LEVEL {

inline constexpr std::int64_t kBlockHeight = 2 * kTileHeight;
inline constexpr std::int64_t kPairOutputs = 2 * kPanelOutputs;

// The block before, in the part of `sums` that is not written next.
struct WaitingBlock {
  FinishRows finish = nullptr;
  Finishing job;
  std::int64_t begin = 0, end = 0;  // rows
  int written = 0;
  alignas(64) std::int32_t sums[2][kBlockHeight * kPairOutputs];

  OXY_MEMBER void finish_all() {
    if (begin < end) finish(job, begin, end);
    begin = end;
  }

  // The block whose sums have been written has this to be done.
  OXY_MEMBER void set(const Finishing& given, std::int64_t first, std::int64_t last) {
    job = given;
    job.sums = sums[written];
    job.stride = kPairOutputs;
    begin = first, end = last;
    written ^= 1;
  }
};

// Up to 32 rows times up to two panels.
struct TileBlock {
  const std::uint8_t* rows;
  const std::uint8_t* more_rows;  // the last 16
  std::int64_t row_bytes;
  const std::uint8_t* panels;
  std::int64_t panel_bytes;
  std::int64_t depth;          // a multiple of 64
  const std::int32_t* starts;  // of the sums of 32 outputs; null: zeros
  const std::uint8_t* ahead;   // what the second cache gets meanwhile,
  std::int64_t asked;          // lines in each step
};

// The operands of tile instructions are part of the instruction, so loops cannot number them.

#define OXY_MULTIPLY_BYTES(sums, left, right) \
  if constexpr (is_signed) {                  \
    _tile_dpbssd(sums, left, right);          \
  } else {                                    \
    _tile_dpbusd(sums, left, right);          \
  }

template <bool second_rows, bool second_panel>
OXY_INLINE void start_sums(const std::int32_t* starts) {
  if (starts) {  // the same line for every row
    _tile_loadd(0, starts, 0);
    if constexpr (second_panel) _tile_loadd(1, starts + kPanelOutputs, 0);
    if constexpr (second_rows) _tile_loadd(2, starts, 0);
    if constexpr (second_rows && second_panel) _tile_loadd(3, starts + kPanelOutputs, 0);
  } else {
    _tile_zero(0);
    if constexpr (second_panel) _tile_zero(1);
    if constexpr (second_rows) _tile_zero(2);
    if constexpr (second_rows && second_panel) _tile_zero(3);
  }
}

// The sums of `more_rows` lie `apart` rows after those of the first ones.
template <bool second_rows, bool second_panel>
OXY_INLINE void store_byte_sums(std::int32_t* to, std::int64_t apart) {
  constexpr std::int64_t kStride = kPairOutputs * 4;
  _tile_stored(0, to, kStride);
  if constexpr (second_panel) _tile_stored(1, to + kPanelOutputs, kStride);
  if constexpr (second_rows) _tile_stored(2, to + apart * kPairOutputs, kStride);
  if constexpr (second_rows && second_panel) {
    _tile_stored(3, to + apart * kPairOutputs + kPanelOutputs, kStride);
  }
}

template <bool is_signed, bool second_rows, bool second_panel>
static void multiply_byte_tiles(const TileBlock& given, std::int64_t apart, WaitingBlock& waiting) {
  const TileBlock block = given;

  finish_stores(block.rows);
  finish_stores(block.starts);
  start_sums<second_rows, second_panel>(block.starts);
  const std::uint8_t* panel = block.panels;
  const std::uint8_t* ahead = block.ahead;
  for (std::int64_t k = 0; k < block.depth; k += 64, panel += 1024) {
    _tile_loadd(6, panel, 64);
    _tile_loadd(4, block.rows + k, block.row_bytes);
    OXY_MULTIPLY_BYTES(0, 4, 6)
    if constexpr (second_panel) {
      _tile_loadd(7, panel + block.panel_bytes, 64);
      OXY_MULTIPLY_BYTES(1, 4, 7)
    }
    if constexpr (second_rows) {
      _tile_loadd(5, block.more_rows + k, block.row_bytes);
      OXY_MULTIPLY_BYTES(2, 5, 6)
      if constexpr (second_panel) {
        OXY_MULTIPLY_BYTES(3, 5, 7)
      }
    }
    for (std::int64_t i = 0; i < block.asked; ++i, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
  }
  waiting.finish_all();
  store_byte_sums<second_rows, second_panel>(waiting.sums[waiting.written], apart);
  finish_stores(waiting.sums);
}

#undef OXY_MULTIPLY_BYTES

template <bool is_signed>
static void multiply_byte_tiles(const TileBlock& block, std::int64_t apart, bool second_rows,
                                bool second_panel, WaitingBlock& waiting) {
  if (second_rows && second_panel) {
    multiply_byte_tiles<is_signed, true, true>(block, apart, waiting);
  } else if (second_rows) {
    multiply_byte_tiles<is_signed, true, false>(block, apart, waiting);
  } else if (second_panel) {
    multiply_byte_tiles<is_signed, false, true>(block, apart, waiting);
  } else {
    multiply_byte_tiles<is_signed, false, false>(block, apart, waiting);
  }
}

// A chunk's rows times up to two panels. Where rows do not fill the last tile, it begins with rows
// before, whose results are there already.
static void multiply_pair_of_panels(const ByteGemmArgs& args, const ByteChunk& chunk,
                                    const std::int32_t* starts, const Finishing& finishing,
                                    WaitingBlock& waiting) {
  const ByteRows& x = args.x;
  const std::int64_t steps = (x.depth + 63) / 64;
  const std::int64_t blocks = (chunk.rows + kBlockHeight - 1) / kBlockHeight;
  const bool asks = chunk.panel + 2 * chunk.panels <= args.weight.panel_count;
  TileBlock block{
      .rows = nullptr,
      .more_rows = nullptr,
      .row_bytes = x.row_bytes,
      .panels = args.weight.panels + chunk.panel * args.weight.panel_bytes,
      .panel_bytes = args.weight.panel_bytes,
      .depth = steps * 64,
      .starts = x.zero_point == 0 ? nullptr : starts,
      .ahead = nullptr,
      .asked = asks ? (16 * chunk.panels + blocks - 1) / blocks : 0,
  };
  block.ahead = block.panels + chunk.panels * args.weight.panel_bytes;
  for (std::int64_t b = 0; b < blocks; ++b, block.ahead += block.asked * steps * 64) {
    const std::int64_t end =
        b * kBlockHeight + kBlockHeight < chunk.rows ? b * kBlockHeight + kBlockHeight : chunk.rows;
    const std::int64_t rows = end - b * kBlockHeight;
    // The first row of the last tile of all may be one of a row before.
    const std::int64_t last = chunk.row + end - kTileHeight;
    const std::int64_t first = rows > kTileHeight ? chunk.row + b * kBlockHeight : last;
    const std::int64_t begin = first < 0 ? 0 : first;
    block.rows = x.values + begin * x.row_bytes;
    block.more_rows = x.values + last * x.row_bytes;
    const bool second_rows = rows > kTileHeight;
    if (x.is_signed) {
      multiply_byte_tiles<true>(block, last - begin, second_rows, chunk.panels == 2, waiting);
    } else {
      multiply_byte_tiles<false>(block, last - begin, second_rows, chunk.panels == 2, waiting);
    }
    Finishing job = finishing;
    job.row = begin;
    if (job.row_scales) job.row_scales += begin;
    waiting.set(job, chunk.row + b * kBlockHeight - begin, chunk.row + end - begin);
  }
}

}  // namespace oxytorch::OXY_LEVEL

#endif
