// What is noted of tensors that derived values were made from.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/process.h"
#include "core/torch_api.h"

namespace oxytorch {

// Whoever notes a tensor keeps its handle.
struct Version {
  AtenTensorHandle tensor;
  std::int64_t number;
  const void* address;
};

// Contiguous, on the CPU.
struct Values {
  AtenTensorHandle tensor;
  std::int64_t count;
  std::vector<char> bytes;
};

constexpr std::ptrdiff_t kObject = 256;  // bytes, more than a tensor's object has
constexpr std::int64_t kInline = 5;  // dimensions, whose sizes and strides are in a tensor's object

struct Form {
  AtenTensorHandle tensor;
  std::int32_t dtype;
  std::vector<std::int64_t> sizes, strides;
};

// Asked of torch, since a tensor may have been given other memory.
inline Form form_of(AtenTensorHandle handle) {
  std::int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  std::int32_t dtype = 0;
  check_call(aoti_torch_get_dim(handle, &dim), "get_dim");
  check_call(aoti_torch_get_sizes(handle, &sizes), "get_sizes");
  check_call(aoti_torch_get_strides(handle, &strides), "get_strides");
  check_call(aoti_torch_get_dtype(handle, &dtype), "get_dtype");
  return {handle, dtype, {sizes, sizes + dim}, {strides, strides + dim}};
}

inline bool has_form(const Form& own) {
  AtenTensorHandle handle = own.tensor;
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

inline const void* data_of(AtenTensorHandle handle) {
  const void* pointer = nullptr;
  check_call(torch_get_const_data_ptr(handle, &pointer), "const_data_ptr");
  return pointer;
}

inline Version version_of(AtenTensorHandle handle) {
  return {handle, version_function()(handle), data_of(handle)};
}

inline Values values_of(AtenTensorHandle handle) {
  std::int32_t dtype = 0;
  check_call(aoti_torch_get_dtype(handle, &dtype), "get_dtype");
  const std::int64_t count = element_count(handle);
  const char* begin = static_cast<const char*>(data_of(handle));
  return {handle, count, {begin, begin + count * aoti_torch_dtype_element_size(dtype)}};
}

}  // namespace oxytorch
