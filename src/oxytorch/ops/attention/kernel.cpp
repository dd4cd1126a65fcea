#include "ops/attention/kernel.h"

#include "core/functions.h"
#include "core/running_softmax.h"
#include "ops/_attention/turn.h"
#include "ops/attention/products.h"

namespace oxytorch::OXY_LEVEL {

// Blockwise attention with a running softmax: of each block of keys the scores, then their
// exponentials, then these times the values.

inline constexpr std::int64_t kRows = kAttentionRows;
inline constexpr std::int64_t kDim = kAttentionMostDim;
static_assert(kRows % kTileRows == 0 && kRows % 16 == 0);

// Keys taken at a time: products in tiles are so fast that more pay, since a row's largest score
// and its total are taken less often.
template <class Dot>
inline constexpr std::int64_t kKeys = kInTiles<Dot> ? 256 : 128;

template <class T>
OXY_INLINE float to_float(T value) {
  T one[kLanes] = {value};
  return load(one)[0];
}

OXY_INLINE float to_float(float value) { return value; }

// Queries as rows of units, zero beyond `dim` and beyond `rows`. Where products take many units
// along the sum together, all operands go on with zeros.

template <class T>
static void take_rows(Float32Unit, const T* from, std::int64_t stride, std::int64_t rows,
                      std::int64_t dim, float* to, std::int64_t to_stride) {
  for (std::int64_t r = 0; r < round_up(rows, kTileRows); ++r) {
    sweep(0, dim, [&](std::int64_t i, auto count) {
      store(to + r * to_stride + i, r < rows ? load(from + r * stride + i, count) : f32v{}, count);
    });
  }
}

// Keys turned round, [dim, kKeys<Float32Unit>], zero beyond `keys` up to a vector.

#if OXY_HAS_VECTORS_512

template <class T>
static void take_turned(Float32Unit, const T* from, std::int64_t stride, std::int64_t keys,
                        std::int64_t dim, float* to) {
  for (std::int64_t k = 0; k < keys; k += kLanes) {
    sweep(0, dim, [&](std::int64_t i, auto count) {
      __m512i rows[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const f32v row = k + lane < keys ? load(from + (k + lane) * stride + i, count) : f32v{};
        rows[lane] = reinterpret_cast<__m512i>(row);
      }
      turn(rows);
      const std::int64_t wide = dim - i < kLanes ? dim - i : kLanes;
      for (int lane = 0; lane < wide; ++lane) {
        _mm512_storeu_si512(to + (i + lane) * kKeys<Float32Unit> + k, rows[lane]);
      }
    });
  }
}

#else

template <class T>
static void take_turned(Float32Unit, const T* from, std::int64_t stride, std::int64_t keys,
                        std::int64_t dim, float* to) {
  for (std::int64_t k = 0; k < round_up(keys, kLanes); ++k) {
    for (std::int64_t i = 0; i < dim; ++i) {
      to[i * kKeys<Float32Unit> + k] = k < keys ? to_float(from[k * stride + i]) : 0.0f;
    }
  }
}

#endif

// Values, [keys, to_stride], zero beyond `dim` up to a vector.
template <class T>
static void take_values(Float32Unit, const T* from, std::int64_t stride, std::int64_t keys,
                        std::int64_t dim, float* to, std::int64_t to_stride) {
  for (std::int64_t k = 0; k < keys; ++k) {
    sweep(0, dim, [&](std::int64_t i, auto count) {
      store(to + k * to_stride + i, load(from + k * stride + i, count));
    });
  }
}

OXY_INLINE void put_exponentials(Float32Unit, float* to, std::int64_t i, f32v v) {
  store(to + i, v);
}

#if OXY_HAS_BF16_DOT

OXY_INLINE std::uint32_t pair_of(const bf16* from, std::int64_t left) {
  std::uint16_t low = 0, high = 0;
  if (left > 0) std::memcpy(&low, from, 2);
  if (left > 1) std::memcpy(&high, from + 1, 2);
  return low | static_cast<std::uint32_t>(high) << 16;
}

static void take_rows(Bf16Pair, const bf16* from, std::int64_t stride, std::int64_t rows,
                      std::int64_t dim, std::uint32_t* to, std::int64_t to_stride) {
  for (std::int64_t r = 0; r < round_up(rows, kRowsTogether<Bf16Pair>); ++r) {
    std::uint32_t* row = to + r * to_stride;
    const std::int64_t given = r < rows ? dim : 0;
    std::memcpy(row, from + r * stride, given / 2 * 4);
    if (given % 2) row[given / 2] = pair_of(from + r * stride + given - 1, 1);
    const std::int64_t units = divide_up(given, 2);
    std::memset(row + units, 0, (to_stride - units) * 4);
  }
}

// 16 keys at a time: a register takes one pair of each.
static void take_turned(Bf16Pair, const bf16* from, std::int64_t stride, std::int64_t keys,
                        std::int64_t dim, std::uint32_t* to) {
  constexpr std::int64_t kUnits = kUnitsTogether<Bf16Pair>;
  for (std::int64_t unit = divide_up(dim, 2); unit < round_up(divide_up(dim, 2), kUnits); ++unit) {
    std::memset(to + unit * kKeys<Bf16Pair>, 0, round_up(keys, kLanes) * 4);
  }
  for (std::int64_t k = 0; k < keys; k += kLanes) {
    const std::int64_t most = keys - k < kLanes ? keys - k : kLanes;
    std::int64_t i = 0;
    for (; most == kLanes && i + 32 <= dim; i += 32) {
      __m512i rows[16];
      for (int lane = 0; lane < 16; ++lane) {
        rows[lane] = _mm512_loadu_si512(from + (k + lane) * stride + i);
      }
      turn(rows);
      for (int pair = 0; pair < 16; ++pair) {
        _mm512_storeu_si512(to + (i / 2 + pair) * kKeys<Bf16Pair> + k, rows[pair]);
      }
    }
    for (; i < dim; i += 2) {
      std::uint32_t* row = to + i / 2 * kKeys<Bf16Pair> + k;
      for (std::int64_t lane = 0; lane < most; ++lane) {
        row[lane] = pair_of(from + (k + lane) * stride + i, dim - i);
      }
      for (std::int64_t lane = most; lane < kLanes; ++lane) row[lane] = 0;
    }
  }
}

static void take_values(Bf16Pair, const bf16* from, std::int64_t stride, std::int64_t keys,
                        std::int64_t dim, std::uint32_t* to, std::int64_t to_stride) {
  for (std::int64_t k = 0; k < round_up(keys, 2 * kUnitsTogether<Bf16Pair>); k += 2) {
    const bf16* first = from + k * stride;
    std::uint32_t* row = to + k / 2 * to_stride;
    if (k >= keys) {
      std::memset(row, 0, to_stride * 4);
      continue;
    }
    sweep(0, dim, [&](std::int64_t i, auto count) {
      const u32v low = bits_of(load(first + i, count)) >> 16;
      const u32v high = k + 1 < keys ? bits_of(load(first + stride + i, count)) : u32v{};
      const u32v pairs = low | high;
      std::memcpy(row + i, &pairs, sizeof pairs);
    });
  }
}

#if OXY_HAS_FAST_BF16_DOT

// Rows of float32 are rounded first, and then taken as those of bfloat16 are.

static void round_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t dim,
                       bf16* to) {
  for (std::int64_t r = 0; r < rows; ++r) {
    sweep(0, dim, [&](std::int64_t i, auto count) {
      store(to + r * dim + i, load(from + r * stride + i, count), count);
    });
  }
}

