#pragma once

#include "ops/_attention/args.h"

namespace oxytorch {

// Most query rows of one work item.
inline constexpr std::int64_t kAttentionRows = 192;
inline constexpr std::int64_t kAttentionMostDim = 256;

// Items are blocks of `rows` query rows of one head of one batch entry.
struct AttentionArgs {
  const void* query;
  const void* key;
  const void* value;
  MaskView mask;
  void* out;
  AttentionStrides query_strides, key_strides, value_strides, out_strides;
  std::int64_t heads;
  std::int64_t heads_per_key_head;
  std::int64_t length;
  std::int64_t keys;
  std::int64_t dim;
  std::int64_t rows;
  std::int64_t blocks;  // items of one head
  float scale;
  float unseen;  // what a row that sees no key is multiplied with: 0 or NaN
  bool causal;
  bool rounds_products;  // float32 is rounded to bfloat16 before it is multiplied
  DType dtype;
};

}  // namespace oxytorch

OXY_KERNEL(attention, AttentionArgs)
