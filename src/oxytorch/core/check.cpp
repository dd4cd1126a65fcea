#include "core/check.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

namespace oxytorch {

namespace {

struct Codes {
  std::int32_t float32 = aoti_torch_dtype_float32();
  std::int32_t bfloat16 = aoti_torch_dtype_bfloat16();
  std::int32_t float16 = aoti_torch_dtype_float16();
};

const Codes& codes() {
  static const Codes values;
  return values;
}

Tensor contiguous(const Tensor& tensor) {
  // clone(memory_format=contiguous_format): a plain clone would keep the strides.
  AtenTensorHandle handle = nullptr;
  check_call(aoti_torch_new_tensor_handle(tensor.handle(), &handle), "new_tensor_handle");
  StableIValue stack[2] = {
      reinterpret_cast<StableIValue>(handle),
      torch::stable::detail::from(torch::headeronly::MemoryFormat::Contiguous)};
  call_operator("aten::contiguous", "", stack);
  return Tensor(reinterpret_cast<AtenTensorHandle>(stack[0]));
}

}  // namespace

Tensor guarded_empty(const std::int64_t* sizes, const std::int64_t* strides, std::int64_t dim,
                     std::int32_t dtype_code) {
  std::int64_t numel = 1;
  for (std::int64_t i = 0; i < dim; ++i) numel *= sizes[i];
  const std::int64_t guard = tuning.guard_elements;
  const std::int64_t all = numel + 2 * guard;
  const std::int64_t one = 1;
  AtenTensorHandle handle = nullptr;
  check_call(
      aoti_torch_empty_strided(1, &all, &one, dtype_code, aoti_torch_device_type_cpu(), 0, &handle),
      "empty");
  const Tensor block(handle);
  std::memset(block.mutable_data(), 0xff, all * aoti_torch_dtype_element_size(dtype_code));
  check_call(aoti_torch__reinterpret_tensor(handle, dim, sizes, strides, guard, &handle), "view");
  return Tensor(handle);
}

std::string describe(const Extents& sizes) {
  std::string text = "[";
  for (std::int64_t i = 0; i < sizes.count; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(sizes.values[i]);
  }
  return text + "]";
}

std::string dtype_name(std::int32_t code) {
  if (code == codes().float32) return "float32";
  if (code == codes().bfloat16) return "bfloat16";
  if (code == codes().float16) return "float16";
  if (code == aoti_torch_dtype_float64()) return "float64";
  if (code == aoti_torch_dtype_int64()) return "int64";
  if (code == aoti_torch_dtype_int32()) return "int32";
  if (code == aoti_torch_dtype_int16()) return "int16";
  if (code == aoti_torch_dtype_int8()) return "int8";
  if (code == aoti_torch_dtype_uint8()) return "uint8";
  if (code == aoti_torch_dtype_bool()) return "bool";
  if (code == aoti_torch_dtype_complex64()) return "complex64";
  if (code == aoti_torch_dtype_complex128()) return "complex128";
  return "dtype number " + std::to_string(code);
}

namespace unboxing {

std::string shown(const Tensor& value) {
  std::string text = dtype_name(value.dtype_code());
  for (std::int64_t i = 0; i < value.dim(); ++i) {
    text += (i == 0 ? ':' : 'x') + std::to_string(value.size(i));
  }
  return text;
}

std::string shown(const std::string& value) { return value; }
std::string shown(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}
std::string shown(std::int64_t value) { return std::to_string(value); }
std::string shown(bool value) { return value ? "true" : "false"; }

}  // namespace unboxing

void fail(const char* op, const char* argument, const std::string& wanted,
          const std::string& given) {
  throw std::runtime_error(std::string(op) + ": expected " + argument + " " + wanted + ", got " +
                           given);
}

DType check_dtype(const char* op, const char* argument, const Tensor& tensor) {
  const std::int32_t code = tensor.dtype_code();
  if (code == codes().float32) return DType::float32;
  if (code == codes().bfloat16) return DType::bfloat16;
  if (code == codes().float16) return DType::float16;
  fail(op, argument, "of dtype float32, bfloat16 or float16 (or float64)", dtype_name(code));
}

DType check_weight_dtype(const char* op, const char* argument, const Tensor& tensor, DType x) {
  const std::int32_t code = tensor.dtype_code();
  if (code == codes().float32) return DType::float32;
  if (code == codes().bfloat16 && x == DType::bfloat16) return x;
  if (code == codes().float16 && x == DType::float16) return x;
  const char* own = x == DType::bfloat16  ? "bfloat16 or "
                    : x == DType::float16 ? "float16 or "
                                          : "";
  fail(op, argument, std::string("of dtype ") + own + "float32", dtype_name(code));
}

void check_same_dtype(const char* op, const char* argument, const Tensor& tensor, const Tensor& x) {
  if (tensor.dtype_code() != x.dtype_code()) {
    fail(op, argument, "of dtype " + dtype_name(x.dtype_code()), dtype_name(tensor.dtype_code()));
  }
}

void check_shape(const char* op, const char* argument, const Tensor& tensor,
                 const Extents& wanted) {
  bool same = tensor.dim() == wanted.count;
  for (std::int64_t i = 0; same && i < wanted.count; ++i) same = tensor.size(i) == wanted[i];
  if (!same) fail(op, argument, "of shape " + describe(wanted), describe(tensor.sizes()));
}

void check_vector(const char* op, const char* argument, const Tensor& tensor, std::int64_t length) {
  check_shape(op, argument, tensor, Extents{&length, 1});
}

void check_minimum_dim(const char* op, const char* argument, const Tensor& tensor,
                       std::int64_t dim) {
  if (tensor.dim() < dim) {
    fail(op, argument, "with at least " + std::to_string(dim) + " dimension(s)",
         "shape " + describe(tensor.sizes()));
  }
}

void check_cpu(const char* op, const char* argument, const Tensor& tensor) {
  if (tensor.device_type() != aoti_torch_device_type_cpu()) {
    fail(op, argument, "on the CPU like the other arguments", "another device");
  }
}

bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) != 1) dims.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

