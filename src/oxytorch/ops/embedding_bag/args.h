// Bags of embeddings: what entries tell kernels.
#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

struct EmbeddingTable {
  const void* weight;
  const void* indices;
  const void* offsets;  // null: every bag has `bag_length` indices
  const void* scales;   // per-sample weights of the table's dtype (of bytes: float32), or null
  std::int64_t rows;
  std::int64_t row_stride;  // elements
  std::int64_t index_count;
  std::int64_t bag_length;
  bool wide_indices;  // int64, else int32
  bool wide_offsets;
  bool last_offset;  // the end of the last bag is given too
};

// Bags of one table that make one item.
inline constexpr std::int64_t kBagsPerItem = 32;

// Items are runs of kBagsPerItem bags, all of the first table's before the second's: a table's rows
// lie in fewer pages than those of all tables. Row `bag` of `out` holds the tables side by side.
struct EmbeddingBagArgs {
  const EmbeddingTable* tables;
  std::int64_t table_count;
  std::int64_t bags;
  std::int64_t dim;
  void* out;
  // -1 before; set to table * bags + bag where an index or offset is out of range.
  std::int64_t* bad_bag;
  DType dtype;  // of `out`
  bool mean;
  bool stream;
};

// Internal linkage, so that no level shares them with another.

static inline std::int64_t read_index(const void* data, bool wide, std::int64_t i) {
  return wide ? static_cast<const std::int64_t*>(data)[i]
              : static_cast<const std::int32_t*>(data)[i];
}

struct BagSpan {
  std::int64_t begin;
  std::int64_t end;
};

static inline BagSpan bag_span(const EmbeddingTable& table, std::int64_t bag, std::int64_t bags) {
  if (!table.offsets) return {bag * table.bag_length, (bag + 1) * table.bag_length};
  const std::int64_t begin = read_index(table.offsets, table.wide_offsets, bag);
  const bool given = bag + 1 < bags || table.last_offset;
  return {begin,
          given ? read_index(table.offsets, table.wide_offsets, bag + 1) : table.index_count};
}

static inline bool span_fits(const EmbeddingTable& table, BagSpan span) {
  return span.begin >= 0 && span.begin <= span.end && span.end <= table.index_count;
}

}  // namespace oxytorch
