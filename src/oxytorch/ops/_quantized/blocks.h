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
  const std::uint8_t* const* rows;
  std::int64_t offset;  // of the first line in a row
  std::int64_t lines;
  std::int64_t line_step;
  std::int64_t units;  // of a line
  const std::uint8_t* panels;
  std::int64_t panel_bytes;
  const std::int32_t* from;  // what sums begin with, kBlockOutputs apart or the same for all rows
  std::int64_t from_stride;
  std::int32_t* sums;  // rows are kBlockOutputs apart
};

// Bytes between what is read and what is asked for.
inline constexpr std::int64_t kAhead = 2048;

template <int rows, int panels>
OXY_INLINE void sum_byte_block(const ByteBlock& block, i32v (&sums)[rows][panels * kParts]) {
  constexpr int kVectors = panels * kParts;
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = load_as<i32v>(block.from + r * block.from_stride + v * kLanes);
    }
  }
  const std::uint8_t* row[rows];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) row[r] = block.rows[r];
  const std::uint8_t* panel = block.panels;
  const std::uint8_t* const end = panel + block.lines * block.units * 64;
  const std::int64_t gap = block.line_step - 4 * block.units;
  // One loop that always runs, because otherwise the compiler keeps sums in memory around it.
  std::int64_t left = block.units, k = block.offset;
  do {
    i32v weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const std::uint8_t* at = panel + v / kParts * block.panel_bytes;
      weights[v] = load_as<i32v>(at + v % kParts * sizeof(i32v));
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const auto unit = load_as<std::uint32_t>(row[r] + k);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = ByteUnit::multiply(sums[r][v], weights[v], unit);
      }
    }
    if (--left == 0) k += gap, left = block.units;
    k += 4, panel += 64;
  } while (panel < end);
}

template <int rows, int panels>
__attribute__((noinline)) static void multiply_byte_block(const ByteBlock& given) {
  // A copy, because what is stored below could otherwise be the block.
  const ByteBlock block = given;
  i32v sums[rows][panels * kParts];
  sum_byte_block<rows, panels>(block, sums);
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < panels * kParts; ++v) {
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

// Sums of a whole block, and what becomes of them, in registers; job: of its rows.
using FinishBlock = void (*)(const ByteBlock& block, const Finishing& job);

#if OXY_HAS_VECTORS_512 && OXY_HAS_INT8_DOT

template <PanelEpilogue epilogue, class Out, class Other, int panels>
static void multiply_and_finish(const ByteBlock& given, const Finishing& finishing) {
  const ByteBlock block = given;
  const Finishing job = finishing;
  const ByteResult result = *finishing.result;
  i32v sums[kBlockRows][panels];
  sum_byte_block<kBlockRows, panels>(block, sums);
  const ByteVectors<epilogue, Out, Other, panels, true> vectors(job, result, 0);
  constexpr int kTogether = 4 / panels;
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; r += kTogether) {
    i32v some[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) some[i] = sums[r + i / panels][i % panels];
    vectors.finish(some, r, kTogether - 1);
  }
}

#endif

