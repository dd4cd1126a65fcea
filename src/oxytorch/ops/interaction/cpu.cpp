#include "core/check.h"
#include "core/parallel.h"
#include "ops/interaction/kernel.h"

namespace oxytorch {

static Tensor interaction(const Tensor& dense, const std::vector<Tensor>& sparse) {
  constexpr const char* kOp = "interaction";
  const DType dtype = check_dtype(kOp, "dense", dense);
  if (dense.dim() != 2) fail(kOp, "dense", "of shape [batch, dim]", describe(dense.sizes()));
  const auto count = static_cast<std::int64_t>(sparse.size()) + 1;
  if (count > InteractionArgs::kMaxInputs) {
    fail(kOp, "sparse",
         "of at most " + std::to_string(InteractionArgs::kMaxInputs - 1) + " tensors",
         std::to_string(count - 1));
  }
  std::vector<InteractionInput> inputs(count);
  std::vector<Tensor> copies(count);
  for (std::int64_t i = 0; i < count; ++i) {
    const Tensor& tensor = i == 0 ? dense : sparse[i - 1];
    if (i > 0) {
      const std::string argument = "sparse[" + std::to_string(i - 1) + "]";
      check_shape(kOp, argument.c_str(), tensor, dense.sizes());
      check_same_dtype(kOp, argument.c_str(), tensor, dense);
      check_cpu(kOp, argument.c_str(), tensor);
    }
    const bool usable = tensor.size(1) <= 1 || tensor.stride(1) == 1;
    inputs[i].data = usable ? tensor.data() : contiguous_data(tensor, copies[i]);
    inputs[i].stride = usable ? tensor.stride(0) : tensor.size(1);
  }
  const std::int64_t batch = dense.size(0);
  const std::int64_t dim = dense.size(1);
  const std::int64_t sizes[] = {batch, dim + count * (count - 1) / 2};
  Tensor out = empty(sizes, 2, dense.dtype_code());
  const InteractionArgs args{
      .inputs = inputs.data(),
      .input_count = count,
      .dim = dim,
      .out = out.mutable_data(),
      .dtype = dtype,
  };
  // The products cost about as much as moving the inputs count / 8 times.
  run(interaction_copies, args, batch, (1 + count / 8) * count * dim * size_of(dtype));
  return out;
}

OXY_OP(interaction, "(Tensor dense, Tensor[] sparse) -> Tensor", interaction)

}  // namespace oxytorch
