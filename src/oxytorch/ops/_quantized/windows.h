// Windows of images of bytes times a weight of bytes in panels.
#pragma once

#include "ops/_quantized/gemm.h"
#include "ops/_quantized/prepare.h"
#include "ops/windows/inside.h"

namespace oxytorch::OXY_LEVEL {

OXY_INLINE void copy_bytes(std::uint8_t* to, const std::uint8_t* from, std::int64_t count) {
  for (; count >= 64; count -= 64, to += 64, from += 64) std::memcpy(to, from, 64);
#if defined(__AVX512F__)
  const __mmask64 some = (std::uint64_t{1} << count) - 1;
  _mm512_mask_storeu_epi8(to, some, _mm512_maskz_loadu_epi8(some, from));
#else
  std::memcpy(to, from, static_cast<std::size_t>(count));
#endif
}

// Writes bytes of x as they are multiplied.
template <class T, bool in_pairs>
struct WindowWriter {
  std::int32_t added;
  std::uint8_t* to;

  OXY_MEMBER void take(const T* from, std::int64_t count) {
    if (!in_pairs && added == 0) {
      copy_bytes(to, reinterpret_cast<const std::uint8_t*>(from), count);
    } else {
      std::int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) {
        put_whole(to, i, load_whole(from + i, Whole{}) + added, in_pairs);
      }
      for (; i < count; ++i) put_one(i, from[i] + added);
    }
    to += count * (in_pairs ? 2 : 1);
  }

  // `value` as it is multiplied.
  OXY_MEMBER void fill(std::int32_t value, std::int64_t count) {
    if constexpr (in_pairs) {
      for (std::int64_t i = 0; i < count; ++i) put_one(i, value);
    } else {
      std::memset(to, value & 0xff, static_cast<std::size_t>(count));
    }
    to += count * (in_pairs ? 2 : 1);
  }

  OXY_MEMBER void put_one(std::int64_t i, std::int32_t value) {
    if constexpr (in_pairs) {
      const auto number = static_cast<std::int16_t>(value);
      std::memcpy(to + 2 * i, &number, sizeof number);
    } else {
      to[i] = static_cast<std::uint8_t>(value);
    }
  }
};

// Where a window begins.
struct WindowPlace {
  std::int64_t image, at[kWindowDims];  // of the result

  OXY_MEMBER void advance(const WindowDim* dims) {
    for (int d = kWindowDims - 1; d >= 0; --d) {
      if (++at[d] < dims[d].out_size) return;
      at[d] = 0;
    }
    ++image;
  }
};

OXY_INLINE WindowPlace place_of(std::int64_t row, const WindowDim* dims) {
  WindowPlace place{};
  for (int d = kWindowDims - 1; d >= 0; --d) {
    place.at[d] = row % dims[d].out_size;
    row /= dims[d].out_size;
  }
  place.image = row;
  return place;
}

// A line of a window, `line` null where it lies beyond the image.
template <class T, bool in_pairs>
OXY_INLINE void write_window_line(const WindowArgs& windows, const T* line, std::int64_t first,
                                  Inside columns, std::int32_t outside,
                                  WindowWriter<T, in_pairs>& writer) {
  const WindowDim& dim = windows.dims[2];
  const std::int64_t channels = windows.channels;
  if (!line || columns.begin >= columns.end) {
    writer.fill(outside, dim.kernel * channels);
    return;
  }
  if (columns.begin > 0) writer.fill(outside, columns.begin * channels);
  const std::int64_t step = dim.dilation * dim.x_stride;
  const T* from = line + first * dim.x_stride + columns.begin * step;
  if (step == channels) {
    writer.take(from, (columns.end - columns.begin) * channels);
  } else {
    for (std::int64_t j = columns.begin; j < columns.end; ++j, from += step) {
      writer.take(from, channels);
    }
  }
  if (columns.end < dim.kernel) writer.fill(outside, (dim.kernel - columns.end) * channels);
}

#if defined(__AVX512F__)
// Copies of so many bytes, behind which up to 64 more are overwritten.
struct LineCopy {
  std::int64_t whole;
  __mmask64 rest;
  bool is_short;

  OXY_MEMBER explicit LineCopy(std::int64_t count)
      : whole(count / 64 * 64), rest((std::uint64_t{1} << count % 64) - 1), is_short(count <= 32) {}

