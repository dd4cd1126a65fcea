#include "ops/embedding_bag/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

// Adds up `vectors` vectors of the bag's rows, from element `at` on; the last may be cut off.
template <int vectors, class T, class Index, class Count>
OXY_INLINE void sum_block(const EmbeddingTable& table, BagSpan span, std::int64_t at, Count count,
                          f32v factor, bool streaming, T* out) {
  const auto* indices = static_cast<const Index*>(table.indices);
  const auto* scales = static_cast<const T*>(table.scales);
  f32v total[vectors] = {};
  for (std::int64_t i = span.begin; i < span.end; ++i) {
    const T* row = static_cast<const T*>(table.weight) + indices[i] * table.row_stride + at;
    if (scales) {
      T copies[kLanes];
      for (T& copy : copies) copy = scales[i];
      const f32v scale = load(copies);
      for (int k = 0; k < vectors; ++k) total[k] += load(row + k * kLanes, count) * scale;
    } else {
      for (int k = 0; k < vectors; ++k) total[k] += load(row + k * kLanes, count);
    }
  }
  for (int k = 0; k < vectors; ++k) {
    if constexpr (!__is_same(Count, Whole)) {
      store(out + at + k * kLanes, total[k] * factor, count);
    } else if (streaming) {
      stream(out + at + k * kLanes, total[k] * factor);
    } else {
      store(out + at + k * kLanes, total[k] * factor);
    }
  }
}

template <class T, class Index>
static void sum_bag(const EmbeddingTable& table, BagSpan span, std::int64_t dim, f32v factor,
                    bool streaming, T* out) {
  std::int64_t at = 0;
  for (; at + 8 * kLanes <= dim; at += 8 * kLanes) {
    sum_block<8, T, Index>(table, span, at, Whole{}, factor, streaming, out);
  }
  for (; at + 4 * kLanes <= dim; at += 4 * kLanes) {
    sum_block<4, T, Index>(table, span, at, Whole{}, factor, streaming, out);
  }
  for (; at + kLanes <= dim; at += kLanes) {
    sum_block<1, T, Index>(table, span, at, Whole{}, factor, streaming, out);
  }
  if (at < dim) sum_block<1, T, Index>(table, span, at, dim - at, factor, streaming, out);
}

template <class Index>
static bool indices_fit(const EmbeddingTable& table, BagSpan span) {
  const auto* indices = static_cast<const Index*>(table.indices);
  bool fits = true;
  for (std::int64_t i = span.begin; i < span.end; ++i) {
    fits &= indices[i] >= 0 && indices[i] < table.rows;
  }
  return fits;
}

// Asks for the rows that are summed `distance` indices later.
template <class T, class Index>
OXY_INLINE void prefetch_rows(const EmbeddingTable& table, BagSpan span, std::int64_t distance,
                              std::int64_t dim) {
  const auto* indices = static_cast<const Index*>(table.indices);
  const std::int64_t row_bytes = dim * std::int64_t{sizeof(T)};
  for (std::int64_t i = span.begin + distance; i < span.end + distance; ++i) {
    if (i >= table.index_count) return;
    const auto* row = reinterpret_cast<const char*>(static_cast<const T*>(table.weight) +
                                                    indices[i] * table.row_stride);
    for (std::int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(row + byte);
  }
}

template <class T, class Index>
static void embedding_items(const EmbeddingBagArgs& args, std::int64_t begin, std::int64_t end) {
  // Rows in flight: enough to hide the latency of memory, few enough to stay in the caches.
  constexpr std::int64_t kAhead = 24;
  const std::int64_t tables = args.table_count;
  const std::int64_t distance = (kAhead + tables - 1) / tables;
  for (std::int64_t item = begin; item < end; ++item) {
    const EmbeddingTable& table = args.tables[item % tables];
    const BagSpan span = bag_span(table, item / tables, args.bags);
    if (!span_fits(table, span) || !indices_fit<Index>(table, span)) {
      __atomic_store_n(args.bad_item, item, __ATOMIC_RELAXED);
      continue;
    }
    prefetch_rows<T, Index>(table, span, distance, args.dim);
    T* out = static_cast<T*>(args.out) + item * args.dim;
    const std::int64_t length = span.end - span.begin;
    const f32v factor = splat(args.mean && length > 0 ? 1.0f / static_cast<float>(length) : 1.0f);
    const bool streaming = args.stream && is_aligned(out, kLanes * sizeof(T));
    sum_bag<T, Index>(table, span, args.dim, factor, streaming, out);
  }
  if (args.stream) stream_end();
}

static void embedding_bag(const EmbeddingBagArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    if (args.tables[0].wide_indices) {
      embedding_items<T, std::int64_t>(args, begin, end);
    } else {
      embedding_items<T, std::int32_t>(args, begin, end);
    }
  });
}

}  // namespace oxytorch::OXY_LEVEL
