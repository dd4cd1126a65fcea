#include "ops/quantized_embedding_bag/entry.h"

namespace oxytorch {

static constexpr const char* kOp = "quantized_merged_embedding_bag";

// Whether table `i` and its indices are like the first ones.
static void check_alike(const std::vector<Tensor>& weights, const std::vector<Tensor>& indices,
                        std::size_t i) {
  check_table_of_bytes(kOp, "weights", weights[i]);
  if (weights[i].size(1) != weights[0].size(1)) {
    fail(kOp, "weights", "with " + std::to_string(weights[0].size(1)) + " columns in every table",
         std::to_string(weights[i].size(1)));
  }
  if (indices[i].dtype_code() != indices[0].dtype_code()) {
    fail(kOp, "indices", "of dtype " + dtype_name(indices[0].dtype_code()) + " in every table",
         dtype_name(indices[i].dtype_code()));
  }
}

static Tensor quantized_merged_embedding_bag(const std::vector<Tensor>& weights,
                                             const std::vector<Tensor>& indices,
                                             const std::vector<Tensor>& offsets,
                                             const std::string& mode,
                                             const std::string& out_dtype) {
  const std::size_t count = weights.size();
  if (count == 0) fail(kOp, "weights", "with at least one table", "none");
  for (const auto& [argument, list] : {std::pair{"indices", &indices}, {"offsets", &offsets}}) {
    if (list->size() != count) {
      fail(kOp, argument, "with " + std::to_string(count) + " tensors, one per table",
           std::to_string(list->size()));
    }
  }
  check_table_of_bytes(kOp, "weights", weights[0]);
  const BagRows rows = rows_of_bytes(kOp, weights[0], out_dtype);
  const bool mean = check_mode(kOp, mode);
  std::vector<EmbeddingTable> tables(count);
  std::vector<BagCopies> copies(count);
  std::int64_t bags = 0;
  for (std::size_t i = 0; i < count; ++i) {
    check_alike(weights, indices, i);
    const BagInput input{weights[i], indices[i], &offsets[i], nullptr};
    const std::int64_t found = describe_table(kOp, input, false, tables[i], copies[i]);
    if (i == 0) bags = found;
    if (found != bags) {
      fail(kOp, "offsets", "with " + std::to_string(bags) + " bags in every table",
           std::to_string(found));
    }
  }
  return embedding_entry(kOp, quantized_embedding_bag_copies, rows, tables, bags, mean);
}

OXY_OP(quantized_merged_embedding_bag,
       "(Tensor[] weights, Tensor[] indices, Tensor[] offsets, str mode=\"sum\", "
       "str out_dtype=\"float32\") -> Tensor",
       quantized_merged_embedding_bag)

}  // namespace oxytorch
