// Few rows of x times a weight in panels, at the speed at which memory gives the panels: each is
// read once, from its begin to its end, and asked for ahead of its use.
#pragma once

#include "ops/panels/codecs.h"
#include "ops/panels/finish.h"
#include "ops/panels/gemv_args.h"

namespace oxytorch::OXY_LEVEL {

// Rows that are multiplied at once; the others find the panel in the nearest caches.
#if defined(__AVX512F__)
inline constexpr int kChunkRows = 4;
inline constexpr int kRegisterSums = 16;
#elif defined(__AVX2__)
inline constexpr int kChunkRows = 2;
inline constexpr int kRegisterSums = 8;
#else
inline constexpr int kChunkRows = 2;
inline constexpr int kRegisterSums = 32;  // more than there are: this level is not fast anyway
#endif

// Bytes between what is read and what is asked for; panels follow each other, so that it is the
// thread's next panel at the end of one.
inline constexpr std::int64_t kAhead = 4096;

OXY_INLINE void ask_ahead(const std::uint8_t* row) { __builtin_prefetch(row + kAhead); }

// Independent sums for each row and part: additions need not wait for each other, and err less.
template <int rows>
inline constexpr int kChains = rows * kParts * 4 <= kRegisterSums   ? 4
                               : rows * kParts * 2 <= kRegisterSums ? 2
                                                                    : 1;

// A block of in_features of one panel and some rows.
struct Block {
  const std::uint8_t* panel;
  std::int64_t length;
  std::int64_t begin = 0;  // of in_features
  std::int64_t index = 0;
  std::int64_t row;                           // the first
  const std::uint8_t* zero_points = nullptr;  // of 16 outputs; null: the middle
};

template <class Codec>
OXY_INLINE std::int32_t middle(Codec) {
  return __is_same(Codec, ByteCodec) ? 128 : __is_same(Codec, NibbleCodec) ? 8 : 0;
}

template <class Codec>
OXY_INLINE i32v zero_point_of(Codec codec, const Block& block, int part) {
  if (!block.zero_points) return i32v{} + middle(codec);
  u8v values;
  std::memcpy(&values, block.zero_points + part * kLanes, sizeof values);
  return reinterpret_cast<i32v>(zero_extend(values));
}

// A path stages rows of x, and multiplies blocks of them: `multiply` gives sums of
// products of x and the weight without its scales. kMostBlock: in_features of a block.

OXY_INLINE std::int64_t group_length(const GemvArgs& args) {
  return args.weight.group_scales ? args.in_features / args.weight.groups : args.depth;
}

template <class Path>
OXY_INLINE std::int64_t block_length(const GemvArgs& args) {
  const std::int64_t group = group_length(args);
  return group < Path::kMostBlock ? group : Path::kMostBlock;
}

template <class Path, class Codec, int rows>
static void multiply_panel(const GemvArgs& args, std::int64_t panel, std::int64_t first_row,
                           float* sums) {
  const PanelsArgs& weight = args.weight;
  const std::uint8_t* begin = weight.panels + panel * panel_bytes(weight.format, args.depth);
  const std::int64_t end = weight.group_scales ? args.in_features : args.depth;
  const std::int64_t in_group = group_length(args);
  const std::int64_t length = block_length<Path>(args);
  f32v totals[rows][kParts] = {};
  Block block{.panel = begin, .length = length, .row = first_row};
  for (std::int64_t group = panel * weight.groups; block.begin < end; ++group) {
    const std::int64_t group_end = block.begin + in_group;
    const std::uint8_t* zero_points = weight.zero_points;
    if (zero_points) block.zero_points = zero_points + group * kPanelOutputs;
    for (; block.begin < group_end; block.begin += length, ++block.index) {
      if (block.begin + length > end) block.length = end - block.begin;
      f32v products[rows][kParts];
      Path::template multiply<Codec, rows>(args, block, products);
      for (int part = 0; part < kParts; ++part) {
        f32v scale = splat(1.0f);
        if (weight.group_scales) {
          scale = load(weight.group_scales + group * kPanelOutputs + part * kLanes);
        }
        for (int r = 0; r < rows; ++r) totals[r][part] += products[r][part] * scale;
      }
      block.panel += length * (kPanelRowBytes / Codec::kNumbers);
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int part = 0; part < kParts; ++part) {
      store(sums + r * kPanelOutputs + part * kLanes, totals[r][part]);
    }
  }
}

// Rows of one item from their sums; `sums` has the up's after the gate's kChunkRows rows.
template <class T>
static void finish_item(const GemvArgs& args, std::int64_t item, std::int64_t first_row,
                        std::int64_t rows, const float* sums) {
  const PanelResultArgs& result = args.result;
  const bool gated = is_gated(result.epilogue);
  const std::int64_t panel = gated ? 2 * item : item;
  const std::int64_t output = item * kPanelOutputs;
  const std::int64_t left = args.weight.out_features - output;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* gate = sums + r * kPanelOutputs;
    const float* up = gate + kChunkRows * kPanelOutputs;
    T* out = static_cast<T*>(result.out) + (first_row + r) * result.out_stride + output;
    const T* other =
        static_cast<const T*>(result.other) + (first_row + r) * result.other_stride + output;
    sweep(0, left < kPanelOutputs ? left : kPanelOutputs, [&](std::int64_t i, auto count) {
      const std::int64_t channel = panel * kPanelOutputs + i;
      f32v v = scaled(args.weight, result, gate + i, 1.0f, channel, output + i, count);
      v = activate(result.epilogue, v, T{});
      if (gated) {
        v *= scaled(args.weight, result, up + i, 1.0f, channel + kPanelOutputs,
                    args.weight.out_features + output + i, count);
      }
      if (result.epilogue == PanelEpilogue::add) v += load(other + i, count);
      store(out + i, v, count);
    });
  }
}

