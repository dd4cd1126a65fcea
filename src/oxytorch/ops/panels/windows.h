// Windows of images, written as rows of a product, times a weight in panels.
#pragma once

#include "ops/_windows/inside.h"
#include "ops/panels/float_gemm.h"
#include "ops/panels/gemm.h"
#include "ops/panels/prepare_rows.h"
#include "ops/panels/window_args.h"

namespace oxytorch::OXY_LEVEL {

// Rows are written in their order, and each from its start on, so that what lies behind an end may
// be overwritten with anything.
template <class Element, class T>
OXY_INLINE void copy_elements(Element* to, const T* from, std::int64_t count) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  if constexpr (__is_same(T, Element)) {
    for (; count >= kLine; count -= kLine, to += kLine, from += kLine) std::memcpy(to, from, 64);
  }
  sweep(0, count, [&](std::int64_t i, auto lanes) {
    if constexpr (__is_same(T, Element)) {
      copy(to + i, from + i, lanes);
    } else {
      put(to + i, load(from + i, lanes));
    }
  });
}

template <class Element>
OXY_INLINE void clear_elements(Element* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) put(to + i, f32v{});
}

// Writes a row of the prepared ones.
template <class Element>
struct RowWriter {
  Element* to;
  std::int64_t left;   // of the current block
  std::int64_t block;  // elements of a block
  std::int64_t next;   // elements from one block's end to the next one's start
  std::int64_t depth;  // elements that are still to be written

  template <class Put>
  OXY_MEMBER void write(std::int64_t count, Put put) {
    depth -= count;
    for (std::int64_t at = 0; at < count;) {
      const std::int64_t some = count - at < left ? count - at : left;
      put(to, at, some);
      at += some;
      to += some;
      left -= some;
      if (left == 0) {
        to += next;
        left = block;
      }
    }
  }

  template <class T>
  OXY_MEMBER void take(const T* from, std::int64_t count) {
    write(count, [&](Element* values, std::int64_t at, std::int64_t some) {
      copy_elements(values, from + at, some);
    });
  }

  OXY_MEMBER void zeros(std::int64_t count) {
    write(count,
          [&](Element* values, std::int64_t, std::int64_t some) { clear_elements(values, some); });
  }
};

// One line of a window: what a kernel's last dimension covers.
template <class Element, class T>
OXY_INLINE void write_line(const WindowArgs& args, const T* line, std::int64_t first,
                           const Inside& columns, RowWriter<Element>& row) {
  const WindowDim& dim = args.dims[kWindowDims - 1];
  row.zeros(columns.begin * args.channels);
  const T* from = line + (first + columns.begin * dim.dilation) * dim.x_stride;
  const std::int64_t count = columns.end - columns.begin;
  if (dim.dilation == 1 && dim.x_stride == args.channels) {
    row.take(from, count * args.channels);
  } else {
    for (std::int64_t i = 0; i < count; ++i, from += dim.dilation * dim.x_stride) {
      row.take(from, args.channels);
    }
  }
  row.zeros((dim.kernel - columns.end) * args.channels);
}

// A window that does not lie within the image; `first`: where it begins.
template <class Element, class T>
static void write_edge(const WindowArgs& args, const T* image, const std::int64_t* first,
                       RowWriter<Element> row) {
  const WindowDim &outer = args.dims[0], &inner = args.dims[1];
  const Inside planes = inside(outer, first[0]), lines = inside(inner, first[1]);
  const Inside columns = inside(args.dims[2], first[2]);
  const std::int64_t line = args.dims[2].kernel * args.channels;
  for (std::int64_t i = 0; i < outer.kernel; ++i) {
    if (i < planes.begin || i >= planes.end) {
      row.zeros(inner.kernel * line);
      continue;
    }
    const T* plane = image + (first[0] + i * outer.dilation) * outer.x_stride;
    row.zeros(lines.begin * line);
    for (std::int64_t j = lines.begin; j < lines.end; ++j) {
      write_line(args, plane + (first[1] + j * inner.dilation) * inner.x_stride, first[2], columns,
                 row);
    }
    row.zeros((inner.kernel - lines.end) * line);
  }
  row.zeros(row.depth);
}