// Null where it is not worth the code.
template <int panels>
static FinishBlock finish_block_of([[maybe_unused]] const Finishing& job) {
  FinishBlock found = nullptr;
#if OXY_HAS_VECTORS_512 && OXY_HAS_INT8_DOT
  if constexpr (panels == 2 || panels == 4) {
    const ByteResult& result = *job.result;
    if (!job.fit || !is_byte(result.number) || job.outputs < panels * kPanelOutputs) return found;
    with_number(result.number, [&](auto out) {
      using Out = decltype(out);
      if constexpr (kIsByte<Out>) {
        if (result.epilogue == PanelEpilogue::none) {
          found = &multiply_and_finish<PanelEpilogue::none, Out, float, panels>;
        } else if (result.epilogue == PanelEpilogue::add && result.other_number == result.number) {
          found = &multiply_and_finish<PanelEpilogue::add, Out, Out, panels>;
        }
      }
    });
  }
#endif
  return found;
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

// Rows that are finished together: what is prepared for them takes as long as some.
inline constexpr std::int64_t kFinishedRows = 4 * kBlockRows;

// Where rows begin, of which `room` keeps those of a block.
OXY_INLINE const std::uint8_t* const* rows_of(const ByteRows& x, std::int64_t row,
                                              std::int64_t count,
                                              const std::uint8_t* (&room)[kBlockRows]) {
  if (x.starts) return x.starts + row;
  for (std::int64_t r = 0; r < count; ++r) room[r] = x.values + (row + r) * x.row_bytes;
  return room;
}

// A piece of the depth: `lines` lines of a plane, or elements of one, `from` elements of a panel
// on.
struct BytePiece {
  std::int64_t lines, depth;
  std::int64_t offset;  // bytes in a row
  std::int64_t from;
};

// Calls body(piece) for pieces of at most `most` elements.
template <class Body>
OXY_INLINE void each_piece(const ByteRows& x, std::int64_t most, Body body) {
  const std::int64_t depth = x.depth / (x.planes * x.lines);
  const std::int64_t together = depth < most ? most / depth : 1;
  std::int64_t from = 0;
  for (std::int64_t plane = 0; plane < x.planes; ++plane) {
    for (std::int64_t line = 0; line < x.lines; line += together) {
      const std::int64_t offset = plane * x.plane_step + line * x.line_step;
      const std::int64_t lines = x.lines - line < together ? x.lines - line : together;
      for (std::int64_t k = 0; k < depth; k += most) {
        const std::int64_t length = depth - k < most ? depth - k : most;
        body(BytePiece{lines, length, offset + k * (4 / ByteUnit::kDepth), from});
        from += lines * length;
      }
    }
  }
}

// A block of rows from chunk row `row` on, along a piece.
OXY_INLINE ByteBlock block_of(const ByteRows& x, std::int64_t row, std::int64_t rows,
                              const BytePiece& piece, const std::uint8_t* stored,
                              std::int64_t panel_bytes, const std::int32_t* starts,
                              std::int32_t* sums, const std::uint8_t* (&room)[kBlockRows]) {
  return {
      .rows = rows_of(x, row, rows, room),
      .offset = piece.offset,
      .lines = piece.lines,
      .line_step = x.line_step,
      .units = piece.depth / ByteUnit::kDepth,
      .panels = stored,
      .panel_bytes = panel_bytes,
      .from = piece.from == 0 ? starts : sums,
      .from_stride = piece.from == 0 ? 0 : kBlockOutputs,
      .sums = sums,
  };
}

// `rows` rows from chunk row `row` on, times some panels, along a piece.
template <int panels>
OXY_INLINE void multiply_rows_of_piece(const ByteRows& x, std::int64_t row, std::int64_t rows,
                                       const BytePiece& piece, const std::uint8_t* stored,
                                       std::int64_t panel_bytes, const std::int32_t* starts,
                                       std::int32_t* sums) {
  const std::uint8_t* room[kBlockRows];
  for (std::int64_t r = 0; r < rows; r += kBlockRows) {
    const std::int64_t some = rows - r < kBlockRows ? rows - r : kBlockRows;
    multiply_some_rows<panels>(block_of(x, row + r, some, piece, stored, panel_bytes, starts,
                                        sums + r * kBlockOutputs, room),
                               some);
  }
}

// The whole depth of a chunk, whose weights are widened piece by piece.
template <int panels>
static void multiply_widened_panels(const ByteRows& x, const ByteChunk& chunk,
                                    const std::uint8_t* stored, std::int64_t panel_bytes,
                                    const std::int32_t* starts, std::int32_t* sums) {
  alignas(64) std::uint8_t widened[panels * kPiece * 32];
  each_piece(x, kPiece, [&](const BytePiece& piece) {
    for (int p = 0; p < panels; ++p) {
      widen_panel(stored + p * panel_bytes + piece.from * 16, (piece.lines * piece.depth + 3) / 4,
                  widened + p * kPiece * 32);
    }
    multiply_rows_of_piece<panels>(x, chunk.row, chunk.rows, piece, widened, kPiece * 32, starts,
                                   sums);
  });
}

// Whole blocks of rows, as many as there are; these rows are returned.
template <int panels>
OXY_INLINE std::int64_t finish_blocks(const ByteRows& x, const ByteChunk& chunk,
                                      const std::uint8_t* stored, std::int64_t panel_bytes,
                                      const std::int32_t* starts, Finishing& job) {
  const FinishBlock finish = x.planes == 1 ? finish_block_of<panels>(job) : nullptr;
  if (!finish) return 0;
  const BytePiece piece{x.lines, x.depth / x.lines, 0, 0};
  const std::uint8_t* room[kBlockRows];
  std::int64_t r = 0;
  for (; r + kBlockRows <= chunk.rows; r += kBlockRows, job.row += kBlockRows) {
    finish(
        block_of(x, chunk.row + r, kBlockRows, piece, stored, panel_bytes, starts, nullptr, room),
        job);
  }
  return r;
}

// `sums`: room for those of all rows and a block's panels.
template <int panels>
static void multiply_panels_of_bytes(const ByteGemmArgs& args, const ByteChunk& chunk,
                                     const ByteOutputs& outputs, std::int64_t offset,
                                     Finishing finishing, FinishRows finish, std::int32_t* sums) {
  const ByteRows& x = args.x;
  const std::int32_t* starts = outputs.starts + offset;
  const std::int64_t panel_bytes = args.weight.panel_bytes;
  const std::uint8_t* stored = args.weight.panels + chunk.panel * panel_bytes;
  finishing.sums = sums;
  if constexpr (ByteUnit::kDepth == 2) {
    multiply_widened_panels<panels>(x, chunk, stored, panel_bytes, starts, sums);
    finish(finishing, 0, chunk.rows);
  } else {
    std::int64_t r = finish_blocks<panels>(x, chunk, stored, panel_bytes, starts, finishing);
    for (; r < chunk.rows; r += kFinishedRows) {
      const std::int64_t rows = chunk.rows - r < kFinishedRows ? chunk.rows - r : kFinishedRows;
      each_piece(x, x.depth, [&](const BytePiece& piece) {
        multiply_rows_of_piece<panels>(x, chunk.row + r, rows, piece, stored + piece.from * 16,
                                       panel_bytes, starts, sums);
      });
      finish(finishing, 0, rows);
      finishing.row += rows;
      if (finishing.row_scales) finishing.row_scales += rows;
    }
  }
}

}  // namespace oxytorch::OXY_LEVEL
