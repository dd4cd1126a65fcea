// Convolutions whose windows are written side by side.
#include "core/parallel.h"
#include "ops/convolution_panels/products.h"
#include "ops/panels/entry.h"
#include "ops/panels/kernel.h"

namespace oxytorch {
namespace {

// How groups, rows and panels are cut into items.
struct WindowSplit {
  std::int64_t chunk_rows;
  std::int64_t range_panels;
};

// Cuts so that the busiest thread has the least to do.
WindowSplit split_windows(const ChunkCosts& costs, std::int64_t rows, std::int64_t groups,
                          std::int64_t panels, std::int64_t row_bytes, std::int64_t threads) {
  WindowSplit best{};
  std::int64_t least = 0;
  const std::int64_t fits = std::max(kChunkBytes / row_bytes, costs.row_step);
  const std::int64_t most = std::min(
      {fits / costs.row_step * costs.row_step, kChunkRows, round_up(rows, costs.row_step)});
  for (std::int64_t chunk = most; chunk >= costs.row_step; chunk -= costs.row_step) {
    for (std::int64_t ranges = 1; ranges <= panels; ranges *= 2) {
      const std::int64_t range = round_up(divide_up(panels, ranges), ranges > 1 ? 2 : 1);
      const std::int64_t items = groups * divide_up(rows, chunk) * divide_up(panels, range);
      const std::int64_t outputs = range * kPanelOutputs;
      // Chunks whose ranges are neighbours are written once for all of them.
      const std::int64_t turns = divide_up(items, threads);
      const std::int64_t writes = divide_up(turns, divide_up(panels, range));
      const std::int64_t cost =
          turns * (chunk * outputs + outputs * costs.read) + writes * chunk * costs.write;
      if (best.chunk_rows == 0 || cost < least) best = {chunk, range}, least = cost;
    }
  }
  return best;
}

// A chunk's windows: as tiles are loaded, or one below the other.
PreparedRows describe_chunk(RowType type, std::int64_t chunk_rows, std::int64_t in_features) {
  const bool in_tiles = type == RowType::bfloat16 && level_has(Capability::tiles);
  const std::int64_t depth = round_up(in_features, kPanelDepth);
  const std::int64_t whole_tiles = round_up(chunk_rows, kTileHeight) + kTileHeight;
  const std::int64_t room = whole_tiles + (whole_tiles % (2 * kTileHeight) ? 0 : kTileHeight);
  // Rows 4 KiB apart would share a part of the nearest cache's lines.
  const std::int64_t block = in_tiles ? kTileBytes / 2 : depth + (depth % 512 ? 0 : kPanelDepth);
  return {
      .values = nullptr,
      .scales = nullptr,
      .sums = nullptr,
      .rows = in_tiles ? room : chunk_rows,
      .first = 0,
      .block = block,
      .blocks = in_tiles ? depth / block : 1,
      .in_features = in_features,
      .depth = depth,
      .type = type,
      .in_tiles = in_tiles,
  };
}

// The stretches of a window that lies within the image.
std::vector<WindowStretch> stretches_of(const WindowArgs& windows, const PreparedRows& chunk) {
  std::vector<WindowStretch> found;
  const WindowDim &outer = windows.dims[0], &inner = windows.dims[1], &last = windows.dims[2];
  std::int64_t k = 0;
  const auto add = [&](std::int64_t from, std::int64_t count) {
    while (count > 0) {
      const std::int64_t block = k / chunk.block, at = k % chunk.block;
      const std::int64_t some = std::min(count, chunk.block - at);
      found.push_back({from, block * chunk.rows * chunk.block + at, some});
      from += some, k += some, count -= some;
    }
  };
  const bool joins = last.dilation == 1 && last.x_stride == windows.channels;
  for (std::int64_t i = 0; i < outer.kernel; ++i) {
    for (std::int64_t j = 0; j < inner.kernel; ++j) {
      const std::int64_t line =
          i * outer.dilation * outer.x_stride + j * inner.dilation * inner.x_stride;
      if (joins) {
        add(line, last.kernel * windows.channels);
        continue;
      }
      for (std::int64_t l = 0; l < last.kernel; ++l) {
        add(line + l * last.dilation * last.x_stride, windows.channels);
      }
    }
  }
  return found;
}

}  // namespace

void multiply_windows(const Convolution& call, RowType type, std::int64_t threads) {
  const WindowArgs& windows = call.windows;
  const std::int64_t in_features = call.in_features(), panels = call.weight.panel_count;
  const std::int64_t element = bytes_of_element(type);
  const WindowSplit split = split_windows(chunk_costs(type), call.rows, call.groups, panels,
                                          in_features * element, threads);
  const PreparedRows chunk = describe_chunk(type, split.chunk_rows, in_features);
  const std::vector<WindowStretch> stretches = stretches_of(windows, chunk);
  WindowGemmArgs args{
      .windows = windows,
      .stretches = stretches.data(),
      .stretch_count = static_cast<std::int64_t>(stretches.size()),
      .prepared = chunk,
      // Rows are written in vectors, which end behind them.
      .scratch_bytes = round_up(chunk.rows * chunk.blocks * chunk.block * element + 64, 64),
      .weight = call.weight,
      .result = call.result,
      .rows = call.rows,
      .groups = call.groups,
      .chunk_rows = split.chunk_rows,
      .chunks = divide_up(call.rows, split.chunk_rows),
      .range_panels = split.range_panels,
      .ranges = divide_up(panels, split.range_panels),
      .parts = threads,
  };
  args.parts = std::min(threads, args.groups * args.chunks * args.ranges);
  const Tensor memory = scratch_of_parts(args.parts, args.scratch_bytes, args.prepared.values);
  run_in_pieces(window_gemm_copies, args, args.parts, 1);
}

}  // namespace oxytorch