// A window that lies within the image, and begins at `window`.
template <class Element, class T>
OXY_INLINE void write_window(const WindowGemmArgs& args, const T* window, Element* row) {
  for (std::int64_t i = 0; i < args.stretch_count; ++i) {
    const WindowStretch& stretch = args.stretches[i];
    copy_elements(row + stretch.to, window + stretch.from, stretch.count);
  }
  const PreparedRows& to = args.prepared;
  for (std::int64_t k = to.in_features; k < to.depth;) {
    const std::int64_t end = (k / to.block + 1) * to.block;
    const std::int64_t count = (end < to.depth ? end : to.depth) - k;
    clear_elements(row + k / to.block * to.rows * to.block + k % to.block, count);
    k += count;
  }
}

// `rows` windows of a group from `first` on, which become the first ones of `to`.
template <class Dot, class T>
static void write_windows(const WindowGemmArgs& args, const PreparedRows& to, std::int64_t group,
                          std::int64_t first, std::int64_t rows) {
  using Element = typename Dot::Element;
  const WindowArgs& windows = args.windows;
  std::int64_t place[kWindowDims], left = first;
  for (int d = kWindowDims - 1; d >= 0; --d) {
    place[d] = left % windows.dims[d].out_size;
    left /= windows.dims[d].out_size;
  }
  const T* image =
      static_cast<const T*>(windows.x) + left * windows.image_stride + group * windows.channels;
  for (std::int64_t r = 0; r < rows; ++r) {
    Element* row = reinterpret_cast<Element*>(to.values) + r * to.block;
    std::int64_t begin[kWindowDims], offset = 0;
    bool is_within = true;
    for (int d = 0; d < kWindowDims; ++d) {
      const WindowDim& dim = windows.dims[d];
      begin[d] = place[d] * dim.stride - dim.padding;
      is_within &= begin[d] >= 0 && begin[d] + dim.dilation * (dim.kernel - 1) < dim.size;
      offset += begin[d] * dim.x_stride;
    }
    if (is_within) {
      write_window(args, image + offset, row);
    } else {
      write_edge(windows, image, begin,
                 RowWriter<Element>{row, to.block, to.block, (to.rows - 1) * to.block, to.depth});
    }
    int d = kWindowDims - 1;
    while (d >= 0 && ++place[d] == windows.dims[d].out_size) place[d--] = 0;
    if (d < 0) image += windows.image_stride;
  }
}

OXY_INLINE bool reads_floats(const WindowGemmArgs& args) {
  return args.windows.dtype == DType::float32 && args.weight.codec == PanelCodec::fp32;
}

// Some rows of a group, in scratch, times some of its panels.
struct WindowItem {
  PreparedRows prepared;
  PanelsArgs weight;       // the group's
  PanelResultArgs result;  // from the first row and the group's first output on
  std::int64_t rows;
  std::int64_t all_rows;  // of the call
};

static void multiply_float_windows(const WindowItem& item, std::int64_t panel,
                                   std::int64_t panels) {
  alignas(64) float sums[kFloatItem * kPanelOutputs];
  const FloatGemmArgs product{
      .x = reinterpret_cast<const float*>(item.prepared.values),
      .x_stride = item.prepared.block,
      .rows = item.all_rows,
      .in_features = item.prepared.in_features,
      .weight = item.weight,
      .result = item.result,
      .chunk_rows = item.rows,
      .item_panels = panels,
  };
  const std::int64_t fits = kFloatItem / item.rows;
  const std::int64_t most = fits < kMostFloatPanels ? fits : kMostFloatPanels;
  for (std::int64_t p = 0; p < panels; p += most) {
    const std::int64_t some = panels - p < most ? panels - p : most;
    multiply_float_item(product, {0, item.rows, panel + p, some}, sums);
  }
}