static void take_rows(Bf16Pair dot, const float* from, std::int64_t stride, std::int64_t rows,
                      std::int64_t dim, std::uint32_t* to, std::int64_t to_stride) {
  alignas(64) bf16 rounded[kRows * kDim];
  round_rows(from, stride, rows, dim, rounded);
  take_rows(dot, rounded, dim, rows, dim, to, to_stride);
}

static void take_turned(Bf16Pair dot, const float* from, std::int64_t stride, std::int64_t keys,
                        std::int64_t dim, std::uint32_t* to) {
  alignas(64) bf16 rounded[kKeys<Bf16Pair> * kDim];
  round_rows(from, stride, keys, dim, rounded);
  take_turned(dot, rounded, dim, keys, dim, to);
}

static void take_values(Bf16Pair dot, const float* from, std::int64_t stride, std::int64_t keys,
                        std::int64_t dim, std::uint32_t* to, std::int64_t to_stride) {
  alignas(64) bf16 rounded[kKeys<Bf16Pair> * kDim];
  round_rows(from, stride, keys, dim, rounded);
  take_values(dot, rounded, dim, keys, dim, to, to_stride);
}

#endif

OXY_INLINE void put_exponentials(Bf16Pair, std::uint32_t* to, std::int64_t i, f32v v) {
  store(reinterpret_cast<bf16*>(to) + i, v);
}

#endif

// Adds the mask's values for one query row to its scores.
template <class M>
static void add_mask(float* scores, const M* mask, std::int64_t step, std::int64_t keys) {
  if (step != 1) {
    for (std::int64_t i = 0; i < keys; ++i) scores[i] += to_float(mask[i * step]);
    return;
  }
  sweep(0, keys, [&](std::int64_t i, auto count) {
    store(scores + i, load(scores + i, count) + load(mask + i, count), count);
  });
}

