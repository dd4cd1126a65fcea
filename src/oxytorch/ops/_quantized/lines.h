// Convolutions of bytes whose windows are read from lines, where they overlap.
#pragma once

#include "ops/_quantized/planes.h"
#include "ops/_quantized/windows.h"

namespace oxytorch::OXY_LEVEL {

// Pixels of planes that are joined at once.
inline constexpr std::int64_t kJoinedPixels = 128;

// `pixels` neighbours of a line.
template <class T, bool in_pairs>
OXY_INLINE void write_pixels(const WindowArgs& windows, const T* from, std::int64_t pixels,
                             WindowWriter<T, in_pairs>& writer) {
  const std::int64_t channels = windows.channels, step = windows.dims[2].x_stride;
  if (windows.channel_stride == 1 && step == channels) {
    writer.take(from, pixels * channels);
  } else if (windows.channel_stride == 1 || step != 1) {
    for (std::int64_t i = 0; i < pixels; ++i, from += step) {
      if (windows.channel_stride == 1) {
        writer.take(from, channels);
      } else {
        for (std::int64_t c = 0; c < channels; ++c) {
          writer.take(from + c * windows.channel_stride, 1);
        }
      }
    }
  } else {
    std::uint8_t joined[kJoinedPixels * kFewChannels + kVectorBytes];
    for (std::int64_t i = 0; i < pixels; i += kJoinedPixels, from += kJoinedPixels) {
      const std::int64_t some = pixels - i < kJoinedPixels ? pixels - i : kJoinedPixels;
      join_planes(reinterpret_cast<const std::uint8_t*>(from), windows.channel_stride, channels,
                  some, joined);
      writer.take(reinterpret_cast<const T*>(joined), some * channels);
    }
  }
}

// `columns` pixels of a line from column `first` on; `line` null where it lies beyond the image.
template <class T, bool in_pairs>
OXY_INLINE void write_line(const WindowArgs& windows, const T* line, std::int64_t first,
                           std::int64_t columns, std::int32_t outside,
                           WindowWriter<T, in_pairs> writer) {
  const WindowDim& dim = windows.dims[2];
  if (!line) return writer.fill(outside, columns * windows.channels);
  const std::int64_t room = dim.size - first, before = first < 0 ? -first : 0;
  const std::int64_t end = room < columns ? (room > 0 ? room : 0) : columns;
  const std::int64_t begin = before < end ? before : end;
  writer.fill(outside, begin * windows.channels);
  write_pixels(windows, line + (first + begin) * dim.x_stride, end - begin, writer);
  writer.fill(outside, (columns - end) * windows.channels);
}

// Lines of the result of a group, and columns of each.
struct LinesChunk {
  std::int64_t group, line, lines, column, columns;
};

static LinesChunk lines_chunk(const ByteLinesArgs& args, std::int64_t number) {
  const std::int64_t chunks = (args.lines + args.chunk_lines - 1) / args.chunk_lines;
  const std::int64_t part = number % args.line_parts, place = number / args.line_parts;
  LinesChunk chunk{.group = place / chunks, .line = place % chunks * args.chunk_lines};
  const std::int64_t left = args.lines - chunk.line, width = args.windows.args.dims[2].out_size;
  chunk.lines = left < args.chunk_lines ? left : args.chunk_lines;
  chunk.column = part * width / args.line_parts;
  chunk.columns = (part + 1) * width / args.line_parts - chunk.column;
  return chunk;
}

// Lines in memory from one line of the result to the next, and those that a line reads.
struct LineSteps {
  std::int64_t step, reach;
};

OXY_INLINE LineSteps line_steps(const WindowDim& inner) {
  const std::int64_t reach = (inner.kernel - 1) * inner.dilation + 1;
  return {inner.stride < reach ? inner.stride : reach, reach};
}

// The first line in memory of line `i` of a chunk: planes of the result have lines of their own.
OXY_INLINE std::int64_t place_of_line(const ByteLinesArgs& args, const LinesChunk& chunk,
                                      std::int64_t i) {
  const WindowDim& inner = args.windows.args.dims[1];
  const auto [step, reach] = line_steps(inner);
  const std::int64_t before = chunk.line % inner.out_size, down = before + i;
  if (down < inner.out_size) return i * step;
  const std::int64_t first = (inner.out_size - before - 1) * step + reach;
  const std::int64_t whole = (inner.out_size - 1) * step + reach;
  return first + (down / inner.out_size - 1) * whole + down % inner.out_size * step;
}

// The lines that a chunk reads.
template <class T, bool in_pairs>
static void write_lines(const ByteLinesArgs& args, const LinesChunk& chunk, std::uint8_t* memory) {
  const WindowArgs& windows = args.windows.args;
  const WindowDim &outer = windows.dims[0], &inner = windows.dims[1], &last = windows.dims[2];
  const bool moves = args.bytes == Bytes::unsigned_bytes && __is_same(T, std::int8_t);
  const std::int32_t added = in_pairs ? -args.windows.zero_point : moves ? 128 : 0;
  const auto [step, reach] = line_steps(inner);
  const std::int64_t first = chunk.column * last.stride - last.padding;
  const std::int64_t columns = (chunk.columns - 1) * last.stride + last.kernel;
  for (std::int64_t i = 0; i < chunk.lines; ++i) {
    const std::int64_t plane = (chunk.line + i) / inner.out_size;
    const std::int64_t down = (chunk.line + i) % inner.out_size;
    const T* image = static_cast<const T*>(windows.x) +
                     plane / outer.out_size * windows.image_stride +
                     chunk.group * windows.channels * windows.channel_stride;
    const std::int64_t place = place_of_line(args, chunk, i);
    const bool is_first = i == 0 || down == 0;  // else those above are there
    for (std::int64_t p = 0; p < outer.kernel; ++p) {
      const std::int64_t z =
          plane % outer.out_size * outer.stride - outer.padding + p * outer.dilation;
      for (std::int64_t j = is_first ? 0 : reach - step; j < reach; ++j) {
        const std::int64_t y = down * inner.stride - inner.padding + j;
        const bool is_there = z >= 0 && z < outer.size && y >= 0 && y < inner.size;
        const T* line = is_there ? image + z * outer.x_stride + y * inner.x_stride : nullptr;
        std::uint8_t* to = memory + p * args.plane_bytes + (place + j) * args.line_bytes;
        write_line(windows, line, first, columns, args.windows.zero_point + added,
                   WindowWriter<T, in_pairs>{added, to});
      }
    }
  }
}

static void write_lines(const ByteLinesArgs& args, const LinesChunk& chunk, std::uint8_t* memory) {
  const bool in_pairs = args.bytes == Bytes::pairs;
  if (args.windows.number == Number::int8) {
    in_pairs ? write_lines<std::int8_t, true>(args, chunk, memory)
             : write_lines<std::int8_t, false>(args, chunk, memory);
  } else {
    in_pairs ? write_lines<std::uint8_t, true>(args, chunk, memory)
             : write_lines<std::uint8_t, false>(args, chunk, memory);
  }
}

// Where the windows of `rows` results begin, from result `row` of a chunk on.
static void find_rows(const ByteLinesArgs& args, const LinesChunk& chunk,
                      const std::uint8_t* memory, std::int64_t row, std::int64_t rows,
                      const std::uint8_t** starts) {
  const WindowArgs& windows = args.windows.args;
  const WindowDim &outer = windows.dims[0], &inner = windows.dims[1], &last = windows.dims[2];
  std::int64_t column = row % chunk.columns;
  for (std::int64_t i = row / chunk.columns; rows > 0; ++i, column = 0) {
    const std::int64_t plane = (chunk.line + i) / inner.out_size;
    const std::uint8_t* line = nullptr;
    std::int64_t step = last.stride;
    if (args.lie_well) {
      line = static_cast<const std::uint8_t*>(windows.x) + chunk.group * windows.channels +
             plane / outer.out_size * windows.image_stride +
             plane % outer.out_size * outer.stride * outer.x_stride +
             (chunk.line + i) % inner.out_size * inner.stride * inner.x_stride +
             chunk.column * last.stride * last.x_stride;
      step *= last.x_stride;
    } else {
      line = memory + place_of_line(args, chunk, i) * args.line_bytes;
      step *= windows.channels * (args.bytes == Bytes::pairs ? 2 : 1);
    }
    for (; column < chunk.columns && rows > 0; ++column, --rows) *starts++ = line + column * step;
  }
}

static void multiply_lines_part(const ByteLinesArgs& args, std::int64_t part, std::int32_t* sums) {
  const std::int64_t chunks =
      (args.lines + args.chunk_lines - 1) / args.chunk_lines * args.line_parts;
  const std::int64_t items = args.groups * chunks * args.ranges;
  const std::int64_t panel_groups =
      (args.product.weight.panel_count + kItemPanels - 1) / kItemPanels;
  const std::uint8_t* starts[kItemRows];
  std::uint8_t* memory = args.scratch + part * args.scratch_bytes;
  ByteGemmArgs product = args.product;
  ByteGemm gemm{.args = product, .finish = finish_of(product.result)};
  LinesChunk chunk{};
  const WindowArgs& windows = args.windows.args;
  if (!args.lie_well && windows.dims[2].kernel * windows.channels % 4 != 0) {
    // The last windows of lines are read beyond their ends, up to a multiple of 4 elements.
    std::memset(memory, 0, static_cast<std::size_t>(args.scratch_bytes));
  }
  std::int64_t written = -1;
  for (std::int64_t i = part * items / args.parts; i < (part + 1) * items / args.parts; ++i) {
    if (i / args.ranges != written) {
      written = i / args.ranges;
      chunk = lines_chunk(args, written);
      if (!args.lie_well) write_lines(args, chunk, memory);
    }
    const std::int64_t range = i % args.ranges, count = chunk.lines * chunk.columns;
    const std::int64_t first = chunk.line * windows.dims[2].out_size + chunk.column;
    const std::int64_t end = (range + 1) * panel_groups / args.ranges;
    for (std::int64_t row = 0; row < count; row += kItemRows) {
      const std::int64_t rows = count - row < kItemRows ? count - row : kItemRows;
      find_rows(args, chunk, memory, row, rows, starts);
      product = product_of(args.product, chunk.group, first + row, rows);
      product.x.starts = starts;
      for (std::int64_t p = range * panel_groups / args.ranges; p < end; ++p) {
        multiply_item_of_bytes(gemm, p, sums);
      }
    }
  }
}

static void byte_lines(const ByteLinesArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) std::int32_t sums[kItemRows * kBlockOutputs];
  for (std::int64_t part = begin; part < end; ++part) multiply_lines_part(args, part, sums);
}

}  // namespace oxytorch::OXY_LEVEL
