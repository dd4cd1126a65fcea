#include <algorithm>
#include <cstring>

#include "core/export.h"
#include "core/math_mode.h"
#include "core/parallel.h"
#include "ops/panels/entry.h"
#include "ops/panels/kernel.h"
#include "ops/panels/split.h"

namespace oxytorch {

std::int64_t panel_bytes(const PanelFormat& format, std::int64_t in_features) {
  return round_up(in_features, kPanelDepth) * kPanelOutputs * format.stored_bits / 8;
}

void check_panel_tensor(const char* op, const char* argument, const Tensor& tensor,
                        std::int32_t dtype, std::int64_t elements) {
  check_cpu(op, argument, tensor);
  if (tensor.dtype_code() != dtype) {
    fail(op, argument, "of dtype " + dtype_name(dtype), dtype_name(tensor.dtype_code()));
  }
  if (tensor.numel() != elements) {
    fail(op, argument, "with " + std::to_string(elements) + " elements", describe(tensor.sizes()));
  }
}

// A tensor [panels, groups, 16], contiguous.
static const void* grouped_data(const char* op, const char* argument, const Tensor& tensor,
                                std::int32_t dtype, std::int64_t panels, std::int64_t groups,
                                Tensor& copy) {
  const std::int64_t wanted[] = {panels, groups, kPanelOutputs};
  check_shape(op, argument, tensor, Extents{wanted, 3});
  check_panel_tensor(op, argument, tensor, dtype, panels * groups * kPanelOutputs);
  return contiguous_data(tensor, copy);
}

void check_other(const char* op, const std::string& epilogue, const std::optional<Tensor>& other) {
  if (adds_other(parse_epilogue(op, epilogue)) == other.has_value()) return;
  fail(op, "other", (other ? "None with epilogue " : "with epilogue ") + quoted(epilogue),
       other ? describe(other->sizes()) : "None");
}

static void check_groups(const char* op, std::int64_t in_features, std::int64_t groups) {
  for (const std::int64_t size : kGroupSizes) {
    if (groups * size == in_features) return;
  }
  std::vector<std::string> sizes;
  for (const std::int64_t size : kGroupSizes) sizes.push_back(std::to_string(size));
  fail(op, "group_scales",
       "with groups of " + any_of(sizes) + " of " + std::to_string(in_features) + " in_features",
       std::to_string(groups) + " groups");
}

void check_features(const char* op, std::int64_t in_features, std::int64_t out_features) {
  if (std::max(in_features, out_features) < kMostFeatures) return;
  fail(op, "panels",
       "of fewer than " + std::to_string(kMostFeatures) + " in_features and out_features",
       std::to_string(in_features) + " and " + std::to_string(out_features));
}

Shape linear_shape(const char* op, const Tensor& x, std::int64_t out_features) {
  check_minimum_dim(op, "x", x, 1);
  if (x.size(-1) < 1) fail(op, "x", "with in_features", describe(x.sizes()));
  if (out_features < 1) fail(op, "out_features", "of at least 1", std::to_string(out_features));
  Shape shape(x.sizes().begin(), x.sizes().end());
  shape.back() = out_features;
  return shape;
}

PanelsArgs describe_weight(const char* op, const PanelFormat& format, const PanelTensors& tensors,
                           std::int64_t in_features, std::int64_t out_features, bool gated,
                           PanelCopies& copies) {
  static const std::int32_t byte = aoti_torch_dtype_uint8();
  static const std::int32_t half = aoti_torch_dtype_float16();
  static const std::int32_t single = aoti_torch_dtype_float32();
  check_features(op, in_features, out_features);
  const std::int64_t panels = panels_of(out_features, gated);
  PanelsArgs weight{
      .panels = nullptr,
      .channel_scales = nullptr,
      .group_scales = nullptr,
      .zero_points = nullptr,
      .table = format.table,
      .panel_count = panels,
      .panel_bytes = panel_bytes(format, in_features),
      .groups = 1,
      .out_features = out_features,
      .middle = format.middle,
      .group_dtype = DType::float16,
      .codec = codec_of(format),
  };
  check_panel_tensor(op, "panels", tensors.panels, byte, panels * weight.panel_bytes);
  weight.panels = static_cast<const std::uint8_t*>(contiguous_data(tensors.panels, copies.panels));
  const Tensor* channel_scales = tensors.channel_scales.tensor;
  if (!channel_scales) return weight;
  check_panel_tensor(op, "channel_scales", *channel_scales, single, panels * kPanelOutputs);
  weight.channel_scales =
      static_cast<const float*>(contiguous_data(*channel_scales, copies.channel_scales));
  if (const Tensor* scales = tensors.group_scales.tensor) {
    check_minimum_dim(op, "group_scales", *scales, 3);
    weight.groups = scales->size(1);
    check_groups(op, in_features, weight.groups);
    const bool is_single = scales->dtype_code() == single;
    if (!is_single && scales->dtype_code() != half) {
      fail(op, "group_scales", "of dtype float16 or float32", dtype_name(scales->dtype_code()));
    }
    weight.group_dtype = is_single ? DType::float32 : DType::float16;
    weight.group_scales = grouped_data(op, "group_scales", *scales, is_single ? single : half,
                                       panels, weight.groups, copies.group_scales);
  }
  if (const Tensor* zero_points = tensors.zero_points.tensor) {
    weight.zero_points = static_cast<const std::uint8_t*>(grouped_data(
        op, "zero_points", *zero_points, byte, panels, weight.groups, copies.zero_points));
  }
  return weight;
}

RowType row_type(DType dtype, bool rounds_to_int8, PanelCodec codec) {
  if (rounds_to_int8) return RowType::int8;
  if (codec == PanelCodec::fp32) return RowType::float32;
  // A level without fast products of bfloat16 would lose time by it.
  const bool gains = level_has(Capability::tiles) || level_has(Capability::fast_bf16_dot);
  if (dtype == DType::float32 && gains && rounds_products()) return RowType::bfloat16;
  return dtype == DType::bfloat16 ? RowType::bfloat16 : RowType::float32;
}

bool holds_tiles(const Rows& x, DType dtype) {
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(x.data) % kTileBytes == 0;
  if (dtype != DType::bfloat16 || !is_aligned || x.width % 2 != 0 || x.count < kTileHeight) {
    return false;
  }
  // Where no number divides them well, copies with zeros at their ends take fewer steps.
  const std::int64_t units = x.width / 2, steps = units / tile_step(units);
  return 4 * steps <= 5 * (round_up(x.width, kPanelDepth) * 2 / kTileBytes);
}

// The same of vectors, which take pairs of a row where panels have them, or whole blocks of both.
static bool holds_pairs(const Rows& x, DType dtype, const PanelsArgs& weight) {
  const bool multiplies = level_has(Capability::bf16_dot) && !level_has(Capability::tiles);
  const std::int64_t step = weight.codec == PanelCodec::bf16 ? 2 : kPanelDepth;
  return multiplies && dtype == DType::bfloat16 && !weight.group_scales && x.width % step == 0;
}

namespace {

// Many rows: a gemm.

// What the prepared rows lie in.
struct RowBuffers {
  Tensor values;
  Tensor scales;
  Tensor sums;
};

// in_features of a block. Bytes of x times codes of 4 bits have a sum of x for each block that is
// unpacked at once.
std::int64_t block_of(RowType type, const PanelsArgs& weight, std::int64_t in_features) {
  const std::int64_t group = weight.groups > 1 ? in_features / weight.groups : kLongPanelBlock;
  if (type == RowType::digits) return std::min(group, kDigitBlock);
  if (weight.groups > 1) return group;
  const bool sums_pieces = type == RowType::int8 && weight.codec == PanelCodec::nibbles;
  return sums_pieces ? kPanelBlock : kLongPanelBlock;
}

// Whether rows are multiplied in tiles of AMX along the whole of them.
bool lie_in_tiles(RowType type, const PanelsArgs& weight) {
  return type == RowType::bfloat16 && level_has(Capability::tiles) && !weight.group_scales;
}

PreparedRows allocate_rows(std::int64_t rows, std::int64_t in_features, RowType type,
                           const PanelsArgs& weight, RowBuffers& buffers) {
  const bool in_tiles = lie_in_tiles(type, weight);
  const std::int64_t depth = round_up(in_features, kPanelDepth);
  const std::int64_t block = in_tiles ? depth : block_of(type, weight, in_features);
  const std::int64_t blocks = divide_up(in_features, block);
  // Tiles of AMX read whole ones.
  const std::int64_t room = rows + kTileHeight;
  // A level without bfloat16 takes float32.
  const bool has_digits = type == RowType::digits, whole = type == RowType::int8 || has_digits;
  buffers.values = scratch(blocks * block * room * (whole ? 2 : 4));
  if (whole) {
    buffers.scales = scratch((has_digits ? blocks : 1) * room * 4);
    buffers.sums = scratch(blocks * room * 4);
  }
  auto* scales = whole ? static_cast<float*>(buffers.scales.mutable_data()) : nullptr;
  return {
      .values = static_cast<std::uint8_t*>(buffers.values.mutable_data()),
      .scales = has_digits ? nullptr : scales,
      .block_scales = has_digits ? scales : nullptr,
      .sums = whole ? static_cast<std::int32_t*>(buffers.sums.mutable_data()) : nullptr,
      .rows = room,
      .first = 0,
      .block = block,
      .blocks = blocks,
      .in_features = in_features,
      .depth = depth,
      .digit_bytes = blocks * block * room,
      .type = type,
      .in_tiles = in_tiles,
      .row_bytes = in_tiles ? block * 2 : 0,
      .is_padded = true,
  };
}

// Rows that are multiplied where they are.
PreparedRows unprepared(const Rows& x, bool in_tiles) {
  return {
      .values = static_cast<std::uint8_t*>(const_cast<void*>(x.data)),
      .scales = nullptr,
      .block_scales = nullptr,
      .sums = nullptr,
      .rows = x.count,
      .first = 0,
      .block = x.width,
      .blocks = 1,
      .in_features = x.width,
      .depth = x.width,
      .digit_bytes = 0,
      .type = RowType::bfloat16,
      .in_tiles = in_tiles,
      .row_bytes = x.stride * 2,
      .is_padded = false,
  };
}

// The most rows of an item. Where there are many, those of x and of the result stay in a core's own
// cache for all panels: the result's would leave it half written. As measured with tiles, of panels
// that need no unpacking.
std::int64_t most_rows_of_item(std::int64_t rows, std::int64_t row_bytes, PanelCodec codec) {
  const bool is_measured = codec == PanelCodec::bf16 && level_has(Capability::tiles);
  if (!is_measured || rows <= 2 * kItemRows) return kItemRows;
  constexpr std::int64_t kStep = 2 * kTileHeight;
  const std::int64_t fitting = core_cache_bytes() / 2 / row_bytes;
  return std::clamp(fitting - fitting % kStep, 2 * kStep, kItemRows);
}

Split split_of(std::span<const RowsProduct> products, std::int64_t in_features, RowType type) {
  std::int64_t panels = 0, most_rows = 0, row_bytes = 0, all = 0;
  for (const RowsProduct& product : products) {
    most_rows = std::max(most_rows, product.row_count);
    const std::int64_t count = product.weight.panel_count;
    panels += products.size() == 1 ? count : round_up(count, kItemPanels);
    const std::int64_t outputs = count * kPanelOutputs;
    const std::int64_t moved = (in_features + outputs) * 2;  // bytes of a row
    row_bytes = std::max(row_bytes, moved);
    all += work_of_product(product.row_count, outputs * in_features, type,
                           count * product.weight.panel_bytes, moved);
  }
  const std::int64_t threads = threads_for(all);
  const bool reads_panels = products[0].weight.codec == PanelCodec::bf16 &&
                            type == RowType::bfloat16 && !level_has(Capability::tiles);
  return split_product(reads_panels ? kVectorSplit : kCoarseSplit, most_rows, panels, threads,
                       most_rows_of_item(most_rows, row_bytes, products[0].weight.codec));
}

// `buffers`: what the result lies in, if it is not x.
PreparedRows prepare(const Rows& x, const std::vector<std::int64_t>* order, DType dtype,
                     RowType type, std::span<const RowsProduct> products, RowBuffers& buffers) {
  const PanelsArgs& weight = products[0].weight;
  const bool is_one = products.size() == 1 && !order;
  const bool in_tiles = lie_in_tiles(type, weight);
  const bool lies_well = in_tiles ? holds_tiles(x, dtype) : holds_pairs(x, dtype, weight);
  if (is_one && type == RowType::bfloat16 && lies_well) return unprepared(x, in_tiles);
  std::int64_t rows = 0;
  for (const RowsProduct& product : products) rows += product.row_count;
  const PrepareRowsArgs args{
      .x = x.data,
      .order = order ? order->data() : nullptr,
      .x_stride = x.stride,
      .x_dtype = dtype,
      .prepared = allocate_rows(rows, x.width, type, weight, buffers),
  };
  run(prepare_rows_copies, args, rows, x.width * 4);
  return args.prepared;
}

void run_gemm(const Rows& x, const std::vector<std::int64_t>* order, DType x_dtype, RowType type,
              std::span<const RowsProduct> products) {
  RowBuffers buffers;
  const PreparedRows prepared = prepare(x, order, x_dtype, type, products, buffers);
  const Split split = split_of(products, x.width, type);
  std::vector<GemmProduct> parts;
  parts.reserve(products.size());
  std::int64_t items = 0;
  for (const RowsProduct& product : products) {
    const std::int64_t chunks = divide_up(product.row_count, split.chunk_rows);
    parts.push_back({
        .prepared = prepared,
        .weight = product.weight,
        .result = product.result,
        .row_count = product.row_count,
        .chunk_rows = split.chunk_rows,
        .chunks = chunks,
        .items = divide_up(product.weight.panel_count, kItemPanels) * chunks,
    });
    parts.back().prepared.first = product.first_row;
    items += parts.back().items;
  }
  run_in_pieces(gemm_copies, GemmArgs{parts.data()}, items, split.grain);
}

Split split_float_product(std::int64_t rows, std::int64_t panels, std::int64_t in_features,
                          bool is_gated, std::int64_t threads) {
  const std::int64_t outputs = panels * kPanelOutputs, numbers = outputs * in_features;
  const std::int64_t work =
      work_of_product(rows, numbers, RowType::float32, 4 * numbers, 4 * (in_features + outputs));
  return split_product(float_split(is_gated), rows, panels, threads_for(work, threads));
}

void run_float_gemm(const Rows& x, const RowsProduct& product) {
  const Split split = split_float_product(product.row_count, product.weight.panel_count, x.width,
                                          is_gated(product.result.epilogue), available_threads());
  const FloatGemmArgs args{
      .x = static_cast<const float*>(x.data) + product.first_row * x.stride,
      .x_stride = x.stride,
      .rows = product.row_count,
      .in_features = x.width,
      .weight = product.weight,
      .result = product.result,
      .chunk_rows = split.chunk_rows,
      .groups = split.groups,
  };
  run_in_pieces(float_gemm_copies, args, split.items, split.grain);
}

// Few rows: a gemv.

// The most rows for which a gemv is faster than a gemm, as measured. Tiles of AMX take as long for
// one row as for 16, so products of bfloat16 go there early.
std::int64_t most_gemv_rows(PanelCodec codec, RowType type) {
  if (level_has(Capability::tiles) && type != RowType::float32) return is_integer(codec) ? 8 : 2;
  // Narrow vectors take longer to decode a panel than to multiply it with more rows than these.
  if (codec == PanelCodec::float8) return level_has(Capability::vectors_512) ? 12 : 4;
  return is_integer(codec) ? 12 : 8;
}

// The most rows of bfloat16 that are multiplied as integers of 15 bits. Sums of short groups take
// longer to finish than to multiply: from a gemm on, bfloat16 is faster.
std::int64_t most_digit_rows(const PanelsArgs& weight, std::int64_t in_features) {
  const bool is_short = weight.groups > 1 && in_features / weight.groups < kLeastDigitGroup;
  return is_short ? most_gemv_rows(weight.codec, RowType::digits) : kMostDigitRows;
}

// Memory for the staged rows of the calling thread's products; it stays, a few hundred KiB at most
// for weights of usual width.
std::uint8_t* staging_memory(std::int64_t bytes) {
  constexpr std::int64_t kLine = 64;
  static thread_local std::vector<std::uint8_t> memory;
  if (static_cast<std::int64_t>(memory.size()) < bytes + kLine) memory.resize(bytes + kLine);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  return memory.data() + (-address & (kLine - 1));
}

// Rows of x and the room in which they are staged.
struct Staging {
  const Rows& x;
  DType dtype;
  bool rounds_to_int8;
  std::int64_t depth;
  std::int64_t blocks;
  std::uint8_t* values;
  std::uint8_t* scales;
  std::uint8_t* sums;

