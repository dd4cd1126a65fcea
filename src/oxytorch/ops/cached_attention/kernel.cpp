#include "ops/cached_attention/kernel.h"

#include "ops/cached_attention/rows.h"
#include "ops/cached_attention/tiles.h"

namespace oxytorch::OXY_LEVEL {

// Blockwise attention with a running softmax. All query rows that share a key are taken together,
// side by side in the lanes of vectors.

// What an item is: query rows [first, first + rows) of a kv head, keys [begin, end), none where its
// sequence has fewer splits.
struct Item {
  std::int64_t batch, head, first, rows, begin, end, split;
  const CachedSequence* sequence;
};

// The blocks in an order in which neighbours together are as long as any other two: late rows of
// causal attention see more keys than early ones.
OXY_INLINE std::int64_t balanced(std::int64_t block, std::int64_t blocks) {
  return block % 2 == 0 ? block / 2 : blocks - 1 - block / 2;
}

static Item item_of(const CachedAttentionArgs& args, std::int64_t index) {
  Item item{};
  item.split = index % args.splits;
  index /= args.splits;
  // Blocks of a head follow each other: its keys and values stay in the cache.
  const std::int64_t block = balanced(index % args.row_blocks, args.row_blocks);
  index /= args.row_blocks;
  item.head = index % args.kv_heads;
  item.batch = index / args.kv_heads;
  const std::int64_t all = args.length * args.group;
  item.first = block * args.rows;
  item.rows = all - item.first < args.rows ? all - item.first : args.rows;
  item.sequence = args.sequences + item.batch;
  const std::int64_t start = item.sequence->start;
  const std::int64_t early = start + item.first / args.group;
  const std::int64_t late = start + (item.first + item.rows - 1) / args.group;
  item.begin = item.sequence->first_key + item.split * item.sequence->split_keys;
  item.end = args.causal ? late + 1 : start + args.length;
  if (item.begin + item.sequence->split_keys < item.end) {
    item.end = item.begin + item.sequence->split_keys;
  }
  if (args.window > 0 && early - args.window >= item.begin) {
    item.begin = (early - args.window + 1) / kKeys * kKeys;
  }
  return item;
}

// The row of the cache that position `at` of a sequence is read from.
OXY_INLINE std::int64_t row_of(const CachedAttentionArgs& args, const Item& item, std::int64_t at) {
  if (!args.beams || at >= item.sequence->start) return item.sequence->row;
  const std::int64_t index = item.batch * args.beams_stride + at;
  return args.beams_are_wide ? static_cast<const std::int64_t*>(args.beams)[index]
                             : static_cast<const std::int32_t*>(args.beams)[index];
}

// Rows of a block, `stride` elements apart and of a multiple of kDimStep dims.
template <class Element>
struct Block {
  const Element* rows;
  std::int64_t stride;
};

OXY_INLINE void convert(const float* from, std::int64_t dim, float* to) {
  std::memcpy(to, from, sizeof(float) * dim);
}
OXY_INLINE void convert(const bf16* from, std::int64_t dim, bf16* to) {
  std::memcpy(to, from, sizeof(bf16) * dim);
}
OXY_INLINE void convert(const std::int8_t* from, std::int64_t dim, std::int8_t* to) {
  std::memcpy(to, from, dim);
}
OXY_INLINE void convert(const std::int8_t* from, std::int64_t dim, std::int16_t* to) {
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
    const i32v wide = CodeOperands::widened(from + i);
    std::memcpy(to + i, &wide, sizeof wide);
  }
  for (; i < dim; ++i) to[i] = from[i];
}
OXY_INLINE void convert(const std::int8_t* from, std::int64_t dim, bf16* to) {
  sweep(0, dim, [&](std::int64_t i, auto count) {
    const u8v codes = load_raw<u8v>(reinterpret_cast<const std::uint8_t*>(from) + i, count);
    const i32v whole = reinterpret_cast<i32v>(zero_extend(codes) << 24) >> 24;
    store(to + i, __builtin_convertvector(whole, f32v), count);
  });
}
OXY_INLINE void convert(const bf16* from, std::int64_t dim, float* to) {
  sweep(0, dim, [&](std::int64_t i, auto count) { store(to + i, load(from + i, count), count); });
}

