#include "ops/embedding_bag/entry.h"
#include "ops/embedding_bag/kernel.h"

namespace oxytorch {

static Tensor embedding_bag(const Tensor& weight, const Tensor& indices,
                            const std::optional<Tensor>& offsets, const std::string& mode,
                            const std::optional<Tensor>& per_sample_weights,
                            bool include_last_offset) {
  constexpr const char* kOp = "embedding_bag";
  check_dtype(kOp, "weight", weight);
  const bool mean = check_mode(kOp, mode);
  if (mean && per_sample_weights) {
    fail(kOp, "per_sample_weights", "None with mode 'mean'", describe(per_sample_weights->sizes()));
  }
  std::vector<EmbeddingTable> tables(1);
  BagCopies copies;
  const BagInput input{weight, indices, offsets ? &*offsets : nullptr,
                       per_sample_weights ? &*per_sample_weights : nullptr};
  const std::int64_t bags = describe_table(kOp, input, include_last_offset, tables[0], copies);
  return embedding_entry(kOp, embedding_bag_copies, rows_of_numbers(kOp, weight), tables, bags,
                         mean);
}

OXY_OP(embedding_bag,
       "(Tensor weight, Tensor indices, Tensor? offsets=None, str mode=\"sum\", "
       "Tensor? per_sample_weights=None, bool include_last_offset=False) -> Tensor",
       embedding_bag)

}  // namespace oxytorch
