#include "ops/quantized_embedding_bag/entry.h"

namespace oxytorch {

static Tensor quantized_embedding_bag(const Tensor& weight, const Tensor& indices,
                                      const std::optional<Tensor>& offsets, const std::string& mode,
                                      const std::optional<Tensor>& per_sample_weights,
                                      bool include_last_offset, const std::string& out_dtype) {
  constexpr const char* kOp = "quantized_embedding_bag";
  check_table_of_bytes(kOp, "weight", weight);
  const BagRows rows = rows_of_bytes(kOp, weight, out_dtype);
  const bool mean = check_mode(kOp, mode);
  if (per_sample_weights && mean) {
    fail(kOp, "per_sample_weights", "None with mode 'mean'", describe(per_sample_weights->sizes()));
  }
  if (per_sample_weights && per_sample_weights->dtype_code() != aoti_torch_dtype_float32()) {
    fail(kOp, "per_sample_weights", "of dtype float32",
         dtype_name(per_sample_weights->dtype_code()));
  }
  std::vector<EmbeddingTable> tables(1);
  BagCopies copies;
  const BagInput input{weight, indices, offsets ? &*offsets : nullptr,
                       per_sample_weights ? &*per_sample_weights : nullptr};
  const std::int64_t bags = describe_table(kOp, input, include_last_offset, tables[0], copies);
  return embedding_entry(kOp, quantized_embedding_bag_copies, rows, tables, bags, mean);
}

OXY_OP(quantized_embedding_bag,
       "(Tensor weight, Tensor indices, Tensor? offsets=None, str mode=\"sum\", "
       "Tensor? per_sample_weights=None, bool include_last_offset=False, "
       "str out_dtype=\"float32\") -> Tensor",
       quantized_embedding_bag)

}  // namespace oxytorch
