// Lines of images in the memory of a chunk: how they are written there.
#pragma once

#include "ops/panels/prepare_rows.h"
#include "ops/panels/window_args.h"
#include "ops/windows/positions.h"

namespace oxytorch::OXY_LEVEL {

// Some results of a group: of an image, and of its outermost dimension, lines and columns.
struct LineChunk {
  std::int64_t group, image, plane, line, column;
  std::int64_t lines, columns;  // how many
  std::uint8_t* memory;
};

// Rows of the product from one line of a chunk to the next one.
OXY_INLINE std::int64_t line_rows(const LineGemmArgs& args) {
  return args.columns / args.windows.dims[2].stride;
}

// Planes and phases that some window reads, with their lines and columns, one after the other.
OXY_INLINE std::int64_t pixels_of(const LineGemmArgs& args) {
  const WindowDim* dims = args.windows.dims;
  return dims[0].kernel * phases_of(dims[1]) * args.phase_lines * args.columns;
}

// Memory is written from its start on, so that what lies behind an end may be overwritten with
// zeros, or with anything that is written later.
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

#if OXY_HAS_BF16_DOT && OXY_HAS_VECTORS_512
// As write_few_channels, of at most four channels whose values of a line lie side by side.
template <class T>
static void write_channel_pairs(const LineGemmArgs& args, const T* from, std::int64_t count,
                                bf16* to) {
  const WindowArgs& windows = args.windows;
  const i32v first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  sweep(0, count, [&](std::int64_t w, auto lanes) {
    const auto bits = [&](std::int64_t c) {
      if (c >= windows.channels) return u32v{};
      return zero_extend(narrow(load(from + c * windows.channel_stride + w, lanes), bf16{}));
    };
    const u32v pair = bits(0) | bits(1) << 16;
    if (args.channels == 2) return store_raw(to + 2 * w, pair, Whole{});
    const u32v next = bits(2) | bits(3) << 16;
    store_raw(to + 4 * w, __builtin_shuffle(pair, next, first), Whole{});
    store_raw(to + 4 * w + 2 * kLanes, __builtin_shuffle(pair, next, first + 8), Whole{});
  });
}

// Pixels of three channels that follow each other, each with a zero behind it.
static void write_triples(const bf16* from, std::int64_t count, bf16* to) {
  constexpr std::int64_t kPixels = 8;
  const __m512i places = _mm512_set_epi16(0, 23, 22, 21, 0, 20, 19, 18, 0, 17, 16, 15, 0, 14, 13,
                                          12, 0, 11, 10, 9, 0, 8, 7, 6, 0, 5, 4, 3, 0, 2, 1, 0);
  for (std::int64_t w = 0; w < count; w += kPixels) {
    const std::int64_t pixels = count - w < kPixels ? count - w : kPixels;
    const auto given = static_cast<__mmask32>((1u << 3 * pixels) - 1);
    const __m512i values = _mm512_maskz_loadu_epi16(given, from + 3 * w);
    _mm512_storeu_si512(to + 4 * w, _mm512_maskz_permutexvar_epi16(0x77777777, places, values));
  }
}
#endif

// Pixels of few channels, which may lie apart: one value after the other.
template <class Element, class T>
static void write_few_channels(const LineGemmArgs& args, const T* from, std::int64_t count,
                               Element* to) {
  const WindowArgs& windows = args.windows;
  const std::int64_t step = windows.dims[2].x_stride;
#if OXY_HAS_BF16_DOT && OXY_HAS_VECTORS_512
  if constexpr (__is_same(Element, bf16)) {
    if (step == 1 && args.channels <= 4) return write_channel_pairs(args, from, count, to);
    if constexpr (__is_same(T, bf16)) {
      const bool follow = windows.channel_stride == 1 && step == 3 && windows.channels == 3;
      if (follow) return write_triples(from, count, to);
    }
  }
#endif
  if constexpr (__is_same(T, Element)) {
    if (step == 1 && args.channels == 3 && windows.channels == 3) {
      const T *second = from + windows.channel_stride, *third = second + windows.channel_stride;
      for (std::int64_t w = 0; w < count; ++w, to += 3) {
        to[0] = from[w], to[1] = second[w], to[2] = third[w];
      }
      return;
    }
  }
  for (std::int64_t c = 0; c < args.channels; ++c) {
    const T* values = from + c * windows.channel_stride;
    for (std::int64_t w = 0; w < count; ++w) {
      Element& value = to[w * args.channels + c];
      if (c >= windows.channels) {
        value = Element{};
      } else if constexpr (__is_same(T, Element)) {
        value = values[w * step];
      } else {
        Element some[kLanes];
        put(some, load(values + w * step, 1));
        value = some[0];
      }
    }
  }
}

// The pixels of a line from `column` on, with zeros beyond its ends; `line` is null for zeros
// alone.
template <class Element, class T>
static void write_pixels(const LineGemmArgs& args, const T* line, std::int64_t column,
                         Element* to) {
  const WindowArgs& windows = args.windows;
  const WindowDim& dim = windows.dims[2];
  const std::int64_t block = args.block, next = pixels_of(args) * block;
  std::int64_t begin = column < 0 ? -column : 0, end = dim.size - column;
  if (end > args.columns) end = args.columns;
  if (!line || begin >= end) begin = end = args.columns;
  const auto clear = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t c = 0; first < last && c < args.channels; c += block) {
      clear_elements(to + c / block * next + first * block, (last - first) * block);
    }
  };
  clear(0, begin);
  const T* from = line + (column + begin) * dim.x_stride;
  const bool are_neighbours = windows.channel_stride == 1;
  if (are_neighbours && block == windows.channels && dim.x_stride == block) {
    copy_elements(to + begin * block, from, (end - begin) * block);
  } else if (!are_neighbours || windows.channels < kFewChannels) {
    write_few_channels(args, from, end - begin, to + begin * block);
  } else {
    for (std::int64_t w = begin; w < end; ++w, from += dim.x_stride) {
      for (std::int64_t c = 0; c < windows.channels; c += block) {
        const std::int64_t left = windows.channels - c;
        copy_elements(to + c / block * next + w * block, from + c, left < block ? left : block);
      }
    }
  }
  clear(end, args.columns);
}

