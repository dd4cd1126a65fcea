#include "ops/panels/kernel.h"

#include "ops/panels/few_rows_ways.h"
#include "ops/panels/finish.h"
#include "ops/panels/many_rows.h"
#include "ops/panels/prepare_rows.h"

namespace oxytorch::OXY_LEVEL {

// Calls body(Stored{}) with what can be multiplied in the form.
template <class Form, class Body>
OXY_INLINE void with_stored(Form, PanelFormat format, Body body) {
  switch (format) {
    case PanelFormat::bf16:
      if constexpr (!kIsInteger<Form>) body(StoredHalves{});
      return;
    case PanelFormat::int8:
      return body(StoredBytes{});
    case PanelFormat::int4:
      return body(StoredNibbles{});
    case PanelFormat::nf4:
      if constexpr (!kIsInteger<Form>) body(StoredNormalFloats{});
      return;
  }
}

static void multiply_item(const PanelProduct& product, std::int64_t item, float* sums) {
  const std::int64_t panel_groups = product.items / product.chunks;
  const std::int64_t first_row = item / panel_groups * product.chunk_rows;
  const std::int64_t rows_left = product.row_count - first_row;
  const std::int64_t rows = rows_left < product.chunk_rows ? rows_left : product.chunk_rows;
  const std::int64_t first_panel = item % panel_groups * kItemPanels;
  const std::int64_t panels_left = product.weight.panel_count - first_panel;
  const std::int64_t panels = panels_left < kItemPanels ? panels_left : kItemPanels;
  with_form(product.prepared.form, [&](auto form) {
    with_stored(form, product.weight.format, [&](auto stored) {
      multiply_chunk<decltype(form), decltype(stored)>(product, first_row, rows, first_panel,
                                                       panels, sums);
    });
  });
  finish_chunk(product, first_row, rows, first_panel, panels, sums);
}

static void multiply_panels(const MultiplyPanelsArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) float sums[kItemRows * kItemOutputs];
  const PanelProduct* product = args.products;
  std::int64_t first = 0;
  for (std::int64_t item = begin; item < end; ++item) {
    while (item - first >= product->items) first += product++->items;
    multiply_item(*product, item - first, sums);
  }
#if defined(__AMX_TILE__)
  release_tiles();
#endif
}

static void stage_few_rows(const FewRowsArgs& args, std::int64_t begin, std::int64_t end) {
  with_way(args, [&](auto way) {
    with_type(args.dtype, [&](auto element) {
      const auto* x = static_cast<const decltype(element)*>(args.x);
      if constexpr (requires { way.stage(args, begin, x); }) {
        for (std::int64_t row = begin; row < end; ++row) {
          way.stage(args, row, x + row * args.x_stride);
        }
      }
    });
  });
}

static void multiply_few_rows(const FewRowsArgs& args, std::int64_t begin, std::int64_t end) {
  with_way(args, [&](auto way) {
    using Way = decltype(way);
    const auto multiply = [&](auto stored) {
      using Stored = decltype(stored);
      if constexpr (Way::template kTakes<Stored>) multiply_items<Way, Stored>(args, begin, end);
    };
    switch (args.weight.format) {
      case PanelFormat::bf16:
        return multiply(StoredHalves{});
      case PanelFormat::int8:
        return multiply(StoredBytes{});
      case PanelFormat::int4:
        return multiply(StoredNibbles{});
      case PanelFormat::nf4:
        return multiply(StoredNormalFloats{});
    }
  });
}

static void multiply_few_rows_of_each(const FewRowsOfEachArgs& args, std::int64_t begin,
                                      std::int64_t end) {
  std::int64_t product = 0, first = 0;
  while (begin < end) {
    for (; begin >= args.ends[product]; ++product) first = args.ends[product];
    const std::int64_t most = end < args.ends[product] ? end : args.ends[product];
    multiply_few_rows(args.products[product], begin - first, most - first);
    begin = most;
  }
}

}  // namespace oxytorch::OXY_LEVEL
