#include "core/parallel.h"
#include "ops/_panels/kernel.h"
#include "ops/_panels/many_rows_entry.h"

namespace oxytorch {

static std::int64_t divided_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step; }

// What the prepared rows lie in.
struct RowBuffers {
  Tensor values;
  Tensor scales;
  Tensor sums;
};

static Tensor scratch(std::int64_t bytes) {
  static const std::int32_t byte = aoti_torch_dtype_uint8();
  return empty(&bytes, 1, byte);
}

static PreparedRows allocate_rows(std::int64_t rows, std::int64_t in_features, RowForm form,
                                  std::int64_t groups, RowBuffers& buffers) {
  // Float32 rows of a panel take twice the room in the nearest cache.
  const std::int64_t longest = form == RowForm::float32 ? kPanelBlock / 2 : kPanelBlock;
  const std::int64_t depth = divided_up(in_features, kPanelDepth) * kPanelDepth;
  const std::int64_t block = groups > 1 ? in_features / groups : longest;
  const std::int64_t blocks = divided_up(in_features, block);
  // Tiles of AMX read whole ones, up to the end of the last.
  const std::int64_t padded = divided_up(rows, kTileHeight) * kTileHeight;
  PreparedRows prepared{
      .values = nullptr,
      .scales = nullptr,
      .sums = nullptr,
      .rows = padded,
      .block = block,
      .blocks = blocks,
      .in_features = in_features,
      .depth = depth,
      .form = form,
  };
  // A level without bfloat16 takes float32.
  const std::int64_t element = form == RowForm::int8 ? 2 : 4;
  buffers.values = scratch(blocks * block * padded * element);
  prepared.values = buffers.values.mutable_data();
  if (form == RowForm::int8) {
    buffers.scales = scratch(rows * 4);
    buffers.sums = scratch(blocks * padded * 4);
    prepared.scales = static_cast<float*>(buffers.scales.mutable_data());
    prepared.sums = static_cast<std::int32_t*>(buffers.sums.mutable_data());
  }
  return prepared;
}

// Rows of a chunk, so that the busiest thread has the least to do. A chunk costs about as much more
// as `kUnpacking` rows, because it unpacks the weight for itself.
static std::int64_t choose_chunk(std::int64_t rows, std::int64_t panel_groups) {
  constexpr std::int64_t kUnpacking = 12;
  constexpr std::int64_t kStep = 48;
  std::uint32_t threads = 1;
  check_call(torch_get_num_threads(&threads), "get_num_threads");
  std::int64_t best = 0, least = 0;
  for (std::int64_t chunk = kItemRows; chunk >= kStep; chunk -= kStep) {
    const std::int64_t taken = chunk < rows ? chunk : rows;
    const std::int64_t items = panel_groups * divided_up(rows, taken);
    const std::int64_t time = divided_up(items, threads) * (taken + kUnpacking);
    if (best == 0 || time < least) best = taken, least = time;
  }
  return best;
}

void multiply_many_rows(const Rows& x, DType x_dtype, RowForm form, const PanelsArgs& weight,
                        const PanelResultArgs& result) {
  if (x.count == 0) return;
  RowBuffers buffers;
  const PrepareRowsArgs prepare{
      .x = x.data,
      .rows = nullptr,
      .x_stride = x.stride,
      .x_dtype = x_dtype,
      .prepared = allocate_rows(x.count, x.width, form, weight.groups, buffers),
  };
  run(prepare_rows_copies, prepare, x.count, x.width * 4);
  const std::int64_t panel_groups = divided_up(weight.panel_count, kItemPanels);
  const std::int64_t chunk = choose_chunk(x.count, panel_groups);
  const std::int64_t chunks = divided_up(x.count, chunk);
  const PanelProduct product{
      .prepared = prepare.prepared,
      .weight = weight,
      .result = result,
      .row_count = x.count,
      .chunk_rows = chunk,
      .chunks = chunks,
      .items = panel_groups * chunks,
  };
  run(multiply_panels_copies, MultiplyPanelsArgs{&product}, product.items, chunk * x.width);
}

}  // namespace oxytorch
