// Convolutions of bytes, of each channel for itself.
//
// First the lines that a kernel covers are interleaved: four bytes below each other become a lane
// of 32 bits, in which instructions for bytes sum. Neighbouring results share what is interleaved.
#pragma once

#include "ops/_quantized/finish.h"
#include "ops/_quantized/interleave.h"
#include "ops/_windows/inside.h"

namespace oxytorch::OXY_LEVEL {

// Results and vectors of channels that are summed at once, as many as registers allow.
inline constexpr int kTileResults = OXY_HAS_VECTORS_512 ? 6 : 4;
inline constexpr int kTileVectors = OXY_HAS_VECTORS_512 ? 4 : 2;

// Signed bytes that are multiplied with quads of unsigned ones.
#if OXY_HAS_INT8_DOT
struct QuadWeights {
  i32v bytes;

  OXY_MEMBER i32v multiply(i32v sum, u32v quads) const {
    return ByteQuad::multiply(sum, bytes, reinterpret_cast<i32v>(quads));
  }
};

OXY_INLINE QuadWeights quad_weights(const std::uint8_t* p) { return {load_as<i32v>(p)}; }
#else
struct QuadWeights {
  i32v even, odd;  // bytes of each lane, as integers of 16 bits

  OXY_MEMBER i32v multiply(i32v sum, u32v quads) const {
    sum = Int16Pair::multiply(sum, even, reinterpret_cast<i32v>(quads & 0x00ff00ff));
    return Int16Pair::multiply(sum, odd, reinterpret_cast<i32v>(quads >> 8 & 0x00ff00ff));
  }
};

OXY_INLINE QuadWeights quad_weights(const std::uint8_t* p) {
  typedef std::int16_t pairs __attribute__((vector_size(kVectorBytes)));
  const auto both = load_as<pairs>(p);
  return {reinterpret_cast<i32v>(both << 8 >> 8), reinterpret_cast<i32v>(both >> 8)};
}
#endif

// Neighbouring results of some channels.
struct DepthwiseTile {
  const std::uint8_t* quads;  // [columns, fours of lines, channels] of the first result
  std::int64_t quad_bytes;    // of the channels
  std::int64_t column_bytes;  // between columns that a kernel takes
  std::int64_t result_bytes;  // between the first columns of results
  const std::uint8_t* weights;
  std::int64_t panel_bytes;
  std::int64_t columns;  // of the kernel
  std::int64_t fours;    // of lines
  const std::int32_t* starts;
  std::int32_t* sums;  // those of results are kBlockChannels apart
};

template <int results, int vectors>
__attribute__((noinline)) static void sum_tile(const DepthwiseTile& given) {
  // A copy, because what is stored below could otherwise be the tile.
  const DepthwiseTile tile = given;
  i32v sums[results][vectors];
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    const i32v start = load_as<i32v>(tile.starts + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < results; ++r) sums[r][v] = start;
  }
  const std::uint8_t* weights = tile.weights;
  for (std::int64_t j = 0; j < tile.columns; ++j) {
    const std::uint8_t* quads = tile.quads + j * tile.column_bytes;
    for (std::int64_t l = 0; l < tile.fours; ++l, quads += tile.quad_bytes, weights += 64) {
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        const QuadWeights factors =
            quad_weights(weights + v / kParts * tile.panel_bytes + v % kParts * sizeof(i32v));
#pragma GCC unroll 8
        for (int r = 0; r < results; ++r) {
          const u32v given = load_as<u32v>(quads + r * tile.result_bytes + v * sizeof(u32v));
          sums[r][v] = factors.multiply(sums[r][v], given);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < results; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      std::memcpy(tile.sums + r * kBlockChannels + v * kLanes, &sums[r][v], sizeof(i32v));
    }
  }
}

template <int vectors, int results = kTileResults>
OXY_INLINE void sum_some_results(const DepthwiseTile& tile, std::int64_t given) {
  if constexpr (results > 0) {
    if (given == results) return sum_tile<results, vectors>(tile);
    sum_some_results<vectors, results - 1>(tile, given);
  }
}

// What a part keeps.
struct Depthwise {
  const ByteDepthwiseArgs& args;
  FinishRows finish;
  std::uint8_t* quads;
  ByteOutputs outputs;  // of a block
  alignas(64) std::int32_t sums[kMostResults * kBlockChannels];
  alignas(64) std::uint8_t outside[kVectorBytes];  // the zero point
};

// Some channels, and lines of the image that a line of the result reads.
struct DepthwiseLines {
  std::int64_t channel, count;   // which are `count` or fewer than a vector has
  std::int64_t block;            // the first channel of the block
  ByteLine all[kMostByteLines];  // of the first channel; as many as fill fours
  std::int64_t fours;
};

static void find_byte_lines(const Depthwise& own, std::int64_t line, DepthwiseLines& lines) {
  const WindowArgs& windows = own.args.windows;
  const WindowDim &outer = windows.dims[0], &inner = windows.dims[1], &last = windows.dims[2];
  const std::int64_t plane = line / inner.out_size;
  const std::int64_t down = line % inner.out_size * inner.stride - inner.padding;
  const std::int64_t deep = plane % outer.out_size * outer.stride - outer.padding;
  const std::uint8_t* image = static_cast<const std::uint8_t*>(windows.x) +
                              plane / outer.out_size * windows.image_stride + lines.channel;
  const ByteLine none{own.outside, 0};
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < outer.kernel; ++i) {
    for (std::int64_t j = 0; j < inner.kernel; ++j, ++count) {
      const std::int64_t z = deep + i * outer.dilation, y = down + j * inner.dilation;
      const bool is_there = z >= 0 && z < outer.size && y >= 0 && y < inner.size;
      const std::uint8_t* from = image + z * outer.x_stride + y * inner.x_stride;
      lines.all[count] = is_there ? ByteLine{from, last.x_stride} : none;
    }
  }
  while (count % 4 != 0) lines.all[count++] = none;
  lines.fours = count / 4;
}

