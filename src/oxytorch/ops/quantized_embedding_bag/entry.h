// Checks that the two ops on bags of bytes share.
#pragma once

#include "ops/_quantized/entry.h"
#include "ops/embedding_bag/entry.h"
#include "ops/quantized_embedding_bag/kernel.h"

namespace oxytorch {

inline void check_table_of_bytes(const char* op, const char* argument, const Tensor& weight) {
  if (weight.dtype_code() != aoti_torch_dtype_uint8()) {
    fail(op, argument, "of dtype uint8", dtype_name(weight.dtype_code()));
  }
  if (weight.dim() != 2 || weight.size(1) <= kRowEnd) {
    fail(op, argument, "of shape [rows, dim + 8]", describe(weight.sizes()));
  }
}

// A table that was checked, and what results of its rows are.
inline BagRows rows_of_bytes(const char* op, const Tensor& weight, const std::string& out_dtype) {
  const Number number = parse_number(op, "out_dtype", out_dtype);
  if (is_byte(number)) {
    fail(op, "out_dtype", "'float32', 'bfloat16' or 'float16'", "'" + out_dtype + "'");
  }
  const DType dtype = number == Number::float32    ? DType::float32
                      : number == Number::bfloat16 ? DType::bfloat16
                                                   : DType::float16;
  return {dtype, dtype_code_of(number), weight.size(1) - kRowEnd, weight.size(1)};
}

}  // namespace oxytorch
