// What epilogues do to sums, in registers.
#pragma once

#include "core/functions.h"
#include "ops/_gated/gelu.h"
#include "ops/panels/args.h"

namespace oxytorch::OXY_LEVEL {

// NaN stays NaN.
OXY_INLINE f32v relu(f32v v) { return maximum(f32v{}, v); }

// The sum of a result and what an epilogue adds to it, and what becomes of the sum.
OXY_INLINE f32v total(PanelEpilogue epilogue, f32v v, f32v other) {
  return epilogue == PanelEpilogue::add_relu ? relu(v + other) : v + other;
}

// The activation of an epilogue, as accurate as a result of type T needs.
template <class T>
OXY_INLINE f32v activate(PanelEpilogue epilogue, f32v v, T) {
  switch (epilogue) {
    case PanelEpilogue::none:
    case PanelEpilogue::add:
    case PanelEpilogue::add_relu:
      return v;
    case PanelEpilogue::gelu:
    case PanelEpilogue::gelu_add:
    case PanelEpilogue::gelu_mul:
      return gelu(v, T{});
    case PanelEpilogue::gelu_tanh:
    case PanelEpilogue::gelu_tanh_add:
    case PanelEpilogue::gelu_tanh_mul:
      return gelu_tanh(v, T{});
    case PanelEpilogue::silu:
    case PanelEpilogue::silu_add:
    case PanelEpilogue::silu_mul:
      return v * sigmoid(v, T{});
    case PanelEpilogue::relu:
    case PanelEpilogue::relu_add:
      return relu(v);
    case PanelEpilogue::relu6:
    case PanelEpilogue::relu6_add:
      return minimum(splat(6.0f), relu(v));
    case PanelEpilogue::tanh:
    case PanelEpilogue::tanh_add:
      return hyperbolic_tangent(v, T{});
    case PanelEpilogue::sigmoid:
    case PanelEpilogue::sigmoid_add:
      return sigmoid(v, T{});
    case PanelEpilogue::hardswish:
    case PanelEpilogue::hardswish_add:
      return v * maximum(splat(0.0f), minimum(splat(6.0f), v + 3.0f)) * (1.0f / 6.0f);
  }
  return v;
}

// The same in the code of an epilogue (`compiled_as`), for one that has it.
template <PanelEpilogue code, class T>
OXY_INLINE f32v activate_in(PanelEpilogue epilogue, f32v v, T) {
  return activate(is_summed(code) ? epilogue : code, v, T{});
}

// v + from[i]; nothing where `from` is null.
template <class Count>
OXY_INLINE f32v add_from(f32v v, const void* from, DType dtype, std::int64_t i, Count count) {
  if (!from) return v;
  with_type(dtype, [&](auto element) {
    v += load(static_cast<const decltype(element)*>(from) + i, count);
  });
  return v;
}

}  // namespace oxytorch::OXY_LEVEL
