// Convolutions of bytes, of each channel for itself.
//
// First the lines that a kernel covers are interleaved: four bytes below each other become a lane
// of 32 bits, in which instructions for bytes sum. Neighbouring results share what is interleaved,
// and so do lines of the result where four lines are more than a kernel has: weights are moved
// then.
#pragma once

#include "ops/_quantized/depthwise_tile.h"
#include "ops/_quantized/interleave.h"

namespace oxytorch::OXY_LEVEL {

// What a part keeps.
struct Depthwise {
  const ByteDepthwiseArgs& args;
  FinishRows finish;
  std::uint8_t *weights, *quads;
  ByteOutputs outputs;  // of a block
  alignas(64) std::int32_t sums[kMostResults * kBlockChannels];
  alignas(64) std::uint8_t outside[kVectorBytes];  // the zero point
};

// Some channels, and lines of the image that neighbouring lines of the result read.
struct DepthwiseLines {
  std::int64_t channel, count;   // which are `count` or fewer than a vector has
  std::int64_t block;            // the first channel of the block
  std::int64_t fours;            // of lines
  ByteLine all[kMostByteLines];  // of the first channel
};

static void find_byte_lines(const Depthwise& own, std::int64_t line, DepthwiseLines& lines) {
  const WindowArgs& windows = own.args.windows.args;
  const WindowDim &outer = windows.dims[0], &inner = windows.dims[1], &last = windows.dims[2];
  const std::int64_t plane = line / inner.out_size;
  const std::int64_t down = line % inner.out_size * inner.stride - inner.padding;
  const std::int64_t deep = plane % outer.out_size * outer.stride - outer.padding;
  const std::uint8_t* image = static_cast<const std::uint8_t*>(windows.x) +
                              plane / outer.out_size * windows.image_stride + lines.channel;
  // What lies behind a kernel's lines belongs to those of the next result, or is multiplied with
  // zeros.
  const std::int64_t below = outer.kernel == 1 ? 4 * lines.fours : inner.kernel;
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < outer.kernel; ++i) {
    for (std::int64_t j = 0; j < below; ++j, ++count) {
      const std::int64_t z = deep + i * outer.dilation, y = down + j * inner.dilation;
      const bool is_there = z >= 0 && z < outer.size && y >= 0 && y < inner.size;
      const std::uint8_t* from = image + z * outer.x_stride + y * inner.x_stride;
      lines.all[count] = is_there ? ByteLine{from, last.x_stride} : ByteLine{own.outside, 0};
    }
  }
  for (; count < 4 * lines.fours; ++count) lines.all[count] = {own.outside, 0};
}

// Quads of `pixels` neighbouring columns; columns are `column_bytes` apart. flip: 0x80 makes signed
// bytes unsigned ones.
template <int width, int pixels, class Load>
OXY_INLINE void write_quads(ByteLine (&lines)[4], std::uint8_t flip, std::uint8_t* to,
                            std::int64_t column_bytes, Load load) {
  constexpr int kVectors = width / kLanes;  // of quads of a pixel
  bytesv bytes[4];
  u32v quads[4];
  for (int i = 0; i < 4; ++i) {
    bytes[i] = load(lines[i]) ^ (bytesv{} + flip);
    lines[i].from += pixels * lines[i].step;
  }
  interleave_bytes(bytes, quads);
#pragma GCC unroll 4
  for (int i = 0; i < pixels * kVectors; ++i) {
    std::memcpy(to + i / kVectors * column_bytes + i % kVectors * sizeof(u32v), &quads[i],
                sizeof(u32v));
  }
}

