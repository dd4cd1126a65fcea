// One block of keys for a group of query rows: scores, their softmax, and the values they weigh.
#pragma once

#include "core/functions.h"
#include "core/running_softmax.h"
#include "core/sizes.h"
#include "ops/cached_attention/operands.h"

namespace oxytorch::OXY_LEVEL {

// What is known of `lanes` query rows stands in vectors: twice, where these have more lanes.

template <int lanes>
OXY_INLINE f32v swapped_copies(f32v v) {
  if constexpr (lanes == kLanes) return v;
#if defined(__AVX512F__)
  const auto whole = reinterpret_cast<__m512>(v);
  return reinterpret_cast<f32v>(_mm512_shuffle_f32x4(whole, whole, 0x4e));
#else
  return v;
#endif
}

// A vector over rows and the keys that stand in it: lane i has the value of key i / lanes.
template <int lanes>
OXY_INLINE f32v of_keys(const float* values) {
  if constexpr (lanes == kLanes) return splat(values[0]);
#if defined(__AVX512F__)
  return reinterpret_cast<f32v>(
      _mm512_insertf32x8(_mm512_set1_ps(values[0]), _mm256_set1_ps(values[1]), 1));
#else
  return splat(values[0]);
#endif
}

// Rows of the cache that are wanted soon: the products touch too many rows at a time for the
// processor to foresee them.
struct Ahead {
  const char* rows;      // may be null
  std::int64_t stride;   // in bytes
  std::int64_t element;  // bytes of one

  // Asks for `count` elements of row `row`.
  OXY_MEMBER void ask(std::int64_t row, std::int64_t count) const {
    if (!rows) return;
    const char* from = rows + row * stride;
    for (std::int64_t i = 0; i < count * element; i += 64) __builtin_prefetch(from + i);
  }
};

// scores[keys, lanes] = queries times rows of keys, each with the scale of its row and key.
template <class Operands, int lanes, int keys>
OXY_INLINE void score_tile(const typename Operands::Unit* queries,
                           const typename Operands::Key* rows, std::int64_t stride,
                           std::int64_t units, const float* row_scales, const float* key_scales,
                           float* scores) {
  using Unit = typename Operands::Unit;
  using Sum = typename Operands::template SumOf<lanes>;
  using Float = typename Wide<lanes>::Float;
  Sum sums[2][keys] = {};
  for (std::int64_t unit = 0; unit < units; unit += 2) {
    for (int chain = 0; chain < 2; ++chain) {
      const Sum many = load_as<Sum>(queries + (unit + chain) * lanes);
      for (int k = 0; k < keys; ++k) {
        const Unit one = load_as<Unit>(rows + k * stride + (unit + chain) * Operands::kDepth);
        sums[chain][k] = Operands::multiply(sums[chain][k], many, one);
      }
    }
  }
  const Float scale = load_as<Float>(row_scales);
  for (int k = 0; k < keys; ++k) {
    Float score = __builtin_convertvector(sums[0][k] + sums[1][k], Float) * scale;
    if (key_scales) score *= key_scales[k];
    std::memcpy(scores + k * lanes, &score, sizeof score);
  }
}

// Keys beyond `keys`, up to an even number, get minus infinity.
template <class Operands, int lanes>
static void score_block(const typename Operands::Unit* queries, const typename Operands::Key* rows,
                        std::int64_t stride, std::int64_t keys, std::int64_t width,
                        const float* row_scales, const float* key_scales, const Ahead& ahead,
                        float* scores) {
  const std::int64_t units = width / Operands::kDepth;
  std::int64_t k = 0;
  for (; k + kKeyTile <= keys; k += kKeyTile) {
    for (int i = 0; i < kKeyTile; ++i) ahead.ask(k + i, width);
    score_tile<Operands, lanes, kKeyTile>(queries, rows + k * stride, stride, units, row_scales,
                                          key_scales ? key_scales + k : nullptr,
                                          scores + k * lanes);
  }
  for (; k < keys; ++k) {
    score_tile<Operands, lanes, 1>(queries, rows + k * stride, stride, units, row_scales,
                                   key_scales ? key_scales + k : nullptr, scores + k * lanes);
  }
  for (int lane = 0; keys % 2 && lane < lanes; ++lane) scores[k * lanes + lane] = kMinusInfinity;
}

OXY_INLINE void cap_scores(float* scores, std::int64_t count, float cap) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const f32v s = load(scores + i);
    const f32v tangent = 2.0f * sigmoid(s * (2.0f / cap), 0.0f) - 1.0f;
    store(scores + i, s > kMinusInfinity ? tangent * cap : s);
  }
}

