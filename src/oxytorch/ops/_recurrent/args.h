// Steps of recurrent layers of bytes: what the entry tells the kernels.
//
// The outputs of a weight are those of all gates of 16 hidden units, then those of the next 16:
// whoever multiplies them has all that the units' next state is made of.
#pragma once

#include "ops/_quantized/args.h"

namespace oxytorch {

// One direction in one step. Rows are those of sequences that have not ended.
struct RecurrentDirection {
  ByteRows h;                // the hidden state, as it is multiplied
  BytePanels weight;         // of the hidden state
  const float* hidden_bias;  // [outputs], or null
  const float* input;        // [rows, outputs]: the input's product with its weight and bias
  float* products;           // [rows, outputs]: the hidden state's
  float* state;              // [rows, hidden_size]: the hidden state
  float* cell;               // [rows, hidden_size]: that of an LSTM, or null
  void* out;                 // rows are `out_stride` apart
};

// Items are units of 16 times chunks of rows of the first direction, then of the second one.
struct RecurrentStepArgs {
  const RecurrentDirection* directions;
  std::int64_t direction_count;
  std::int64_t hidden_size;
  std::int64_t outputs;     // of a weight, padded: of all gates
  std::int64_t out_stride;  // elements
  std::int64_t chunk_rows;
  Number number;  // of `out`
};

// Internal linkage, so that no level shares it with another.
static inline std::int64_t items_of(const RecurrentStepArgs& args, std::int64_t rows) {
  return (args.hidden_size + kPanelOutputs - 1) / kPanelOutputs *
         ((rows + args.chunk_rows - 1) / args.chunk_rows);
}

// Products as they are, in float32. bias: or null.
static inline ByteResult plain_products(float* out, const float* bias, std::int64_t stride) {
  return {.out = out,
          .bias = bias,
          .other = nullptr,
          .out_stride = stride,
          .other_stride = 0,
          .number = Number::float32,
          .other_number = Number::float32,
          .inverse_scale = 1.0f,
          .zero_point = 0,
          .other_scale = 1.0f,
          .other_zero_point = 0,
          .epilogue = PanelEpilogue::none};
}

}  // namespace oxytorch
