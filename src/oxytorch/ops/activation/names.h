// Activations: the one list in C++, in the order of `ACTIVATIONS` in __init__.py.
#pragma once

#include <cstdint>

namespace oxytorch {

enum class Activation : std::int32_t { leaky_relu, clamp, elu, power, mish };

inline constexpr int kActivationNumbers = 3;

struct ActivationRow {
  const char* name;
  int numbers;
};
inline constexpr ActivationRow kActivations[] = {
    {"leaky_relu", 1}, {"clamp", 2}, {"elu", 3}, {"power", 1}, {"mish", 0}};

// Whole exponents that the kernel multiplies out.
inline constexpr int kLeastPower = 2, kMostPower = 8;

}  // namespace oxytorch
