#include "core/parallel.h"
#include "ops/_windows/result.h"
#include "ops/panels/kernel.h"
#include "ops/panels/split.h"

namespace oxytorch {
namespace {

constexpr const char* kOp = "convolution_panels";

// How groups, rows and panels are cut into items.
struct WindowSplit {
  std::int64_t chunk_rows;
  std::int64_t range_panels;
};

// Times of an element in units of a multiplication, on one thread: written to a chunk's scratch,
// and read of a panel's output.
struct WindowCosts {
  std::int64_t row_step;
  std::int64_t write;
  std::int64_t read;
};

WindowCosts costs_of(RowType type) {
  if (type == RowType::bfloat16 && level_has(Capability::tiles)) return {kTileHeight, 64, 64};
  return {6, 4, 8};
}

// Bytes of a chunk's windows, which are to stay in the second cache.
constexpr std::int64_t kChunkBytes = 512 << 10;

// Cuts so that the busiest thread has the least to do.
WindowSplit split_windows(const WindowCosts& costs, std::int64_t rows, std::int64_t groups,
                          std::int64_t panels, std::int64_t row_bytes, std::int64_t threads) {
  WindowSplit best{};
  std::int64_t least = 0;
  const std::int64_t fits = std::max(kChunkBytes / row_bytes, costs.row_step);
  const std::int64_t most =
      std::min({fits / costs.row_step * costs.row_step, kItemRows, round_up(rows, costs.row_step)});
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

struct Convolution {
  WindowArgs windows;
  PanelsArgs weight;  // of the first group
  PanelResultArgs result;
  std::int64_t rows;
  std::int64_t groups;
};

// Whether windows are the pixels of the images, one after the other.
bool takes_pixels(const Convolution& call, const Tensor& images) {
  bool same = call.groups == 1 && pixel_stride(images) > 0;
  for (const WindowDim& dim : call.windows.dims) {
    same &= dim.kernel == 1 && dim.stride == 1 && dim.out_size == dim.size;
  }
  return same;
}

void multiply_windows(const Convolution& call) {
  const WindowArgs& windows = call.windows;
  std::int64_t in_features = windows.channels;
  for (const WindowDim& dim : windows.dims) in_features *= dim.kernel;
  const RowType type = row_type(windows.dtype, false, call.weight.codec);
  const std::int64_t panels = call.weight.panel_count;
  const bool is_wide = type == RowType::float32 || !level_has(Capability::tiles);
  const std::int64_t element = is_wide ? 4 : 2;
  const std::int64_t work = call.rows * call.groups * panels * kPanelOutputs * in_features;
  const std::int64_t per_byte = type == RowType::float32 ? kFloatsPerByte : kUnitsPerByte;
  const std::int64_t threads =
      threads_for(work, tuning.bytes_per_thread * per_byte, available_threads());
  const WindowSplit split =
      split_windows(costs_of(type), call.rows, call.groups, panels, in_features * element, threads);
  const PreparedRows chunk = describe_chunk(type, split.chunk_rows, in_features);
  WindowGemmArgs args{
      .windows = windows,
      .prepared = chunk,
      // Rows are written in vectors, which end behind them.
      .scratch_bytes = round_up(chunk.rows * chunk.blocks * chunk.block * element + 64, 4096) + 64,
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
  Tensor memory = scratch(args.parts * args.scratch_bytes + 64);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.mutable_data());
  args.prepared.values = reinterpret_cast<std::uint8_t*>((address + 63) & ~std::uintptr_t{63});
  run_in_pieces(window_gemm_copies, args, args.parts, 1);
}

Tensor convolution_panels(const Tensor& x, const std::string& format_name, const Tensor& panels,
                          const Numbers& kernel_size, std::int64_t out_channels,
                          const std::optional<Tensor>& bias, const std::optional<Tensor>& other,
                          const Numbers& stride, const Numbers& padding, const Numbers& dilation,
                          std::int64_t groups, const std::string& epilogue) {
  const PanelFormat& format = parse_format(kOp, "format", format_name);
  if (has_codes(format)) fail(kOp, "format", "'fp32' or 'bf16'", quoted(format_name));
  Convolution call{};
  call.windows = describe_windows(kOp, x, kernel_size, stride, padding, dilation, groups);
  call.groups = groups;
  if (out_channels < 1 || out_channels % groups != 0) {
    fail(kOp, "out_channels", "a multiple of groups, " + std::to_string(groups),
         std::to_string(out_channels));
  }
  std::int64_t in_features = call.windows.channels;
  for (const std::int64_t size : kernel_size) in_features *= size;
  const std::int64_t outputs = out_channels / groups;
  const std::int64_t padded = round_up(outputs, kPanelOutputs);
  PanelCopies copies;
  call.weight = describe_weight(kOp, format, {panels, {}, {}, {}}, in_features, groups * padded,
                                false, copies);
  call.weight.panel_count /= groups;
  call.weight.out_features = outputs;
  const Shape shape = shape_of_result(x, call.windows, out_channels);
  Images others{};
  call.result = describe_result(kOp, epilogue, x, call.windows.dtype, shape, bias, other, others,
                                copies.bias);
  Tensor out = empty_images(shape, x.dtype_code());
  if (out.numel() == 0) return out;
  const Images copied = images_of(x);
  const Tensor& images = copied.tensor();
  set_data(call.windows, images);
  call.result.out = out.mutable_data();
  call.rows = out.numel() / out_channels;
  if (takes_pixels(call, images)) {
    const Rows rows{Tensor(), images.data(), call.rows, x.size(1), pixel_stride(images)};
    const RowsProduct product{call.weight, call.result, 0, call.rows};
    multiply_rows(rows, nullptr, call.windows.dtype, false, {&product, 1});
  } else {
    multiply_windows(call);
  }
  return out;
}

}  // namespace

OXY_OP(convolution_panels,
       "(Tensor x, str format, Tensor panels, int[] kernel_size, int out_channels, "
       "Tensor? bias, Tensor? other, int[] stride, int[] padding, int[] dilation, int groups, "
       "str epilogue=\"none\") -> Tensor",
       convolution_panels)

}  // namespace oxytorch