template <class Path, class Codec, int rows>
static void multiply_item(const GemvArgs& args, std::int64_t item, std::int64_t first_row,
                          float* sums) {
  if (!is_gated(args.result.epilogue)) {
    multiply_panel<Path, Codec, rows>(args, item, first_row, sums);
    return;
  }
  multiply_panel<Path, Codec, rows>(args, 2 * item, first_row, sums);
  multiply_panel<Path, Codec, rows>(args, 2 * item + 1, first_row,
                                    sums + kChunkRows * kPanelOutputs);
}

template <class Path, class Codec>
static void multiply_items(const GemvArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) float sums[2 * kChunkRows * kPanelOutputs];
  const std::int64_t panels = is_gated(args.result.epilogue) ? 2 : 1;
  const std::int64_t bytes = panels * panel_bytes(args.weight.format, args.depth);
  const std::uint8_t* first = args.weight.panels + begin * bytes;
  const std::int64_t all = (end - begin) * bytes;
  for (std::int64_t at = 0; at < (all < kAhead ? all : kAhead); at += kPanelRowBytes) {
    __builtin_prefetch(first + at);
  }
  for (std::int64_t item = begin; item < end; ++item) {
    std::int64_t row = 0;
    while (row < args.rows) {
      const std::int64_t left = args.rows - row;
      const std::int64_t rows = left >= kChunkRows ? kChunkRows : left >= 2 ? 2 : 1;
      if (rows == kChunkRows) {
        multiply_item<Path, Codec, kChunkRows>(args, item, row, sums);
      } else if (rows == 2) {
        multiply_item<Path, Codec, 2>(args, item, row, sums);
      } else {
        multiply_item<Path, Codec, 1>(args, item, row, sums);
      }
      with_type(args.result.out_dtype,
                [&](auto element) { finish_item<decltype(element)>(args, item, row, rows, sums); });
      row += rows;
    }
  }
}

}  // namespace oxytorch::OXY_LEVEL
