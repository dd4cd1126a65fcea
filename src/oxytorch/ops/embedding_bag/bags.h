// How a kernel goes through the bags of its items.
#pragma once

#include "core/vec.h"
#include "ops/embedding_bag/args.h"

namespace oxytorch::OXY_LEVEL {

// Rows asked for ahead of their use: enough to hide the latency of memory, also with short rows.
inline constexpr std::int64_t kAhead = 24;

// A table up to this size stays in the second-level cache and nothing is asked for ahead.
inline constexpr std::int64_t kNearTable = 512 << 10;

template <int n>
struct Count {
  static constexpr int value = n;
};

// Covers [begin, end) with blocks of `count` lengths, then of fewer: body(at, Count<lengths>{}).
// Returns where less than one length is left.
template <int count, class Body>
OXY_INLINE std::int64_t blocks(std::int64_t begin, std::int64_t end, std::int64_t length,
                               Body body) {
  std::int64_t at = begin;
  for (; at + count * length <= end; at += count * length) body(at, Count<count>{});
  if constexpr (count > 1) return blocks<count / 2>(at, end, length, body);
  return at;
}

// Whether the bags [first, last) lie in the indices and these in the table. Bags follow each other,
// so that their indices are looked at in one sweep.
template <class Index>
static bool bags_fit(const EmbeddingBagArgs& args, const EmbeddingTable& table, std::int64_t first,
                     std::int64_t last) {
  bool fits = true;
  for (std::int64_t bag = first; bag < last; ++bag) {
    fits &= span_fits(table, bag_span(table, bag, args.bags));
  }
  if (!fits) return false;
  const auto* indices = static_cast<const Index*>(table.indices);
  const std::int64_t begin = bag_span(table, first, args.bags).begin;
  const std::int64_t end = bag_span(table, last - 1, args.bags).end;
  // Without branches: a negative index and one beyond the last row both set the sign.
  const auto last_row = static_cast<std::uint64_t>(table.rows - 1);
  std::uint64_t signs = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const auto index = static_cast<std::uint64_t>(std::int64_t{indices[i]});
    signs |= index | (last_row - index);
  }
  return signs >> 63 == 0;
}

// Bags of one table.
struct BagRange {
  std::int64_t table, first, last;
};

template <class Index, class Body>
OXY_INLINE void with_range(const EmbeddingBagArgs& args, std::int64_t item, Body body) {
  const std::int64_t ranges = (args.bags + kBagsPerItem - 1) / kBagsPerItem;
  const std::int64_t number = item / ranges;
  const EmbeddingTable& table = args.tables[number];
  const std::int64_t first = item % ranges * kBagsPerItem;
  const std::int64_t last = first + kBagsPerItem < args.bags ? first + kBagsPerItem : args.bags;
  if (bags_fit<Index>(args, table, first, last))
    return body(BagRange{number, first, last}, Index{});
  std::int64_t bag = last - 1;
  while (bag > first && bags_fit<Index>(args, table, bag, bag + 1)) --bag;
  __atomic_store_n(args.bad_bag, number * args.bags + bag, __ATOMIC_RELAXED);
}

// Calls body(BagRange, Index{}) for the bags of items [begin, end), whose indices and offsets it
// has looked at; notes a bag that does not fit.
template <class Body>
OXY_INLINE void for_each_range(const EmbeddingBagArgs& args, std::int64_t begin, std::int64_t end,
                               Body body) {
  for (std::int64_t item = begin; item < end; ++item) {
    if (args.tables[0].wide_indices) {
      with_range<std::int64_t>(args, item, body);
    } else {
      with_range<std::int32_t>(args, item, body);
    }
  }
}

}  // namespace oxytorch::OXY_LEVEL