// Rows [at, at + count) of the cache where they lie, or copied where the products cannot read them;
// `step`: copies are filled up with rows of zeros to a multiple of this.
template <class Stored, class Element>
static Block<Element> rows_of(const CachedAttentionArgs& args, const CachedTensor& tensor,
                              const Item& item, std::int64_t at, std::int64_t count,
                              std::int64_t width, std::int64_t step, Element* copy) {
  const AttentionStrides& strides = tensor.cache_strides;
  const auto* cache = static_cast<const Stored*>(tensor.cache) + item.head * strides.head;
  if constexpr (__is_same(Stored, Element)) {
    if (!args.beams && width == args.dim && count % step == 0) {
      return {cache + item.sequence->row * strides.batch + at * strides.row, strides.row};
    }
  }
  for (std::int64_t k = 0; k < count; ++k) {
    const std::int64_t row = row_of(args, item, at + k);
    Element* to = copy + k * width;
    convert(cache + row * strides.batch + (at + k) * strides.row, args.dim, to);
    if (width > args.dim) std::memset(to + args.dim, 0, sizeof(Element) * (width - args.dim));
  }
  std::memset(copy + count * width, 0, sizeof(Element) * width * (round_up(count, step) - count));
  return {copy, width};
}

// Rows of the item's own sequence from position `at` on, the next split's included.
template <class Stored>
static Ahead ahead_of(const CachedAttentionArgs& args, const CachedTensor& tensor, const Item& item,
                      std::int64_t at) {
  if (args.beams) return {};
  const AttentionStrides& strides = tensor.cache_strides;
  const auto* rows = static_cast<const Stored*>(tensor.cache) + item.sequence->row * strides.batch +
                     item.head * strides.head + at * strides.row;
  return {reinterpret_cast<const char*>(rows),
          strides.row * static_cast<std::int64_t>(sizeof(Stored)), sizeof(Stored)};
}

static void take_scales(const CachedAttentionArgs& args, const CachedTensor& tensor,
                        const Item& item, std::int64_t at, std::int64_t count, float* to) {
  const float* scales = tensor.scales + item.head * tensor.scale_strides[1];
  if (!args.beams) {
    std::memcpy(to, scales + item.sequence->row * tensor.scale_strides[0] + at,
                sizeof(float) * count);
    return;
  }
  for (std::int64_t k = 0; k < count; ++k) {
    to[k] = scales[row_of(args, item, at + k) * tensor.scale_strides[0] + at + k];
  }
}

// Scales of values become factors of weights that use all bits of 15; returns what undoes that.
static float spread_scales(float* scales, std::int64_t count) {
  const float largest = largest_magnitude(scales, count);
  const f32v factor = splat(largest > 0.0f ? 32767.0f / largest : 0.0f);
  sweep(0, count, [&](std::int64_t i, auto left) {
    store(scales + i, load(scales + i, left) * factor, left);
  });
  scales[count] = 0.0f;
  return largest / 32767.0f;
}

// The query rows of an item, in groups of `lanes`, and what is known of them so far.
template <class Operands, int lanes>
struct Rows {
  static constexpr std::int64_t kGroups = kCachedRows / lanes;
  alignas(64) typename Operands::Unit queries[kCachedRows * kDim / Operands::kDepth];
  alignas(64) float sums[kCachedRows * kDim];
  alignas(64) float scales[kCachedRows];
  Running<f32v> running[kGroups];
  Seen seen[kGroups];
  std::int32_t first[kGroups], last[kGroups];  // keys that any row of the group sees
  std::int64_t mask_offsets[kCachedRows];
};

// Positions of keys that a row sees, and where its elements of the mask begin.
template <class Operands, int lanes>
static void describe_row(const CachedAttentionArgs& args, const Item& item, std::int64_t row,
                         Rows<Operands, lanes>& rows) {
  const std::int64_t index = item.first + (row < item.rows ? row : item.rows - 1);
  const std::int64_t position = index / args.group;
  const std::int64_t at = item.sequence->start + position;
  const std::int64_t last = args.causal ? at : item.sequence->start + args.length - 1;
  const std::int64_t first = args.window > 0 ? at - args.window + 1 : 0;
  const std::int64_t group = row / lanes;
  for (int lane = static_cast<int>(row % lanes); lane < kLanes; lane += lanes) {
    rows.seen[group].first[lane] = static_cast<std::int32_t>(first);
    rows.seen[group].last[lane] = static_cast<std::int32_t>(last);
  }
  // Later rows see later keys.
  if (row % lanes == 0) rows.first[group] = static_cast<std::int32_t>(first);
  rows.last[group] = static_cast<std::int32_t>(last);
  const AttentionStrides& strides = args.mask.strides;
  rows.mask_offsets[row] = item.batch * strides.batch +
                           (item.head * args.group + index % args.group) * strides.head +
                           position * strides.row;
}