static void multiply_windows(const WindowItem& item, std::int64_t panel, std::int64_t panels) {
  alignas(64) float sums[kItemRows * kItemOutputs];
  const GemmProduct product{
      .prepared = item.prepared,
      .weight = item.weight,
      .result = item.result,
      .row_count = item.rows,
      .chunk_rows = item.rows,
      .chunks = 1,
      .items = 1,
  };
  with_dot(item.prepared.type, [&](auto dot) {
    with_codec(item.weight, [&](auto codec) {
      using Dot = decltype(dot);
      if constexpr (kFits<Dot, decltype(codec)>) {
        for (std::int64_t p = panel; p < panel + panels; p += kItemPanels) {
          const std::int64_t left = panel + panels - p;
          const std::int64_t some = left < kItemPanels ? left : kItemPanels;
          multiply_chunk<Dot>(codec, product, 0, item.rows, p, some, sums);
          finish_chunk(product, 0, item.rows, p, some, sums);
        }
      }
    });
  });
}

// Has a result begin with a later row and output.
static void move_result(PanelResultArgs& result, std::int64_t row, std::int64_t output) {
  const std::int64_t size = size_of(result.out_dtype);
  const auto moved = [](const void* from, std::int64_t elements, std::int64_t bytes) {
    return from ? static_cast<const std::uint8_t*>(from) + elements * bytes : nullptr;
  };
  result.out = static_cast<std::uint8_t*>(result.out) + (row * result.out_stride + output) * size;
  result.other = moved(result.other, row * result.other_stride + output, size);
  result.bias = moved(result.bias, output, size_of(result.bias_dtype));
}

// What a chunk of a group's rows is multiplied with, and where its results go.
static WindowItem item_of(const WindowGemmArgs& args, std::int64_t group, std::int64_t chunk,
                          std::uint8_t* scratch) {
  WindowItem item{args.prepared, args.weight, args.result, args.chunk_rows, args.rows};
  const std::int64_t first = chunk * args.chunk_rows, outputs = args.weight.out_features;
  if (item.rows > args.rows - first) item.rows = args.rows - first;
  item.prepared.values = scratch;
  item.weight.panels += group * args.weight.panel_count * args.weight.panel_bytes;
  move_result(item.result, first, group * outputs);
  return item;
}

static void multiply_part(const WindowGemmArgs& args, std::int64_t part) {
  const std::int64_t items = args.groups * args.chunks * args.ranges;
  std::uint8_t* scratch = args.prepared.values + part * args.scratch_bytes;
  std::int64_t written = -1;
  WindowItem item;
  for (std::int64_t i = part * items / args.parts; i < (part + 1) * items / args.parts; ++i) {
    const std::int64_t block = i / args.ranges;
    if (block != written) {
      item = item_of(args, block / args.chunks, block % args.chunks, scratch);
      with_dot(args.prepared.type, [&](auto dot) {
        with_type(args.windows.dtype, [&](auto element) {
          write_windows<decltype(dot), decltype(element)>(args, item.prepared, block / args.chunks,
                                                          block % args.chunks * args.chunk_rows,
                                                          item.rows);
        });
      });
      written = block;
    }
    const std::int64_t panel = i % args.ranges * args.range_panels;
    const std::int64_t left = args.weight.panel_count - panel;
    const std::int64_t panels = left < args.range_panels ? left : args.range_panels;
    if (reads_floats(args)) {
      multiply_float_windows(item, panel, panels);
    } else {
      multiply_windows(item, panel, panels);
    }
  }
}

static void window_gemm(const WindowGemmArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t part = begin; part < end; ++part) multiply_part(args, part);
#if OXY_HAS_TILES
  release_tiles();
#endif
}

}  // namespace oxytorch::OXY_LEVEL
