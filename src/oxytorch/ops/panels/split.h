// How a product of many rows is cut into items, so that all threads work and none waits long.
#pragma once

#include <algorithm>

#include "ops/panels/gemm_args.h"

namespace oxytorch {

// What items of some rows times some panels may be, and what they cost.
struct SplitRules {
  std::int64_t row_step;      // chunks of rows have a multiple of it
  std::int64_t least_rows;    // of a chunk
  std::int64_t unpacking;     // what reading a panel takes, in rows that it could multiply
  std::int64_t least_panels;  // of an item
  std::int64_t most_panels;
  std::int64_t most;        // rows times panels of an item
  std::int64_t most_turns;  // items of a thread, where one each is possible
};

// Panels that are unpacked first.
inline constexpr SplitRules kCoarseSplit{.row_step = kTileHeight,
                                         .least_rows = 32,
                                         .unpacking = 12,
                                         .least_panels = kItemPanels,
                                         .most_panels = kItemPanels,
                                         .most = kItemRows * kItemPanels,
                                         .most_turns = 8};

// Panels of bfloat16 that vectors read as they are.
inline constexpr SplitRules kVectorSplit{.row_step = 6,
                                         .least_rows = 12,
                                         .unpacking = 6,
                                         .least_panels = kItemPanels,
                                         .most_panels = kItemPanels,
                                         .most = kItemRows * kItemPanels,
                                         .most_turns = 8};

// Panels of float32, which are read as they are. Those of a gated weight go in pairs.
constexpr SplitRules float_split(bool is_gated) {
  return {.row_step = 6,
          .least_rows = 6,
          .unpacking = 8,
          .least_panels = is_gated ? 2 : 1,
          .most_panels = kMostFloatPanels,
          .most = kFloatItem,
          .most_turns = 4};
}

struct Split {
  std::int64_t chunk_rows;
  std::int64_t item_panels;
  std::int64_t items;
  std::int64_t grain;  // items of a thread; all of them where one thread is enough
};

// The cost of an item in units of its own: the sums of an odd panel do not fill the registers, and
// each item reads its rows.
inline std::int64_t item_cost(const SplitRules& rules, std::int64_t rows, std::int64_t panels) {
  return (round_up(rows, rules.row_step) + rules.unpacking) * (4 * panels + panels % 2 + 2);
}

// Cuts `rows` rows times `panels` panels for at most `threads` threads, so that the busiest one has
// the least to do: into about as many items as there are threads, or a few times as many.
inline Split split_product(const SplitRules& rules, std::int64_t rows, std::int64_t panels,
                           std::int64_t threads) {
  Split best{};
  std::int64_t least = 0;
  for (std::int64_t taken = rules.most_panels; taken >= rules.least_panels; taken /= 2) {
    const std::int64_t groups = divide_up(panels, taken);
    const std::int64_t most_rows = std::min(kItemRows, rules.most / taken);
    for (std::int64_t turns = 1; turns <= rules.most_turns; ++turns) {
      const std::int64_t chunks = std::max(divide_up(rows, most_rows), turns * threads / groups);
      const std::int64_t even = round_up(divide_up(rows, chunks), rules.row_step);
      const std::int64_t chunk = std::max(even, rules.least_rows);
      const std::int64_t items = groups * divide_up(rows, chunk);
      const std::int64_t grain = divide_up(items, threads);
      // Of a thread's items so many take the last panels, which may be fewer.
      const std::int64_t short_ones = grain / groups, some_rows = std::min(chunk, rows);
      const std::int64_t cost =
          (grain - short_ones) * item_cost(rules, some_rows, std::min(taken, panels)) +
          short_ones * item_cost(rules, some_rows, panels - (groups - 1) * taken);
      if (best.items == 0 || cost < least) best = {chunk, taken, items, grain}, least = cost;
    }
  }
  return best;
}

// Multiplications that take about as long as the memory of one thread takes for a byte: of float32,
// and of numbers with units of their own.
inline constexpr std::int64_t kFloatsPerByte = 8;
inline constexpr std::int64_t kUnitsPerByte = 64;

// What multiplications and moved bytes take, in such bytes: short sums cost less than their
// results.
inline std::int64_t bytes_of_work(std::int64_t products, std::int64_t per_byte,
                                  std::int64_t moved) {
  return std::max(products / per_byte, moved);
}

}  // namespace oxytorch
