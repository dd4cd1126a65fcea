// Windows of images times a weight in panels, read from the images' lines: a row of the product is
// where a window begins, and neighbouring rows overlap.
#pragma once

#include "ops/panels/float_gemm.h"
#include "ops/panels/gemm.h"
#include "ops/panels/prepare_rows.h"
#include "ops/panels/write_lines.h"

namespace oxytorch::OXY_LEVEL {

// Has a result begin with a later row and output.
static void move_result(PanelResultArgs& result, std::int64_t row, std::int64_t output) {
  const std::int64_t size = size_of(result.out_dtype);
  const auto moved = [](const void* from, std::int64_t elements, std::int64_t bytes) {
    return from ? static_cast<const std::uint8_t*>(from) + elements * bytes : nullptr;
  };
  result.out = static_cast<std::uint8_t*>(result.out) + (row * result.out_stride + output) * size;
  result.other = moved(result.other, row * result.other_stride + output, size);
  result.bias = moved(result.bias, output, size_of(result.bias_dtype));
}

// What the results of a chunk's line are, from its first one and the group's first output on.
static PanelResultArgs line_result(const LineGemmArgs& args, const LineChunk& chunk,
                                   std::int64_t line) {
  PanelResultArgs result = args.result;
  const WindowDim* dims = args.windows.dims;
  const std::int64_t row =
      ((chunk.image * dims[0].out_size + chunk.plane) * dims[1].out_size + chunk.line + line) *
          dims[2].out_size +
      chunk.column;
  move_result(result, row, chunk.group * args.weight.out_features);
  return result;
}

// Along channels: panels that take 24 KiB of the nearest cache.
inline constexpr std::int64_t kLinePiece = 96;

// Panels of floats times rows of floats. Sums begin again in each piece: short ones err less. Tiles
// are whole, the last one too, because sums of a part of one are added up in another order. It
// multiplies some of the rows before it again, or the last row a few times.
static void multiply_float_lines(const LineGemmArgs& args, const PanelsArgs& weight,
                                 const LineChunk& chunk, std::int64_t panel, std::int64_t panels) {
  alignas(64) float sums[(kItemRows + kTileRows) * kSumsStride];
  alignas(64) float bias[kFloatPanels * kPanelOutputs] = {};
  const float* starts[kItemRows + kTileRows];
  const std::int64_t rows = chunk.lines * chunk.columns, panel_stride = weight.panel_bytes / 4;
  const WindowDim& last = args.windows.dims[2];
  FloatGemmArgs product{};
  product.weight = weight;
  product.result = line_result(args, chunk, 0);
  arrange_bias(product, {0, rows, panel, panels}, bias);
  // Results of rows that follow each other may be finished in registers.
  const bool follow = chunk.lines == 1 || chunk.columns == last.out_size;
  ClampedResults clamped{};
  if (follow && rows >= kTileRows) {
    clamped = clamped_results(product.result, 0, panel * kPanelOutputs, weight.out_features, bias);
  }
  const std::int64_t whole = rows / kTileRows * kTileRows, end_of_rows = round_up(rows, kTileRows);
  for (std::int64_t r = 0; r < end_of_rows; ++r) {
    const std::int64_t repeated = clamped.out ? rows - (end_of_rows - r) : rows - 1;
    const std::int64_t row = r < (clamped.out ? whole : rows) ? r : repeated;
    const std::int64_t pixel =
        (row / chunk.columns * line_rows(args) + row % chunk.columns) * last.stride;
    starts[r] = reinterpret_cast<const float*>(chunk.memory) + pixel * args.channels;
  }
  const auto* stored = reinterpret_cast<const float*>(weight.panels) + panel * panel_stride;
  const std::int64_t summands = summands_of(args);
  const bool follows = panel + panels < weight.panel_count;
  FloatAhead ahead{};
  FloatTile tile{
      .tiles = 1,
      .x = nullptr,
      .x_stride = 0,
      .starts = nullptr,
      .offset = 0,
      .runs = nullptr,
      .asks_ahead = false,
      .panels = stored,
      .panel_stride = panel_stride,
      .length = 0,
      .begins = true,
      .bias = clamped.out ? nullptr : bias,
      .sums = sums,
      .sums_step = kTileRows * kSumsStride,
      .ahead = &ahead,
      .is_steady = false,
      .asked = 0,
      .block = kLinePiece,
      .is_spread = false,
      .clamped = {},
  };
  // A piece of `length` elements from `k` on, of rows that begin `offset` later.
  const auto multiply = [&](std::int64_t k, std::int64_t length, std::int64_t offset) {
    tile.panels = stored + k * kPanelOutputs;
    tile.length = length;
    tile.offset = offset;
    tile.begins = k == 0;
    const bool ends = k + length == summands;
    const float* next =
        ends ? stored + panels * panel_stride : tile.panels + length * kPanelOutputs;
    ahead = {.panel = next,
             .panel_stride = panel_stride,
             .panels = ends && !follows ? 0 : panels,
             .rows = length,
             .row = 0};
    const std::int64_t tiles = end_of_rows / kTileRows, block = tile.block;
    set_pace(tile, tiles * ((panels + kTilePanels - 1) / kTilePanels));
    if (tile.runs) tile.block = block;
    const auto multiply_tiles = [&](std::int64_t row, std::int64_t count, std::int64_t result) {
      tile.starts = starts + row;
      tile.tiles = count;
      tile.sums = sums + row * kSumsStride;
      if (ends) tile.clamped = clamped, tile.clamped.skip_rows(result);
      if (count > 0) multiply_float_panels(tile, kTileRows, panels);
    };
    const std::int64_t repeated = clamped.out && ends && end_of_rows > rows ? 1 : 0;
    multiply_tiles(0, tiles - repeated, 0);
    if (repeated) multiply_tiles(end_of_rows - kTileRows, 1, rows - kTileRows);
  };
  const std::int64_t run = run_of(last, args.channels), each = kLinePiece / run;
  const auto each_run = [&](auto body) {
    each_position(args.windows.dims, args.phase_lines, args.columns, last.dilation == 1,
                  [&](std::int64_t pixel) { body(pixel * args.channels); });
  };
  std::int64_t k = 0;
  if (each > 1) {  // a piece takes a few runs
    std::int64_t runs[kLinePiece], count = 0;
    tile.runs = runs;
    tile.block = run;
    each_run([&](std::int64_t offset) {
      runs[count++] = offset;
      const std::int64_t length = count * run;
      if (count < each && k + length < summands) return;
      multiply(k, length, 0);
      k += length, count = 0;
    });
  } else {
    each_run([&](std::int64_t offset) {
      for (std::int64_t begin = 0; begin < run; begin += kLinePiece) {
        const std::int64_t left = run - begin;
        multiply(k + begin, left < kLinePiece ? left : kLinePiece, offset + begin);
      }
      k += run;
    });
  }
  for (std::int64_t l = 0; l < chunk.lines && !clamped.out; ++l) {
    product.result = line_result(args, chunk, l);
    finish_float_rows(product, {0, chunk.columns, panel, panels},
                      sums + l * chunk.columns * kSumsStride);
  }
}

// Finishes blocks of a chunk's rows. Between the lines of tiles of AMX there are rows without
// results. numbers: of panels from `first_panel` on.
struct LineFinish {
  const GemmProduct& product;  // whose result begins with the chunk's
  const OutputNumbers& numbers;
  std::int64_t first_panel;
  std::int64_t stride;  // rows from one line to the next
  std::int64_t columns;
  std::int64_t out_columns;  // of a line of the result
  FinishRows finish = finish_of(product.result, numbers.has_scales);