template <class Operands, int lanes>
static void take_rows(const CachedAttentionArgs& args, const Item& item, std::int64_t width,
                      Rows<Operands, lanes>& rows) {
  alignas(64) float row[kDim];
  std::memset(row + args.dim, 0, sizeof(float) * (width - args.dim));
  const std::int64_t padded = round_up(item.rows, lanes);
  const std::int64_t units = width / Operands::kDepth;
  std::memset(rows.sums, 0, sizeof(float) * padded * width);
  for (std::int64_t r = 0; r < padded; ++r) {
    describe_row(args, item, r, rows);
    auto* to = rows.queries + r / lanes * lanes * units + r % lanes;
    if (r >= item.rows) {
      for (std::int64_t i = 0; i < units; ++i) to[i * lanes] = 0;
      rows.scales[r] = 0.0f;
      continue;
    }
    const std::int64_t position = (item.first + r) / args.group;
    const std::int64_t head = item.head * args.group + (item.first + r) % args.group;
    const AttentionStrides& strides = args.query_strides;
    with_type(args.dtype, [&](auto element) {
      using T = decltype(element);
      const T* from = static_cast<const T*>(args.query) + item.batch * strides.batch +
                      head * strides.head + position * strides.row;
      prepare_row(args, from, args.query_norm, item.batch, position, row);
    });
    rows.scales[r] = args.scale * take_query(Operands{}, row, width, lanes, to);
  }
  for (std::int64_t g = 0; g < padded / lanes; ++g) rows.running[g] = {};
}

template <class Operands, int lanes>
static void change_block(const CachedAttentionArgs& args, const Rows<Operands, lanes>& rows,
                         std::int64_t group, std::int64_t at, std::int64_t keys, float* scores) {
  const std::int64_t count = round_up(keys, 2) * lanes;
  if (args.softcap > 0.0f) cap_scores(scores, count, args.softcap);
  if (args.mask.kind != AttentionMask::none) {
    std::int64_t offsets[lanes];
    for (int lane = 0; lane < lanes; ++lane) {
      offsets[lane] = rows.mask_offsets[group * lanes + lane] + at * args.mask.strides.last;
    }
    with_type(args.dtype,
              [&](auto element) { apply_mask<lanes>(args.mask, element, scores, keys, offsets); });
  }
  // The first row of the group sees the fewest late keys, the last one the fewest early ones.
  const Seen& seen = rows.seen[group];
  if (at + keys - 1 > seen.last[0] || at < seen.first[lanes - 1]) {
    hide<lanes>(scores, count, at, seen);
  }
}

// The row's mix of values, and the sink's share of nothing.
template <class T>
static void finish_row(const CachedAttentionArgs& args, std::int64_t batch, std::int64_t head,
                       std::int64_t row, const float* sums, float top, float total, T* out) {
  const std::int64_t query_head = head * args.group + row % args.group;
  if (args.sinks) {
    const float sink = args.sinks_dtype == DType::float32
                           ? static_cast<const float*>(args.sinks)[query_head]
                           : load(static_cast<const T*>(args.sinks) + query_head, 1)[0];
    const float highest = sink > top ? sink : top;
    const float shift = shift_of(highest);
    const float factor = decay(splat(shift - top), 0.0f)[0];
    const float all = total * factor + decay(splat(shift - sink), 0.0f)[0];
    total = factor > 0.0f ? all / factor : 0.0f;
  }
  // Nothing was seen: zero, as in PyTorch.
  const f32v factor = splat(total == 0.0f ? 0.0f : 1.0f / total);
  T* to =
      out + ((batch * args.length + row / args.group) * args.kv_heads * args.group + query_head) *
                args.dim;
  sweep(0, args.dim,
        [&](std::int64_t i, auto count) { store(to + i, load(sums + i, count) * factor, count); });
}

// Where an item leaves the sums, top and total of row `row`.
OXY_INLINE float* partial_of(const CachedAttentionArgs& args, std::int64_t batch, std::int64_t head,
                             std::int64_t split, std::int64_t row) {
  const std::int64_t item = (batch * args.kv_heads + head) * args.splits + split;
  return args.partials + (item * args.rows + row) * (args.dim + 2);
}

