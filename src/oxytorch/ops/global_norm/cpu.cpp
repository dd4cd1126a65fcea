#include <cmath>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"
#include "ops/global_norm/kernel.h"

namespace oxytorch {

static Tensor global_norm(const std::vector<Tensor>& tensors) {
  constexpr const char* kOp = "global_norm";
  std::vector<NormTensor> described;
  std::vector<Tensor> copies(tensors.size());
  described.reserve(tensors.size());
  std::int64_t items = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    check_cpu(kOp, "tensors", tensor);
    const DType dtype = check_dtype(kOp, "tensors", tensor);
    const std::int64_t count = tensor.numel();
    if (count == 0) continue;
    // The order of the elements does not matter.
    const void* data = is_dense(tensor) ? tensor.data() : contiguous_data(tensor, copies[i]);
    described.push_back({data, dtype, count, items});
    items += (count + kNormBlock - 1) / kNormBlock;
  }
  std::vector<double> sums(static_cast<std::size_t>(items));
  const GlobalNormArgs args{described.data(), static_cast<std::int64_t>(described.size()),
                            sums.data()};
  run(global_norm_copies, args, items, 4 * kNormBlock);
  // In an order that does not depend on threads.
  double total = 0;
  for (const double sum : sums) total += sum;
  Tensor result = empty(nullptr, 0, aoti_torch_dtype_float32());
  *static_cast<float*>(result.mutable_data()) = static_cast<float>(std::sqrt(total));
  return result;
}

OXY_OP(global_norm, "(Tensor[] tensors) -> Tensor", global_norm)

}  // namespace oxytorch
