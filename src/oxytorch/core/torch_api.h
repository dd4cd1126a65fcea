// The only file that includes torch: its stable ABI, wrapped so thinly that a call stays cheap.
//
// torch::stable::Tensor allocates a shared pointer per argument and reads strings through a leaking
// copy, so arguments are unboxed here.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/tuning.h"
#include "core/verbose.h"

// Exists in torch 2.13 and later.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace oxytorch {

using Shape = std::vector<std::int64_t>;

// Throws if a call into torch reported a failure.
inline void check_call(AOTITorchError error, const char* what) {
  if (error == AOTI_TORCH_SUCCESS) return;
  const char* text = torch_exception_get_what_without_backtrace
                         ? torch_exception_get_what_without_backtrace()
                         : nullptr;
  throw std::runtime_error(text ? text : std::string(what) + " failed inside torch");
}

// A span of sizes or strides that torch owns.
struct Extents {
  const std::int64_t* values;
  std::int64_t count;

  std::int64_t operator[](std::int64_t i) const { return values[i < 0 ? count + i : i]; }
  const std::int64_t* begin() const { return values; }
  const std::int64_t* end() const { return values + count; }
};

// Owns one reference to a tensor. Move-only; metadata is read once.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
    std::int64_t dim = 0;
    std::int64_t* sizes = nullptr;
    std::int64_t* strides = nullptr;
    check_call(aoti_torch_get_dim(handle, &dim), "get_dim");
    check_call(aoti_torch_get_sizes(handle, &sizes), "get_sizes");
    check_call(aoti_torch_get_strides(handle, &strides), "get_strides");
    check_call(aoti_torch_get_dtype(handle, &dtype_), "get_dtype");
    sizes_ = {sizes, dim};
    strides_ = {strides, dim};
  }
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(sizes_, other.sizes_);
    std::swap(strides_, other.strides_);
    std::swap(dtype_, other.dtype_);
    return *this;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle handle() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  std::int64_t dim() const { return sizes_.count; }
  const Extents& sizes() const { return sizes_; }
  const Extents& strides() const { return strides_; }
  std::int64_t size(std::int64_t i) const { return sizes_[i]; }
  std::int64_t stride(std::int64_t i) const { return strides_[i]; }
  // torch's own code of the dtype.
  std::int32_t dtype_code() const { return dtype_; }
  std::int64_t numel() const {
    std::int64_t product = 1;
    for (std::int64_t size : sizes_) product *= size;
    return product;
  }
  bool is_contiguous() const {
    std::int64_t expected = 1;
    for (std::int64_t i = dim() - 1; i >= 0; --i) {
      if (sizes_[i] == 0) return true;
      if (sizes_[i] != 1 && strides_[i] != expected) return false;
      expected *= sizes_[i];
    }
    return true;
  }
  const void* data() const {
    const void* pointer = nullptr;
    check_call(torch_get_const_data_ptr(handle_, &pointer), "const_data_ptr");
    return pointer;
  }
  void* mutable_data() const {
    void* pointer = nullptr;
    check_call(torch_get_mutable_data_ptr(handle_, &pointer), "mutable_data_ptr");
    return pointer;
  }
  std::int32_t device_type() const {
    std::int32_t type = 0;
    check_call(aoti_torch_get_device_type(handle_, &type), "get_device_type");
    return type;
  }

 private:
  AtenTensorHandle handle_ = nullptr;
  Extents sizes_{nullptr, 0};
  Extents strides_{nullptr, 0};
  std::int32_t dtype_ = 0;
};

// As `empty`, inside a larger block of 0xff bytes that tests look at afterwards.
Tensor guarded_empty(const std::int64_t* sizes, const std::int64_t* strides, std::int64_t dim,
                     std::int32_t dtype_code);

// A new uninitialized tensor on the CPU, dense in some order of its dimensions: in the arena of a
// program that makes it, else as torch allocates.
inline Tensor empty_strided(const std::int64_t* sizes, const std::int64_t* strides,
                            std::int64_t dim, std::int32_t dtype_code) {
  static const std::int32_t cpu = aoti_torch_device_type_cpu();
  if (tuning.guard_elements > 0) return guarded_empty(sizes, strides, dim, dtype_code);
  AtenTensorHandle handle = nullptr;
  if (Arena* arena = Arena::of_this_thread())
    handle = arena->empty(sizes, strides, dim, dtype_code);
  if (handle) return Tensor(handle);
  check_call(aoti_torch_empty_strided(dim, sizes, strides, dtype_code, cpu, 0, &handle), "empty");
  return Tensor(handle);
}

