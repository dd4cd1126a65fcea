// Checks of arguments. Messages name the op, the argument, and the wanted and the given value:
//   rms_norm: expected weight of shape [4096], got [1, 4096]
#pragma once

#include <string>

#include "core/dtype.h"
#include "core/own_operators.h"

namespace oxytorch {

std::string describe(const Extents& sizes);
std::string dtype_name(std::int32_t dtype_code);

// Throws "<op>: expected <argument> <wanted>, got <given>".
[[noreturn]] void fail(const char* op, const char* argument, const std::string& wanted,
                       const std::string& given);

// The dtype of an activation: float32, bfloat16 or float16.
DType check_dtype(const char* op, const char* argument, const Tensor& tensor);

// The dtype of a weight: that of the activation, or float32.
DType check_weight_dtype(const char* op, const char* argument, const Tensor& tensor, DType x);

void check_same_dtype(const char* op, const char* argument, const Tensor& tensor, const Tensor& x);
void check_shape(const char* op, const char* argument, const Tensor& tensor, const Extents& wanted);
void check_vector(const char* op, const char* argument, const Tensor& tensor, std::int64_t length);
void check_minimum_dim(const char* op, const char* argument, const Tensor& tensor,
                       std::int64_t dim);
void check_cpu(const char* op, const char* argument, const Tensor& tensor);

// Whether the elements fill a stretch of memory without holes, in any order of the dimensions.
bool is_dense(const Tensor& tensor);

// The values of a tensor for an operation on each element, and the tensor for the results, in the
// same order of memory where that has no holes. Copies the values only where it has.
struct Elements {
  Tensor copy;
  Tensor out;
  const void* x;
};

Elements elements_of(const Tensor& x, std::int32_t out_dtype_code);

// A tensor seen as rows: last dimension contiguous, one stride between rows.
// Copies the tensor only where it cannot be seen so.
struct Rows {
  Tensor copy;
  const void* data;
  std::int64_t count;
  std::int64_t width;
  std::int64_t stride;
};

Rows rows_of(const Tensor& tensor);

// The tensor's values in contiguous memory; `copy` owns them where a copy was needed.
const void* contiguous_data(const Tensor& tensor, Tensor& copy);

}  // namespace oxytorch