  Staging(const Rows& rows, DType type, bool rounds, std::int64_t groups)
      : x(rows),
        dtype(type),
        rounds_to_int8(rounds),
        depth(round_up(rows.width, kPanelDepth)),
        blocks(groups + divide_up(depth, kDigitBlock)),
        values(staging_memory(rows.count * (depth * 4 + blocks * 8))),
        scales(values + rows.count * depth * 4),
        sums(scales + rows.count * blocks * 4) {}

  // `count` rows from `row` on, times the product's weight.
  GemvArgs describe(std::int64_t row, std::int64_t count, const RowsProduct& product) const {
    return {
        .x = static_cast<const std::uint8_t*>(x.data) + row * x.stride * size_of(dtype),
        .x_stride = x.stride,
        .rows = count,
        .in_features = x.width,
        .depth = depth,
        .dtype = dtype,
        .rounds_to_int8 = rounds_to_int8,
        .staged = {.values = values + row * depth * 4,
                   .scales = reinterpret_cast<float*>(scales + row * blocks * 4),
                   .sums = reinterpret_cast<std::int32_t*>(sums) + row * blocks,
                   .blocks = blocks},
        .weight = product.weight,
        .result = product.result,
    };
  }
};

// Items of a product, and the bytes that one reads.

std::int64_t gemv_items(const RowsProduct& product) {
  return product.weight.panel_count / (is_gated(product.result.epilogue) ? 2 : 1);
}

std::int64_t gemv_bytes(const RowsProduct& product) {
  const std::int64_t scales =
      product.weight.groups * kPanelOutputs * size_of(product.weight.group_dtype);
  return (is_gated(product.result.epilogue) ? 2 : 1) * (product.weight.panel_bytes + scales);
}

void run_gemv(const Staging& staging, const RowsProduct& product) {
  const GemvArgs args = staging.describe(0, product.row_count, product);
  run(stage_gemv_copies, args, args.rows, 1);
  run(gemv_copies, args, gemv_items(product), gemv_bytes(product));
}

// The rows of x in an order, one after the other.
Rows gathered(const Rows& x, const std::vector<std::int64_t>& order, DType dtype) {
  const std::int64_t bytes = x.width * size_of(dtype);
  const std::int64_t count = static_cast<std::int64_t>(order.size());
  Tensor memory = scratch(count * bytes);
  auto* to = static_cast<std::uint8_t*>(memory.mutable_data());
  const auto* from = static_cast<const std::uint8_t*>(x.data);
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * bytes, from + order[i] * x.stride * size_of(dtype), bytes);
  }
  return {std::move(memory), to, count, x.width, x.width};
}

