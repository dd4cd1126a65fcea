// Integer numbers of steps.
#pragma once

#include <cstdint>

namespace oxytorch {

// How many steps n fills or begins, and where the last of them ends.

static constexpr std::int64_t divide_up(std::int64_t n, std::int64_t step) {
  return (n + step - 1) / step;
}

static constexpr std::int64_t round_up(std::int64_t n, std::int64_t step) {
  return divide_up(n, step) * step;
}

}  // namespace oxytorch