// A new uninitialized contiguous tensor on the CPU.
inline Tensor empty(const std::int64_t* sizes, std::int64_t dim, std::int32_t dtype_code) {
  constexpr std::int64_t kMaxDim = 64;
  if (dim > kMaxDim) throw std::runtime_error("more than 64 dimensions");
  std::int64_t strides[kMaxDim];
  std::int64_t step = 1;
  for (std::int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
  return empty_strided(sizes, strides, dim, dtype_code);
}

inline Tensor empty(const Extents& sizes, std::int32_t dtype_code) {
  return empty(sizes.values, sizes.count, dtype_code);
}

// Calls an operator by name; `stack` holds the arguments and then the results.
inline void call_operator(const char* name, const char* overload, StableIValue* stack) {
  check_call(torch_call_dispatcher(name, overload, stack, TORCH_ABI_VERSION), name);
}

namespace unboxing {

template <class T>
struct Take;

template <>
struct Take<Tensor> {
  static Tensor from(StableIValue value) {
    return Tensor(reinterpret_cast<AtenTensorHandle>(value));
  }
};

template <>
struct Take<double> {
  static double from(StableIValue value) { return torch::stable::detail::to<double>(value); }
};

template <>
struct Take<std::int64_t> {
  static std::int64_t from(StableIValue value) { return static_cast<std::int64_t>(value); }
};

template <>
struct Take<bool> {
  static bool from(StableIValue value) { return torch::stable::detail::to<bool>(value); }
};

template <>
struct Take<std::string> {
  static std::string from(StableIValue value) {
    const StringHandle handle = reinterpret_cast<StringHandle>(value);
    const char* text = nullptr;
    std::size_t length = 0;
    check_call(torch_string_length(handle, &length), "string_length");
    check_call(torch_string_c_str(handle, &text), "string_c_str");
    std::string result(text, length);
    check_call(torch_delete_string(handle), "delete_string");
    return result;
  }
};

template <class T>
struct Take<std::optional<T>> {
  static std::optional<T> from(StableIValue value) {
    // Under target 2.10 the box of an optional belongs to the callee.
    auto* box = reinterpret_cast<StableIValue*>(value);
    if (!box) return std::nullopt;
    std::optional<T> result(Take<T>::from(*box));
    delete box;
    return result;
  }
};

template <class T>
struct Take<std::vector<T>> {
  static std::vector<T> from(StableIValue value) {
    const StableListHandle list = reinterpret_cast<StableListHandle>(value);
    std::size_t size = 0;
    check_call(torch_list_size(list, &size), "list_size");
    std::vector<T> result;
    result.reserve(size);
    for (std::size_t i = 0; i < size; ++i) {
      StableIValue element = 0;
      check_call(torch_list_get_item(list, i, &element), "list_get_item");
      result.push_back(Take<T>::from(element));
    }
    check_call(torch_delete_list(list), "delete_list");
    return result;
  }
};

inline StableIValue box(Tensor& tensor) { return reinterpret_cast<StableIValue>(tensor.release()); }

// The dtype of the first argument; of a list, that of its first tensor. Only looks: the handles
// stay with the stack (a list hands out the same handle each time).
inline std::int32_t first_dtype(const StableIValue* stack, bool list) {
  std::int32_t dtype = -1;
  StableIValue value = stack[0];
  if (list) {
    const StableListHandle handle = reinterpret_cast<StableListHandle>(value);
    std::size_t size = 0;
    check_call(torch_list_size(handle, &size), "list_size");
    if (size == 0) return dtype;
    check_call(torch_list_get_item(handle, 0, &value), "list_get_item");
  }
  check_call(aoti_torch_get_dtype(reinterpret_cast<AtenTensorHandle>(value), &dtype), "get_dtype");
  return dtype;
}

// Shapes, and the values of what is no tensor, for `oxytorch.verbose`.
std::string shown(const Tensor& value);
std::string shown(const std::string& value);
std::string shown(double value);
std::string shown(std::int64_t value);
std::string shown(bool value);
template <class T>
std::string shown(const std::vector<T>& values);

template <class T>
std::string shown(const std::optional<T>& value) {
  return value ? shown(*value) : "-";
}

template <class T>
std::string shown(const std::vector<T>& values) {
  std::string text;
  for (const T& value : values) {
    text.push_back(text.empty() ? '[' : ' ');
    text.append(shown(value));
  }
  if (text.empty()) text.push_back('[');
  text.push_back(']');
  return text;
}

}  // namespace unboxing

}  // namespace oxytorch