template <class Operands, int lanes>
static void leave(const CachedAttentionArgs& args, const Item& item, std::int64_t width,
                  const Rows<Operands, lanes>& rows) {
  for (std::int64_t r = 0; r < item.rows; ++r) {
    const Running<f32v>& running = rows.running[r / lanes];
    const float top = running.top[r % lanes], total = running.total[r % lanes];
    const float* sums = rows.sums + r * width;
    if (args.partials) {
      float* to = partial_of(args, item.batch, item.head, item.split, r);
      std::memcpy(to, sums, sizeof(float) * args.dim);
      to[args.dim] = top;
      to[args.dim + 1] = total;
      continue;
    }
    with_type(args.dtype, [&](auto element) {
      finish_row(args, item.batch, item.head, item.first + r, sums, top, total,
                 static_cast<decltype(element)*>(args.out));
    });
  }
}

// The scales of a block of an int8 cache.
struct Scales {
  float keys[kKeys];
  float values[kKeys + 1];
  float undo = 1.0f;  // what weights times values are multiplied with
};

template <class Operands>
static void take_scales_of_block(const CachedAttentionArgs& args, const Item& item, std::int64_t at,
                                 std::int64_t keys, Scales& scales) {
  // All of the block, also what this item does not see: rounding must not depend on items.
  const std::int64_t left = item.sequence->start + args.length - at;
  const std::int64_t block = left < kKeys ? left : kKeys;
  take_scales(args, args.key, item, at, keys, scales.keys);
  take_scales(args, args.value, item, at, block, scales.values);
  scales.values[block] = 0.0f;
  if (Operands::kIsInteger) scales.undo = spread_scales(scales.values, block);
}

// Copies of a block's rows where the products cannot read them in place, and what is found of it.
template <class Operands, int lanes>
struct Scratch {
  alignas(64) typename Operands::Key keys[kKeys * kDim];
  alignas(64) typename Operands::Value values[kKeys * kDim];
  alignas(64) float scores[kKeys * lanes];
  alignas(64) typename Operands::Unit weights[kKeys * lanes / Operands::kDepth];
  Scales scales;
#if OXY_HAS_TILES
  ValuePairs pairs;
#endif
};

template <class Operands, class Stored, int lanes>
static void attend_block(const CachedAttentionArgs& args, const Item& item, std::int64_t at,
                         std::int64_t width, Rows<Operands, lanes>& rows,
                         Scratch<Operands, lanes>& scratch) {
  constexpr bool kScaled = __is_same(Stored, std::int8_t);
  const std::int64_t keys = item.end - at < kKeys ? item.end - at : kKeys;
  constexpr std::int64_t kStep = kInTiles<Operands, lanes> ? 16 : 1;
  const auto k = rows_of<Stored>(args, args.key, item, at, keys, width, kStep, scratch.keys);
  const auto v = rows_of<Stored>(args, args.value, item, at, keys, width, 1, scratch.values);
  Ahead values_ahead = ahead_of<Stored>(args, args.value, item, at);
  Ahead keys_ahead = ahead_of<Stored>(args, args.key, item, at + kKeys);
  if (kScaled) take_scales_of_block<Operands>(args, item, at, keys, scratch.scales);
  const float* key_scales = kScaled ? scratch.scales.keys : nullptr;
  const float* value_scales = kScaled ? scratch.scales.values : nullptr;
  if constexpr (kInTiles<Operands, lanes>) {
    pair_values(v.rows, v.stride, keys, width, scratch.pairs);
  }
  for (std::int64_t group = 0; group * lanes < item.rows; ++group) {
    if (at > rows.last[group] || at + keys <= rows.first[group]) continue;
    const std::int64_t first = group * lanes;
    const std::int64_t count = item.rows - first < lanes ? item.rows - first : lanes;
    const auto* queries = rows.queries + first * width / Operands::kDepth;
    float* sums = rows.sums + first * width;
    if constexpr (kInTiles<Operands, lanes>) {
      score_in_tiles(queries, k.rows, k.stride, keys, width, rows.scales + first, key_scales,
                     scratch.scores);
    } else {
      score_block<Operands, lanes>(queries, k.rows, k.stride, keys, width, rows.scales + first,
                                   key_scales, values_ahead, scratch.scores);
    }
    change_block(args, rows, group, at, keys, scratch.scores);
    const Running<f32v> block =
        weigh<Operands, lanes>(scratch.scores, keys, value_scales, scratch.weights);
    Factors factors = join(rows.running[group], block);
    store(factors.block, load(factors.block) * scratch.scales.undo);
    if constexpr (kInTiles<Operands, lanes>) {
      add_in_tiles(scratch.weights, scratch.pairs, keys, factors, sums, count, width);
    } else {
      add_values<Operands, lanes>(scratch.weights, v.rows, v.stride, keys, factors, keys_ahead,
                                  sums, count, width);
    }
    values_ahead = keys_ahead = {};
  }
}

