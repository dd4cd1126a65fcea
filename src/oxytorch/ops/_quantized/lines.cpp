#include <algorithm>

#include "core/parallel.h"
#include "ops/_quantized/entry.h"
#include "ops/_quantized/kernel.h"
#include "ops/panels/entry.h"
#include "ops/panels/split.h"

namespace oxytorch {

namespace {

// Lines of a chunk stay in the second cache, beside weights.
constexpr std::int64_t kChunkBytes = 256 << 10;
// Chunks of fewer results read the weight too often.
constexpr std::int64_t kFewResults = 96;

// Whether windows are read where they lie: bytes of whole images as they are multiplied.
bool windows_lie_well(const ByteWindows& call, const ByteOperand& operand, Bytes bytes) {
  const WindowArgs& windows = call.windows;
  const WindowDim& last = windows.dims[kWindowDims - 1];
  bool found = bytes == Bytes::unsigned_bytes && operand.number == Number::uint8 &&
               windows.channel_stride == 1 && windows.channels * last.kernel % 4 == 0 &&
               (last.kernel == 1 || last.x_stride == windows.channels);
  for (const WindowDim& dim : windows.dims) {
    const std::int64_t reach = (dim.kernel - 1) * dim.dilation + 1;
    found &= dim.padding == 0 && (dim.out_size - 1) * dim.stride + reach <= dim.size;
  }
  return found;
}

struct Memory {
  std::int64_t line_bytes, plane_bytes, bytes;
};

// Of a chunk of so many lines of the result, and columns of each.
Memory memory_of(const ByteWindows& call, std::int64_t size, std::int64_t lines,
                 std::int64_t out_columns) {
  const WindowDim *dims = call.windows.dims, &inner = dims[1], &last = dims[2];
  const std::int64_t columns = (out_columns - 1) * last.stride + last.kernel;
  const std::int64_t reach = (inner.kernel - 1) * inner.dilation + 1;
  const std::int64_t step = std::min(inner.stride, reach);
  const std::int64_t planes = divide_up(lines - 1, inner.out_size) + 1;
  Memory found{};
  found.line_bytes = round_up(columns * call.windows.channels * size, 4);
  found.plane_bytes = (lines * step + planes * (reach - step)) * found.line_bytes;
  // Reads of the last window end behind it, writes of pixels too.
  found.bytes = round_up(dims[0].kernel * found.plane_bytes + 64, 64);
  return found;
}

}  // namespace

void multiply_lines_of_bytes(const ByteWindows& call, const ByteOperand& operand) {
  const WindowDim& last = call.windows.dims[kWindowDims - 1];
  const Bytes bytes = bytes_of(false);
  const bool lie_well = windows_lie_well(call, operand, bytes);
  const std::int64_t size = bytes == Bytes::pairs ? 2 : 1;
  const std::int64_t lines = call.rows / last.out_size;
  const std::int64_t work = work_of_products(
      call.rows, call.in_features, call.groups * call.weight.panel_count * call.weight.panel_bytes);
  const std::int64_t threads = threads_for(work);
  const std::int64_t each = divide_up(threads, call.groups);
  const std::int64_t enough = std::clamp<std::int64_t>(call.rows / kFewResults, 1, each);
  const std::int64_t whole = lie_well ? 0 : memory_of(call, size, lines, last.out_size).bytes;
  const std::int64_t wanted = round_up(std::max(enough, divide_up(whole, kChunkBytes)), enough);
  const std::int64_t chunk_lines = divide_up(lines, wanted);
  const std::int64_t chunks = divide_up(lines, chunk_lines);
  const std::int64_t most_parts = std::max<std::int64_t>(last.out_size / kFewResults, 1);
  const std::int64_t line_parts =
      chunk_lines > 1 ? 1 : std::clamp<std::int64_t>(divide_up(wanted, chunks), 1, most_parts);
  const std::int64_t turns = call.groups * chunks * line_parts;
  const std::int64_t ranges = std::clamp<std::int64_t>(
      divide_up(threads, turns), 1, divide_up(call.weight.panel_count, kItemPanels));
  Memory memory{};
  if (!lie_well) memory = memory_of(call, size, chunk_lines, divide_up(last.out_size, line_parts));
  ByteLinesArgs args{
      .windows = {call.windows, operand.number, operand.zero_point},
      .bytes = bytes,
      .lie_well = lie_well,
      .scratch = nullptr,
      .scratch_bytes = memory.bytes,
      .line_bytes = memory.line_bytes,
      .plane_bytes = memory.plane_bytes,
      .product = product_of_windows(call, operand, false, 0, call.in_features),
      .lines = lines,
      .groups = call.groups,
      .chunk_lines = chunk_lines,
      .line_parts = line_parts,
      .ranges = ranges,
      .parts = std::min(threads, turns * ranges),
  };
  const WindowDim &outer = call.windows.dims[0], &inner = call.windows.dims[1];
  ByteRows& x = args.product.x;
  x.planes = outer.kernel;
  x.lines = inner.kernel;
  x.plane_step = lie_well ? outer.dilation * outer.x_stride : memory.plane_bytes;
  x.line_step = inner.dilation * (lie_well ? inner.x_stride : memory.line_bytes);
  Tensor owned;
  if (!lie_well) owned = scratch_of_parts(args.parts, args.scratch_bytes, args.scratch);
  run_in_pieces(byte_lines_copies, args, args.parts, 1);
}

}  // namespace oxytorch