// Columns of the image from `first` on, as quads of `width` channels, of which `count` are there.
template <int width>
static void write_columns(const Depthwise& own, const DepthwiseLines& lines, std::int64_t first,
                          std::int64_t columns) {
  constexpr int kPixels = kVectorBytes / width;
  const std::uint8_t flip = own.args.windows.number == Number::int8 ? 0x80 : 0;
  const std::int64_t column_bytes = lines.fours * width * 4;
  const std::int64_t room = own.args.windows.args.dims[2].size - first,
                     before = first < 0 ? -first : 0;
  const std::int64_t end = room < columns ? (room > 0 ? room : 0) : columns;
  const std::int64_t begin = before < end ? before : end;
  const int zero = own.outside[0] ^ flip;
  std::memset(own.quads, zero, static_cast<std::size_t>(begin * column_bytes));
  std::memset(own.quads + end * column_bytes, zero,
              static_cast<std::size_t>((columns - end) * column_bytes));
  for (std::int64_t four = 0; four < lines.fours; ++four) {
    ByteLine some[4];
    for (int i = 0; i < 4; ++i) {
      some[i] = lines.all[4 * four + i];
      some[i].from += (first + begin) * some[i].step;
    }
    std::uint8_t* to = own.quads + begin * column_bytes + four * width * 4;
    std::int64_t column = begin;
    if (lines.count == width) {
      for (; column + kPixels <= end; column += kPixels, to += kPixels * column_bytes) {
        write_quads<width, kPixels>(some, flip, to, column_bytes, load_pixels<width>);
      }
    }
    for (; column < end; ++column, to += column_bytes) {
      write_quads<width, 1>(some, flip, to, column_bytes, [&](const ByteLine& line) {
        return load_some_bytes(line.from, lines.count);
      });
    }
  }
}

// The weights of `width` channels: for each line of the result that shares quads [columns, fours,
// channels], where lines are moved down by its number.
template <int width>
static void write_weights(const Depthwise& own, const DepthwiseLines& lines) {
  const BytePanels& weight = own.args.weight;
  const std::int64_t columns = own.args.windows.args.dims[2].kernel;
  const std::uint8_t* panels = weight.panels + lines.channel / kPanelOutputs * weight.panel_bytes;
  std::uint8_t* to = own.weights;
  for (std::int64_t moved = 0; moved < own.args.shared_lines; ++moved) {
    for (std::int64_t unit = 0; unit < columns * lines.fours; ++unit, to += width * 4) {
      const bool has_before = moved > 0 && unit % lines.fours > 0;
      for (int v = 0; v < width / kLanes; ++v) {
        const std::uint8_t* from =
            panels + v / kParts * weight.panel_bytes + unit * 64 + v % kParts * sizeof(u32v);
        u32v bytes = load_as<u32v>(from) << static_cast<std::uint32_t>(8 * moved);
        if (has_before)
          bytes |= load_as<u32v>(from - 64) >> static_cast<std::uint32_t>(32 - 8 * moved);
        std::memcpy(to + v * sizeof bytes, &bytes, sizeof bytes);
      }
    }
  }
}

// Results of a line, from `at` on, whose quads are written.
struct DepthwiseStretch {
  std::int64_t at, results;
  const std::uint8_t* weights;
};

// Calls body(tile, place, results, vector) for parts of a stretch: of results from `place` on, and
// of vectors of channels.
template <int width, class Body>
OXY_INLINE void each_tile(const Depthwise& own, const DepthwiseLines& lines,
                          const DepthwiseStretch& stretch, Body body) {
  constexpr int kVectors = width / kLanes < kTileVectors ? width / kLanes : kTileVectors;
  const WindowDim& dim = own.args.windows.args.dims[2];
  const std::int64_t column_bytes = lines.fours * width * 4;
  DepthwiseTile tile{.quads = nullptr,
                     .quad_bytes = width * 4,
                     .column_bytes = dim.dilation * column_bytes,
                     .result_bytes = dim.stride * column_bytes,
                     .weights = nullptr,
                     .columns = dim.kernel,
                     .fours = lines.fours,
                     .starts = nullptr,
                     .sums = nullptr};
  for (std::int64_t place = 0; place < stretch.results;) {
    const std::int64_t left = stretch.results - place;
    const std::int64_t tiles = (left + kTileResults - 1) / kTileResults;
    const std::int64_t some = (left + tiles - 1) / tiles;
    for (int v = 0; v < width / kLanes; v += kVectors) {
      tile.quads = own.quads + place * tile.result_bytes + v * kVectorBytes;
      tile.weights = stretch.weights + v * kVectorBytes;
      tile.starts = own.outputs.starts + (lines.channel - lines.block) + v * kLanes;
      body(tile, place, some, v);
    }
    place += some;
  }
}

