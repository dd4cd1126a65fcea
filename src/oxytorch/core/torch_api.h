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

template <class Result, class... Arguments, std::size_t... I>
void call(Result (*function)(Arguments...), StableIValue* stack, verbose::Call& noted,
          std::index_sequence<I...>) {
  // Braces fix the order; every argument is taken before the results overwrite the stack.
  std::tuple<std::decay_t<Arguments>...> arguments{
      Take<std::decay_t<Arguments>>::from(stack[I])...};
  if (noted.is_noted()) [[unlikely]] {
    (noted.takes(shown(std::get<I>(arguments))), ...);
  }
  if constexpr (std::is_void_v<Result>) {
    function(std::get<I>(arguments)...);
  } else if constexpr (std::is_same_v<Result, Tensor>) {
    Tensor result = function(std::get<I>(arguments)...);
    stack[0] = box(result);
  } else {
    Result result = function(std::get<I>(arguments)...);
    for (std::size_t i = 0; i < result.size(); ++i) stack[i] = box(result[i]);
  }
}

template <class Function>
struct Signature;

template <class Result, class First, class... Rest>
struct Signature<Result (*)(First, Rest...)> {
  static constexpr bool first_is_list = !std::is_same_v<std::decay_t<First>, Tensor>;
  using Indices = std::make_index_sequence<1 + sizeof...(Rest)>;
};

}  // namespace unboxing

// The boxed form of `function`. float64 goes to the op's overload `reference`, plain PyTorch.
template <auto function, const char* const& name>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  using Signature = unboxing::Signature<decltype(function)>;
  static const std::int32_t float64 = aoti_torch_dtype_float64();
  verbose::Call noted(name + sizeof "oxytorch::" - 1);
  if (unboxing::first_dtype(stack, Signature::first_is_list) == float64) {
    if (noted.is_noted()) noted.ran("reference", "-");
    call_operator(name, "reference", stack);
    return;
  }
  unboxing::call(function, stack, noted, typename Signature::Indices{});
}

// Calls from programs that hold all arguments already: nothing is boxed, copied or counted.
namespace lending {

// What a parameter takes.
struct Kind {
  enum Of { number, tensor, list, text } of;
  bool is_optional = false;
};

// An argument, which the caller keeps. Of an optional one that is none nothing is set.
struct Argument {
  AtenTensorHandle tensor = nullptr;
  StableIValue number = 0;
  const std::vector<std::int64_t>* list = nullptr;
  const std::string* text = nullptr;
  bool is_there = false;
};

// `Lent<T>(argument).get()` is what a parameter T takes. There are no others.
template <class T>
struct Lent {
  static constexpr bool kExists = false;
};

template <class T>
struct LentNumber {
  static constexpr bool kExists = true;
  static constexpr Kind kKind{Kind::number};
  T value;
  explicit LentNumber(const Argument& argument) : value(unboxing::Take<T>::from(argument.number)) {}
  T get() const { return value; }
};
template <>
struct Lent<double> : LentNumber<double> {
  using LentNumber::LentNumber;
};
template <>
struct Lent<std::int64_t> : LentNumber<std::int64_t> {
  using LentNumber::LentNumber;
};
template <>
struct Lent<bool> : LentNumber<bool> {
  using LentNumber::LentNumber;
};

template <>
struct Lent<std::vector<std::int64_t>> {
  static constexpr bool kExists = true;
  static constexpr Kind kKind{Kind::list};
  const std::vector<std::int64_t>& value;
  explicit Lent(const Argument& argument) : value(*argument.list) {}
  const std::vector<std::int64_t>& get() const { return value; }
};

template <>
struct Lent<std::string> {
  static constexpr bool kExists = true;
  static constexpr Kind kKind{Kind::text};
  const std::string& value;
  explicit Lent(const Argument& argument) : value(*argument.text) {}
  const std::string& get() const { return value; }
};

template <>
struct Lent<Tensor> {
  static constexpr bool kExists = true;
  static constexpr Kind kKind{Kind::tensor};
  Tensor value;
  explicit Lent(const Argument& argument) : value(argument.tensor) {}
  Lent(const Lent&) = delete;
  ~Lent() { value.release(); }
  const Tensor& get() const { return value; }
};

template <>
struct Lent<std::optional<Tensor>> {
  static constexpr bool kExists = true;
  static constexpr Kind kKind{Kind::tensor, true};
  std::optional<Tensor> value;
  explicit Lent(const Argument& argument) {
    if (argument.is_there) value.emplace(argument.tensor);
  }
  Lent(const Lent&) = delete;
  ~Lent() {
    if (value) value->release();
  }
  const std::optional<Tensor>& get() const { return value; }
};

template <class T>
  requires std::is_arithmetic_v<T>
struct Lent<std::optional<T>> {
  static constexpr bool kExists = true;
  static constexpr Kind kKind{Kind::number, true};
  std::optional<T> value;
  explicit Lent(const Argument& argument) {
    if (argument.is_there) value = unboxing::Take<T>::from(argument.number);
  }
  std::optional<T> get() const { return value; }
};

// Returns false, with nothing done, where plain PyTorch has to compute it.
using Call = bool (*)(const Argument* arguments, AtenTensorHandle* results);

// Of a function: how it is called so, if all its parameters can be lent.
template <auto function, const char* const& name, class Type = decltype(function)>
struct Lender {
  static constexpr Call kCall = nullptr;
  static constexpr std::size_t kCount = 0;
  static constexpr const Kind* kKinds = nullptr;
};

template <auto function, const char* const& name, class... Rest>
  requires(Lent<std::decay_t<Rest>>::kExists && ...)
struct Lender<function, name, Tensor (*)(const Tensor&, Rest...)> {
  static constexpr std::size_t kCount = 1 + sizeof...(Rest);
  static constexpr Kind kKinds[kCount] = {Lent<Tensor>::kKind, Lent<std::decay_t<Rest>>::kKind...};

