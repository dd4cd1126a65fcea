// Recurrent layers of bytes: checks, and all of their steps.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/check.h"

namespace oxytorch {

enum class RecurrentCell { lstm, gru };

// One tensor for each direction of each layer, the first layer's first.
struct RecurrentWeights {
  const std::vector<Tensor>& input_panels;
  const std::vector<Tensor>& input_scales;
  const std::vector<Tensor>& input_sums;
  const std::vector<Tensor>& hidden_panels;
  const std::vector<Tensor>& hidden_scales;
  const std::vector<Tensor>& hidden_sums;
  // In torch's order, in which the gates' biases follow each other; empty: there are none.
  const std::vector<Tensor>& input_biases;
  const std::vector<Tensor>& hidden_biases;
};

struct RecurrentCall {
  const char* op;
  RecurrentCell cell;
  const Tensor& x;
  const std::optional<Tensor>& h;
  const std::optional<Tensor>* c;  // null: there are no cells
  const RecurrentWeights& weights;
  std::int64_t hidden_size;
  const std::string& direction;
  const std::optional<std::vector<std::int64_t>>& batch_sizes;
};

// The outputs, the last hidden states and, of an LSTM, the last cells.
std::vector<Tensor> run_recurrent(const RecurrentCall& call);

}  // namespace oxytorch
