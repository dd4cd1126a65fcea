// How a product of many rows is cut into items, so that all threads work and none waits long.
#pragma once

#include <algorithm>

#include "core/levels.h"
#include "ops/panels/gemm_args.h"

namespace oxytorch {

// What items of some rows times some panels may be, and what they cost.
struct SplitRules {
  std::int64_t row_step;    // chunks of rows have a multiple of it
  std::int64_t least_rows;  // of a chunk
  std::int64_t unpacking;   // what reading a panel takes, in rows that it could multiply
  std::int64_t least_panels = kItemPanels;  // of an item
  std::int64_t most_panels = kItemPanels;
  // Panels that items have multiples of, if not all that they may have.
  std::int64_t least_step = kItemPanels;
  std::int64_t most = kItemRows * kItemPanels;  // rows times panels of an item
  std::int64_t most_turns = 8;                  // items of a thread, where one each is possible
};

// Panels that are unpacked first.
inline constexpr SplitRules kCoarseSplit{
    .row_step = kTileHeight, .least_rows = 32, .unpacking = 12};

// Panels of bfloat16 that vectors read as they are.
inline constexpr SplitRules kVectorSplit{.row_step = 6, .least_rows = 12, .unpacking = 6};

// Panels of float32, which are read as they are. Those of a gated weight go in pairs.
constexpr SplitRules float_split(bool is_gated) {
  return {.row_step = 6,
          .least_rows = 6,
          .unpacking = 8,
          .least_panels = is_gated ? 2 : 1,
          .most_panels = kMostFloatPanels,
          .least_step = is_gated ? 2 : 1,
          .most = kFloatItem,
          .most_turns = 4};
}

// Items are chunks of `chunk_rows` rows times groups of panels, all groups of a chunk first.
struct Split {
  std::int64_t chunk_rows;
  PanelGroups groups;
  std::int64_t items;
  std::int64_t grain;  // items of a thread; all of them where one thread is enough
};

// The cost of what the busiest thread takes of a chunk of rows after the other, in units of its
// own: the sums of one or two panels do not fill the registers, and each item reads its rows.
inline std::int64_t thread_cost(const SplitRules& rules, std::int64_t rows, std::int64_t panels,
                                const PanelGroups& groups, bool is_cut, std::int64_t grain) {
  const std::int64_t chunks = grain / groups.count, rest = grain % groups.count;
  const std::int64_t steps = divide_up(panels, groups.step);
  const std::int64_t some = std::min(divide_up(rest * steps, groups.count) * groups.step, panels);
  const std::int64_t narrow = is_cut && groups.step < 4 ? (3 - groups.step) * grain : 0;
  return (round_up(rows, rules.row_step) + rules.unpacking) *
         (4 * (chunks * panels + some) + chunks * (panels % 2) + narrow + 2 * grain);
}

// Cuts `rows` rows times `panels` panels for at most `threads` threads, so that the busiest one has
// the least to do: into about as many items as there are threads, or a few times as many. Groups
// have about as many panels each where they may have a part of `taken`, else as many as possible.
// most: rows of an item.
inline Split split_product(const SplitRules& rules, std::int64_t rows, std::int64_t panels,
                           std::int64_t threads, std::int64_t most = kItemRows) {
  Split best{};
  std::int64_t least = 0;
  const auto try_groups = [&](std::int64_t taken, const PanelGroups& groups) {
    const std::int64_t most_rows = std::min(most, rules.most / taken);
    for (std::int64_t turns = 1; turns <= rules.most_turns; ++turns) {
      const std::int64_t chunks =
          std::max(divide_up(rows, most_rows), turns * threads / groups.count);
      const std::int64_t even = round_up(divide_up(rows, chunks), rules.row_step);
      const std::int64_t chunk = std::max(even, rules.least_rows);
      const std::int64_t items = groups.count * divide_up(rows, chunk);
      const std::int64_t grain = divide_up(items, threads);
      const std::int64_t cost =
          thread_cost(rules, std::min(chunk, rows), panels, groups, groups.step < taken, grain);
      if (best.items == 0 || cost < least) best = {chunk, groups, items, grain}, least = cost;
    }
  };
  for (std::int64_t taken = rules.most_panels; taken >= rules.least_panels; taken /= 2) {
    const std::int64_t count = divide_up(panels, taken);
    try_groups(taken, {count, taken});
    for (std::int64_t step = taken / 2; step >= rules.least_step; step /= 2) {
      try_groups(taken, {count, step});
      const std::int64_t even = round_up(count, threads);
      if (even != count && even <= divide_up(panels, step)) try_groups(taken, {even, step});
    }
  }
  return best;
}

// Multiplications of a product that take about as long as the memory of one thread takes for a
// byte, at the active level. One without instructions for bfloat16 takes float32.
inline std::int64_t products_per_byte(RowType type) {
  if (type != RowType::float32 && level_has(Capability::tiles)) return 64;
  const std::int64_t floats = level_has(Capability::vectors_512) ? 8 : 4;
  const bool is_whole = type == RowType::int8 || type == RowType::digits;
  const bool has_dot = level_has(is_whole ? Capability::int8_dot : Capability::fast_bf16_dot);
  return type != RowType::float32 && has_dot ? 2 * floats : floats;
}

// What a product takes, in such bytes. Few rows wait for the weight, many for the multiplications,
// and short sums for what is moved of each row.
inline std::int64_t work_of_product(std::int64_t rows, std::int64_t products_of_row, RowType type,
                                    std::int64_t weight_bytes, std::int64_t row_bytes) {
  return std::max(
      {rows * products_of_row / products_per_byte(type), weight_bytes, rows * row_bytes});
}

}  // namespace oxytorch
