// Tensors to bytes and back, as a whole.
#pragma once

#include "core/elementwise.h"
#include "ops/_quantized/entry.h"
#include "ops/_quantized/kernel.h"

namespace oxytorch {

// `factor`: the scale, or its inverse where bytes are written.
inline Tensor converted(const char* op, const Tensor& x, Number number, float factor,
                        std::int64_t zero_point) {
  check_cpu(op, "x", x);
  QuantizeArgs args{};
  args.x_number = check_number(op, "x", x);
  args.out_number = number;
  args.scale = factor;
  args.zero_point = static_cast<std::int32_t>(zero_point);
  return run_over_elements(quantize_stretches_copies, args, x, dtype_code_of(number),
                           size_of(args.x_number) + size_of(number));
}

}  // namespace oxytorch
