#include "ops/activation/kernel.h"

#include "core/functions.h"

namespace oxytorch::OXY_LEVEL {

// exp(x) - 1 for x <= 0: with t = tanh(x / 2) it is 2 t / (1 - t), where no digits cancel.
template <class T>
OXY_INLINE f32v exponential_less_one(f32v x, T) {
  const f32v t = hyperbolic_tangent(0.5f * x, T{});
  return 2.0f * t * inverse(1.0f - t, T{});
}

// x tanh(log(1 + exp(x))); with e = exp(x) the tanh is (e^2 + 2 e) / (e^2 + 2 e + 2), where no
// digits cancel. From 20 on it is 1.
template <class T>
OXY_INLINE f32v mish(f32v x, T) {
  const f32v e = exponential(minimum(splat(20.0f), x));
  const f32v n = e * (e + 2.0f);
  return x * (n * inverse(n + 2.0f, T{}));
}

OXY_INLINE f32v power(f32v v, int exponent) {
  f32v found = v;
  for (int i = 1; i < exponent; ++i) found = found * v;
  return found;
}

// Of each: what it makes of numbers. NaN stays NaN.
template <Activation activation, class T>
OXY_INLINE f32v activated(const float* numbers, f32v v, T) {
  switch (activation) {
    case Activation::leaky_relu:
      return v > 0.0f ? v : v * numbers[0];
    case Activation::clamp:
      return minimum(splat(numbers[1]), maximum(splat(numbers[0]), v));
    case Activation::elu: {
      const f32v below = minimum(splat(0.0f), v * numbers[2]);
      const f32v scaled = numbers[0] * numbers[1] * exponential_less_one(below, T{});
      return v >= 0.0f ? v * numbers[1] : scaled;
    }
    case Activation::power:
      return power(v, static_cast<int>(numbers[0]));
    case Activation::mish:
      return mish(v, T{});
  }
  return v;
}

template <Activation activation, class T>
static void sweep_stretch(const ActivationArgs& args, std::int64_t begin, std::int64_t end) {
  const T* x = static_cast<const T*>(args.x);
  T* out = static_cast<T*>(args.out);
  sweep(begin, end, [&](std::int64_t i, auto count) {
    store(out + i, activated<activation>(args.numbers, load(x + i, count), T{}), count);
  });
}

template <int number = 0, class T>
static void with_activation(const ActivationArgs& args, std::int64_t begin, std::int64_t end, T) {
  constexpr auto kActivation = static_cast<Activation>(number);
  if (args.activation == kActivation) return sweep_stretch<kActivation, T>(args, begin, end);
  constexpr int kCount = sizeof(kActivations) / sizeof(kActivations[0]);
  if constexpr (number + 1 < kCount) with_activation<number + 1>(args, begin, end, T{});
}

static void activation(const ActivationArgs& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t first = begin * args.stretch;
  const std::int64_t last = end * args.stretch < args.count ? end * args.stretch : args.count;
  with_type(args.dtype, [&](auto element) { with_activation(args, first, last, element); });
}

}  // namespace oxytorch::OXY_LEVEL
