#include "ops/embedding_bag/entry.h"
#include "ops/embedding_bag/kernel.h"

namespace oxytorch {

static Tensor merged_embedding_bag(const std::vector<Tensor>& weights,
                                   const std::vector<Tensor>& indices,
                                   const std::vector<Tensor>& offsets, const std::string& mode) {
  constexpr const char* kOp = "merged_embedding_bag";
  const std::size_t count = weights.size();
  if (count == 0) fail(kOp, "weights", "with at least one table", "none");
  for (const auto& [argument, list] : {std::pair{"indices", &indices}, {"offsets", &offsets}}) {
    if (list->size() != count) {
      fail(kOp, argument, "with " + std::to_string(count) + " tensors, one per table",
           std::to_string(list->size()));
    }
  }
  check_dtype(kOp, "weights", weights[0]);
  const bool mean = check_mode(kOp, mode);
  std::vector<EmbeddingTable> tables(count);
  std::vector<BagCopies> copies(count);
  std::int64_t bags = 0;
  for (std::size_t i = 0; i < count; ++i) {
    check_same_dtype(kOp, "weights", weights[i], weights[0]);
    const BagInput input{weights[i], indices[i], &offsets[i], nullptr};
    const std::int64_t found = describe_table(kOp, input, false, tables[i], copies[i]);
    if (i == 0) bags = found;
    if (found != bags) {
      fail(kOp, "offsets", "with " + std::to_string(bags) + " bags in every table",
           std::to_string(found));
    }
    if (weights[i].size(1) != weights[0].size(1)) {
      fail(kOp, "weights", "with " + std::to_string(weights[0].size(1)) + " columns in every table",
           std::to_string(weights[i].size(1)));
    }
    if (tables[i].wide_indices != tables[0].wide_indices) {
      fail(kOp, "indices", "of dtype " + dtype_name(indices[0].dtype_code()) + " in every table",
           dtype_name(indices[i].dtype_code()));
    }
  }
  return embedding_entry(kOp, embedding_bag_copies, rows_of_numbers(kOp, weights[0]), tables, bags,
                         mean);
}

OXY_OP(merged_embedding_bag,
       "(Tensor[] weights, Tensor[] indices, Tensor[] offsets, str mode=\"sum\") -> Tensor",
       merged_embedding_bag)

}  // namespace oxytorch
