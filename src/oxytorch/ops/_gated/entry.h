// Checks, allocation and the parallel loop that the gated activations share.
#pragma once

#include "core/check.h"
#include "core/parallel.h"
#include "ops/_gated/args.h"

namespace oxytorch {

// `weight_of_arithmetic`: how many bytes one thread moves while it computes on one byte.
inline Tensor gated_entry(const char* op, const Copies<GatedArgs>& copies, const Tensor& gate,
                          const Tensor& up, bool tanh_form, std::int64_t weight_of_arithmetic) {
  constexpr std::int64_t kBlock = 2048;
  const DType dtype = check_dtype(op, "gate", gate);
  check_minimum_dim(op, "gate", gate, 1);
  check_shape(op, "up", up, gate.sizes());
  check_same_dtype(op, "up", up, gate);
  check_cpu(op, "up", up);
  const Rows gate_rows = rows_of(gate);
  const Rows up_rows = rows_of(up);
  Tensor out = empty(gate.sizes(), gate.dtype_code());
  const std::int64_t numel = gate_rows.count * gate_rows.width;
  GatedArgs args{
      .gate = gate_rows.data,
      .up = up_rows.data,
      .out = out.mutable_data(),
      .width = gate_rows.width,
      .numel = numel,
      .gate_stride = gate_rows.stride,
      .up_stride = up_rows.stride,
      .dtype = dtype,
      .tanh_form = tanh_form,
      .stream = should_stream(numel * size_of(dtype)),
  };
  if (gate_rows.stride == gate_rows.width && up_rows.stride == gate_rows.width) {
    args.width = args.gate_stride = args.up_stride = kBlock;
  }
  const std::int64_t rows = args.width == 0 ? 0 : (numel + args.width - 1) / args.width;
  run(copies, args, rows, 3 * args.width * size_of(dtype) * weight_of_arithmetic);
  return out;
}

}  // namespace oxytorch
