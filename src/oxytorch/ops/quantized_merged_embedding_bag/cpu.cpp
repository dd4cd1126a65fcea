#include "ops/quantized_embedding_bag/entry.h"

namespace oxytorch {

static Tensor quantized_merged_embedding_bag(const std::vector<Tensor>& weights,
                                             const std::vector<Tensor>& indices,
                                             const std::vector<Tensor>& offsets,
                                             const std::string& mode,
                                             const std::string& out_dtype) {
  constexpr const char* kOp = "quantized_merged_embedding_bag";
  std::vector<EmbeddingTable> tables;
  std::vector<BagCopies> copies;
  const auto check = [](const Tensor& weight) { check_table_of_bytes(kOp, "weights", weight); };
  const std::int64_t bags = describe_tables(kOp, weights, indices, offsets, tables, copies, check);
  const bool mean = check_mode(kOp, mode);
  const BagRows rows = rows_of_bytes(kOp, weights[0], out_dtype);
  return embedding_entry(kOp, quantized_embedding_bag_copies, rows, tables, bags, mean);
}

OXY_OP(quantized_merged_embedding_bag,
       "(Tensor[] weights, Tensor[] indices, Tensor[] offsets, str mode=\"sum\", "
       "str out_dtype=\"float32\") -> Tensor",
       quantized_merged_embedding_bag)

}  // namespace oxytorch