// Keys that each lane's row sees are first to last.
struct Seen {
  i32v first, last;
};

template <int lanes>
OXY_INLINE void hide(float* scores, std::int64_t count, std::int64_t at, const Seen& seen) {
  i32v key = reinterpret_cast<i32v>(lane_numbers() / lanes) + static_cast<std::int32_t>(at);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const f32v s = load(scores + i);
    store(scores + i, (key >= seen.first) & (key <= seen.last) ? s : splat(kMinusInfinity));
    key += kLanes / lanes;
  }
}

// The mask for `lanes` rows whose elements begin at `offsets`.
template <int lanes, class Change>
OXY_INLINE void change_scores(float* scores, std::int64_t keys, const std::int64_t* offsets,
                              std::int64_t step, Change change) {
  bool same = true;
  for (int lane = 1; lane < lanes; ++lane) same &= offsets[lane] == offsets[0];
  for (std::int64_t k = 0; k < keys; ++k) {
    float* row = scores + k * lanes;
    if (same) {
      const auto changed = change(offsets[0] + k * step);
      for (int lane = 0; lane < lanes; ++lane) row[lane] += changed;
    } else {
      for (int lane = 0; lane < lanes; ++lane) row[lane] += change(offsets[lane] + k * step);
    }
  }
}

template <int lanes, class T>
static void apply_mask(const MaskView& mask, T, float* scores, std::int64_t keys,
                       const std::int64_t* offsets) {
  const auto changed = [&](auto change) {
    change_scores<lanes>(scores, keys, offsets, mask.strides.last, change);
  };
  if (mask.kind == AttentionMask::keep) {
    const auto* kept = static_cast<const std::uint8_t*>(mask.data);
    changed([&](std::int64_t i) { return kept[i] ? 0.0f : kMinusInfinity; });
  } else if (mask.dtype == DType::float32) {
    const auto* added = static_cast<const float*>(mask.data);
    changed([&](std::int64_t i) { return added[i]; });
  } else {
    const auto* added = static_cast<const T*>(mask.data);
    changed([&](std::int64_t i) { return load(added + i, 1)[0]; });
  }
}

// Exponentials of two keys' scores as units of weights, `lanes` rows side by side.

template <int lanes>
OXY_INLINE void put_weights(Float32Operands, const f32v (&e)[2], float* units) {
  store(units, e[0]);
  if (lanes == kLanes) store(units + kLanes, e[1]);
}

template <int lanes>
OXY_INLINE void put_pairs(u32v first, u32v second, std::uint32_t* units) {
  if constexpr (lanes == kLanes) {
    const u32v pairs = (first & 0xffff) | second << 16;
    std::memcpy(units, &pairs, sizeof pairs);
  } else {
    using Whole = typename Wide<lanes>::Whole;
    Whole halves[2];
    std::memcpy(halves, &first, sizeof halves);
    const Whole pairs = (halves[0] & 0xffff) | halves[1] << 16;
    std::memcpy(units, &pairs, sizeof pairs);
  }
}

#if OXY_HAS_BF16_DOT
template <int lanes>
OXY_INLINE void put_weights(Bf16Operands, const f32v (&e)[2], std::uint32_t* units) {
  put_pairs<lanes>(zero_extend(narrow(e[0], bf16{})), zero_extend(narrow(e[1], bf16{})), units);
}
#endif

template <int lanes>
OXY_INLINE void put_weights(CodeOperands, const f32v (&e)[2], std::uint32_t* units) {
  const auto whole = [](f32v v) {
    return reinterpret_cast<u32v>(__builtin_convertvector(nearest(v), i32v));
  };
  put_pairs<lanes>(whole(e[0]), whole(e[1]), units);
}

