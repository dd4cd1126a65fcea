// What torch's operators take on trust: with arguments that do not fit they read beyond tensors,
// divide by zero, or end the process.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/torch_api.h"

namespace oxytorch::runtime {

// An argument of a call: the tensors in it, and its numbers and truth values as the stack has them.
struct Given {
  std::vector<AtenTensorHandle> tensors;
  std::vector<Shape> shapes;
  std::vector<StableIValue> numbers;
};

// Throws where the arguments, of which there are as many as the operator takes, do not fit.
using TrustedCheck = void (*)(const std::vector<Given>&);

// The check of an operator, with its overload; null where torch makes its own.
TrustedCheck trusted_check(std::string_view target);

}  // namespace oxytorch::runtime
