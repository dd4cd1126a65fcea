#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"
#include "ops/activation/names.h"

namespace oxytorch {

// Items are stretches of so many elements, in the order in which they lie in memory.
struct ActivationArgs {
  const void* x;
  void* out;
  std::int64_t count;
  std::int64_t stretch;
  float numbers[kActivationNumbers];
  Activation activation;
  DType dtype;
};

}  // namespace oxytorch

OXY_KERNEL(activation, ActivationArgs)