// Turns scores of `keys` keys (and one more if that is odd) into weights relative to the block's
// own top. Returns that top and their total, before `key_factors` multiply them.
template <class Operands, int lanes>
static Running<f32v> weigh(const float* scores, std::int64_t keys, const float* key_factors,
                           typename Operands::Unit* weights) {
  using Accuracy = typename Operands::Accuracy;
  constexpr std::int64_t kStep = 2 * lanes;
  const std::int64_t count = round_up(keys, 2) * lanes;
  f32v top = splat(kMinusInfinity);
  for (std::int64_t i = 0; i < count; i += kLanes) top = maximum(load(scores + i), top);
  top = maximum(swapped_copies<lanes>(top), top);
  const f32v shift = shift_of(top);
  f32v totals[2] = {};
  for (std::int64_t i = 0; i < count; i += kStep) {
    f32v e[2] = {};
    for (int half = 0; half < kStep / kLanes; ++half) {
      e[half] = decay(shift - load(scores + i + half * kLanes), Accuracy{});
      totals[half] += e[half];
      if (key_factors) e[half] *= of_keys<lanes>(key_factors + i / lanes + half);
    }
    put_weights<lanes>(Operands{}, e, weights + i / Operands::kDepth);
  }
  const f32v total = totals[0] + totals[1];
  return {top, lanes == kLanes ? total : total + swapped_copies<lanes>(total)};
}

// How sums before a block and those of the block add up, by row.
struct Factors {
  alignas(64) float before[kLanes];
  alignas(64) float block[kLanes];
};

static Factors join(Running<f32v>& running, const Running<f32v>& block) {
  Factors factors;
  store(factors.before, raise_top(running, block.top, 0.0f));
  const f32v own = decay(shift_of(running.top) - block.top, 0.0f);
  running.total += block.total * own;
  store(factors.block, own);
  return factors;
}

// sums[rows, 2 * kLanes] = sums * before + weights * values * block.
template <class Operands, int lanes, int rows>
OXY_INLINE void value_tile(const typename Operands::Unit* weights,
                           const typename Operands::Value* values, std::int64_t stride,
                           std::int64_t keys, const float* before, const float* block,
                           const Ahead& ahead, float* sums, std::int64_t width) {
  using Sum = typename Operands::template SumOf<kLanes>;
  constexpr int kDepth = Operands::kDepth;
  Sum found[rows][2] = {};
  for (std::int64_t k = 0; k < keys; k += kDepth) {
    const auto* first = values + k * stride;
    Sum two[2];
    for (int i = 0; i < kDepth; ++i) ahead.ask(k + i, 2 * kLanes);
    // The weight of a row that is not there is zero.
    Operands::load_pair(first, k + 1 < keys ? first + stride : first, two);
    for (int r = 0; r < rows; ++r) {
      const auto weight = weights[k / kDepth * lanes + r];
      for (int v = 0; v < 2; ++v) found[r][v] = Operands::multiply(found[r][v], two[v], weight);
    }
  }
  for (int r = 0; r < rows; ++r) {
    f32v ordered[2];
    Operands::in_order(found[r], ordered);
    for (int v = 0; v < 2; ++v) {
      float* to = sums + r * width + v * kLanes;
      store(to, load(to) * before[r] + ordered[v] * block[r]);
    }
  }
}

template <class Operands, int lanes>
static void add_values(const typename Operands::Unit* weights,
                       const typename Operands::Value* values, std::int64_t stride,
                       std::int64_t keys, const Factors& factors, const Ahead& ahead, float* sums,
                       std::int64_t rows, std::int64_t width) {
  const auto tiles = [&](auto count, std::int64_t row) {
    for (std::int64_t i = 0; i < width; i += 2 * kLanes) {
      // Once for all rows.
      const bool first = row == 0 && ahead.rows;
      const Ahead part{first ? ahead.rows + i * ahead.element : nullptr, ahead.stride,
                       ahead.element};
      value_tile<Operands, lanes, decltype(count)::value>(weights + row, values + i, stride, keys,
                                                          factors.before + row, factors.block + row,
                                                          part, sums + row * width + i, width);
    }
  };
  std::int64_t row = 0;
  for (; row + kRowTile <= rows; row += kRowTile) tiles(Count<kRowTile>{}, row);
  if (kRowTile > 4 && rows - row > 2) {
    for (; row < rows; row += 4) tiles(Count<4>{}, row);
  } else if (rows - row > 1) {
    for (; row < rows; row += 2) tiles(Count<2>{}, row);
  }
  for (; row < rows; ++row) tiles(Count<1>{}, row);
}

}  // namespace oxytorch::OXY_LEVEL
