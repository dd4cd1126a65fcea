// One step of an optimizer over many tensors.
//
// A rule works on float32; a format says how an operand is kept in memory. Items are blocks of
// kBlock elements, numbered over all tensors of the call.
#pragma once

#include <cstdint>

#include "core/dispatch.h"

namespace oxytorch {

enum class Format : std::int32_t {
  float32,
  bfloat16,
  float16,
  // The upper half of a float32 in `data`, the lower half in `extra`.
  split,
  // bfloat16, rounded up or down at random so that the mean is right.
  stochastic,
  // Codes of 8 bits in `data`, a float32 for every kCodeBlock of them in `extra`.
  signed_codes,
  unsigned_codes,
  // The product of a column in `data` and a row in `extra`, float32; only read.
  factored,
};

struct Operand {
  void* data;
  void* extra;
  Format format;
  std::uint32_t key;  // of this operand's random numbers
  // Of a factored operand: the last two sizes.
  std::int64_t height = 0;
  std::int64_t width = 0;
  // Elements asked for ahead of their use, in the direction of the sweep.
  std::int64_t ahead = 0;
};

inline constexpr std::int64_t kBlock = 1024;
inline constexpr std::int64_t kCodeBlock = 256;
inline constexpr int kMaxOperands = 5;  // parameter, gradient, states
inline constexpr int kMaxScalars = 12;
inline constexpr int kMaxSums = 2;

// The update of one tensor.
struct Update {
  Operand operands[kMaxOperands];
  std::int64_t count;
  std::int64_t first_item;
  int variant;
  int measure;   // the loop before it whose sums the update needs
  float factor;  // of the gradient
  float scalars[kMaxScalars];
};

struct StepArgs {
  const Update* updates;
  std::int64_t update_count;
  std::int64_t first_item;
  double* sums;  // of a measure: kMaxSums per item from first_item on; else null
  // Of an update after a measure: begins with what the measure left in the caches. Slower where
  // nothing is there, because the processor prefetches forwards.
  bool backwards;
};

}  // namespace oxytorch

OXY_KERNEL(optimizer_step, optimizer_step, StepArgs)
