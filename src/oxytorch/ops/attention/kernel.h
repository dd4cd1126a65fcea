#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// Most query rows of one work item, and keys taken at a time.
inline constexpr std::int64_t kAttentionRows = 192;
inline constexpr std::int64_t kAttentionKeys = 128;
inline constexpr std::int64_t kAttentionMostDim = 256;

enum class AttentionMask : std::int32_t { none, additive, keep };

// Strides, in elements, of [batch, heads, length, dim]; that of dim is 1, but for a mask's keys.
struct AttentionStrides {
  std::int64_t batch, head, row, last;
};

// Items are blocks of `rows` query rows of one head of one batch entry.
struct AttentionArgs {
  const void* query;
  const void* key;
  const void* value;
  const void* mask;
  void* out;
  AttentionStrides query_strides, key_strides, value_strides, mask_strides, out_strides;
  std::int64_t heads;
  std::int64_t heads_per_key_head;
  std::int64_t length;
  std::int64_t keys;
  std::int64_t dim;
  std::int64_t rows;
  std::int64_t blocks;  // items of one head
  float scale;
  bool causal;
  DType dtype;
  DType mask_dtype;
  AttentionMask mask_kind;
};

}  // namespace oxytorch

OXY_KERNEL(attention, AttentionArgs)
