// What is noted of tensors that derived values were made from.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "core/torch_api.h"

namespace oxytorch {

struct Version {
  Tensor tensor;
  std::int64_t number;
  const void* address;
};

// Contiguous, on the CPU.
struct Values {
  Tensor tensor;
  std::int64_t count;
  std::vector<char> bytes;
};

constexpr std::ptrdiff_t kObject = 256;  // bytes, more than a tensor's object has
constexpr std::int64_t kInline = 5;  // dimensions, whose sizes and strides are in a tensor's object

struct Form {
  Tensor tensor;
  std::int32_t dtype;
  std::vector<std::int64_t> sizes, strides;
};

// Asked of torch, since a tensor may have been given other memory.
inline Form form_of(Tensor tensor) {
  AtenTensorHandle handle = tensor.handle();
  std::int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  std::int32_t dtype = 0;
  check_call(aoti_torch_get_dim(handle, &dim), "get_dim");
  check_call(aoti_torch_get_sizes(handle, &sizes), "get_sizes");
  check_call(aoti_torch_get_strides(handle, &strides), "get_strides");
  check_call(aoti_torch_get_dtype(handle, &dtype), "get_dtype");
  return {std::move(tensor), dtype, {sizes, sizes + dim}, {strides, strides + dim}};
}

inline bool has_form(const Form& own) {
  AtenTensorHandle handle = own.tensor.handle();
  const std::size_t bytes = own.sizes.size() * sizeof(std::int64_t);
  std::int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  std::int32_t dtype = 0;
  check_call(aoti_torch_get_dim(handle, &dim), "get_dim");
  check_call(aoti_torch_get_dtype(handle, &dtype), "get_dtype");
  if (dim != static_cast<std::int64_t>(own.sizes.size()) || dtype != own.dtype) return false;
  check_call(aoti_torch_get_sizes(handle, &sizes), "get_sizes");
  check_call(aoti_torch_get_strides(handle, &strides), "get_strides");
  return bytes == 0 || (std::memcmp(sizes, own.sizes.data(), bytes) == 0 &&
                        std::memcmp(strides, own.strides.data(), bytes) == 0);
}

inline std::int64_t element_count(AtenTensorHandle handle) {
  std::int64_t count = 0;
  check_call(aoti_torch_get_numel(handle, &count), "get_numel");
  return count;
}

}  // namespace oxytorch
