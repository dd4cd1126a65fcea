// The element types of tensors as kernels see them.
#pragma once

#include <cstdint>

namespace oxytorch {

enum class DType : std::int32_t { float32, bfloat16, float16 };

// The upper half of a float32.
struct bf16 {
  std::uint16_t bits;
};

// IEEE 754 binary16.
struct f16 {
  std::uint16_t bits;
};

constexpr std::int64_t size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

}  // namespace oxytorch
