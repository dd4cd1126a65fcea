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

static void multiply_panels(const MultiplyPanelsArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) float sums[kItemRows * kItemOutputs];
  for (std::int64_t item = begin; item < end; ++item) {
    const std::int64_t first_row = item % args.chunks * args.chunk_rows;
    const std::int64_t rows_left = args.row_count - first_row;
    const std::int64_t rows = rows_left < args.chunk_rows ? rows_left : args.chunk_rows;
    const std::int64_t first_panel = item / args.chunks * kItemPanels;
    const std::int64_t panels_left = args.weight.panel_count - first_panel;
    const std::int64_t panels = panels_left < kItemPanels ? panels_left : kItemPanels;
    with_form(args.prepared.form, [&](auto form) {
      with_stored(form, args.weight.format, [&](auto stored) {
        multiply_chunk<decltype(form), decltype(stored)>(args, first_row, rows, first_panel, panels,
                                                         sums);
      });
    });
    finish_chunk(args, first_row, rows, first_panel, panels, sums);
  }
}

}  // namespace oxytorch::OXY_LEVEL
