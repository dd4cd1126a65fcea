#include "ops/_panels/kernel.h"

#include "ops/_panels/finish.h"
#include "ops/_panels/many_rows.h"
#include "ops/_panels/prepare_rows.h"

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
  const std::int64_t first_row = item % product.chunks * product.chunk_rows;
  const std::int64_t rows_left = product.row_count - first_row;
  const std::int64_t rows = rows_left < product.chunk_rows ? rows_left : product.chunk_rows;
  const std::int64_t first_panel = item / product.chunks * kItemPanels;
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

}  // namespace oxytorch::OXY_LEVEL