// Quads of `pixels` neighbouring columns; columns are `column_bytes` apart. flip: 0x80 makes signed
// bytes unsigned ones.
template <int width, int pixels, class Load>
OXY_INLINE void write_quads(ByteLine (&lines)[4], std::uint8_t flip, std::uint8_t* to,
                            std::int64_t column_bytes, Load load) {
  constexpr int kVectors = width / kLanes;  // of quads of a pixel
  bytes_v bytes[4];
  u32v quads[4];
  for (int i = 0; i < 4; ++i) {
    bytes[i] = load(lines[i]) ^ (bytes_v{} + flip);
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
  const std::uint8_t flip = own.args.number == Number::int8 ? 0x80 : 0;
  const std::int64_t column_bytes = lines.fours * width * 4;
  const std::int64_t room = own.args.windows.dims[2].size - first, before = first < 0 ? -first : 0;
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

// Sums of `results` neighbours of a line, of `width` channels, whose quads are written.
template <int width>
static void sum_stretch(const Depthwise& own, const DepthwiseLines& lines, std::int64_t results,
                        std::int32_t* sums) {
  constexpr int kVectors = width / kLanes < kTileVectors ? width / kLanes : kTileVectors;
  const BytePanels& weight = own.args.weight;
  const WindowDim& dim = own.args.windows.dims[2];
  const std::int64_t column_bytes = lines.fours * width * 4;
  DepthwiseTile tile{.quads = nullptr,
                     .quad_bytes = width * 4,
                     .column_bytes = dim.dilation * column_bytes,
                     .result_bytes = dim.stride * column_bytes,
                     .weights = nullptr,
                     .panel_bytes = weight.panel_bytes,
                     .columns = dim.kernel,
                     .fours = lines.fours,
                     .starts = nullptr,
                     .sums = nullptr};
  const std::uint8_t* panel = weight.panels + lines.channel / kPanelOutputs * weight.panel_bytes;
  for (std::int64_t at = 0; at < results;) {
    const std::int64_t left = results - at, tiles = (left + kTileResults - 1) / kTileResults;
    const std::int64_t some = (left + tiles - 1) / tiles;
    for (int v = 0; v < width / kLanes; v += kVectors) {
      tile.quads = own.quads + at * tile.result_bytes + v * kVectorBytes;
      tile.weights = panel + v / kParts * weight.panel_bytes + v % kParts * sizeof(i32v);
      tile.starts = own.outputs.starts + (lines.channel - lines.block) + v * kLanes;
      tile.sums = sums + at * kBlockChannels + v * kLanes;
      sum_some_results<kVectors>(tile, some);
    }
    at += some;
  }
}

// Lines of the result, of `width` channels of a block or fewer.
template <int width>
static void convolve_byte_lines(Depthwise& own, DepthwiseLines& lines, std::int64_t begin,
                                std::int64_t end) {
  const ByteDepthwiseArgs& args = own.args;
  const WindowDim& dim = args.windows.dims[2];
  const std::int64_t place = lines.channel - lines.block;
  Finishing job{.result = &args.result,
                .scales = own.outputs.scales + place,
                .biases = own.outputs.biases + place,
                .row_scales = nullptr,
                .sums = own.sums,
                .stride = kBlockChannels,
                .row = begin * dim.out_size,
                .output = lines.channel,
                .outputs = lines.count,
                .fit = own.outputs.fit};
  std::int64_t summed = 0;  // rows, which follow each other from line to line
  const auto finish = [&] {
    own.finish(job, 0, summed);
    job.row += summed, summed = 0;
  };
  for (std::int64_t line = begin; line < end; ++line) {
    find_byte_lines(own, line, lines);
    for (std::int64_t at = 0; at < dim.out_size; at += args.results) {
      const std::int64_t left = dim.out_size - at;
      const std::int64_t results = left < args.results ? left : args.results;
      if (summed + results > kMostResults) finish();
      write_columns<width>(own, lines, at * dim.stride - dim.padding,
                           (results - 1) * dim.stride + (dim.kernel - 1) * dim.dilation + 1);
      sum_stretch<width>(own, lines, results, own.sums + summed * kBlockChannels);
      summed += results;
    }
  }
  finish();
}

// Lines of the result, of a block of `channels` channels.
static void convolve_block(Depthwise& own, std::int64_t first, std::int64_t channels,
                           std::int64_t begin, std::int64_t end) {
  DepthwiseLines lines{.channel = first, .count = kVectorBytes, .block = first};
  const std::int64_t last = first + channels;
  for (; lines.channel + kVectorBytes <= last; lines.channel += kVectorBytes) {
    convolve_byte_lines<kVectorBytes>(own, lines, begin, end);
  }
  if constexpr (kVectorBytes > 32) {
    if (lines.channel + 32 <= last) {
      lines.count = 32;
      convolve_byte_lines<32>(own, lines, begin, end);
      lines.channel += 32;
    }
  }
  for (; lines.channel < last; lines.channel += 16) {
    lines.count = last - lines.channel < 16 ? last - lines.channel : 16;
    convolve_byte_lines<16>(own, lines, begin, end);
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

static void convolve_part(Depthwise& own, std::int64_t part) {
  const ByteDepthwiseArgs& args = own.args;
  const DepthwisePlace from = place_of_part(args, part), to = place_of_part(args, part + 1);
  own.quads = args.scratch + part * args.scratch_bytes;
  for (std::int64_t block = from.block; block <= to.block; ++block) {
    const std::int64_t begin = block == from.block ? from.line : 0;
    const std::int64_t end = block == to.block ? to.line : args.lines;
    if (begin >= end) continue;
    const std::int64_t first = block * kBlockChannels, left = args.weight.out_features - first;
    const std::int64_t panel = first / kPanelOutputs, panels = args.weight.panel_count - panel;
    constexpr std::int64_t kMost = kBlockChannels / kPanelOutputs;
    const std::int32_t moved = args.number == Number::int8 ? 128 : 0;
    read_outputs(
        args.weight, args.result, args.scale, args.zero_point + moved, panel,
        panels < kMost ? panels : kMost, own.outputs,
        args.windows.dims[0].kernel * args.windows.dims[1].kernel * args.windows.dims[2].kernel);
    convolve_block(own, first, left < kBlockChannels ? left : kBlockChannels, begin, end);
  }
}

static void byte_depthwise(const ByteDepthwiseArgs& args, std::int64_t begin, std::int64_t end) {
  Depthwise own{.args = args, .finish = finish_of(args.result)};
  std::memset(own.outside, args.zero_point & 0xff, sizeof own.outside);
  for (std::int64_t part = begin; part < end; ++part) convolve_part(own, part);
}

}  // namespace oxytorch::OXY_LEVEL