// Several products in one parallel region. `shares_row`: of the same row, the only one of x.
void run_gemv_of_each(const Staging& staging, bool shares_row,
                      std::span<const RowsProduct> products) {
  for (const RowsProduct& product : products) {
    const std::int64_t row = shares_row ? 0 : product.first_row;
    run(stage_gemv_copies, staging.describe(row, product.row_count, product), product.row_count, 1);
    if (shares_row) break;
  }
  std::vector<GemvArgs> parts;
  std::vector<std::int64_t> ends;
  std::int64_t items = 0;
  for (const RowsProduct& product : products) {
    const std::int64_t row = shares_row ? 0 : product.first_row;
    parts.push_back(staging.describe(row, product.row_count, product));
    ends.push_back(items += gemv_items(product));
  }
  run(gemv_of_each_copies, GemvOfEachArgs{parts.data(), ends.data()}, items,
      gemv_bytes(products[0]));
}

}  // namespace

void multiply_rows(const Rows& x, const std::vector<std::int64_t>* order, DType x_dtype,
                   bool rounds_to_int8, std::span<const RowsProduct> products) {
  std::int64_t most_rows = 0;
  for (const RowsProduct& product : products) most_rows = std::max(most_rows, product.row_count);
  const PanelsArgs& weight = products[0].weight;
  const bool has_digits = !rounds_to_int8 && x_dtype == DType::bfloat16 &&
                          is_integer(weight.codec) && level_has(Capability::int8_dot) &&
                          most_rows <= most_digit_rows(weight, x.width);
  const RowType type =
      has_digits ? RowType::digits : row_type(x_dtype, rounds_to_int8, weight.codec);
  const bool is_float = x_dtype == DType::float32 && weight.codec == PanelCodec::fp32;
  if (is_float && products.size() == 1 && !order) return run_float_gemm(x, products[0]);
  if (most_rows > most_gemv_rows(weight.codec, type)) {
    return run_gemm(x, order, x_dtype, type, products);
  }
  if (products.size() == 1 && !order) {
    return run_gemv(Staging(x, x_dtype, rounds_to_int8, weight.groups), products[0]);
  }
  // Rows that are no neighbours are brought together; a single one is the same for all.
  const bool shares_row = x.count == 1 && most_rows == 1;
  Rows copy;
  if (order && !shares_row) copy = gathered(x, *order, x_dtype);
  const Staging staging(order && !shares_row ? copy : x, x_dtype, rounds_to_int8, weight.groups);
  run_gemv_of_each(staging, shares_row, products);
}

}  // namespace oxytorch

OXY_EXPORT void oxytorch_split_float_product(std::int64_t rows, std::int64_t out_features,
                                             std::int64_t in_features, std::int64_t threads,
                                             std::int64_t* result) {
  using namespace oxytorch;
  const std::int64_t panels = panels_of(out_features, false);
  const Split split = split_float_product(rows, panels, in_features, false, threads);
  const std::int64_t found[] = {split.chunk_rows, split.groups.count, split.groups.step,
                                split.items, split.grain};
  std::copy(std::begin(found), std::end(found), result);
}

// For tests: the threads that so much work is worth, and the kernels of this thread that had
// pieces.
OXY_EXPORT std::int64_t oxytorch_threads_for(std::int64_t work, std::int64_t threads) {
  return oxytorch::threads_for(work, threads);
}

OXY_EXPORT std::int64_t oxytorch_kernels_split() { return oxytorch::kernels_split; }
