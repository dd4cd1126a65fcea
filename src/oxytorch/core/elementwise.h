// Kernels that compute each element of a tensor for itself.
#pragma once

#include "core/check.h"
#include "core/parallel.h"
#include "core/sizes.h"

namespace oxytorch {

// Elements of one item.
inline constexpr std::int64_t kStretch = 4096;

// Returns a kernel's results for all elements of x, which lie in x's order. The call fills `x`,
// `out`, `count` and `stretch` of args; items are stretches of so many elements, of which the last
// may be shorter. bytes: of one element in x and in the result.
template <class Args>
Tensor run_over_elements(const Copies<Args>& copies, Args args, const Tensor& x,
                         std::int32_t out_dtype_code, std::int64_t bytes) {
  Elements elements = elements_of(x, out_dtype_code);
  args.count = x.numel();
  if (args.count == 0) return std::move(elements.out);
  args.x = elements.x;
  args.out = elements.out.mutable_data();
  args.stretch = kStretch;
  run(copies, args, divide_up(args.count, kStretch), kStretch * bytes);
  return std::move(elements.out);
}

}  // namespace oxytorch
