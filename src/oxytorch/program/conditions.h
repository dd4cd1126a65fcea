// Conditions on the sizes of a program's inputs, as conditions.py writes them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "program/json.h"

namespace oxytorch {

// An input as conditions see it: the shape of a tensor, or a number.
struct InputSizes {
  bool is_tensor = true;
  std::vector<std::int64_t> shape;
  std::int64_t value = 0;
};

// Throws std::runtime_error if data is no condition on inputs of these kinds and dimensions.
void check_condition(const json::Value& condition, const std::vector<InputSizes>& inputs);

// Whether a checked condition holds; one that cannot be computed does not.
bool holds(const json::Value& condition, const std::vector<InputSizes>& inputs);

std::string shown(const json::Value& condition, const std::vector<std::string>& names);

}  // namespace oxytorch
