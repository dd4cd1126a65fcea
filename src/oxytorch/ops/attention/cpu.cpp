#include <cmath>

#include "core/math_mode.h"
#include "core/parallel.h"
#include "ops/_attention/entry.h"
#include "ops/attention/kernel.h"

namespace oxytorch {

static constexpr const char* kAttention = "attention";

static void check_heads(const char* argument, const Tensor& tensor, const Tensor& query) {
  if (tensor.dim() != 4 || tensor.size(0) != query.size(0) || tensor.size(3) != query.size(3)) {
    fail(kAttention, argument,
         "of shape [" + std::to_string(query.size(0)) + ", heads, keys, " +
             std::to_string(query.size(3)) + "]",
         describe(tensor.sizes()));
  }
  if (tensor.size(1) == 0 ? query.size(1) != 0 : query.size(1) % tensor.size(1) != 0) {
    fail(kAttention, argument,
         "with a number of heads that divides the query's " + std::to_string(query.size(1)),
         std::to_string(tensor.size(1)));
  }
}

// Large blocks read the keys less often; there should be a few of them for every thread.
static std::int64_t rows_of_item(std::int64_t heads, std::int64_t length) {
  std::uint32_t threads = 1;
  check_call(torch_get_num_threads(&threads), "get_num_threads");
  constexpr std::int64_t kLeast = 24;
  std::int64_t blocks = (length + kAttentionRows - 1) / kAttentionRows;
  while (heads * blocks < 3 * threads && length / (blocks + 1) >= kLeast) ++blocks;
  return blocks > 0 ? (length + blocks - 1) / blocks : 1;
}

static std::int64_t check_dim(const Tensor& query) {
  if (query.dim() != 4) {
    fail(kAttention, "query", "of shape [batch, heads, length, dim]", describe(query.sizes()));
  }
  const std::int64_t dim = query.size(3);
  if (dim == 0 || dim > kAttentionMostDim) {
    fail(kAttention, "query", "of at most " + std::to_string(kAttentionMostDim) + " in dim",
         std::to_string(dim));
  }
  return dim;
}

static Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                        const std::optional<Tensor>& mask, const std::optional<double>& scale,
                        bool is_causal, bool unseen_as_nan) {
  AttentionArgs args{};
  args.dtype = check_dtype(kAttention, "query", query);
  const std::int64_t dim = check_dim(query);
  check_same_dtype(kAttention, "key", key, query);
  check_same_dtype(kAttention, "value", value, query);
  check_heads("key", key, query);
  check_shape(kAttention, "value", value, key.sizes());
  Tensor query_copy, key_copy, value_copy;
  const Tensor& q = dense_rows(query, query_copy);
  const Tensor& k = dense_rows(key, key_copy);
  const Tensor& v = dense_rows(value, value_copy);
  const std::int64_t batch = query.size(0), heads = query.size(1), length = query.size(2);
  const std::int64_t keys = key.size(2);
  if (mask) {
    args.mask = describe_mask(kAttention, *mask, args.dtype, {batch, heads, length, keys}, false);
  }
  // In memory [batch, length, heads, dim]: what follows wants the heads of a row side by side.
  const std::int64_t sizes[] = {batch, heads, length, dim};
  const std::int64_t row = heads * dim;
  const std::int64_t strides[] = {(length > 1 ? length : 1) * row, dim, row, 1};
  Tensor out = empty_strided(sizes, strides, 4, query.dtype_code());
  args.query = q.data();
  args.key = k.data();
  args.value = v.data();
  args.out = out.mutable_data();
  args.query_strides = strides_of(q);
  args.key_strides = strides_of(k);
  args.value_strides = strides_of(v);
  args.out_strides = {strides[0], strides[1], strides[2], 1};
  args.heads = heads;
  args.heads_per_key_head = key.size(1) > 0 ? heads / key.size(1) : 1;
  args.length = length;
  args.keys = keys;
  args.dim = dim;
  args.rows = rows_of_item(batch * heads, length);
  args.blocks = (length + args.rows - 1) / args.rows;
  args.scale = static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(dim)));
  args.causal = is_causal;
  args.unseen = unseen_as_nan ? std::nanf("") : 0.0f;
  args.rounds_products = args.dtype == DType::float32 && rounds_products();
  run(attention_copies, args, batch * heads * args.blocks, args.rows * keys * dim / 4 + 1);
  return out;
}

OXY_OP(attention,
       "(Tensor query, Tensor key, Tensor value, Tensor? mask=None, float? scale=None, "
       "bool is_causal=False, bool unseen_as_nan=False) -> Tensor",
       attention)

}  // namespace oxytorch