  static bool call(const Argument* arguments, AtenTensorHandle* results) {
    return call(arguments, results, std::make_index_sequence<kCount>{});
  }
  static constexpr Call kCall = &call;

 private:
  template <std::size_t... I>
  static bool call(const Argument* arguments, AtenTensorHandle* results,
                   std::index_sequence<I...>) {
    static const std::int32_t float64 = aoti_torch_dtype_float64();
    std::int32_t dtype = 0;
    check_call(aoti_torch_get_dtype(arguments[0].tensor, &dtype), "get_dtype");
    if (dtype == float64) return false;
    verbose::Call noted(name + sizeof "oxytorch::" - 1);
    std::tuple<Lent<Tensor>, Lent<std::decay_t<Rest>>...> lent(arguments[I]...);
    if (noted.is_noted()) [[unlikely]] {
      (noted.takes(unboxing::shown(std::get<I>(lent).get())), ...);
    }
    results[0] = function(std::get<I>(lent).get()...).release();
    return true;
  }
};

}  // namespace lending

// `stack` holds the arguments, which are taken, and then the results.
using BoxedOperator = void (*)(StableIValue* stack, std::uint64_t, std::uint64_t);

// The CPU kernel of an operator that `OXY_OP` defines. Whoever calls it knows that torch's
// dispatcher has nothing to see to: gradients, autocast, modes, signs turned when read, a profiler.
struct OwnOperator {
  BoxedOperator boxed;
  lending::Call lent;  // or null; it has one result
  const lending::Kind* kinds;
  std::size_t count;

  // Null where there is none.
  static const OwnOperator* find(const std::string& name);
};

struct OwnOperators {
  OwnOperators(const char* name, OwnOperator operator_);
};

}  // namespace oxytorch

// Defines op `name` with the rest of its schema, its overload `reference`, and its CPU kernel.
#define OXY_OP(name, schema, function)                                                     \
  static constexpr const char* name##_qualified = "oxytorch::" #name;                      \
  static constexpr oxytorch::BoxedOperator name##_boxed =                                  \
      &oxytorch::boxed<&function, name##_qualified>;                                       \
  using name##_lender = oxytorch::lending::Lender<&function, name##_qualified>;            \
  static const oxytorch::OwnOperators name##_own(                                          \
      name##_qualified,                                                                    \
      {name##_boxed, name##_lender::kCall, name##_lender::kKinds, name##_lender::kCount}); \
  STABLE_TORCH_LIBRARY_FRAGMENT(oxytorch, library) {                                       \
    library.def(#name schema);                                                             \
    library.def(#name ".reference" schema);                                                \
  }                                                                                        \
  STABLE_TORCH_LIBRARY_IMPL(oxytorch, CPU, library) { library.impl(#name, name##_boxed); }