  OXY_MEMBER void operator()(std::uint8_t* to, const void* line) const {
    const auto* from = static_cast<const std::uint8_t*>(line);
    if (is_short) {
      const __m256i bytes = _mm256_maskz_loadu_epi8(static_cast<__mmask32>(rest), from);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
      return;
    }
    for (std::int64_t i = 0; i < whole; i += 64) {
      _mm512_storeu_si512(to + i, _mm512_loadu_si512(from + i));
    }
    if (rest) _mm512_storeu_si512(to + whole, _mm512_maskz_loadu_epi8(rest, from + whole));
  }
};
#else
struct LineCopy {
  std::int64_t count;

  OXY_MEMBER explicit LineCopy(std::int64_t bytes) : count(bytes) {}

  OXY_MEMBER void operator()(std::uint8_t* to, const void* from) const {
    std::memcpy(to, from, static_cast<std::size_t>(count));
  }
};
#endif

// Lines of windows are padded to a multiple of 4 elements.
OXY_INLINE std::int64_t window_line_bytes(const WindowArgs& windows, bool in_pairs) {
  return (windows.dims[2].kernel * windows.channels + 3) / 4 * (in_pairs ? 8 : 4);
}

// Writes zeros behind lines of windows and behind the last one, where no window is written: what
// lies there is multiplied too, with zeros unless a weight was packed otherwise.
static void clear_padding(const ByteWindowsArgs& args, std::uint8_t* row) {
  const WindowArgs& windows = args.windows.args;
  const bool in_pairs = args.bytes == Bytes::pairs;
  const std::int64_t line_bytes = window_line_bytes(windows, in_pairs);
  const std::int64_t used = windows.dims[2].kernel * windows.channels * (in_pairs ? 2 : 1);
  const std::int64_t lines = windows.dims[0].kernel * windows.dims[1].kernel;
  const std::int64_t row_bytes = args.product.x.row_bytes, end = lines * line_bytes;
  for (std::int64_t r = 0; r < args.chunk_rows; ++r, row += row_bytes) {
    for (std::int64_t at = used; at < end && used < line_bytes; at += line_bytes) {
      std::memset(row + at, 0, static_cast<std::size_t>(line_bytes - used));
    }
    std::memset(row + end, 0, static_cast<std::size_t>(row_bytes - end));
  }
}

// The lines of the window at `first` of an image, one after the other.
template <class T, bool in_pairs>
OXY_INLINE void write_window(const ByteWindowsArgs& args, const T* image,
                             const std::int64_t (&first)[kWindowDims], const LineCopy& copy,
                             WindowWriter<T, in_pairs>& writer) {
  const WindowArgs& windows = args.windows.args;
  const WindowDim *dims = windows.dims, &last = dims[2];
  const std::int64_t line_bytes = window_line_bytes(windows, in_pairs);
  const Inside columns = inside(last, first[2]);
  const bool is_copied = !in_pairs && writer.added == 0 && columns.begin == 0 &&
                         columns.end == last.kernel &&
                         last.dilation * last.x_stride == windows.channels;
  for (std::int64_t p = 0; p < dims[0].kernel; ++p) {
    const std::int64_t plane = first[0] + p * dims[0].dilation;
    for (std::int64_t i = 0; i < dims[1].kernel; ++i) {
      const std::int64_t line = first[1] + i * dims[1].dilation;
      const bool is_there = plane >= 0 && plane < dims[0].size && line >= 0 && line < dims[1].size;
      std::uint8_t* const next = writer.to + line_bytes;
      const T* from =
          is_there ? image + plane * dims[0].x_stride + line * dims[1].x_stride : nullptr;
      if (is_copied && is_there) {
        copy(writer.to, from + first[2] * last.x_stride);
      } else {
        write_window_line(windows, from, first[2], columns, args.windows.zero_point + writer.added,
                          writer);
      }
      writer.to = next;
    }
  }
}

// Windows of a group, from `row` on, one below the other.
template <class T, bool in_pairs>
static void write_windows(const ByteWindowsArgs& args, std::int64_t group, std::int64_t row,
                          std::int64_t rows, std::uint8_t* to) {
  const WindowArgs& windows = args.windows.args;
  const WindowDim* dims = windows.dims;
  const bool moves = args.bytes == Bytes::unsigned_bytes && __is_same(T, std::int8_t);
  const std::int32_t added = in_pairs ? -args.windows.zero_point : moves ? 128 : 0;
  const std::int64_t row_bytes = args.product.x.row_bytes;
  const LineCopy copy(dims[2].kernel * windows.channels);
  WindowPlace place = place_of(row, dims);
  for (std::int64_t r = 0; r < rows; ++r, to += row_bytes, place.advance(dims)) {
    WindowWriter<T, in_pairs> writer{added, to};
    std::int64_t first[kWindowDims];
    for (int d = 0; d < kWindowDims; ++d) first[d] = place.at[d] * dims[d].stride - dims[d].padding;
    const T* image = static_cast<const T*>(windows.x) + place.image * windows.image_stride +
                     group * windows.channels;
    write_window(args, image, first, copy, writer);
  }
}

