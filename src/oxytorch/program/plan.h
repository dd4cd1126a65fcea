// The plan of a program's memory: which results lie where in its arena, for all sizes.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/arena.h"
#include "program/stack.h"

namespace oxytorch::runtime {

// A size of an input: dimension `dim` of a tensor, or an input that is a size, where it is -1.
struct InputSize {
  std::int32_t input;
  std::int32_t dim;
};

// Bytes as a sum of products of sizes of inputs.
struct Formula {
  struct Term {
    std::int64_t factor = 1;
    std::vector<InputSize> sizes;
  };
  std::vector<Term> terms;
};

// A result of a step, the buffer that it lies in and the bytes that it takes. Buffers are as large
// as the largest of their results, and lie one after the other.
struct Place {
  std::int32_t slot;
  std::int32_t buffer;
  Formula bytes;
};

// Reads 3072*%0.1*%0.0+64*$1: a factor is a number, dimension 1 of input 0, or input size 1. Throws
// std::runtime_error where it is no such sum.
Formula read_formula(std::string_view word, std::int32_t tensors, std::int32_t sizes);

// Where each place lies for a call's inputs, and the bytes of all buffers. False where an input has
// no such dimension, or it is more than a machine has.
bool lay_out(const std::vector<Place>& places, std::int32_t buffers,
             const std::vector<TensorOwner>& tensors, const std::vector<std::int64_t>& sizes,
             std::vector<Arena::Spot>& spots, std::size_t& total);

}  // namespace oxytorch::runtime
