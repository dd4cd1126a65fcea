// The loop that the gated activations share. Included by kernel.cpp files only.
#pragma once

#include "core/vec.h"
#include "ops/_gated/args.h"

namespace oxytorch::OXY_LEVEL {

// out = activation(gate) * up; activation(v, T{}) is as accurate as a result of type T needs.
template <class T, class Activation>
static void gated_rows(const GatedArgs& args, std::int64_t begin, std::int64_t end,
                       Activation activation) {
  for (std::int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.gate) + row * args.gate_stride;
    const T* up = static_cast<const T*>(args.up) + row * args.up_stride;
    T* out = static_cast<T*>(args.out) + row * args.width;
    const std::int64_t left = args.numel - row * args.width;
    const std::int64_t width = left < args.width ? left : args.width;
    const auto value = [&](std::int64_t i, auto count) {
      return activation(load(gate + i, count), T{}) * load(up + i, count);
    };
    if (args.stream && width % kLanes == 0 && is_aligned(out, kLanes * sizeof(T))) {
      for (std::int64_t i = 0; i < width; i += kLanes) stream(out + i, value(i, Whole{}));
    } else {
      sweep(0, width, [&](std::int64_t i, auto count) { store(out + i, value(i, count), count); });
    }
  }
  if (args.stream) stream_end();
}

template <class Activation>
static void gated(const GatedArgs& args, std::int64_t begin, std::int64_t end,
                  Activation activation) {
  with_type(args.dtype,
            [&](auto element) { gated_rows<decltype(element)>(args, begin, end, activation); });
}

}  // namespace oxytorch::OXY_LEVEL