// Writes the lines that a chunk's windows cover.
template <class Dot, class T>
static void write_lines(const LineGemmArgs& args, const LineChunk& chunk) {
  using Element = typename Dot::Element;
  const WindowArgs& windows = args.windows;
  const WindowDim &outer = windows.dims[0], &inner = windows.dims[1], &last = windows.dims[2];
  const T* image = static_cast<const T*>(windows.x) + chunk.image * windows.image_stride +
                   chunk.group * windows.channels * windows.channel_stride;
  const std::int64_t first_line = chunk.line * inner.stride - inner.padding;
  const std::int64_t phases = phases_of(inner), needed = phase_lines_of(inner, chunk.lines);
  for (std::int64_t p = 0; p < outer.kernel; ++p) {
    const std::int64_t depth = chunk.plane * outer.stride - outer.padding + p * outer.dilation;
    const bool has_plane = depth >= 0 && depth < outer.size;
    for (std::int64_t phase = 0; phase < phases; ++phase) {
      for (std::int64_t l = 0; l < needed; ++l) {
        const std::int64_t line = first_line + l * inner.stride + phase;
        const bool has_line = has_plane && line >= 0 && line < inner.size;
        const T* from = has_line ? image + depth * outer.x_stride + line * inner.x_stride : nullptr;
        const std::int64_t at = ((p * phases + phase) * args.phase_lines + l) * args.columns;
        write_pixels(args, from, chunk.column * last.stride - last.padding,
                     reinterpret_cast<Element*>(chunk.memory) + at * args.block);
      }
    }
  }
}

// Elements of a window's line below which all its lines are multiplied at once: their sums would
// leave the registers, and come back, after too few products.
inline constexpr std::int64_t kShortRun = 64;

// Numbers along the sum of a result.
OXY_INLINE std::int64_t summands_of(const LineGemmArgs& args) {
  const WindowDim* dims = args.windows.dims;
  return dims[0].kernel * dims[1].kernel * dims[2].kernel * args.channels;
}

OXY_INLINE bool has_short_runs(const LineGemmArgs& args) {
  const std::int64_t run = run_of(args.windows.dims[2], args.channels), all = summands_of(args);
  return run <= kShortRun && run < all && all <= kPanelBlock;
}

}  // namespace oxytorch::OXY_LEVEL
