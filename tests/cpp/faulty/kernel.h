#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// The mistakes that the tests have to find; harness tests ask for one after the other.
enum class Fault : std::int64_t {
  none,
  last_element_not_written,
  write_past_the_end,
  read_past_the_end,
  wrong_at_one_level,
  rounded_towards_zero,
  input_changed,
  level_ignored,
};

struct FaultyArgs {
  void* x;
  void* out;
  std::int64_t width;
  float factor;
  DType dtype;
  Fault fault;
};

}  // namespace oxytorch

OXY_KERNEL(faulty, faulty, FaultyArgs)
