#include "ops/_quantized/entry.h"
#include "ops/embedding_bag/entry.h"
#include "ops/quantized_embedding_bag/kernel.h"

namespace oxytorch {

static constexpr const char* kOp = "quantized_embedding_bag";

static BagRows rows_of_bytes(const Tensor& weight, const std::string& out_dtype) {
  if (weight.dtype_code() != aoti_torch_dtype_uint8()) {
    fail(kOp, "weights", "of dtype uint8", dtype_name(weight.dtype_code()));
  }
  if (weight.dim() != 2 || weight.size(1) <= kRowEnd) {
    fail(kOp, "weights", "of shape [rows, dim + 8]", describe(weight.sizes()));
  }
  DType dtype = DType::float32;
  switch (parse_number(kOp, "out_dtype", out_dtype)) {
    case Number::float32:
      break;
    case Number::bfloat16:
      dtype = DType::bfloat16;
      break;
    case Number::float16:
      dtype = DType::float16;
      break;
    default:
      fail(kOp, "out_dtype", "'float32', 'bfloat16' or 'float16'", "'" + out_dtype + "'");
  }
  return {dtype, dtype_code_of(parse_number(kOp, "out_dtype", out_dtype)), weight.size(1) - kRowEnd,
          weight.size(1)};
}

static void check_count(const char* argument, const std::vector<Tensor>& given,
                        std::size_t tables) {
  if (given.size() == tables) return;
  fail(kOp, argument, "with " + std::to_string(tables) + " tensors, one per table",
       std::to_string(given.size()));
}

// As all other tables.
static void check_alike(const std::vector<Tensor>& weights, const std::vector<Tensor>& indices,
                        std::size_t i) {
  if (weights[i].dtype_code() != weights[0].dtype_code()) {
    fail(kOp, "weights", "of dtype uint8", dtype_name(weights[i].dtype_code()));
  }
  if (weights[i].dim() != 2 || weights[i].size(1) != weights[0].size(1)) {
    fail(kOp, "weights", "with " + std::to_string(weights[0].size(1)) + " columns in every table",
         describe(weights[i].sizes()));
  }
  if (indices[i].dtype_code() != indices[0].dtype_code()) {
    fail(kOp, "indices", "of dtype " + dtype_name(indices[0].dtype_code()) + " in every table",
         dtype_name(indices[i].dtype_code()));
  }
}

static Tensor quantized_embedding_bag(const std::vector<Tensor>& weights,
                                      const std::vector<Tensor>& indices,
                                      const std::vector<Tensor>& offsets, const std::string& mode,
                                      const std::optional<std::vector<Tensor>>& per_sample_weights,
                                      bool include_last_offset, const std::string& out_dtype) {
  const std::size_t count = weights.size();
  if (count == 0) fail(kOp, "weights", "with at least one table", "none");
  const BagRows rows = rows_of_bytes(weights[0], out_dtype);
  const bool mean = check_mode(kOp, mode);
  check_count("indices", indices, count);
  if (!offsets.empty()) check_count("offsets", offsets, count);
  if (per_sample_weights) check_count("per_sample_weights", *per_sample_weights, count);
  if (mean && per_sample_weights) fail(kOp, "per_sample_weights", "None with mode 'mean'", "some");
  std::vector<EmbeddingTable> tables(count);
  std::vector<BagCopies> copies(count);
  std::int64_t bags = 0;
  for (std::size_t i = 0; i < count; ++i) {
    check_alike(weights, indices, i);
    const Tensor* scales = per_sample_weights ? &(*per_sample_weights)[i] : nullptr;
    if (scales && scales->dtype_code() != aoti_torch_dtype_float32()) {
      fail(kOp, "per_sample_weights", "of dtype float32", dtype_name(scales->dtype_code()));
    }
    const BagInput input{weights[i], indices[i], offsets.empty() ? nullptr : &offsets[i], scales};
    const std::int64_t found =
        describe_table(kOp, input, include_last_offset, tables[i], copies[i]);
    if (i == 0) bags = found;
    if (found != bags) {
      fail(kOp, "offsets", "with " + std::to_string(bags) + " bags in every table",
           std::to_string(found));
    }
  }
  return embedding_entry(kOp, quantized_embedding_bag_copies, rows, tables, bags, mean);
}

OXY_OP(quantized_embedding_bag,
       "(Tensor[] weights, Tensor[] indices, Tensor[] offsets, str mode=\"sum\", "
       "Tensor[]? per_sample_weights=None, bool include_last_offset=False, "
       "str out_dtype=\"float32\") -> Tensor",
       quantized_embedding_bag)

}  // namespace oxytorch