static void keep(float* scores, const std::uint8_t* mask, std::int64_t step, std::int64_t keys) {
  for (std::int64_t i = 0; i < keys; ++i) scores[i] = mask[i * step] ? scores[i] : kMinusInfinity;
}

template <class T>
static void apply_mask(const AttentionArgs& args, float* scores, std::int64_t offset,
                       std::int64_t keys) {
  const std::int64_t step = args.mask.strides.last;
  if (args.mask.kind == AttentionMask::keep) {
    keep(scores, static_cast<const std::uint8_t*>(args.mask.data) + offset, step, keys);
  } else if (args.mask.dtype == DType::float32) {
    add_mask(scores, static_cast<const float*>(args.mask.data) + offset, step, keys);
  } else {
    add_mask(scores, static_cast<const T*>(args.mask.data) + offset, step, keys);
  }
}

// exp(scale score - shift), as accurate as a result of type T needs. The difference is first: the
// lowest number that hides a key is infinite in powers of two.

OXY_INLINE f32v decayed(f32v score, float scale, float shift, float) {
  return exponential(score * scale - shift);
}

template <class T>
OXY_INLINE f32v decayed(f32v score, float scale, float shift, T) {
  constexpr float kLog = 1.44269504f;
  return coarse_power_of_two((score * scale - shift) * kLog);
}

// Turns a row of scores into exponentials; returns the factor for what was summed before. Scores
// are multiplied with `scale` first.
template <class T, class Dot>
static float exponentials(Dot dot, const float* scores, float scale, typename Dot::Unit* to,
                          std::int64_t keys, std::int64_t padded, Running<float>& running) {
  f32v largest[4];
  for (f32v& v : largest) v = splat(kMinusInfinity);
  sweep_in_chains(keys, [&](std::int64_t i, auto count, int chain) {
    const f32v scaled = load(scores + i, count) * scale;
    largest[chain] = maximum(fill_tail(scaled, count, kMinusInfinity), largest[chain]);
  });
  const float factor = raise_top(running, maximum(largest), T{});
  const float shift = shift_of(running.top);
  f32v total[4] = {};
  sweep_in_chains(keys, [&](std::int64_t i, auto count, int chain) {
    const f32v e = decayed(load(scores + i, count), scale, shift, T{});
    const f32v kept = fill_tail(e, count, 0.0f);
    put_exponentials(dot, to, i, kept);
    total[chain] += kept;
  });
  for (std::int64_t i = round_up(keys, kLanes); i < padded; i += kLanes) {
    put_exponentials(dot, to, i, f32v{});
  }
  running.total += sum(total);
  return factor;
}

// Rows whose scores and exponentials stay in the nearest cache.
template <class Dot>
inline constexpr std::int64_t kChunk = kInTiles<Dot> ? 32 : 48;

// What an item computes with.
template <class Dot>
struct Operands {
  using Unit = typename Dot::Unit;
  alignas(64) Unit queries[kRows * kDim];
  alignas(64) Unit turned[kDim * kKeys<Dot>];
  alignas(64) Unit values[kKeys<Dot> * kDim];
  alignas(64) float scores[kChunk<Dot> * kKeys<Dot>];
  alignas(64) Unit weights[kChunk<Dot> * kKeys<Dot> / Dot::kDepth];
  alignas(64) float sums[kRows * kDim];
  Running<float> running[kRows];
  std::int64_t units;    // of a row of queries
  std::int64_t columns;  // of a row of values and sums
};

// Keys `at` and on, as many as `keys`, for rows `begin` to `end` of an item that begins at `first`.
template <class T, class Dot>
static void add_keys(const AttentionArgs& args, Operands<Dot>& own, std::int64_t mask,
                     std::int64_t first, std::int64_t begin, std::int64_t end, std::int64_t at,
                     std::int64_t keys) {
  constexpr std::int64_t kWeights = kKeys<Dot> / Dot::kDepth;
  const std::int64_t rows = end - begin, columns = own.columns;
  const std::int64_t together = round_up(divide_up(keys, Dot::kDepth), kUnitsTogether<Dot>);
  const std::int64_t fill = round_up(together * Dot::kDepth, kLanes);
  const bool is_masked = args.mask.kind != AttentionMask::none;
  product<Dot, false>(own.queries + begin * own.units, own.units, own.turned, kKeys<Dot>,
                      own.scores, kKeys<Dot>, rows, round_up(keys, kLanes), own.units);
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = own.scores + r * kKeys<Dot>;
    const std::int64_t place = first + begin + r;
    const std::int64_t seen = place + 1 - at;
    const std::int64_t visible = !args.causal || seen > keys ? keys : seen > 0 ? seen : 0;
    if (is_masked) {
      sweep(0, visible, [&](std::int64_t i, auto count) {
        store(row + i, load(row + i, count) * args.scale, count);
      });
      apply_mask<T>(args, row, mask + place * args.mask.strides.row + at * args.mask.strides.last,
                    visible);
    }
    const float factor =
        exponentials<T>(Dot{}, row, is_masked ? 1.0f : args.scale, own.weights + r * kWeights,
                        visible, fill, own.running[begin + r]);
    if (factor == 1.0f) continue;
    float* sums = own.sums + (begin + r) * columns;
    sweep(0, columns, [&](std::int64_t i, auto count) {
      store(sums + i, load(sums + i, count) * factor, count);
    });
  }
  for (std::int64_t r = rows; r < round_up(rows, kRowsTogether<Dot>); ++r) {
    std::memset(own.weights + r * kWeights, 0, sizeof(typename Dot::Unit) * together);
  }
  product<Dot, true>(own.weights, kWeights, own.values, columns, own.sums + begin * columns,
                     columns, rows, columns, together);
}

