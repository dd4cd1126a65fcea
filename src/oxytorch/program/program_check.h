// Checks the text of a program from a file before it runs, as check.py does.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace oxytorch {

// How many tensors and sizes a program takes and returns, and its constants.
struct ProgramCounts {
  std::int64_t tensors, sizes, constants, tensor_results, size_results;
};

// What an operator takes and returns, null where there is none of that name and overload:
// "w" if it writes or "-", the kinds of its arguments, ">" and those of its results, divided by
// commas. A kind is T (tensor), i (integer), s (size), f, b (truth), t (text), d (dtype), l
// (layout), m (memory format), c (device) or x (else), after ? for an optional and [ for a list.
using OperatorTypes = const char* (*)(const char* name, const char* overload);

// Throws std::runtime_error, which names the line, if it is none or may not run.
ProgramCounts check_program(std::string_view text, OperatorTypes types);

}  // namespace oxytorch
