// Convolutions that read windows from the lines of images, where they overlap.
#include "core/parallel.h"
#include "ops/_windows/positions.h"
#include "ops/convolution_panels/products.h"
#include "ops/panels/kernel.h"

namespace oxytorch {
namespace {

// Channels of a block of tiles, 0 where they cannot be cut into whole steps.
std::int64_t tile_block(std::int64_t channels) {
  constexpr std::int64_t kWhole = kTileBytes / 2;
  return channels % kWhole == 0 ? kWhole : channels % (kWhole / 2) == 0 ? kWhole / 2 : 0;
}

// What a chunk's results are: lines and columns, and the columns of a line in memory.
struct ChunkShape {
  std::int64_t lines, out_columns, columns;
};

// Columns in memory of a line of `out_columns` results.
std::int64_t columns_of(const WindowDim& dim, std::int64_t out_columns) {
  return round_up((out_columns - 1) * dim.stride + (dim.kernel - 1) * dim.dilation + 1, dim.stride);
}

std::int64_t rows_of(const ChunkShape& chunk, const WindowDim& dim) {
  return (chunk.lines - 1) * chunk.columns / dim.stride + chunk.out_columns;
}

std::int64_t pixels_of(const ChunkShape& chunk, const WindowDim* dims) {
  return dims[0].kernel * phases_of(dims[1]) * phase_lines_of(dims[1], chunk.lines) * chunk.columns;
}

struct LineSplit {
  ChunkShape chunk;
  std::int64_t range_panels;
};

// Cuts so that the busiest thread has the least to do.
LineSplit split_lines(const Convolution& call, RowType type, std::int64_t threads) {
  const WindowDim* dims = call.windows.dims;
  const WindowDim &inner = dims[1], &last = dims[2];
  const ChunkCosts& costs = chunk_costs(type);
  const std::int64_t panels = call.weight.panel_count, in_features = call.in_features();
  ChunkShape chunk{1, last.out_size, columns_of(last, last.out_size)};
  if (chunk.out_columns > kItemRows) {
    const std::int64_t parts = divide_up(last.out_size, kItemRows);
    chunk.out_columns = divide_up(last.out_size, parts);
    chunk.columns = columns_of(last, chunk.out_columns);
  }
  const std::int64_t line_parts = divide_up(last.out_size, chunk.out_columns);
  LineSplit best{};
  std::int64_t least = 0;
  for (; chunk.lines <= inner.out_size; ++chunk.lines) {
    const std::int64_t rows = rows_of(chunk, last);
    const std::int64_t written = pixels_of(chunk, dims) * call.windows.channels;
    const bool is_large = rows > kItemRows || written * bytes_of_element(type) > kChunkBytes;
    if (chunk.lines > 1 && is_large) break;
    const std::int64_t chunks = call.groups * call.images * dims[0].out_size *
                                divide_up(inner.out_size, chunk.lines) * line_parts;
    for (std::int64_t ranges = 1; ranges <= panels; ranges *= 2) {
      const std::int64_t range = round_up(divide_up(panels, ranges), ranges > 1 ? 2 : 1);
      const std::int64_t turns = divide_up(chunks * divide_up(panels, range), threads);
      const std::int64_t writes = divide_up(turns, divide_up(panels, range));
      const std::int64_t outputs = range * kPanelOutputs;
      const std::int64_t products = round_up(rows, costs.row_step) + costs.read;
      const std::int64_t cost =
          turns * products * outputs * in_features + writes * written * costs.write;
      if (best.range_panels == 0 || cost < least) best = {chunk, range}, least = cost;
    }
  }
  return best;
}

// Bytes from a row's start to each step along the sum.
std::vector<std::int32_t> steps_of(const Convolution& call, const ChunkShape& chunk,
                                   std::int64_t block) {
  std::vector<std::int32_t> steps;
  const WindowDim* dims = call.windows.dims;
  const std::int64_t pixels = pixels_of(chunk, dims);
  each_position(dims, phase_lines_of(dims[1], chunk.lines), chunk.columns, false,
                [&](std::int64_t pixel) {
                  for (std::int64_t c = 0; c < call.windows.channels / block; ++c) {
                    steps.push_back(static_cast<std::int32_t>((c * pixels + pixel) * block * 2));
                  }
                });
  return steps;
}

}  // namespace

bool reads_lines(const Convolution& call, RowType type) {
  std::int64_t positions = 1;
  for (const WindowDim& dim : call.windows.dims) positions *= dim.kernel;
  if (positions == 1) return false;
  const std::int64_t channels = call.windows.channels;
  if (has_tiles(type)) return tile_block(channels) > 0;
  return call.weight.codec == PanelCodec::fp32 || channels % 2 == 0;  // units are not cut
}

void multiply_lines(const Convolution& call, RowType type, std::int64_t threads) {
  const LineSplit split = split_lines(call, type, threads);
  const WindowDim* dims = call.windows.dims;
  const bool in_tiles = has_tiles(type);
  const std::int64_t block = in_tiles ? tile_block(call.windows.channels) : 0;
  std::vector<std::int32_t> steps;
  if (in_tiles) steps = steps_of(call, split.chunk, block);
  const std::int64_t written = pixels_of(split.chunk, dims) * call.windows.channels;
  // Whole tiles are read behind the last row, and whole vectors written.
  const std::int64_t row = dims[2].stride * (in_tiles ? block * 2 : call.windows.channels * 4);
  const std::int64_t behind =
      (in_tiles ? 2 * kTileHeight : chunk_costs(type).row_step) * row + kTileBytes;
  const std::int64_t chunks = call.groups * call.images * dims[0].out_size *
                              divide_up(dims[1].out_size, split.chunk.lines) *
                              divide_up(dims[2].out_size, split.chunk.out_columns);
  LineGemmArgs args{
      .windows = call.windows,
      .scratch = nullptr,
      .scratch_bytes = round_up(written * bytes_of_element(type) + behind, 64),
      .type = type,
      .in_tiles = in_tiles,
      .weight = call.weight,
      .result = call.result,
      .images = call.images,
      .groups = call.groups,
      .block = block,
      .lines = split.chunk.lines,
      .out_columns = split.chunk.out_columns,
      .columns = split.chunk.columns,
      .phase_lines = phase_lines_of(dims[1], split.chunk.lines),
      .steps = steps.data(),
      .range_panels = split.range_panels,
      .parts = std::min(threads, chunks * divide_up(call.weight.panel_count, split.range_panels)),
  };
  const Tensor memory = scratch_of_parts(args.parts, args.scratch_bytes, args.scratch);
  run_in_pieces(line_gemm_copies, args, args.parts, 1);
}

}  // namespace oxytorch