template <class T, class Dot>
static void write_results(const AttentionArgs& args, const Operands<Dot>& own, std::int64_t rows,
                          T* out) {
  for (std::int64_t r = 0; r < rows; ++r) {
    // Where nothing was kept, the sums are 0.
    const float total = own.running[r].total;
    const f32v factor = splat(total == 0.0f ? args.unseen : 1.0f / total);
    sweep(0, args.dim, [&](std::int64_t i, auto count) {
      store(out + r * args.out_strides.row + i,
            load(own.sums + r * own.columns + i, count) * factor, count);
    });
  }
}

template <class T, class Dot>
static void attend(const AttentionArgs& args, std::int64_t item) {
  Operands<Dot> own;
  const std::int64_t block = item % args.blocks;
  const std::int64_t head = item / args.blocks % args.heads;
  const std::int64_t batch = item / args.blocks / args.heads;
  const std::int64_t key_head = head / args.heads_per_key_head;
  const auto place = [&](const AttentionStrides& s, std::int64_t h) {
    return batch * s.batch + h * s.head;
  };
  const std::int64_t first = block * args.rows;
  const std::int64_t rows = args.length - first < args.rows ? args.length - first : args.rows;
  const T* query = static_cast<const T*>(args.query) + place(args.query_strides, head) +
                   first * args.query_strides.row;
  const T* key = static_cast<const T*>(args.key) + place(args.key_strides, key_head);
  const T* value = static_cast<const T*>(args.value) + place(args.value_strides, key_head);
  const std::int64_t mask = place(args.mask.strides, head);
  own.units = round_up(divide_up(args.dim, Dot::kDepth), kUnitsTogether<Dot>);
  own.columns = round_up(args.dim, kLanes);
  const std::int64_t columns = own.columns;

  take_rows(Dot{}, query, args.query_strides.row, rows, args.dim, own.queries, own.units);
  const std::int64_t padded_rows = round_up(rows, kRowsTogether<Dot>);
  std::memset(own.sums, 0, sizeof(float) * padded_rows * columns);

  const std::int64_t visible = first + rows < args.keys ? first + rows : args.keys;
  const std::int64_t end = args.causal ? visible : args.keys;
  for (std::int64_t at = 0; at < end; at += kKeys<Dot>) {
    const std::int64_t keys = end - at < kKeys<Dot> ? end - at : kKeys<Dot>;
    take_turned(Dot{}, key + at * args.key_strides.row, args.key_strides.row, keys, args.dim,
                own.turned);
    take_values(Dot{}, value + at * args.value_strides.row, args.value_strides.row, keys, args.dim,
                own.values, columns);
    for (std::int64_t begin = 0; begin < rows; begin += kChunk<Dot>) {
      const std::int64_t last = rows - begin < kChunk<Dot> ? rows : begin + kChunk<Dot>;
      if (args.causal && first + last <= at) continue;  // none of its rows sees these keys
      add_keys<T>(args, own, mask, first, begin, last, at, keys);
    }
  }

  T* out = static_cast<T*>(args.out) + place(args.out_strides, head) + first * args.out_strides.row;
  write_results(args, own, rows, out);
}

template <class T, class Dot>
static void attend(const AttentionArgs& args, std::int64_t begin, std::int64_t end) {
#if OXY_HAS_TILES
  if constexpr (kInTiles<Dot>) configure_tiles();
#endif
  for (std::int64_t item = begin; item < end; ++item) attend<T, Dot>(args, item);
#if OXY_HAS_TILES
  if constexpr (kInTiles<Dot>) release_tiles();
#endif
}

static void attention(const AttentionArgs& args, std::int64_t begin, std::int64_t end) {
#if OXY_HAS_FAST_BF16_DOT
  if (args.rounds_products) return attend<float, Bf16Pair>(args, begin, end);
#endif
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    attend<T, typename DotOf<T>::Dot>(args, begin, end);
  });
}

}  // namespace oxytorch::OXY_LEVEL
