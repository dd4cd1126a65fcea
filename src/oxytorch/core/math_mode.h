// Whether products of float32 may be computed from numbers rounded to bfloat16.
#pragma once

#include <atomic>

namespace oxytorch {

extern std::atomic<bool> bfloat16_products;

// Set for the whole process; sums stay float32 whatever it says.
inline bool rounds_products() { return bfloat16_products.load(std::memory_order_relaxed); }

}  // namespace oxytorch
