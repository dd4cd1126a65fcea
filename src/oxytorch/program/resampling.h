// Resampling of images to sizes that are known when a step runs, by torch's operators.
#pragma once

#include <optional>
#include <string_view>

#include "program/stack.h"

namespace oxytorch {

// An operator of torch's that resamples the last dimensions of a tensor.
struct Resampling {
  std::string_view name;
  std::int64_t dims;
  bool aligns;  // whether it asks if corners are aligned

  // That of a name in program/allowed.py, if there is one.
  static std::optional<Resampling> find(std::string_view name);
};

// The tensor resampled to these sizes. Torch's stable ABI cannot pass these, so that factors are
// passed, which give the same sizes and, up to 2^20, the same indices and weights.
AtenTensorHandle resampled(AtenTensorHandle x, const Resampling& by,
                           const std::vector<std::int64_t>& sizes, bool aligns);

}  // namespace oxytorch
