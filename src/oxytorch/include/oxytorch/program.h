// Programs of oxytorch in C++, without Python: opens a file that `oxytorch.save` wrote, and runs
// it.
//
//   const oxytorch::Program model("model.oxy");
//   std::vector<at::Tensor> results = model.run({at::randn({1, 128, 768})});
//
// For programs that link libtorch (torch, torch_cpu, c10) and liboxytorch.so. C++17.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/program_abi.h"

namespace oxytorch {

namespace detail {

// The letter of a kind of argument that has no other kind within.
inline char letter_of(c10::TypeKind kind) {
  static constexpr std::pair<c10::TypeKind, char> letters[] = {
      {c10::TypeKind::TensorType, 'T'},       {c10::TypeKind::IntType, 'i'},
      {c10::TypeKind::SymIntType, 's'},       {c10::TypeKind::FloatType, 'f'},
      {c10::TypeKind::BoolType, 'b'},         {c10::TypeKind::StringType, 't'},
      {c10::TypeKind::ScalarTypeType, 'd'},   {c10::TypeKind::LayoutType, 'l'},
      {c10::TypeKind::MemoryFormatType, 'm'}, {c10::TypeKind::DeviceObjType, 'c'},
  };
  for (const auto& [each, letter] : letters) {
    if (each == kind) return letter;
  }
  return 'x';
}

// Kinds of arguments by letters; the library checks the steps of a file with them.
inline void write_type(std::string& text, const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      text += '?';
      return write_type(text, type->castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::ListType:
      text += '[';
      return write_type(text, type->castRaw<c10::ListType>()->getElementType());
    default:
      text += letter_of(type->kind());
  }
}

inline const char* operator_types(const char* name, const char* overload) {
  thread_local std::string text;
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!found) return nullptr;
  const c10::FunctionSchema& schema = found->schema();
  bool writes = schema.is_mutable();
  text.clear();
  for (const c10::Argument& each : schema.arguments()) {
    writes = writes || (each.alias_info() != nullptr && each.alias_info()->isWrite());
    if (!text.empty()) text += ',';
    write_type(text, each.real_type());
  }
  text.insert(0, writes ? "w" : "-");
  text += '>';
  for (const c10::Argument& each : schema.returns()) {
    if (text.back() != '>') text += ',';
    write_type(text, each.type());
  }
  return text.c_str();
}

inline void take_result(void* into, void* tensor, int64_t number) {
  auto& results = *static_cast<std::vector<at::Tensor>*>(into);
  if (tensor == nullptr) {
    results.push_back(at::scalar_tensor(number, at::kLong));
    return;
  }
  const std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(tensor));
  results.push_back(*owned);
}

}  // namespace detail

// A program, which any number of threads may run at once, as long as it does not write to buffers
// of the model.
class Program {
 public:
  // path: must not be written to as long as the program or a result of it is used. verifies:
  // compare all tensors with their checksums. Throws std::runtime_error, which says what is wrong,
  // if the file is damaged, of another kind or of a newer version, or asks for what a file may not.
  explicit Program(const std::string& path, bool verifies = false)
      : program_(oxytorch_program_open(path.c_str(), verifies, &detail::operator_types),
                 &oxytorch_program_close) {
    if (!program_) throw std::runtime_error(oxytorch_program_error());
  }

  // tensors, sizes: the tensors and the integers among the arguments with which the model was
  // exported, in their order; other arguments keep the values that they had. Returns the tensors of
  // its result in their order, and integers as tensors without dimensions. Computes no gradients.
  // Throws std::runtime_error if a dtype or shape is none with which the program may be called.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& tensors,
                              const std::vector<int64_t>& sizes = {}) const {
    const at::NoGradGuard no_gradients;
    std::vector<void*> given;
    for (const at::Tensor& each : tensors) {
      if (!each.defined()) throw std::runtime_error("expected tensors, got an undefined one");
      given.push_back(const_cast<at::Tensor*>(&each));
    }
    std::vector<at::Tensor> results;
    if (!oxytorch_program_run(program_.get(), given.data(), given.size(), sizes.data(),
                              sizes.size(), &detail::take_result, &results)) {
      throw std::runtime_error(oxytorch_program_error());
    }
    return results;
  }

  // A line for each argument: "tensor", "size" or "fixed", and its name.
  std::string inputs() const { return oxytorch_program_inputs(program_.get()); }

 private:
  std::shared_ptr<OxytorchProgram> program_;
};

}  // namespace oxytorch
