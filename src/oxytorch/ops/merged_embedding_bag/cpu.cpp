#include "ops/embedding_bag/entry.h"
#include "ops/embedding_bag/kernel.h"

namespace oxytorch {

static Tensor merged_embedding_bag(const std::vector<Tensor>& weights,
                                   const std::vector<Tensor>& indices,
                                   const std::vector<Tensor>& offsets, const std::string& mode) {
  constexpr const char* kOp = "merged_embedding_bag";
  std::vector<EmbeddingTable> tables;
  std::vector<BagCopies> copies;
  const auto check = [&](const Tensor& weight) {
    check_dtype(kOp, "weights", weight);
    check_same_dtype(kOp, "weights", weight, weights[0]);
  };
  const std::int64_t bags = describe_tables(kOp, weights, indices, offsets, tables, copies, check);
  const bool mean = check_mode(kOp, mode);
  return embedding_entry(kOp, embedding_bag_copies, rows_of_numbers(kOp, weights[0]), tables, bags,
                         mean);
}

OXY_OP(merged_embedding_bag,
       "(Tensor[] weights, Tensor[] indices, Tensor[] offsets, str mode=\"sum\") -> Tensor",
       merged_embedding_bag)

}  // namespace oxytorch
