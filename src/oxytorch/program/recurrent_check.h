// What torch's recurrent operators take on trust.
#pragma once

#include <cstdint>
#include <vector>

#include "core/torch_api.h"

namespace oxytorch::runtime {

// The arguments of aten::lstm.input, gru.input, rnn_tanh.input or rnn_relu.input, as sizes.
struct RecurrentCall {
  std::int64_t gates = 1;     // 4 of an LSTM, 3 of a GRU
  Shape input;                // [length, batch, width], or batch first
  std::vector<Shape> states;  // the hidden one, and an LSTM's cells: [layers, batch, size]
  std::vector<Shape> weights;
  bool has_bias = false, is_bidirectional = false, is_batch_first = false;
  std::int64_t layers = 0;
};

// Throws where sizes do not fit each other: torch reads beyond tensors then, or divides by zero.
void check_recurrent(const RecurrentCall& call);

}  // namespace oxytorch::runtime
