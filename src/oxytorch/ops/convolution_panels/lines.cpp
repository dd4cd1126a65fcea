// Convolutions that read windows from the lines of images, where they overlap.
#include "core/parallel.h"
#include "ops/convolution_panels/products.h"
#include "ops/panels/kernel.h"
#include "ops/windows/positions.h"

namespace oxytorch {
namespace {

// How channels lie in memory, and what a step along the sum takes of them.
struct TileSteps {
  std::int64_t block;  // channels
  std::int64_t units;
};

// Whole tiles where blocks of channels fill them, else the widest that divide what lies side by
// side: tiles never take what is not theirs, which might be NaN.
TileSteps tile_steps(const Convolution& call) {
  constexpr std::int64_t kUnits = kTileBytes / 4;
  if (call.channels() % (2 * kUnits) == 0) return {2 * kUnits, kUnits};
  return {call.channels(), tile_step(run_of(call.windows.dims[2], call.channels()) / 2)};
}

// What a chunk's results are: lines and columns, and the columns of a line in memory.
struct ChunkShape {
  std::int64_t lines, out_columns, columns;
};

// Columns in memory of a line of `out_columns` results.
std::int64_t columns_of(const WindowDim& dim, std::int64_t out_columns) {
  return round_up((out_columns - 1) * dim.stride + (dim.kernel - 1) * dim.dilation + 1, dim.stride);
}

// Rows of the product. Those of tiles lie at equal distances, with rows without results between
// lines.
std::int64_t rows_of(const ChunkShape& chunk, const WindowDim& dim, bool in_tiles) {
  if (!in_tiles) return chunk.lines * chunk.out_columns;
  return (chunk.lines - 1) * chunk.columns / dim.stride + chunk.out_columns;
}

std::int64_t pixels_of(const ChunkShape& chunk, const WindowDim* dims) {
  return dims[0].kernel * phases_of(dims[1]) * phase_lines_of(dims[1], chunk.lines) * chunk.columns;
}

// Kernels count the bytes of a chunk in 32 bits, of which a dilation can ask for more.
void check_chunk(const Convolution& call, const ChunkShape& chunk) {
  const WindowDim* dims = call.windows.dims;
  double bytes = 4.0 * static_cast<double>(call.channels());
  for (const std::int64_t each :
       {dims[0].kernel, phases_of(dims[1]), phase_lines_of(dims[1], chunk.lines), chunk.columns}) {
    bytes *= static_cast<double>(each);
  }
  if (bytes >= static_cast<double>(std::int64_t{1} << 31)) {
    fail("convolution_panels", "dilation and stride",
         "of kernels whose lines take below 2^31 bytes", std::to_string(bytes));
  }
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
  check_chunk(call, chunk);
  const std::int64_t line_parts = divide_up(last.out_size, chunk.out_columns);
  LineSplit best{};
  std::int64_t least = 0;
  for (; chunk.lines <= inner.out_size; ++chunk.lines) {
    const std::int64_t rows = rows_of(chunk, last, has_tiles(type));
    const std::int64_t written = pixels_of(chunk, dims) * call.channels();
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
                                   const TileSteps& tiles) {
  std::vector<std::int32_t> steps;
  const WindowDim* dims = call.windows.dims;
  const bool is_blocked = tiles.block < call.channels() || tiles.units * 2 == tiles.block;
  const std::int64_t next = is_blocked ? pixels_of(chunk, dims) * tiles.block : tiles.units * 2;
  const std::int64_t count = is_blocked ? call.channels() / tiles.block
                                        : run_of(call.windows.dims[2], call.channels()) / next;
  const bool by_lines = !is_blocked && dims[2].dilation == 1;
  each_position(dims, phase_lines_of(dims[1], chunk.lines), chunk.columns, by_lines,
                [&](std::int64_t pixel) {
                  for (std::int64_t i = 0; i < count; ++i) {
                    const std::int64_t element = pixel * tiles.block + i * next;
                    steps.push_back(static_cast<std::int32_t>(element * 2));
                  }
                });
  return steps;
}

}  // namespace

void multiply_lines(const Convolution& call, RowType type, std::int64_t threads) {
  const LineSplit split = split_lines(call, type, threads);
  const WindowDim* dims = call.windows.dims;
  const bool in_tiles = has_tiles(type);
  const TileSteps tiles = in_tiles ? tile_steps(call) : TileSteps{call.channels(), 0};
  std::vector<std::int32_t> steps;
  if (in_tiles) steps = steps_of(call, split.chunk, tiles);
  const std::int64_t written = pixels_of(split.chunk, dims) * call.channels();
  // Whole tiles are read behind the last row, and whole vectors written.
  const std::int64_t behind = 2 * kTileHeight * dims[2].stride * tiles.block * 2 + kTileBytes;
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
      .channels = call.channels(),
      .block = tiles.block,
      .lines = split.chunk.lines,
      .out_columns = split.chunk.out_columns,
      .columns = split.chunk.columns,
      .phase_lines = phase_lines_of(dims[1], split.chunk.lines),
      .steps = steps.data(),
      .step_units = tiles.units,
      .range_panels = split.range_panels,
      .parts = std::min(threads, chunks * divide_up(call.weight.panel_count, split.range_panels)),
  };
  const Tensor memory = scratch_of_parts(args.parts, args.scratch_bytes, args.scratch);
  run_in_pieces(line_gemm_copies, args, args.parts, 1);
}

}  // namespace oxytorch
