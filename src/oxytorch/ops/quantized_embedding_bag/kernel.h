#pragma once

#include "ops/embedding_bag/args.h"

namespace oxytorch {

// Behind the bytes of a row: its scale and the number that byte 0 stands for, float32.
inline constexpr std::int64_t kRowEnd = 8;

}  // namespace oxytorch

OXY_KERNEL(quantized_embedding_bag, EmbeddingBagArgs)
