#include "ops/quantized_embedding_bag/kernel.h"

#include "ops/_quantized/numbers.h"
#include "ops/embedding_bag/bags.h"

namespace oxytorch::OXY_LEVEL {

// The rows of one table.
template <class Index>
struct ByteRowsOfTable {
  const std::uint8_t* weight;
  std::int64_t stride;
  const Index* indices;
  std::int64_t last;  // index into `indices`
  const float* scales;
  std::int64_t dim;

  const std::uint8_t* row(std::int64_t i) const { return weight + indices[i] * stride; }
  // As for rows of numbers, a wrong address does no harm.
  const std::uint8_t* later(std::int64_t i) const {
    return row(i + kAhead < last ? i + kAhead : last);
  }
};

// What bytes of a row stand for: scale * byte + least.
struct RowNumbers {
  float scale, least;
};

template <bool scaled, class Index>
OXY_INLINE RowNumbers numbers_of(const ByteRowsOfTable<Index>& rows, const std::uint8_t* row,
                                 std::int64_t i) {
  RowNumbers numbers;
  static_assert(sizeof numbers == kRowEnd);
  std::memcpy(&numbers, row + rows.dim, sizeof numbers);
  if (!scaled) return numbers;
  return {numbers.scale * rows.scales[i], numbers.least * rows.scales[i]};
}

// What sums of bytes alone would be is large, and cancels: so each number is made for itself.
template <class Count>
OXY_INLINE f32v load_numbers(const std::uint8_t* p, const RowNumbers& numbers, Count count) {
#if defined(__FMA__)
  const f32v whole = __builtin_convertvector(load_whole(p, count), f32v);
  return whole * numbers.scale + numbers.least;
#else
  // Products that are rounded are to be no larger than numbers.
  constexpr float kMiddle = 128.0f;
  const f32v whole = __builtin_convertvector(load_whole(p, count), f32v) - kMiddle;
  return whole * numbers.scale + (numbers.least + kMiddle * numbers.scale);
#endif
}

// Sums `count` vectors from element `at` on. Where `asks`, asks for the same part of a later row.
template <int count, bool asks, bool scaled, class T, class Index>
OXY_INLINE void sum_block(const ByteRowsOfTable<Index>& rows, BagSpan span, f32v factor, T* out,
                          std::int64_t at, bool streaming) {
  f32v sums[count] = {};
  for (std::int64_t i = span.begin; i < span.end; ++i) {
    const std::uint8_t* row = rows.row(i);
    const std::uint8_t* later = asks ? rows.later(i) : row;
    const RowNumbers numbers = numbers_of<scaled>(rows, row, i);
    for (int k = 0; k < count; ++k) {
      const std::int64_t from = at + k * kLanes;
      sums[k] += load_numbers(row + from, numbers, Whole{});
      if (asks && (k * kLanes) % 64 == 0) __builtin_prefetch(later + from);
    }
    if (asks && at == 0) __builtin_prefetch(later + rows.dim + kRowEnd - 1);
  }
  for (int k = 0; k < count; ++k) {
    const f32v result = sums[k] * factor;
    if (streaming) {
      stream(out + at + k * kLanes, result);
    } else {
      store(out + at + k * kLanes, result);
    }
  }
}

// The elements that are too few for a whole vector.
template <bool scaled, class T, class Index>
OXY_INLINE void sum_rest(const ByteRowsOfTable<Index>& rows, BagSpan span, f32v factor, T* out,
                         std::int64_t at) {
  f32v total = {};
  const std::int64_t count = rows.dim - at;
  for (std::int64_t i = span.begin; i < span.end; ++i) {
    const std::uint8_t* row = rows.row(i);
    const RowNumbers numbers = numbers_of<scaled>(rows, row, i);
    total += load_numbers(row + at, numbers, count);
  }
  store(out + at, total * factor, count);
}

template <bool asks, bool scaled, class T, class Index>
static void sum_bags(const EmbeddingBagArgs& args, const BagRange& range) {
  const EmbeddingTable& table = args.tables[range.table];
  const std::int64_t stride = args.table_count * args.dim;
  T* out = static_cast<T*>(args.out) + range.first * stride + range.table * args.dim;
  const ByteRowsOfTable<Index> rows{
      .weight = static_cast<const std::uint8_t*>(table.weight),
      .stride = table.row_stride,
      .indices = static_cast<const Index*>(table.indices),
      .last = table.index_count - 1,
      .scales = static_cast<const float*>(table.scales),
      .dim = args.dim,
  };
  const bool streaming = args.stream && is_aligned(out, kVectorBytes) &&
                         stride * std::int64_t{sizeof(T)} % kVectorBytes == 0;
  for (std::int64_t bag = range.first; bag < range.last; ++bag, out += stride) {
    const BagSpan span = bag_span(table, bag, args.bags);
    const std::int64_t length = span.end - span.begin;
    const f32v factor = splat(args.mean && length > 0 ? 1.0f / static_cast<float>(length) : 1.0f);
    const std::int64_t at = blocks<8>(0, args.dim, kLanes, [&](std::int64_t i, auto n) {
      sum_block<decltype(n)::value, asks, scaled>(rows, span, factor, out, i, streaming);
    });
    if (at < args.dim) sum_rest<scaled>(rows, span, factor, out, at);
  }
}

static void quantized_embedding_bag(const EmbeddingBagArgs& args, std::int64_t begin,
                                    std::int64_t end) {
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    for_each_range(args, begin, end, [&](const BagRange& range, auto index) {
      using Index = decltype(index);
      const EmbeddingTable& table = args.tables[range.table];
      if (table.scales) {
        sum_bags<true, true, T, Index>(args, range);
      } else if (table.rows * table.row_stride > kNearTable) {
        sum_bags<true, false, T, Index>(args, range);
      } else {
        sum_bags<false, false, T, Index>(args, range);
      }
    });
  });
  if (args.stream) stream_end();
}

}  // namespace oxytorch::OXY_LEVEL
