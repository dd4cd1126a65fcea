#include "ops/_quantized/entry.h"

#include <algorithm>
#include <cmath>

#include "core/parallel.h"
#include "ops/_quantized/kernel.h"
#include "ops/panels/entry.h"
#include "ops/panels/split.h"

namespace oxytorch {

namespace {

struct Named {
  Number number;
  const char* name;
  std::int32_t code;
};

const Named* names() {
  static const Named all[] = {
      {Number::float32, "float32", aoti_torch_dtype_float32()},
      {Number::bfloat16, "bfloat16", aoti_torch_dtype_bfloat16()},
      {Number::float16, "float16", aoti_torch_dtype_float16()},
      {Number::int8, "int8", aoti_torch_dtype_int8()},
      {Number::uint8, "uint8", aoti_torch_dtype_uint8()},
  };
  return all;
}

constexpr int kNumbers = 5;
constexpr const char* kAllNumbers = "float32, bfloat16, float16, int8 or uint8";

}  // namespace

Number parse_number(const char* op, const char* argument, const std::string& name) {
  for (int i = 0; i < kNumbers; ++i) {
    if (name == names()[i].name) return names()[i].number;
  }
  fail(op, argument, kAllNumbers, quoted(name));
}

Number check_number(const char* op, const char* argument, const Tensor& tensor) {
  for (int i = 0; i < kNumbers; ++i) {
    if (tensor.dtype_code() == names()[i].code) return names()[i].number;
  }
  fail(op, argument, std::string("of dtype ") + kAllNumbers, dtype_name(tensor.dtype_code()));
}

std::int32_t dtype_code_of(Number number) { return names()[static_cast<int>(number)].code; }

void check_scale(const char* op, const ByteScale& given, Number number) {
  const std::string name = names()[static_cast<int>(number)].name;
  if (!is_byte(number)) {
    if (given.scale) fail(op, given.scale_name, "None for " + name, std::to_string(*given.scale));
    if (given.zero_point == 0) return;
    fail(op, given.zero_point_name, "0 for " + name, std::to_string(given.zero_point));
  }
  if (!given.scale) fail(op, given.scale_name, "a number for " + name, "None");
  // In float32, and so that its inverse is a number too.
  const bool is_scale = *given.scale >= 0x1p-126 && *given.scale <= 0x1p126;
  if (!is_scale) {
    fail(op, given.scale_name, "from 2^-126 to 2^126", std::to_string(*given.scale));
  }
  const std::int64_t least = number == Number::int8 ? -128 : 0;
  if (given.zero_point >= least && given.zero_point <= least + 255) return;
  fail(op, given.zero_point_name,
       "from " + std::to_string(least) + " to " + std::to_string(least + 255) + " for " + name,
       std::to_string(given.zero_point));
}

BytePanels describe_byte_panels(const char* op, const Tensor& panels, const Tensor& scales,
                                const Tensor& sums, std::int64_t in_features,
                                std::int64_t out_features, BytePanelCopies& copies,
                                const BytePanelNames& names) {
  if (in_features > kMostProducts) {
    fail(op, "x", "with at most " + std::to_string(kMostProducts) + " in_features",
         std::to_string(in_features));
  }
  check_features(op, in_features, out_features);
  const std::int64_t count = panels_of(out_features, false);
  const std::int64_t bytes = round_up(in_features, kPanelDepth) * kPanelOutputs;
  check_panel_tensor(op, names.panels, panels, aoti_torch_dtype_uint8(), count * bytes);
  check_panel_tensor(op, names.scales, scales, aoti_torch_dtype_float32(), count * kPanelOutputs);
  check_panel_tensor(op, names.sums, sums, aoti_torch_dtype_int32(), count * kPanelOutputs);
  return {
      .panels = static_cast<const std::uint8_t*>(contiguous_data(panels, copies.panels)),
      .scales = static_cast<const float*>(contiguous_data(scales, copies.scales)),
      .sums = static_cast<const std::int32_t*>(contiguous_data(sums, copies.sums)),
      .panel_count = count,
      .panel_bytes = bytes,
      .out_features = out_features,
  };
}

namespace {

// The most rows that are multiplied without tiles where there are some, and the most products of a
// result: a tile has 64, most of them zeros then.
constexpr std::int64_t kMostVectorRows = 4, kMostVectorProducts = 32;
// Multiplications of bytes that take about as long as memory takes for a byte, results included:
// tiles do 170 a nanosecond of 196 rows, 256 inputs and outputs, of up to 1500 in registers alone.
constexpr std::int64_t kTileProductsPerByte = 32, kProductsPerByte = 16;

}  // namespace

bool fits_tiles(std::int64_t rows, std::int64_t products) {
  return level_has(Capability::tiles) && rows > kMostVectorRows && products > kMostVectorProducts;
}

Bytes bytes_of(bool in_tiles) {
  if (in_tiles) return Bytes::as_they_are;
  return level_has(Capability::int8_dot) ? Bytes::unsigned_bytes : Bytes::pairs;
}

std::int32_t zero_point_of(const ByteOperand& operand, Bytes bytes) {
  if (bytes == Bytes::pairs) return 0;
  const bool moves = bytes == Bytes::unsigned_bytes && operand.number != Number::uint8;
  return operand.zero_point + (moves ? 128 : 0);
}

namespace {

// Whether rows are multiplied where they lie.
bool lie_well(const Rows& x, Number number, Bytes bytes) {
  switch (bytes) {
    case Bytes::as_they_are:
      return is_byte(number) && x.width % kTileBytes == 0 && x.stride % kTileBytes == 0 &&
             reinterpret_cast<std::uintptr_t>(x.data) % kTileBytes == 0 && x.count >= kTileHeight;
    case Bytes::unsigned_bytes:
      return number == Number::uint8 && x.width % 4 == 0;
    case Bytes::pairs:
      return false;
  }
  return false;
}

struct PreparedBytes {
  Tensor values, scales;
};

ByteRows prepare_rows_of_bytes(const Rows& x, const ByteOperand& operand, PreparedBytes& buffers) {
  const bool in_tiles = fits_tiles(x.count, x.width);
  const Bytes bytes = bytes_of(in_tiles);
  if (lie_well(x, operand.number, bytes)) {
    return {
        .values = static_cast<const std::uint8_t*>(x.data),
        .row_bytes = x.stride,
        .count = x.count,
        .depth = x.width,
        .scales = nullptr,
        .scale = operand.scale,
        .zero_point = zero_point_of(operand, bytes),
        .is_signed = operand.number != Number::uint8,
        .in_tiles = in_tiles,
    };
  }
  Preparing preparing = preparing_of(x, operand);
  buffers.values = scratch(room_for(x.count) * preparing.rows.row_bytes);
  if (!is_byte(operand.number)) buffers.scales = scratch(x.count * 4);
  preparing.use(
      static_cast<std::uint8_t*>(buffers.values.mutable_data()),
      is_byte(operand.number) ? nullptr : static_cast<float*>(buffers.scales.mutable_data()));
  run(prepare_bytes_copies, preparing.args, x.count, x.width * 4);
  return preparing.rows;
}

}  // namespace

std::int64_t room_for(std::int64_t rows) { return std::max(rows, kTileHeight); }

Preparing preparing_of(const Rows& x, const ByteOperand& operand) {
  const bool in_tiles = fits_tiles(x.count, x.width);
  const Bytes bytes = bytes_of(in_tiles);
  const std::int64_t row_bytes = round_up(x.width, kTileBytes) * (bytes == Bytes::pairs ? 2 : 1);
  return {
      .args = {.x = x.data,
               .x_stride = x.stride,
               .in_features = x.width,
               .number = operand.number,
               .zero_point = operand.zero_point,
               .bytes = bytes,
               .values = nullptr,
               .row_bytes = row_bytes,
               .scales = nullptr},
      .rows = {.values = nullptr,
               .row_bytes = row_bytes,
               .count = x.count,
               .depth = round_up(x.width, in_tiles ? kTileBytes : 4),
               .scales = nullptr,
               .scale = is_byte(operand.number) ? operand.scale : 1.0f,
               .zero_point = zero_point_of(operand, bytes),
               .is_signed = operand.number != Number::uint8,
               .in_tiles = in_tiles},
  };
}

std::int64_t work_of_products(std::int64_t rows, std::int64_t width, std::int64_t weight_bytes) {
  const std::int64_t per_byte = fits_tiles(rows, width) ? kTileProductsPerByte : kProductsPerByte;
  return std::max(weight_bytes, weight_bytes / per_byte * rows);
}

void multiply_rows_of_bytes(const Rows& x, const ByteOperand& operand, const BytePanels& weight,
                            const ByteResult& result) {
  PreparedBytes buffers;
  const ByteRows rows = prepare_rows_of_bytes(x, operand, buffers);
  const std::int64_t bytes = weight.panel_count * weight.panel_bytes;
  const std::int64_t work = work_of_products(x.count, x.width, bytes);
  const std::int64_t threads = threads_for(work);
  const Split split = split_product(kCoarseSplit, x.count, weight.panel_count, threads);
  const ByteGemmArgs args{rows, weight, result, split.chunk_rows};
  run_in_pieces(byte_gemm_copies, args, split.items, split.grain);
}

namespace {

// Times of a byte in units of a multiplication, on one thread: written to a chunk's scratch, and
// read of a panel.
struct WindowCosts {
  std::int64_t write;
  std::int64_t read;
};

constexpr WindowCosts kTileCosts{.write = 32, .read = 64}, kVectorCosts{.write = 8, .read = 16};

struct WindowSplit {
  std::int64_t chunk_rows, range_panels;
};

// Cuts so that the busiest thread has the least to do: each thread that has some of a chunk's
// panels writes the chunk's windows, of which cores have more in their own caches than they get
// from each other.
WindowSplit split_windows(const ByteWindows& call, bool in_tiles, std::int64_t row_bytes,
                          std::int64_t threads) {
  // Windows of a chunk stay in the second cache.
  constexpr std::int64_t kChunkBytes = 512 << 10;
  const WindowCosts& costs = in_tiles ? kTileCosts : kVectorCosts;
  const std::int64_t panels = call.weight.panel_count, step = in_tiles ? 2 : kItemPanels;
  const std::int64_t most_rows = std::min(kItemRows, round_up(call.rows, kTileHeight));
  WindowSplit best{};
  std::int64_t least = 0;
  for (std::int64_t rows = kTileHeight; rows <= most_rows; rows += kTileHeight) {
    if (rows > kTileHeight && rows * row_bytes > kChunkBytes) break;
    const std::int64_t chunks = call.groups * divide_up(call.rows, rows);
    for (std::int64_t ranges = 1; ranges <= divide_up(panels, step); ranges *= 2) {
      const std::int64_t range = round_up(divide_up(panels, ranges), step);
      const std::int64_t of_chunk = divide_up(panels, range);
      const std::int64_t turns = divide_up(chunks * of_chunk, threads);
      const std::int64_t writes = divide_up(turns, of_chunk) * rows * row_bytes;
      const std::int64_t outputs = std::min(range, panels) * kPanelOutputs;
      const std::int64_t products = turns * (rows + costs.read) * outputs * row_bytes;
      const std::int64_t cost = products + writes * costs.write;
      if (best.chunk_rows == 0 || cost < least) best = {rows, range}, least = cost;
    }
  }
  return best;
}

}  // namespace

void multiply_windows_of_bytes(const ByteWindows& call, const ByteOperand& operand) {
  const std::int64_t weight_bytes = call.weight.panel_count * call.weight.panel_bytes;
  const bool in_tiles = fits_tiles(call.rows, call.in_features);
  const Bytes bytes = bytes_of(in_tiles);
  const std::int64_t size = bytes == Bytes::pairs ? 2 : 1;
  const std::int64_t row_bytes = round_up(call.in_features, kTileBytes) * size;
  const std::int64_t work =
      work_of_products(call.rows, call.in_features, call.groups * weight_bytes);
  const std::int64_t threads = threads_for(work);
  const WindowSplit split = split_windows(call, in_tiles, row_bytes, threads);
  const std::int64_t items = call.groups * divide_up(call.rows, split.chunk_rows) *
                             divide_up(call.weight.panel_count, split.range_panels);
  ByteWindowsArgs args{
      .windows = {call.windows, operand.number, operand.zero_point},
      .bytes = bytes,
      .scratch = nullptr,
      .scratch_bytes = round_up(split.chunk_rows * row_bytes + 64, 64),
      .product = product_of_windows(call, operand, in_tiles, row_bytes,
                                    round_up(call.in_features, in_tiles ? kTileBytes : 4)),
      .rows = call.rows,
      .groups = call.groups,
      .chunk_rows = split.chunk_rows,
      .range_panels = split.range_panels,
      .parts = std::min(threads, items),
  };
  const Tensor memory = scratch_of_parts(args.parts, args.scratch_bytes, args.scratch);
  run_in_pieces(byte_windows_copies, args, args.parts, 1);
}

}  // namespace oxytorch