// Lines of the result, of `width` channels of a block or fewer.
template <int width>
struct DepthwiseChannels {
  static constexpr int kVectors = width / kLanes < kTileVectors ? width / kLanes : kTileVectors;

  Depthwise& own;
  DepthwiseLines& lines;
  Finishing job;
  std::int64_t summed = 0;  // rows from job.row on

  OXY_MEMBER DepthwiseChannels(Depthwise& part, DepthwiseLines& given) : own(part), lines(given) {
    const std::int64_t place = lines.channel - lines.block;
    job = {.result = &own.args.result,
           .scales = own.outputs.scales + place,
           .biases = own.outputs.biases + place,
           .row_scales = nullptr,
           .sums = own.sums,
           .stride = kBlockChannels,
           .row = 0,
           .output = lines.channel,
           .outputs = lines.count,
           .fit = own.outputs.fit};
    write_weights<width>(own, lines);
  }

  void finish() {
    if (summed > 0) own.finish(job, 0, summed);
    summed = 0;
  }

  // Results from row `row` on.
  void convolve(const DepthwiseStretch& stretch, std::int64_t row, FinishTile finish_tile) {
    if (finish_tile) {
      each_tile<width>(own, lines, stretch,
                       [&](const DepthwiseTile& tile, std::int64_t place, std::int64_t some, int) {
                         job.row = row + place;
                         finish_tile(tile, some, job);
                       });
      return;
    }
    // Rows that follow each other are finished together.
    if (row != job.row + summed || summed + stretch.results > kMostResults) finish();
    if (summed == 0) job.row = row;
    each_tile<width>(own, lines, stretch,
                     [&](DepthwiseTile& tile, std::int64_t place, std::int64_t some, int v) {
                       tile.sums = own.sums + (summed + place) * kBlockChannels + v * kLanes;
                       sum_some_results<kVectors>(tile, some);
                     });
    summed += stretch.results;
  }

  // Lines [begin, end).
  void convolve_lines(std::int64_t begin, std::int64_t end) {
    const ByteDepthwiseArgs& args = own.args;
    const WindowDim &inner = args.windows.args.dims[1], &dim = args.windows.args.dims[2];
    const std::int64_t weight_bytes = dim.kernel * lines.fours * width * 4;
    const FinishTile finish_tile = finish_tile_of<kVectors>(job);
    for (std::int64_t line = begin; line < end;) {
      find_byte_lines(own, line, lines);
      std::int64_t shared = inner.out_size - line % inner.out_size;
      shared = shared < args.shared_lines ? shared : args.shared_lines;
      shared = shared < end - line ? shared : end - line;
      for (std::int64_t at = 0; at < dim.out_size; at += args.results) {
        const std::int64_t left = dim.out_size - at;
        const std::int64_t results = left < args.results ? left : args.results;
        write_columns<width>(own, lines, at * dim.stride - dim.padding,
                             (results - 1) * dim.stride + (dim.kernel - 1) * dim.dilation + 1);
        for (std::int64_t i = 0; i < shared; ++i) {
          convolve({at, results, own.weights + i * weight_bytes}, (line + i) * dim.out_size + at,
                   finish_tile);
        }
      }
      line += shared;
    }
    finish();
  }
};

