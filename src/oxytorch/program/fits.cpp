// Whether a tensor is of the form that a graph of TorchScript was changed for, in one call: the
// graph asks before each run. Under autocast, which shows in the dispatch key, none is.
#include "program/stack.h"

namespace oxytorch {

namespace {

// c10/core/MemoryFormat.h
enum Order : std::int64_t { kContiguous = 0, kChannelsLast = 2, kChannelsLast3d = 3 };

bool lies_with_channels_last(const std::int64_t* sizes, const std::int64_t* strides,
                             std::int64_t dim) {
  std::int64_t expected = 1;
  for (std::int64_t place = 0; place < dim; ++place) {
    // channels, then the last dimension up to the third, then the first one
    const std::int64_t d = place == 0 ? 1 : place == dim - 1 ? 0 : dim - place;
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

bool lies_in_order(AtenTensorHandle tensor, std::int64_t order, const std::int64_t* sizes,
                   std::int64_t dim) {
  if (order == kContiguous) {
    bool found = false;
    check_call(aoti_torch_is_contiguous(tensor, &found), "is_contiguous");
    return found;
  }
  if (dim != (order == kChannelsLast ? 4 : 5)) return false;
  std::int64_t* strides = nullptr;
  check_call(aoti_torch_get_strides(tensor, &strides), "get_strides");
  return lies_with_channels_last(sizes, strides, dim);
}

bool is_of_form(AtenTensorHandle tensor, std::int64_t dtype, const Shape& wanted,
                std::int64_t order) {
  std::int32_t device = 0, layout = 0, own_dtype = 0;
  std::int64_t dim = 0;
  check_call(aoti_torch_get_device_type(tensor, &device), "get_device_type");
  check_call(aoti_torch_get_layout(tensor, &layout), "get_layout");
  check_call(aoti_torch_get_dtype(tensor, &own_dtype), "get_dtype");
  if (device != aoti_torch_device_type_cpu() || layout != aoti_torch_layout_strided()) return false;
  if (own_dtype != dtype) return false;
  check_call(aoti_torch_get_dim(tensor, &dim), "get_dim");
  if (dim != static_cast<std::int64_t>(wanted.size())) return false;
  std::int64_t* sizes = nullptr;
  check_call(aoti_torch_get_sizes(tensor, &sizes), "get_sizes");
  for (std::int64_t d = 0; d < dim; ++d) {
    if (sizes[d] == 0 || (wanted[d] >= 0 && wanted[d] != sizes[d])) return false;
  }
  return lies_in_order(tensor, order, sizes, dim);
}

void fits(StableIValue* stack, uint64_t, uint64_t) {
  const TensorOwner x(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const auto dtype = torch::stable::detail::to<std::int64_t>(stack[1]);
  const auto sizes = unboxing::Take<Shape>::from(stack[2]);
  const auto order = torch::stable::detail::to<std::int64_t>(stack[3]);
  stack[0] = torch::stable::detail::from(is_of_form(x.get(), dtype, sizes, order));
}

void fits_never(StableIValue* stack, uint64_t, uint64_t) {
  const TensorOwner x(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  (void)unboxing::Take<Shape>::from(stack[2]);
  stack[0] = torch::stable::detail::from(false);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oxytorch, library) {
  library.def("fits(Tensor x, int dtype, int[] sizes, int order) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(oxytorch, CompositeExplicitAutograd, library) {
  library.impl("fits", &fits);
}

STABLE_TORCH_LIBRARY_IMPL(oxytorch, AutocastCPU, library) { library.impl("fits", &fits_never); }

}  // namespace oxytorch
