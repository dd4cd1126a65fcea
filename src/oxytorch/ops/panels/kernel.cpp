#include "ops/panels/kernel.h"

#include "ops/panels/gemm.h"
#include "ops/panels/gemv.h"
#include "ops/panels/prepare_rows.h"

namespace oxytorch::OXY_LEVEL {

static void multiply_item(const GemmProduct& product, std::int64_t item, float* sums) {
  const std::int64_t panel_groups = product.items / product.chunks;
  const std::int64_t first_row = item / panel_groups * product.chunk_rows;
  const std::int64_t rows_left = product.row_count - first_row;
  const std::int64_t rows = rows_left < product.chunk_rows ? rows_left : product.chunk_rows;
  const std::int64_t first_panel = item % panel_groups * kItemPanels;
  const std::int64_t panels_left = product.weight.panel_count - first_panel;
  const std::int64_t panels = panels_left < kItemPanels ? panels_left : kItemPanels;
  with_dot(product.prepared.type, [&](auto dot) {
    with_codec(product.weight, [&](auto codec) {
      using Dot = decltype(dot);
      if constexpr (!Dot::kIsInteger || decltype(codec)::kIsInteger) {
        multiply_chunk<Dot>(codec, product, first_row, rows, first_panel, panels, sums);
      }
    });
  });
  finish_chunk(product, first_row, rows, first_panel, panels, sums);
}

static void gemm(const GemmArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) float sums[kItemRows * kItemOutputs];
  const GemmProduct* product = args.products;
  std::int64_t first = 0;
  for (std::int64_t item = begin; item < end; ++item) {
    while (item - first >= product->items) first += product++->items;
    multiply_item(*product, item - first, sums);
  }
#if OXY_HAS_TILES
  release_tiles();
#endif
}

static void stage_gemv(const GemvArgs& args, std::int64_t begin, std::int64_t end) {
  with_path(args, [&](auto path) {
    with_type(args.dtype, [&](auto element) {
      const auto* x = static_cast<const decltype(element)*>(args.x);
      if constexpr (requires { path.stage(args, begin, x); }) {
        for (std::int64_t row = begin; row < end; ++row) {
          path.stage(args, row, x + row * args.x_stride);
        }
      }
    });
  });
}

static void gemv(const GemvArgs& args, std::int64_t begin, std::int64_t end) {
  with_path(args, [&](auto path) {
    using Path = decltype(path);
    with_codec(args.weight, [&](auto codec) {
      if constexpr (Path::template kTakes<decltype(codec)>) {
        multiply_items<Path>(codec, args, begin, end);
      }
    });
  });
}

static void gemv_of_each(const GemvOfEachArgs& args, std::int64_t begin, std::int64_t end) {
  std::int64_t product = 0, first = 0;
  while (begin < end) {
    for (; begin >= args.ends[product]; ++product) first = args.ends[product];
    const std::int64_t most = end < args.ends[product] ? end : args.ends[product];
    gemv(args.products[product], begin - first, most - first);
    begin = most;
  }
}

}  // namespace oxytorch::OXY_LEVEL