static void write_windows(const ByteWindowsArgs& args, std::int64_t group, std::int64_t row,
                          std::int64_t rows, std::uint8_t* to) {
  const bool in_pairs = args.bytes == Bytes::pairs;
  if (args.windows.number == Number::int8) {
    in_pairs ? write_windows<std::int8_t, true>(args, group, row, rows, to)
             : write_windows<std::int8_t, false>(args, group, row, rows, to);
  } else {
    in_pairs ? write_windows<std::uint8_t, true>(args, group, row, rows, to)
             : write_windows<std::uint8_t, false>(args, group, row, rows, to);
  }
}

// The product of a group's chunk, which begins with row `row`.
static ByteGemmArgs product_of(const ByteGemmArgs& first, std::int64_t group, std::int64_t row,
                               std::int64_t rows) {
  ByteGemmArgs product = first;
  const std::int64_t outputs = product.weight.out_features;
  const std::int64_t padded = product.weight.panel_count * kPanelOutputs;
  product.x.count = rows;
  product.chunk_rows = rows;
  product.weight.panels += group * product.weight.panel_count * product.weight.panel_bytes;
  product.weight.scales += group * padded;
  product.weight.sums += group * padded;
  ByteResult& result = product.result;
  if (result.bias) result.bias += group * outputs;
  result.out = static_cast<std::uint8_t*>(result.out) +
               (row * result.out_stride + group * outputs) * size_of(result.number);
  if (result.other) {
    result.other = static_cast<const std::uint8_t*>(result.other) +
                   (row * result.other_stride + group * outputs) * size_of(result.other_number);
  }
  return product;
}

static void multiply_windows_part(const ByteWindowsArgs& args, std::int64_t part,
                                  std::int32_t* sums) {
  const std::int64_t chunks = (args.rows + args.chunk_rows - 1) / args.chunk_rows;
  const std::int64_t panels = args.product.weight.panel_count;
  const std::int64_t ranges = (panels + args.range_panels - 1) / args.range_panels;
  const std::int64_t items = args.groups * chunks * ranges;
  ByteGemmArgs product = args.product;
  ByteGemm gemm{.args = product, .finish = finish_of(product.result)};
#if OXY_HAS_TILES
  gemm.waiting.finish = gemm.finish;
#endif
  std::uint8_t* const memory = args.scratch + part * args.scratch_bytes;
  clear_padding(args, memory);
  std::int64_t written = -1;
  for (std::int64_t i = part * items / args.parts; i < (part + 1) * items / args.parts; ++i) {
    if (i / ranges != written) {
      written = i / ranges;
      const std::int64_t group = written / chunks, row = written % chunks * args.chunk_rows;
      const std::int64_t left = args.rows - row;
      const std::int64_t rows = left < args.chunk_rows ? left : args.chunk_rows;
      write_windows(args, group, row, rows, memory);
      product = product_of(args.product, group, row, rows);
      product.x.values = memory;
    }
    const std::int64_t first = i % ranges * args.range_panels;
    const std::int64_t end =
        panels - first < args.range_panels ? panels : first + args.range_panels;
    product.weight.panel_count = end;  // behind which others read
    for (std::int64_t p = first; p < end; p += kItemPanels) {
      const std::int64_t some = end - p < kItemPanels ? end - p : kItemPanels;
      multiply_chunk_of_bytes(gemm, {0, product.x.count, p, some}, sums);
    }
#if OXY_HAS_TILES
    gemm.waiting.finish_all();
#endif
  }
}

static void byte_windows(const ByteWindowsArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) std::int32_t sums[kItemRows * kBlockOutputs];
#if OXY_HAS_TILES
  if (args.product.x.in_tiles) configure_tiles();
#endif
  for (std::int64_t part = begin; part < end; ++part) multiply_windows_part(args, part, sums);
#if OXY_HAS_TILES
  if (args.product.x.in_tiles) release_tiles();
#endif
}

}  // namespace oxytorch::OXY_LEVEL