// Lines of the result, of a block of `channels` channels.
static void convolve_block(Depthwise& own, std::int64_t first, std::int64_t channels,
                           std::int64_t begin, std::int64_t end) {
  const WindowDim* dims = own.args.windows.args.dims;
  DepthwiseLines lines;
  lines.channel = lines.block = first;
  lines.count = kVectorBytes;
  lines.fours = (dims[0].kernel * dims[1].kernel + 3) / 4;
  const std::int64_t last = first + channels;
  for (; lines.channel + kVectorBytes <= last; lines.channel += kVectorBytes) {
    DepthwiseChannels<kVectorBytes>(own, lines).convolve_lines(begin, end);
  }
  if constexpr (kVectorBytes > 32) {
    if (lines.channel + 32 <= last) {
      lines.count = 32;
      DepthwiseChannels<32>(own, lines).convolve_lines(begin, end);
      lines.channel += 32;
    }
  }
  for (; lines.channel < last; lines.channel += 16) {
    lines.count = last - lines.channel < 16 ? last - lines.channel : 16;
    DepthwiseChannels<16>(own, lines).convolve_lines(begin, end);
  }
}

// Where a part begins: its share of channels, which are taken 16 at a time, and lines.
struct DepthwisePlace {
  std::int64_t block, line;
};

static DepthwisePlace place_of_part(const ByteDepthwiseArgs& args, std::int64_t part) {
  const std::int64_t channels = args.weight.panel_count * kPanelOutputs;
  const std::int64_t place = part * channels * args.lines / args.parts;
  const std::int64_t block = place / (kBlockChannels * args.lines);
  const std::int64_t left = channels - block * kBlockChannels;
  const std::int64_t taken = left < kBlockChannels ? left : kBlockChannels;
  return {block, taken > 0 ? (place - block * kBlockChannels * args.lines) / taken : 0};
}

// Lines of a block.
static void convolve_block_of_part(Depthwise& own, std::int64_t block, std::int64_t begin,
                                   std::int64_t end) {
  const ByteDepthwiseArgs& args = own.args;
  if (begin >= end) return;
  const std::int64_t first = block * kBlockChannels, left = args.weight.out_features - first;
  const std::int64_t panel = first / kPanelOutputs, panels = args.weight.panel_count - panel;
  constexpr std::int64_t kMost = kBlockChannels / kPanelOutputs;
  const std::int32_t moved = args.windows.number == Number::int8 ? 128 : 0;
  const WindowDim* dims = args.windows.args.dims;
  read_outputs(args.weight, args.result, args.scale, args.windows.zero_point + moved, panel,
               panels < kMost ? panels : kMost, own.outputs,
               dims[0].kernel * dims[1].kernel * dims[2].kernel);
  convolve_block(own, first, left < kBlockChannels ? left : kBlockChannels, begin, end);
}

static void convolve_part(Depthwise& own, std::int64_t part) {
  const ByteDepthwiseArgs& args = own.args;
  own.weights = args.scratch + part * args.scratch_bytes;
  own.quads = own.weights + args.weight_bytes;
  if (args.by_lines) {
    const std::int64_t begin = part * args.lines / args.parts;
    const std::int64_t end = (part + 1) * args.lines / args.parts;
    for (std::int64_t block = 0; block * kBlockChannels < args.weight.out_features; ++block) {
      convolve_block_of_part(own, block, begin, end);
    }
    return;
  }
  const DepthwisePlace from = place_of_part(args, part), to = place_of_part(args, part + 1);
  for (std::int64_t block = from.block; block <= to.block; ++block) {
    convolve_block_of_part(own, block, block == from.block ? from.line : 0,
                           block == to.block ? to.line : args.lines);
  }
}

static void byte_depthwise(const ByteDepthwiseArgs& args, std::int64_t begin, std::int64_t end) {
  Depthwise own{.args = args, .finish = finish_of(args.result)};
  std::memset(own.outside, args.windows.zero_point & 0xff, sizeof own.outside);
  for (std::int64_t part = begin; part < end; ++part) convolve_part(own, part);
}

}  // namespace oxytorch::OXY_LEVEL
