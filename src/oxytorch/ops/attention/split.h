// How many query rows an item of attention has.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention/kernel.h"

namespace oxytorch {

// What items cost, in rows: they have a multiple of `step`, and arranging the keys and values takes
// as long as `keys` rows.
struct AttentionCosts {
  std::int64_t step;
  std::int64_t keys;
};

// Rows of vectors, and of tiles of AMX, whose products take less of a row's time.
inline constexpr AttentionCosts kVectorAttention{.step = 6, .keys = 24};
inline constexpr AttentionCosts kTileAttention{.step = 16, .keys = 48};
inline constexpr std::int64_t kAttentionLeastRows = 16;

// The rows of an item with which the busiest of `threads` threads has the least to do; of those
// with as little the most, which read the keys least often.
inline std::int64_t attention_rows(const AttentionCosts& costs, std::int64_t heads,
                                   std::int64_t length, std::int64_t threads) {
  const auto divide_up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  std::int64_t best = 1, least = 0;
  std::int64_t blocks = divide_up(length, kAttentionRows);
  // With more items than this the busiest thread has hardly more than its share.
  const std::int64_t most =
      std::max(blocks, divide_up(4 * threads, std::max<std::int64_t>(heads, 1)));
  for (; blocks > 0 && blocks <= most; ++blocks) {
    const std::int64_t rows = divide_up(length, blocks);
    if (least > 0 && rows < kAttentionLeastRows) break;
    const std::int64_t rounds = divide_up(heads * divide_up(length, rows), threads);
    const std::int64_t cost = rounds * (costs.keys + divide_up(rows, costs.step) * costs.step);
    if (least == 0 || cost < least) best = rows, least = cost;
  }
  return best;
}

}  // namespace oxytorch
