#include <algorithm>

#include "core/parallel.h"
#include "ops/panels/gemm_entry.h"
#include "ops/panels/kernel.h"

namespace oxytorch {

static std::int64_t divided_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step; }

// What the prepared rows lie in.
struct RowBuffers {
  Tensor values;
  Tensor scales;
  Tensor sums;
};

// in_features of a block. Bytes of x times codes of 4 bits have a sum of x for each block that is
// unpacked at once.
static std::int64_t block_of(RowType type, const PanelsArgs& weight, std::int64_t in_features) {
  if (weight.groups > 1) return in_features / weight.groups;
  const bool sums_pieces = type == RowType::int8 && weight.format == PanelFormat::int4;
  return sums_pieces ? kPanelBlock : kLongPanelBlock;
}

static PreparedRows allocate_rows(std::int64_t rows, std::int64_t in_features, RowType type,
                                  const PanelsArgs& weight, RowBuffers& buffers) {
  const std::int64_t block = block_of(type, weight, in_features);
  const std::int64_t blocks = divided_up(in_features, block);
  // Tiles of AMX read whole ones.
  const std::int64_t room = rows + kTileHeight;
  // A level without bfloat16 takes float32.
  const std::int64_t element = type == RowType::int8 ? 2 : 4;
  buffers.values = scratch(blocks * block * room * element);
  if (type == RowType::int8) {
    buffers.scales = scratch(rows * 4);
    buffers.sums = scratch(blocks * room * 4);
  }
  const bool whole = type == RowType::int8;
  return {
      .values = static_cast<std::uint8_t*>(buffers.values.mutable_data()),
      .scales = whole ? static_cast<float*>(buffers.scales.mutable_data()) : nullptr,
      .sums = whole ? static_cast<std::int32_t*>(buffers.sums.mutable_data()) : nullptr,
      .rows = room,
      .first = 0,
      .block = block,
      .blocks = blocks,
      .in_features = in_features,
      .depth = divided_up(in_features, kPanelDepth) * kPanelDepth,
      .type = type,
  };
}

// Rows of a chunk, so that the busiest thread has the least to do. A chunk costs about as much more
// as `kUnpacking` rows, because it unpacks the weight for itself.
static std::int64_t choose_chunk(std::int64_t rows, std::int64_t panel_groups) {
  constexpr std::int64_t kUnpacking = 12;
  constexpr std::int64_t kLeast = 32;
  std::uint32_t threads = 1;
  check_call(torch_get_num_threads(&threads), "get_num_threads");
  std::int64_t best = 0, least = 0;
  for (std::int64_t count = divided_up(rows, kItemRows);; ++count) {
    const std::int64_t chunk = divided_up(divided_up(rows, count), kTileHeight) * kTileHeight;
    if (best != 0 && chunk < kLeast) return best;
    const std::int64_t items = panel_groups * divided_up(rows, chunk);
    const std::int64_t time = divided_up(items, threads) * (chunk + kUnpacking);
    if (best == 0 || time < least) best = chunk, least = time;
    if (count >= 8 * threads) return best;
  }
}

void run_gemm(const Rows& x, const std::vector<std::int64_t>* order, DType x_dtype, RowType type,
              const std::vector<RowsProduct>& products) {
  std::int64_t rows = 0, most_rows = 0, panel_groups = 0;
  for (const RowsProduct& product : products) {
    rows += product.row_count;
    most_rows = std::max(most_rows, product.row_count);
    panel_groups += divided_up(product.weight.panel_count, kItemPanels);
  }
  if (rows == 0) return;
  RowBuffers buffers;
  const PrepareRowsArgs prepare{
      .x = x.data,
      .order = order ? order->data() : nullptr,
      .x_stride = x.stride,
      .x_dtype = x_dtype,
      .prepared = allocate_rows(rows, x.width, type, products[0].weight, buffers),
  };
  run(prepare_rows_copies, prepare, rows, x.width * 4);
  const std::int64_t chunk_rows = choose_chunk(most_rows, panel_groups);
  std::vector<GemmProduct> parts;
  parts.reserve(products.size());
  std::int64_t items = 0;
  for (const RowsProduct& product : products) {
    const std::int64_t chunks = divided_up(product.row_count, chunk_rows);
    parts.push_back({
        .prepared = prepare.prepared,
        .weight = product.weight,
        .result = product.result,
        .row_count = product.row_count,
        .chunk_rows = chunk_rows,
        .chunks = chunks,
        .items = divided_up(product.weight.panel_count, kItemPanels) * chunks,
    });
    parts.back().prepared.first = product.first_row;
    items += parts.back().items;
  }
  run(gemm_copies, GemmArgs{parts.data()}, items, chunk_rows * x.width);
}

}  // namespace oxytorch