template <class Operands, class Stored, int lanes>
static void attend(const CachedAttentionArgs& args, std::int64_t index) {
  Rows<Operands, lanes> rows;
  Scratch<Operands, lanes> scratch;
  const Item item = item_of(args, index);
  if (item.split >= item.sequence->splits) return;
  if (args.write_in_attend) {
    const std::int64_t start = item.sequence->start;
    const std::int64_t from = item.begin > start ? item.begin : start;
    for (std::int64_t at = from; at < item.end; ++at) {
      write_position(args, item.batch, item.head, at - start);
    }
  }
  const std::int64_t width = round_up(args.dim, kDimStep);
  take_rows(args, item, width, rows);
  for (std::int64_t at = item.begin; at < item.end; at += kKeys) {
    attend_block<Operands, Stored>(args, item, at, width, rows, scratch);
  }
  leave(args, item, width, rows);
}

template <class Operands, class Stored>
static void attend_all(const CachedAttentionArgs& args, std::int64_t begin, std::int64_t end) {
  const auto each = [&](auto lanes) {
    for (std::int64_t item = begin; item < end; ++item) {
      attend<Operands, Stored, decltype(lanes)::value>(args, item);
    }
  };
#if OXY_HAS_TILES
  if constexpr (kInTiles<Operands, kLanes>) {
    configure_tiles();
    each(Count<kLanes>{});
    return release_tiles();
  }
#endif
  if (args.rows <= kFewLanes) return each(Count<kFewLanes>{});
  each(Count<kLanes>{});
}

static void attend_any(const CachedAttentionArgs& args, std::int64_t begin, std::int64_t end) {
  switch (args.cache_type) {
    case CacheType::float32:
      return attend_all<Float32Operands, float>(args, begin, end);
    case CacheType::bfloat16:
#if OXY_HAS_FAST_BF16_DOT || OXY_HAS_TILES
      // Where pairs are slow and there are no tiles, it is float32.
      if (args.dtype == DType::bfloat16) return attend_all<Bf16Operands, bf16>(args, begin, end);
#endif
      return attend_all<Float32Operands, bf16>(args, begin, end);
    case CacheType::int8:
#if OXY_HAS_TILES
      if (args.dtype == DType::bfloat16 && args.rows >= kLeastTileRowsOfCodes) {
        return attend_all<Bf16Operands, std::int8_t>(args, begin, end);
      }
#endif
      return attend_all<CodeOperands, std::int8_t>(args, begin, end);
  }
}

// Joins what the splits found of query rows [begin, end).
static void combine(const CachedAttentionArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) float sums[kDim];
  for (std::int64_t index = begin; index < end; ++index) {
    const std::int64_t row = index % args.rows;
    const std::int64_t head = index / args.rows % args.kv_heads;
    const std::int64_t batch = index / args.rows / args.kv_heads;
    const auto partial = [&](std::int64_t split) {
      return partial_of(args, batch, head, split, row);
    };
    const std::int64_t splits = args.sequences[batch].splits;
    float top = kMinusInfinity, total = 0.0f;
    for (std::int64_t split = 0; split < splits; ++split) {
      const float own = partial(split)[args.dim];
      top = own > top ? own : top;
    }
    const float shift = shift_of(top);
    std::memset(sums, 0, sizeof(float) * args.dim);
    for (std::int64_t split = 0; split < splits; ++split) {
      const float* from = partial(split);
      const f32v factor = decay(splat(shift - from[args.dim]), 0.0f);
      total += factor[0] * from[args.dim + 1];
      sweep(0, args.dim, [&](std::int64_t i, auto count) {
        store(sums + i, load(sums + i, count) + load(from + i, count) * factor, count);
      });
    }
    with_type(args.dtype, [&](auto element) {
      finish_row(args, batch, head, row, sums, top, total,
                 static_cast<decltype(element)*>(args.out));
    });
  }
}

static void cached_attention(const CachedAttentionArgs& args, std::int64_t begin,
                             std::int64_t end) {
  switch (args.phase) {
    case CachedPhase::write:
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t position = item / args.kv_heads;
        write_position(args, position / args.length, item % args.kv_heads, position % args.length);
      }
      return;
    case CachedPhase::attend:
      return attend_any(args, begin, end);
    case CachedPhase::combine:
      return combine(args, begin, end);
  }
}

}  // namespace oxytorch::OXY_LEVEL
