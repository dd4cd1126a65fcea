// Many rows of x times a weight in panels. A work item takes a few panels: block by block along
// in_features it unpacks them into the nearest caches and multiplies them with all its rows.
#pragma once

#include "ops/panels/blocks.h"
#include "ops/panels/codecs.h"
#include "ops/panels/finish.h"
#include "ops/panels/tiles.h"

namespace oxytorch::OXY_LEVEL {

// Zero points and scales of a group of some panels, as the tiles read them.
struct GroupNumbers {
  alignas(64) std::int32_t zero_points[kItemOutputs];
  alignas(64) float scales[kItemOutputs];
};

static void read_group(const PanelsArgs& weight, std::int64_t first, std::int64_t panels,
                       std::int64_t group, GroupNumbers& numbers) {
  for (std::int64_t p = 0; p < panels; ++p) {
    const std::int64_t at = ((first + p) * weight.groups + group) * kPanelOutputs;
    for (std::int64_t i = 0; i < kPanelOutputs; ++i) {
      numbers.zero_points[p * kPanelOutputs + i] =
          weight.zero_points ? weight.zero_points[at + i] : weight.middle;
    }
    if (!weight.group_scales) continue;
    // A line has those of two groups, or of one.
    const std::int64_t ahead = (at + 2 * kPanelOutputs) * size_of(weight.group_dtype);
    __builtin_prefetch(static_cast<const std::uint8_t*>(weight.group_scales) + ahead);
    for (int part = 0; part < kParts; ++part) {
      store(numbers.scales + p * kPanelOutputs + part * kLanes,
            group_scales_of(weight, at + part * kLanes));
    }
  }
}

// Units of a step in tiles along blocks of so many. Groups of codes have a multiple of 8.
template <class Dot, class Codec>
OXY_INLINE std::int64_t step_of(std::int64_t units) {
  if constexpr (kReadsPanels<Dot, Codec> && !Dot::kIsInteger) return tile_step(units);
  return units % 16 ? 8 : 16;
}

// Called before the first of blocks that are alike.
template <class Dot>
OXY_INLINE void prepare_blocks(std::int64_t step) {
#if OXY_HAS_TILES
  if constexpr (Dot::kDepth > 1) configure_tiles(step);
#endif
}

// finish: see multiply_block. is_exact: that tiles may not read behind the last row.
template <class Dot, class Finish>
OXY_INLINE void multiply_block_at_level(const Tile& tile, std::int64_t rows, std::int64_t panels,
                                        bool is_exact, const Finish& finish) {
#if OXY_HAS_TILES
  if constexpr (Dot::kDepth > 1) {
    multiply_block_in_tiles<Dot>(tile, rows, panels, is_exact, finish);
    return;
  }
#endif
  multiply_block<Dot>(tile, rows, panels, finish);
}

// in_features that are unpacked at once. Sums of float32 begin again in each piece: short ones err
// less.
template <class Dot, class Codec>
inline constexpr std::int64_t kPiece = Dot::kDepth == 1           ? kPanelBlock / 4
                                       : kReadsPanels<Dot, Codec> ? kLongPanelBlock
                                                                  : kPanelBlock;

// What is unpacked after in_features `begin` to `begin + length`: as many of the same panels, or
// the first ones of the panels from `next` on.
template <class Codec>
static StoredLines next_of(const std::uint8_t* stored, std::int64_t begin, std::int64_t length,
                           std::int64_t depth, const PanelsArgs& weight, std::int64_t next) {
  const std::int64_t lines = length / Codec::kNumbers;
  if (begin + length < depth) return {stored + lines * 64, weight.panel_bytes, lines, 0};
  // The last panels may be fewer.
  if (next + kItemPanels > weight.panel_count) return {};
  return {weight.panels + next * weight.panel_bytes, weight.panel_bytes, lines, 0};
}

// Results of a chunk of rows and at most kItemPanels panels. sums: room for those of all rows.
template <class Dot, class Codec>
static void multiply_chunk(Codec codec, const GemmProduct& product, const OutputNumbers& outputs,
                           std::int64_t first_row, std::int64_t rows, std::int64_t first_panel,
                           std::int64_t panels, float* sums) {
  constexpr std::int64_t kLength = kPiece<Dot, Codec>;
  constexpr std::int64_t kBytes = kLength / Dot::kDepth * 64;
  constexpr bool unpacks = !kReadsPanels<Dot, Codec>;
  alignas(64) std::uint8_t unpacked[unpacks ? kItemPanels * kBytes : 64];
  GroupNumbers numbers;
  const PanelsArgs& weight = product.weight;
  const PreparedRows& x = product.prepared;
  constexpr bool uses_tiles = OXY_HAS_TILES && Dot::kDepth > 1;
  const bool in_tiles = uses_tiles && x.in_tiles;
  const bool begins = !uses_tiles || in_tiles;
  const bool ends = in_tiles || (!uses_tiles && finishes_blocks(product.result.epilogue));
  const std::int64_t row_bytes = x.row_bytes ? x.row_bytes : x.block / Dot::kDepth * 4;
  // Pieces of panels stay in the nearest cache for the tiles of all rows.
  ClampedResults clamped{};
  if (!uses_tiles && ends && x.blocks == 1 && !weight.group_scales) {
    clamped = clamped_results_of<Dot>(product, first_row, first_panel, outputs);
  }
  const bool is_short = in_tiles && rows > 2 * kTileHeight && kLength > kPanelBlock;
  const std::int64_t step = step_of<Dot, Codec>(x.block / Dot::kDepth);
  std::int64_t piece = is_short ? tile_piece(x.depth, step * Dot::kDepth) : kLength;
  if (in_tiles) piece -= piece % (step * Dot::kDepth);
  const bool follows = !unpacks && first_panel + kItemPanels + panels <= weight.panel_count;
  const ChunkFinish finish{product, outputs, first_row, first_panel};
  prepare_blocks<Dot>(step);
  if (!begins) std::memset(sums, 0, sizeof(float) * kItemOutputs * rows);
  const std::int64_t group_length = weight.groups > 1 ? x.in_features / weight.groups : x.depth;
  for (std::int64_t block = 0; block < x.blocks; ++block) {
    const std::int64_t end = x.depth < (block + 1) * x.block ? x.depth : (block + 1) * x.block;
    if (block * x.block % group_length == 0) {
      read_group(weight, first_panel, panels, block * x.block / group_length, numbers);
    }
    for (std::int64_t begin = block * x.block; begin < end; begin += piece) {
      const std::int64_t length = end - begin < piece ? end - begin : piece;
      const std::int64_t row = block * x.rows + x.first + first_row;
      const std::uint8_t* stored =
          weight.panels + first_panel * weight.panel_bytes + begin / Codec::kNumbers * 64;
      if constexpr (unpacks) {
        for (std::int64_t p = 0; p < panels; ++p) {
          unpack_panel(Dot{}, codec, stored + p * weight.panel_bytes, length / Codec::kNumbers,
                       numbers.zero_points + p * kPanelOutputs, unpacked + p * kBytes);
        }
      }
      StoredLines next{};
      if constexpr (unpacks) {
        next = next_of<Codec>(stored, begin, length, x.depth, weight, first_panel + kItemPanels);
        // Products of more rows take longer than their weights to arrive.
        if (uses_tiles && next.panels && rows <= kMostDigitRows) next.ask(panels * next.lines);
      }
      // What is multiplied next: the rest of these panels, unless tiles take them in short pieces.
      const std::uint8_t* ahead = follows ? stored + kItemPanels * weight.panel_bytes : nullptr;
      if (in_tiles) {
        if (!is_short) ahead = nullptr;
      } else if (!unpacks && begin + length < x.depth) {
        ahead = stored + length / Codec::kNumbers * 64;
      } else if (ahead) {
        ahead -= begin / Codec::kNumbers * 64;
      }
      Tile tile{
          .rows = x.values + row * row_bytes + begin % x.block / Dot::kDepth * 4,
          .row_bytes = row_bytes,
          .digit_bytes = x.digit_bytes,
          .starts = nullptr,
          .runs = nullptr,
          .run_units = 0,
          .step_bytes = step * 4,
          .steps = nullptr,
          .panels = unpacks ? unpacked : stored,
          .panel_bytes = unpacks ? kBytes : weight.panel_bytes,
          .units = length / Dot::kDepth,
          .row_sums = x.sums ? x.sums + row : nullptr,
          .row_scales = x.block_scales ? x.block_scales + row : nullptr,
          .zero_points = weight.zero_points ? numbers.zero_points : nullptr,
          .middle = weight.middle,
          .scales = weight.group_scales ? numbers.scales : nullptr,
          .sums = sums,
          .begins = begins && begin == 0,
          .ends = ends && block + 1 == x.blocks && begin + length == end,
          .ahead = ahead,
          .stored = uses_tiles ? StoredLines{} : next,
          .clamped = clamped,
      };
      multiply_block_at_level<Dot>(tile, rows, panels, in_tiles && !x.is_padded, finish);
    }
  }
  if (!ends) finish(0, panels, 0, rows, sums);
}

static void multiply_item(const GemmProduct& product, std::int64_t item, float* sums) {
  const std::int64_t panel_groups = product.items / product.chunks;
  const std::int64_t first_row = item / panel_groups * product.chunk_rows;
  const std::int64_t rows_left = product.row_count - first_row;
  const std::int64_t rows = rows_left < product.chunk_rows ? rows_left : product.chunk_rows;
  const std::int64_t first_panel = item % panel_groups * kItemPanels;
  const std::int64_t panels_left = product.weight.panel_count - first_panel;
  const std::int64_t panels = panels_left < kItemPanels ? panels_left : kItemPanels;
  OutputNumbers outputs;
  read_numbers(product.weight, product.result, first_panel, panels, outputs);
  with_dot(product.prepared.type, [&](auto dot) {
    with_codec(product.weight, [&](auto codec) {
      using Dot = decltype(dot);
      if constexpr (kFits<Dot, decltype(codec)>) {
        multiply_chunk<Dot>(codec, product, outputs, first_row, rows, first_panel, panels, sums);
      }
    });
  });
}

static void gemm(const GemmArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) float sums[kItemRows * kItemOutputs];
  const GemmProduct* product = args.products;
  std::int64_t first = 0;
  for (std::int64_t item = begin; item < end; ++item) {
    while (item - first >= product->items) first += product++->items;
    multiply_item(*product, item - first, sums);
  }
#if OXY_HAS_TILES
  release_tiles();
#endif
}

}  // namespace oxytorch::OXY_LEVEL
