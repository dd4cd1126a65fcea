#include "ops/embedding_bag/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

// Rows asked for ahead of their use: enough to hide the latency of memory.
inline constexpr std::int64_t kAhead = 12;

// A table up to this size stays in the second-level cache and nothing is asked for ahead.
inline constexpr std::int64_t kNearTable = 512 << 10;

// Sums of neighbouring elements: as many as one load brings.
template <class T>
struct Sums {
  static constexpr int length = kLanes;
  f32v total = {};

  void add(const T* p) { total += load(p); }
  void add(const T* p, f32v scale) { total += load(p) * scale; }
  void put(T* out, f32v factor, bool streaming) const {
    if (streaming) {
      stream(out, total * factor);
    } else {
      store(out, total * factor);
    }
  }
};

// Elements with even and odd index are summed apart: a shift and a mask widen both, and they are
// put side by side once per bag.
template <>
struct Sums<bf16> {
  static constexpr int length = 2 * kLanes;
  f32v even = {};
  f32v odd = {};

  static u32v read(const bf16* p) {
    u32v pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return pairs;
  }
  void add(const bf16* p) {
    const u32v pairs = read(p);
    even += from_bits(pairs << 16);
    odd += from_bits(pairs & 0xffff0000u);
  }
  void add(const bf16* p, f32v scale) {
    const u32v pairs = read(p);
    even += from_bits(pairs << 16) * scale;
    odd += from_bits(pairs & 0xffff0000u) * scale;
  }
  void put(bf16* out, f32v factor, bool streaming) const {
    const u32v low = zero_extend(narrow(even * factor, bf16{}));
    const u32v high = zero_extend(narrow(odd * factor, bf16{}));
    const f32v pairs = from_bits(low | high << 16);
    if (streaming) {
      stream(reinterpret_cast<float*>(out), pairs);
    } else {
      std::memcpy(out, &pairs, sizeof pairs);
    }
  }
};

template <class T>
struct Bag {
  const EmbeddingTable& table;
  BagSpan span;
  std::int64_t dim;
  f32v factor;
  bool streaming;
  T* out;

  template <class Index>
  const T* row(std::int64_t i) const {
    return static_cast<const T*>(table.weight) +
           static_cast<const Index*>(table.indices)[i] * table.row_stride;
  }
  f32v scale(std::int64_t i) const {
    T copies[kLanes];
    for (T& copy : copies) copy = static_cast<const T*>(table.scales)[i];
    return load(copies);
  }
};

// Sums `count` loads from element `at` on. Where `asks`, asks for the same part of the row that is
// summed kAhead indices later, load by load: asking for a whole row at once holds up the loads.
// That index was not checked yet, but asking for a wrong address does no harm.
template <int count, bool asks, class Index, class T>
OXY_INLINE void sum_block(const Bag<T>& bag, std::int64_t at) {
  constexpr int kLength = Sums<T>::length;
  constexpr int kLine = 64 / sizeof(T);
  const std::int64_t last = bag.table.index_count - 1;
  Sums<T> sums[count];
  for (std::int64_t i = bag.span.begin; i < bag.span.end; ++i) {
    const T* row = bag.template row<Index>(i) + at;
    const T* later =
        asks ? bag.template row<Index>(i + kAhead < last ? i + kAhead : last) + at : row;
    const f32v scale = bag.table.scales ? bag.scale(i) : f32v{};
    for (int k = 0; k < count; ++k) {
      if (bag.table.scales) {
        sums[k].add(row + k * kLength, scale);
      } else {
        sums[k].add(row + k * kLength);
      }
      if (asks && k * kLength % kLine == 0) __builtin_prefetch(later + k * kLength);
    }
  }
  for (int k = 0; k < count; ++k) {
    sums[k].put(bag.out + at + k * kLength, bag.factor, bag.streaming);
  }
}

// The elements that are too few for a whole load.
template <class Index, class T>
OXY_INLINE void sum_rest(const Bag<T>& bag, std::int64_t at) {
  sweep(at, bag.dim, [&](std::int64_t j, auto count) {
    f32v total = {};
    for (std::int64_t i = bag.span.begin; i < bag.span.end; ++i) {
      const f32v v = load(bag.template row<Index>(i) + j, count);
      total += bag.table.scales ? v * bag.scale(i) : v;
    }
    store(bag.out + j, total * bag.factor, count);
  });
}

template <bool asks, class Index, class T>
static void sum_bag(const Bag<T>& bag) {
  constexpr int kLength = Sums<T>::length;
  constexpr int kMost = 8 * kLanes / kLength;
  std::int64_t at = 0;
  for (; at + kMost * kLength <= bag.dim; at += kMost * kLength) {
    sum_block<kMost, asks, Index>(bag, at);
  }
  for (; at + kLength <= bag.dim; at += kLength) sum_block<1, asks, Index>(bag, at);
  if (at < bag.dim) sum_rest<Index>(bag, at);
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

template <class T, class Index>
static void table_bags(const EmbeddingBagArgs& args, std::int64_t item) {
  const std::int64_t blocks = (args.bags + kBagsPerItem - 1) / kBagsPerItem;
  const std::int64_t number = item / blocks;
  const EmbeddingTable& table = args.tables[number];
  const std::int64_t first = item % blocks * kBagsPerItem;
  const std::int64_t last = first + kBagsPerItem < args.bags ? first + kBagsPerItem : args.bags;
  const bool far = table.rows * table.row_stride * std::int64_t{sizeof(T)} > kNearTable;
  for (std::int64_t number_in_table = first; number_in_table < last; ++number_in_table) {
    const BagSpan span = bag_span(table, number_in_table, args.bags);
    if (!span_fits(table, span) || !indices_fit<Index>(table, span)) {
      __atomic_store_n(args.bad_bag, number * args.bags + number_in_table, __ATOMIC_RELAXED);
      continue;
    }
    const std::int64_t length = span.end - span.begin;
    T* out = static_cast<T*>(args.out) + (number_in_table * args.table_count + number) * args.dim;
    const Bag<T> bag{
        .table = table,
        .span = span,
        .dim = args.dim,
        .factor = splat(args.mean && length > 0 ? 1.0f / static_cast<float>(length) : 1.0f),
        .streaming = args.stream && is_aligned(out, kVectorBytes),
        .out = out,
    };
    if (far) {
      sum_bag<true, Index>(bag);
    } else {
      sum_bag<false, Index>(bag);
    }
  }
}

static void embedding_bag(const EmbeddingBagArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    for (std::int64_t item = begin; item < end; ++item) {
      if (args.tables[0].wide_indices) {
        table_bags<T, std::int64_t>(args, item);
      } else {
        table_bags<T, std::int32_t>(args, item);
      }
    }
  });
  if (args.stream) stream_end();
}

}  // namespace oxytorch::OXY_LEVEL
