// The largest value, or the mean, of each window.
#pragma once

#include "core/dispatch.h"
#include "ops/windows/args.h"

namespace oxytorch {

enum class PoolKind : std::int32_t { max, mean };

// Bytes are there for the largest value alone.
enum class PoolElement : std::int32_t { floating, int8, uint8 };

// Items are lines of the result times blocks of `block` channels; blocks of a line follow each
// other.
struct PoolArgs {
  WindowArgs windows;  // of all channels, which lie side by side; dtype: of what is floating
  PoolElement element;
  void* out;  // contiguous lines of [columns, channels]
  std::int64_t block;
  PoolKind kind;
};

}  // namespace oxytorch

OXY_KERNEL_OF(pool, pool, PoolArgs)
