// Few rows of x times a weight in panels, at the speed at which memory gives the panels: each is
// read once, from its begin to its end, and asked for ahead of its use.
#pragma once

#include "ops/panels/finish.h"
#include "ops/panels/gemv_paths.h"

namespace oxytorch::OXY_LEVEL {

template <class Path, int rows, class Codec>
static void multiply_panel(Codec codec, const GemvArgs& args, std::int64_t panel,
                           std::int64_t first_row, float* sums) {
  const PanelsArgs& weight = args.weight;
  const std::uint8_t* begin = weight.panels + panel * weight.panel_bytes;
  // What is padded for others is left out where numbers are read one by one.
  const std::int64_t last = Codec::kNumbers == 1 ? (args.in_features + 3) / 4 * 4 : args.depth;
  const std::int64_t end = weight.group_scales ? args.in_features : last;
  const std::int64_t in_group = group_length(args);
  const std::int64_t length = block_length<Path>(args);
  f32v totals[rows][kParts] = {};
  Block block{.panel = begin, .length = length, .row = first_row, .middle = weight.middle};
  for (std::int64_t group = panel * weight.groups; block.begin < end; ++group) {
    const std::int64_t group_end = block.begin + in_group;
    const std::uint8_t* zero_points = weight.zero_points;
    if (zero_points) block.zero_points = zero_points + group * kPanelOutputs;
    for (; block.begin < group_end; block.begin += length, ++block.index) {
      if (block.begin + length > end) block.length = end - block.begin;
      f32v products[rows][kParts];
      Path::template multiply<rows>(codec, args, block, products);
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
  const std::int64_t panel = is_gated(args.result.epilogue) ? 2 * item : item;
  const std::int64_t output = item * kPanelOutputs;
  const std::int64_t left = args.weight.out_features - output;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* from = sums + r * kPanelOutputs;
    sweep(0, left < kPanelOutputs ? left : kPanelOutputs, [&](std::int64_t i, auto count) {
      finish_outputs<T>(args.weight, args.result, first_row + r, 1.0f, panel * kPanelOutputs + i,
                        output + i, from + i, from + i + kChunkRows * kPanelOutputs, count);
    });
  }
}

template <class Path, int rows, class Codec>
static void multiply_item(Codec codec, const GemvArgs& args, std::int64_t item,
                          std::int64_t first_row, float* sums) {
  if (!is_gated(args.result.epilogue)) {
    multiply_panel<Path, rows>(codec, args, item, first_row, sums);
    return;
  }
  multiply_panel<Path, rows>(codec, args, 2 * item, first_row, sums);
  multiply_panel<Path, rows>(codec, args, 2 * item + 1, first_row,
                             sums + kChunkRows * kPanelOutputs);
}

template <class Path, class Codec>
static void multiply_items(Codec codec, const GemvArgs& args, std::int64_t begin,
                           std::int64_t end) {
  alignas(64) float sums[2 * kChunkRows * kPanelOutputs];
  const std::int64_t panels = is_gated(args.result.epilogue) ? 2 : 1;
  const std::int64_t bytes = panels * args.weight.panel_bytes;
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
        multiply_item<Path, kChunkRows>(codec, args, item, row, sums);
      } else if (rows == 2) {
        multiply_item<Path, 2>(codec, args, item, row, sums);
      } else {
        multiply_item<Path, 1>(codec, args, item, row, sums);
      }
      with_type(args.result.out_dtype,
                [&](auto element) { finish_item<decltype(element)>(args, item, row, rows, sums); });
      row += rows;
    }
  }
}

static void stage_gemv(const GemvArgs& args, std::int64_t begin, std::int64_t end) {
  with_path(args, [&](auto path) {
    with_type(args.dtype, [&](auto element) {
      const auto* x = static_cast<const decltype(element)*>(args.x);
      if constexpr (requires { path.stage(args, begin, x); }) {
        for (std::int64_t row = begin; row < end; ++row) {
          path.stage(args, row, x + row * args.x_stride);
        }
      }
    });
  });
}

static void gemv(const GemvArgs& args, std::int64_t begin, std::int64_t end) {
  with_path(args, [&](auto path) {
    using Path = decltype(path);
    with_codec(args.weight, [&](auto codec) {
      if constexpr (Path::template kTakes<decltype(codec)>) {
        multiply_items<Path>(codec, args, begin, end);
      }
    });
  });
}

static void gemv_of_each(const GemvOfEachArgs& args, std::int64_t begin, std::int64_t end) {
  std::int64_t product = 0, first = 0;
  while (begin < end) {
    for (; begin >= args.ends[product]; ++product) first = args.ends[product];
    const std::int64_t most = end < args.ends[product] ? end : args.ends[product];
    gemv(args.products[product], begin - first, most - first);
    begin = most;
  }
}

}  // namespace oxytorch::OXY_LEVEL