  // Calls body(result, rows, row) for the results of each line, from a row of the result on.
  template <class Body>
  OXY_MEMBER void each_line(std::int64_t first_row, std::int64_t count, Body body) const {
    const std::int64_t end = first_row + count;
    for (std::int64_t row = first_row; row < end;) {
      const std::int64_t line = row / stride, column = row - line * stride;
      const std::int64_t next = (line + 1) * stride, last = line * stride + columns;
      const std::int64_t rows = (last < end ? last : end) - row;
      if (rows > 0) body(line * out_columns + column, rows, row - first_row);
      row = next;
    }
  }

  OXY_MEMBER void operator()(std::int64_t panel, std::int64_t panels, std::int64_t first_row,
                             std::int64_t count, const float* sums) const {
    each_line(first_row, count, [&](std::int64_t result, std::int64_t rows, std::int64_t row) {
      finish(product, {result, rows, first_panel + panel, panels, sums + row * kItemOutputs},
             numbers, first_panel);
    });
  }
  OXY_MEMBER void ask(std::int64_t panel, std::int64_t panels, std::int64_t first_row,
                      std::int64_t count) const {
    each_line(first_row, count, [&](std::int64_t result, std::int64_t rows, std::int64_t) {
      ask_for_results(product, result, rows, first_panel + panel, panels);
    });
  }
};

#if OXY_HAS_TILES
// As multiply_lines. asks: whether the panels that follow are asked for.
template <class Dot, class Finish>
static void multiply_line_tiles(const LineGemmArgs& args, Tile tile, std::int64_t rows,
                                std::int64_t panels, bool asks, const Finish& finish) {
  const std::int64_t units = summands_of(args) / Dot::kDepth;
  // Pieces of panels stay in the nearest cache for the tiles of all rows.
  const std::int64_t step = args.step_units * Dot::kDepth;
  const std::int64_t steps = tile_piece(summands_of(args), step) / step;
  configure_tiles(args.step_units);
  const std::uint8_t* stored = tile.panels;
  tile.step_bytes = args.step_units * 4;
  for (std::int64_t begin = 0; begin < units; begin += steps * args.step_units) {
    const std::int64_t left = units - begin;
    tile.units = left < steps * args.step_units ? left : steps * args.step_units;
    tile.panels = stored + begin * 64;
    tile.steps = args.steps + begin / args.step_units;
    tile.begins = begin == 0;
    tile.ends = begin + tile.units == units;
    tile.ahead = asks ? tile.panels + kItemPanels * tile.panel_bytes : nullptr;
    multiply_block_in_tiles<Dot>(tile, rows, panels, false, finish);
  }
}
#endif

// Results of a chunk's rows and at most kItemPanels panels. memory: room for sums of all rows.
template <class Dot, class Codec>
static void multiply_lines(Codec codec, const LineGemmArgs& args, const PanelsArgs& weight,
                           const LineChunk& chunk, std::int64_t panel, std::int64_t panels,
                           float* memory) {
  using Element = typename Dot::Element;
  constexpr std::int64_t kLength = kPanelBlock;
  constexpr std::int64_t kBytes = kLength / Dot::kDepth * 64;
  constexpr bool unpacks = !kReadsPanels<Dot, Codec>;
  alignas(64) std::uint8_t unpacked[unpacks ? kItemPanels * kBytes : 64];
  alignas(64) static constexpr std::int32_t kNoZeroPoints[kPanelOutputs] = {};
  const WindowDim& last = args.windows.dims[2];
  const std::int64_t pixel_bytes = args.block * sizeof(Element);
  const std::uint8_t* stored = weight.panels + panel * weight.panel_bytes;
  Tile tile{
      .rows = chunk.memory,
      .row_bytes = last.stride * pixel_bytes,
      .starts = nullptr,
      .runs = nullptr,
      .run_units = 0,
      .step_bytes = 0,
      .steps = nullptr,
      .panels = stored,
      .panel_bytes = unpacks ? kBytes : weight.panel_bytes,
      .units = 0,
      .row_sums = nullptr,
      .zero_points = nullptr,
      .middle = 0,
      .scales = nullptr,
      .sums = memory,
      .begins = false,
      .ends = false,
      .ahead = nullptr,
      .stored = {},
      .clamped = {},
  };
  OutputNumbers numbers;
  read_numbers(weight, line_result(args, chunk, 0), panel, panels, numbers);
  const bool in_tiles = args.in_tiles;
  GemmProduct product{};
  product.weight = weight;
  product.result = line_result(args, chunk, 0);
  const LineFinish finish{product,       numbers,
                          panel,         in_tiles ? line_rows(args) : chunk.columns,
                          chunk.columns, last.out_size};
#if OXY_HAS_TILES
  if constexpr (Dot::kDepth > 1 && !unpacks) {
    if (in_tiles) {
      const std::int64_t rows = (chunk.lines - 1) * line_rows(args) + chunk.columns;
      const bool asks = panel + kItemPanels + panels <= weight.panel_count;
      return multiply_line_tiles<Dot>(args, tile, rows, panels, asks, finish);
    }
  }
#endif
  if (chunk.lines == 1 || chunk.columns == last.out_size) {  // rows follow each other
    tile.clamped = clamped_results_of<Dot>(product, 0, panel, numbers);
  }
  const std::int64_t rows = chunk.lines * chunk.columns;
  std::int32_t starts[kItemRows];
  for (std::int64_t l = 0, row = 0; l < chunk.lines; ++l) {
    for (std::int64_t c = 0; c < chunk.columns; ++c, ++row) {
      starts[row] = static_cast<std::int32_t>((l * line_rows(args) + c) * tile.row_bytes);
    }
  }
  // Elements from `k` on of the panels.
  const auto read_panels = [&](std::int64_t k, std::int64_t length) {
    const std::uint8_t* part = stored + k / Codec::kNumbers * 64;
    tile.panels = part;
    tile.units = length / Dot::kDepth;
    if constexpr (unpacks) {
      for (std::int64_t p = 0; p < panels; ++p) {
        unpack_panel(Dot{}, codec, part + p * weight.panel_bytes, length / Codec::kNumbers,
                     kNoZeroPoints, unpacked + p * kBytes);
      }
      tile.panels = unpacked;
    }
  };
  const std::int64_t summands = summands_of(args);
  tile.starts = starts;
  const std::int64_t run = run_of(args.windows.dims[2], args.channels);
  const auto each_run = [&](auto body) {
    each_position(args.windows.dims, args.phase_lines, args.columns, last.dilation == 1, body);
  };
  if (has_short_runs(args)) {
    std::int32_t runs[kPanelBlock];
    std::int64_t count = 0;
    each_run([&](std::int64_t pixel) {
      runs[count++] = static_cast<std::int32_t>(pixel * pixel_bytes);
    });
    read_panels(0, summands);
    tile.rows = chunk.memory;
    tile.runs = runs;
    tile.run_units = run / Dot::kDepth;
    tile.begins = tile.ends = true;
    return multiply_block<Dot>(tile, rows, panels, finish);
  }
  const bool follows = panel + kItemPanels < weight.panel_count;
  const std::uint8_t* following = follows ? stored + kItemPanels * weight.panel_bytes : nullptr;
  std::int64_t k = 0;
  each_run([&](std::int64_t pixel) {
    for (std::int64_t begin = 0; begin < run; begin += kLength) {
      const std::int64_t length = run - begin < kLength ? run - begin : kLength;
      read_panels(k + begin, length);
      tile.rows = chunk.memory + pixel * pixel_bytes + begin * sizeof(Element);
      tile.begins = k + begin == 0;
      tile.ends = k + begin + length == summands;
      if (!unpacks) {
        tile.ahead = tile.ends ? following : tile.panels + length / Codec::kNumbers * 64;
      }
      multiply_block<Dot>(tile, rows, panels, finish);
    }
    k += run;
  });
}

static void multiply_line_range(const LineGemmArgs& args, const LineChunk& chunk,
                                std::int64_t panel, std::int64_t panels) {
  PanelsArgs weight = args.weight;
  weight.panels += chunk.group * weight.panel_count * weight.panel_bytes;
  if (args.windows.dtype == DType::float32 && weight.codec == PanelCodec::fp32) {
    for (std::int64_t p = 0; p < panels; p += kFloatPanels) {
      const std::int64_t left = panels - p;
      multiply_float_lines(args, weight, chunk, panel + p,
                           left < kFloatPanels ? left : kFloatPanels);
    }
    return;
  }
  alignas(64) float sums[kItemRows * kItemOutputs];
  with_dot(args.type, [&](auto dot) {
    with_codec(weight, [&](auto codec) {
      using Dot = decltype(dot);
      if constexpr (kFits<Dot, decltype(codec)> && !Dot::kIsInteger) {
        for (std::int64_t p = panel; p < panel + panels; p += kItemPanels) {
          const std::int64_t left = panel + panels - p;
          const std::int64_t some = left < kItemPanels ? left : kItemPanels;
          multiply_lines<Dot>(codec, args, weight, chunk, p, some, sums);
        }
      }
    });
  });
}

// The chunk number `number` of all.
static LineChunk chunk_of(const LineGemmArgs& args, std::int64_t number, std::uint8_t* memory) {
  const WindowDim* dims = args.windows.dims;
  const auto divide = [&](std::int64_t by) {
    const std::int64_t rest = number % by;
    number /= by;
    return rest;
  };
  LineChunk chunk{};
  chunk.memory = memory;
  chunk.column =
      divide((dims[2].out_size + args.out_columns - 1) / args.out_columns) * args.out_columns;
  chunk.line = divide((dims[1].out_size + args.lines - 1) / args.lines) * args.lines;
  chunk.plane = divide(dims[0].out_size);
  chunk.image = divide(args.images);
  chunk.group = number;
  const std::int64_t lines = dims[1].out_size - chunk.line;
  const std::int64_t columns = dims[2].out_size - chunk.column;
  chunk.lines = lines < args.lines ? lines : args.lines;
  chunk.columns = columns < args.out_columns ? columns : args.out_columns;
  return chunk;
}

OXY_INLINE std::int64_t line_chunks(const LineGemmArgs& args) {
  const WindowDim* dims = args.windows.dims;
  return args.groups * args.images * dims[0].out_size *
         ((dims[1].out_size + args.lines - 1) / args.lines) *
         ((dims[2].out_size + args.out_columns - 1) / args.out_columns);
}

static void multiply_line_part(const LineGemmArgs& args, std::int64_t part) {
  const std::int64_t all = args.weight.panel_count;
  const std::int64_t ranges = (all + args.range_panels - 1) / args.range_panels;
  const std::int64_t items = line_chunks(args) * ranges;
  std::uint8_t* memory = args.scratch + part * args.scratch_bytes;
  std::int64_t written = -1;
  LineChunk chunk{};
  for (std::int64_t i = part * items / args.parts; i < (part + 1) * items / args.parts; ++i) {
    if (i / ranges != written) {
      written = i / ranges;
      chunk = chunk_of(args, written, memory);
      with_dot(args.type, [&](auto dot) {
        with_type(args.windows.dtype, [&](auto element) {
          if constexpr (!decltype(dot)::kIsInteger) {
            write_lines<decltype(dot), decltype(element)>(args, chunk);
          }
        });
      });
    }
    const std::int64_t panel = i % ranges * args.range_panels, left = all - panel;
    multiply_line_range(args, chunk, panel, left < args.range_panels ? left : args.range_panels);
  }
}

static void line_gemm(const LineGemmArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t part = begin; part < end; ++part) multiply_line_part(args, part);
#if OXY_HAS_TILES
  release_tiles();
#endif
}

}  // namespace oxytorch::OXY_LEVEL
