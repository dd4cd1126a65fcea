// Tensors to bytes and back, as a whole.
#pragma once

#include "core/parallel.h"
#include "ops/_quantized/entry.h"
#include "ops/_quantized/kernel.h"

namespace oxytorch {

// `factor`: the scale, or its inverse where bytes are written.
inline Tensor converted(const char* op, const Tensor& x, Number number, float factor,
                        std::int64_t zero_point) {
  check_cpu(op, "x", x);
  Elements elements = elements_of(x, dtype_code_of(number));
  const std::int64_t count = x.numel();
  if (count == 0) return std::move(elements.out);
  constexpr std::int64_t kStretch = 4096;
  QuantizeArgs args{
      .x = elements.x,
      .out = elements.out.mutable_data(),
      .count = count,
      .stretch = kStretch,
      .x_number = check_number(op, "x", x),
      .out_number = number,
      .scale = factor,
      .zero_point = static_cast<std::int32_t>(zero_point),
  };
  run(quantize_stretches_copies, args, divide_up(count, kStretch),
      kStretch * (size_of(args.x_number) + size_of(number)));
  return std::move(elements.out);
}

}  // namespace oxytorch
