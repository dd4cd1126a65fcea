#include "ops/embedding_bag/kernel.h"

#include "ops/embedding_bag/bags.h"

namespace oxytorch::OXY_LEVEL {

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

// The rows of one table, with everything that a bag needs in registers.
template <class T, class Index>
struct Rows {
  const T* weight;
  std::int64_t stride;
  const Index* indices;
  std::int64_t last;  // index into `indices`
  const T* scales;
  std::int64_t dim;
  bool streaming;

  const T* row(std::int64_t i) const { return weight + indices[i] * stride; }
  // The row that is summed kAhead indices later. Its index was not checked yet, but asking for a
  // wrong address does no harm.
  const T* later(std::int64_t i) const { return row(i + kAhead < last ? i + kAhead : last); }
  f32v scale(std::int64_t i) const {
    T copies[kLanes];
    for (T& copy : copies) copy = scales[i];
    return load(copies);
  }
};

// Sums `count` loads from element `at` on. Where `asks`, asks for the same part of a later row load
// by load: asking for a whole row at once holds up the loads.
template <int count, bool asks, bool scaled, class T, class Index>
OXY_INLINE void sum_block(const Rows<T, Index>& rows, BagSpan span, f32v factor, T* out,
                          std::int64_t at) {
  constexpr int kLength = Sums<T>::length;
  constexpr int kLine = 64 / sizeof(T);
  Sums<T> sums[count];
  for (std::int64_t i = span.begin; i < span.end; ++i) {
    const T* row = rows.row(i) + at;
    const T* later = asks ? rows.later(i) + at : row;
    const f32v scale = scaled ? rows.scale(i) : f32v{};
    for (int k = 0; k < count; ++k) {
      if (scaled) {
        sums[k].add(row + k * kLength, scale);
      } else {
        sums[k].add(row + k * kLength);
      }
      if (asks && k * kLength % kLine == 0) __builtin_prefetch(later + k * kLength);
    }
  }
  for (int k = 0; k < count; ++k) sums[k].put(out + at + k * kLength, factor, rows.streaming);
}

// The elements that are too few for a whole load.
template <bool scaled, class T, class Index>
OXY_INLINE void sum_rest(const Rows<T, Index>& rows, BagSpan span, f32v factor, T* out,
                         std::int64_t at) {
  sweep(at, rows.dim, [&](std::int64_t j, auto count) {
    f32v total = {};
    for (std::int64_t i = span.begin; i < span.end; ++i) {
      const f32v v = load(rows.row(i) + j, count);
      total += scaled ? v * rows.scale(i) : v;
    }
    store(out + j, total * factor, count);
  });
}

template <bool asks, bool scaled, class T, class Index>
OXY_INLINE void sum_bag(const Rows<T, Index>& rows, BagSpan span, f32v factor, T* out) {
  constexpr int kLength = Sums<T>::length;
  const std::int64_t at = blocks<8 * kLanes / kLength>(0, rows.dim, kLength, [&](auto i, auto n) {
    sum_block<decltype(n)::value, asks, scaled>(rows, span, factor, out, i);
  });
  if (at < rows.dim) sum_rest<scaled>(rows, span, factor, out, at);
}

// A bag of one row, unscaled, is that row.
template <bool asks, class T, class Index>
OXY_INLINE void copy_row(const Rows<T, Index>& rows, std::int64_t i, T* out) {
  const std::int64_t bytes = rows.dim * std::int64_t{sizeof(T)};
  const auto* row = reinterpret_cast<const char*>(rows.row(i));
  const auto* later = asks ? reinterpret_cast<const char*>(rows.later(i)) : row;
  auto* to = reinterpret_cast<char*>(out);
  // Streamed stores want to follow each other closely.
  const std::int64_t at = blocks<8>(0, bytes, kVectorBytes, [&](auto i, auto n) {
    f32v parts[decltype(n)::value];
    int k = 0;
    for (f32v& part : parts) part = load(reinterpret_cast<const float*>(row + i) + kLanes * k++);
    for (int byte = 0; asks && byte < kVectorBytes * k; byte += 64) {
      __builtin_prefetch(later + i + byte);
    }
    auto* next = reinterpret_cast<float*>(to + i);
    for (const f32v part : parts) {
      if (rows.streaming) {
        stream(next, part);
      } else {
        store(next, part);
      }
      next += kLanes;
    }
  });
  std::memcpy(to + at, row + at, bytes - at);
}

template <bool asks, bool scaled, class T, class Index>
static void sum_bags(const EmbeddingBagArgs& args, const BagRange& range) {
  const EmbeddingTable& table = args.tables[range.table];
  const std::int64_t stride = args.table_count * args.dim;
  T* out = static_cast<T*>(args.out) + range.first * stride + range.table * args.dim;
  const Rows<T, Index> rows{
      .weight = static_cast<const T*>(table.weight),
      .stride = table.row_stride,
      .indices = static_cast<const Index*>(table.indices),
      .last = table.index_count - 1,
      .scales = static_cast<const T*>(table.scales),
      .dim = args.dim,
      .streaming = args.stream && is_aligned(out, kVectorBytes) &&
                   stride * std::int64_t{sizeof(T)} % kVectorBytes == 0,
  };
  for (std::int64_t bag = range.first; bag < range.last; ++bag, out += stride) {
    const BagSpan span = bag_span(table, bag, args.bags);
    const std::int64_t length = span.end - span.begin;
    if (!scaled && length == 1) {
      copy_row<asks>(rows, span.begin, out);
      continue;
    }
    const f32v factor = splat(args.mean && length > 0 ? 1.0f / static_cast<float>(length) : 1.0f);
    sum_bag<asks, scaled>(rows, span, factor, out);
  }
}

template <class T, class Index>
static void table_bags(const EmbeddingBagArgs& args, const BagRange& range) {
  const EmbeddingTable& table = args.tables[range.table];
  if (table.scales) {
    sum_bags<true, true, T, Index>(args, range);
  } else if (table.rows * table.row_stride * std::int64_t{sizeof(T)} > kNearTable) {
    sum_bags<true, false, T, Index>(args, range);
  } else {
    sum_bags<false, false, T, Index>(args, range);
  }
}

static void embedding_bag(const EmbeddingBagArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    for_each_range(args, begin, end, [&](const BagRange& range, auto index) {
      table_bags<T, decltype(index)>(args, range);
    });
  });
  if (args.stream) stream_end();
}

}  // namespace oxytorch::OXY_LEVEL