Elements elements_of(const Tensor& x, std::int32_t out_dtype_code) {
  Elements elements;
  if (is_dense(x)) {
    elements.out = empty_strided(x.sizes().values, x.strides().values, x.dim(), out_dtype_code);
    elements.x = x.data();
  } else {
    elements.out = empty(x.sizes(), out_dtype_code);
    elements.x = contiguous_data(x, elements.copy);
  }
  return elements;
}

Rows rows_of(const Tensor& tensor) {
  const std::int64_t width = tensor.size(-1);
  const std::int64_t numel = tensor.numel();
  if (numel == 0) return {Tensor(), tensor.data(), width == 0 ? 0 : numel / width, width, width};
  // Walks outwards: each dimension must continue the rows of the ones inside it.
  bool uniform = width == 1 || tensor.stride(-1) == 1;
  std::int64_t count = 1;
  std::int64_t stride = width;
  for (std::int64_t i = tensor.dim() - 2; uniform && i >= 0; --i) {
    if (tensor.size(i) == 1) continue;
    if (count == 1) {
      stride = tensor.stride(i);
    } else {
      uniform = tensor.stride(i) == count * stride;
    }
    count *= tensor.size(i);
  }
  if (uniform) return {Tensor(), tensor.data(), count, width, stride};
  Tensor copy = contiguous(tensor);
  const void* data = copy.data();
  return {std::move(copy), data, numel / width, width, width};
}

const void* contiguous_data(const Tensor& tensor, Tensor& copy) {
  if (tensor.is_contiguous()) return tensor.data();
  copy = contiguous(tensor);
  return copy.data();
}

}  // namespace oxytorch
