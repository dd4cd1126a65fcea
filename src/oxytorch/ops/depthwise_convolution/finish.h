// Results of depthwise convolutions from their sums.
#pragma once

#include "ops/depthwise_convolution/kernel.h"
#include "ops/panels/activation.h"

namespace oxytorch::OXY_LEVEL {

// Where neighbouring results go, of a vector of channels.
template <class T>
struct Results {
  T* out;
  const T* other;  // or null
  std::int64_t out_stride;
  std::int64_t other_stride;
  f32v bias;
  PanelEpilogue epilogue;
};

template <class T, class Count>
OXY_INLINE void finish(const Results<T>& to, std::int64_t at, f32v sum, Count count) {
  f32v v = activate(to.epilogue, sum, T{});
  if (to.other) v = total(to.epilogue, v, load(to.other + at * to.other_stride, count));
  store(to.out + at * to.out_stride, v, count);
}

}  // namespace oxytorch::OXY_LEVEL
