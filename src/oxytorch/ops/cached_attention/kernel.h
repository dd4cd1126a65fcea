#pragma once

#include "ops/_attention/args.h"

namespace oxytorch {

// Most query rows of one item, keys taken at a time, and head_dim at most.
inline constexpr std::int64_t kCachedRows = 128;
inline constexpr std::int64_t kCachedKeys = 64;
inline constexpr std::int64_t kCachedMostDim = 256;

// Keys of a split are counted in these, from position 0 on: which keys are summed together then
// depends neither on threads nor on the other rows of the call.
inline constexpr std::int64_t kCachedSplit = 256;

enum class CacheType : std::int32_t { float32, bfloat16, int8 };

// What items are. write: rows of key and value, in the order batch, position, kv head. attend:
// blocks of query rows times splits of keys. combine: query rows, joined from all splits.
enum class CachedPhase : std::int32_t { write, attend, combine };

// One of key and value: new rows, and the cache they go to.
struct CachedTensor {
  const void* rows;
  AttentionStrides strides;
  void* cache;
  AttentionStrides cache_strides;
  float* scales;  // [batch, kv_heads, capacity], int8 only
  std::int64_t scale_strides[2];
};

// A sequence of the call. row: of the cache. start: positions that are there already. Its keys from
// first_key on are cut into splits of split_keys, by its own length alone: which keys are summed
// together does not depend on the call's other sequences.
struct CachedSequence {
  std::int64_t row, start, first_key, split_keys, splits;
};

// cos or sin, or the weight of a norm.
struct CachedFactor {
  const void* data;  // may be null
  std::int64_t strides[2];
  DType dtype;
};

// The query rows of a kv head are numbered position by position, heads of its group innermost.
struct CachedAttentionArgs {
  CachedPhase phase;
  CacheType cache_type;
  DType dtype;  // of query, key, value and out
  const void* query;
  AttentionStrides query_strides;
  CachedTensor key, value;
  CachedFactor cos, sin, query_norm, key_norm;
  MaskView mask;
  const void* beams;  // may be null
  std::int64_t beams_stride;
  bool beams_are_wide;  // int64, else int32
  const void* sinks;    // may be null
  DType sinks_dtype;
  void* out;        // [batch, length, heads, dim]
  float* partials;  // of each item and row: sums [dim], top, total; null with one split
  const CachedSequence* sequences;  // [batch]
  std::int64_t kv_heads, group, length, dim, rotary_dim;
  std::int64_t rows, row_blocks;  // rows of an item, and items that share keys
  std::int64_t splits;            // at most of a sequence
  std::int64_t window;            // 0: none
  float scale, softcap, eps;
  bool interleaved, causal, write_in_attend;
};

}  // namespace oxytorch

OXY_KERNEL(cached_attention, CachedAttentionArgs)
