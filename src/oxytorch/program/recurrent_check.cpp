// See recurrent_check.h.
#include "program/recurrent_check.h"

#include <stdexcept>

namespace oxytorch::runtime {

namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("expected ") + what);
}

}  // namespace

void check_recurrent(const RecurrentCall& call) {
  require(call.input.size() == 3, "an input of 3 dimensions");
  require(call.states.size() == (call.gates == 4 ? 2U : 1U), "a state, and cells of an LSTM");
  const std::int64_t ways = call.is_bidirectional ? 2 : 1;
  const auto count = static_cast<std::int64_t>(call.weights.size());
  require(call.layers >= 1 && call.layers <= count, "at least one layer");
  const std::int64_t parts = call.layers * ways, of_each = count / parts;
  const std::int64_t plain = call.has_bias ? 4 : 2;
  const bool projects = call.gates == 4 && of_each == plain + 1;
  require(of_each * parts == count && (of_each == plain || projects),
          "2 weights of each layer and direction, and 2 biases");
  const std::int64_t batch = call.input[call.is_batch_first ? 0 : 1];
  for (const Shape& state : call.states) {
    require(state.size() == 3 && state[0] == parts && state[1] == batch && state[2] >= 1,
            "states of [layers * directions, batch, size]");
  }
  const std::int64_t hidden = call.states.back()[2], output = call.states.front()[2];
  require(projects || hidden == output, "states of one size");
  for (std::int64_t part = 0; part < parts; ++part) {
    const Shape* own = call.weights.data() + part * of_each;
    const std::int64_t width = part < ways ? call.input[2] : output * ways;
    require(own[0] == Shape{call.gates * hidden, width}, "weights [gates * size, width]");
    require(own[1] == Shape{call.gates * hidden, output}, "hidden weights [gates * size, size]");
    for (std::int64_t bias = 2; bias < plain; ++bias) {
      require(own[bias] == Shape{call.gates * hidden}, "biases [gates * size]");
    }
    require(!projects || own[plain] == Shape{output, hidden}, "a projection [output, size]");
  }
}

}  // namespace oxytorch::runtime
