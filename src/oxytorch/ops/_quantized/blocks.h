// Rows of x times panels in vector registers.
#pragma once

#include "ops/_quantized/finish.h"

namespace oxytorch::OXY_LEVEL {

// Rows and panels of a block, as many as registers allow.
inline constexpr int kBlockRows = kVectorBytes == 16 ? 3 : 6;
inline constexpr int kBlockPanels = OXY_HAS_VECTORS_512 ? 4 : 1;
inline constexpr std::int64_t kBlockOutputs = kBlockPanels * kPanelOutputs;
// Elements whose weights are widened to 16 bits at once.
inline constexpr std::int64_t kPiece = 512;

struct ByteBlock {
  const std::uint8_t* rows;
  std::int64_t row_bytes;
  const std::uint8_t* panels;
  std::int64_t panel_bytes;
  std::int64_t units;
  const std::int32_t* from;  // what sums begin with, kBlockOutputs apart or the same for all rows
  std::int64_t from_stride;
  std::int32_t* sums;  // rows are kBlockOutputs apart
};

// Bytes between what is read and what is asked for.
inline constexpr std::int64_t kAhead = 2048;

template <int rows, int panels>
__attribute__((noinline)) static void multiply_byte_block(const ByteBlock& given) {
  constexpr int kVectors = panels * kParts;
  // A copy, because what is stored below could otherwise be the block.
  const ByteBlock block = given;
  i32v sums[rows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = load_as<i32v>(block.from + r * block.from_stride + v * kLanes);
    }
  }
  const std::uint8_t* row = block.rows;
  const std::uint8_t* panel = block.panels;
  for (std::int64_t k = 0; k < block.units; ++k, row += 4, panel += 64) {
    i32v weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const std::uint8_t* at = panel + v / kParts * block.panel_bytes;
      weights[v] = load_as<i32v>(at + v % kParts * sizeof(i32v));
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const auto unit = load_as<std::uint32_t>(row + r * block.row_bytes);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = ByteUnit::multiply(sums[r][v], weights[v], unit);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      std::memcpy(block.sums + r * kBlockOutputs + v * kLanes, &sums[r][v], sizeof(i32v));
    }
  }
}

template <int panels, int rows = kBlockRows>
OXY_INLINE void multiply_some_rows(const ByteBlock& block, std::int64_t given) {
  if constexpr (rows > 0) {
    if (given == rows) return multiply_byte_block<rows, panels>(block);
    multiply_some_rows<panels, rows - 1>(block, given);
  }
}

// Weights of a panel as pairs of integers of 16 bits: two rows for each row of bytes.
OXY_INLINE void widen_panel(const std::uint8_t* from, std::int64_t rows, std::uint8_t* to) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int part = 0; part < kParts; ++part) {
      const i32v words = load_as<i32v>(from + r * 64 + part * sizeof(i32v));
      const u32v even = reinterpret_cast<u32v>(words << 24 >> 24) & 0xffff;
      const u32v first = even | (reinterpret_cast<u32v>(words << 16 >> 24) << 16);
      const u32v third = reinterpret_cast<u32v>(words << 8 >> 24) & 0xffff;
      const u32v second = third | (reinterpret_cast<u32v>(words >> 24) << 16);
      std::uint8_t* at = to + 2 * r * 64 + part * sizeof(u32v);
      std::memcpy(at, &first, sizeof first);
      std::memcpy(at + 64, &second, sizeof second);
    }
  }
}

// A chunk of rows, from `row` on, times some panels of an item.
struct ByteChunk {
  std::int64_t row, rows;
  std::int64_t panel, panels;
};

// `sums`: room for those of all rows and a block's panels.
template <int panels>
static void multiply_panels_of_bytes(const ByteGemmArgs& args, const ByteChunk& chunk,
                                     const ByteOutputs& outputs, std::int64_t offset,
                                     Finishing finishing, FinishRows finish, std::int32_t* sums) {
  constexpr bool kWidens = ByteUnit::kDepth == 2;
  alignas(64) std::uint8_t widened[kWidens ? panels * kPiece * 32 : 64];
  const ByteRows& x = args.x;
  const std::int64_t piece = kWidens ? kPiece : x.depth;
  const std::uint8_t* rows = x.values + chunk.row * x.row_bytes;
  const std::uint8_t* stored = args.weight.panels + chunk.panel * args.weight.panel_bytes;
  for (std::int64_t begin = 0; begin < x.depth; begin += piece) {
    const std::int64_t left = x.depth - begin, length = left < piece ? left : piece;
    if constexpr (kWidens) {
      for (int p = 0; p < panels; ++p) {
        widen_panel(stored + p * args.weight.panel_bytes + begin * 16, (length + 3) / 4,
                    widened + p * kPiece * 32);
      }
    }
    for (std::int64_t r = 0; r < chunk.rows; r += kBlockRows) {
      std::int32_t* to = sums + r * kBlockOutputs;
      const std::int64_t some = chunk.rows - r < kBlockRows ? chunk.rows - r : kBlockRows;
      const ByteBlock block{
          .rows = rows + r * x.row_bytes + begin * (4 / ByteUnit::kDepth),
          .row_bytes = x.row_bytes,
          .panels = kWidens ? widened : stored,
          .panel_bytes = kWidens ? kPiece * 32 : args.weight.panel_bytes,
          .units = length / ByteUnit::kDepth,
          .from = begin == 0 ? outputs.starts + offset : to,
          .from_stride = begin == 0 ? 0 : kBlockOutputs,
          .sums = to,
      };
      multiply_some_rows<panels>(block, some);
      if (length == left) {
        finishing.sums = sums;
        finish(finishing, r, r + some);
      }
    }
  }
}

}  // namespace oxytorch::OXY_LEVEL
