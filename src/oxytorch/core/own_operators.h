// Our operators: what `OXY_OP` defines, and how torch's dispatcher and programs call it.
#pragma once

#include "core/torch_api.h"

namespace oxytorch {

namespace unboxing {

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
