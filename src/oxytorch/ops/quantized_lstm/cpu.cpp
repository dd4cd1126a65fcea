#include "ops/_recurrent/entry.h"

namespace oxytorch {

static std::vector<Tensor> quantized_lstm(
    const Tensor& x, const std::optional<Tensor>& h, const std::optional<Tensor>& c,
    const std::vector<Tensor>& input_panels, const std::vector<Tensor>& input_scales,
    const std::vector<Tensor>& input_sums, const std::vector<Tensor>& hidden_panels,
    const std::vector<Tensor>& hidden_scales, const std::vector<Tensor>& hidden_sums,
    const std::vector<Tensor>& input_biases, const std::vector<Tensor>& hidden_biases,
    std::int64_t hidden_size, const std::string& direction,
    const std::optional<std::vector<std::int64_t>>& batch_sizes) {
  const RecurrentWeights weights{input_panels,  input_scales, input_sums,   hidden_panels,
                                 hidden_scales, hidden_sums,  input_biases, hidden_biases};
  return run_recurrent({"quantized_lstm", RecurrentCell::lstm, x, h, &c, weights, hidden_size,
                        direction, batch_sizes});
}

OXY_OP(quantized_lstm,
       "(Tensor x, Tensor? h, Tensor? c, Tensor[] input_panels, Tensor[] input_scales, "
       "Tensor[] input_sums, Tensor[] hidden_panels, Tensor[] hidden_scales, "
       "Tensor[] hidden_sums, Tensor[] input_biases, Tensor[] hidden_biases, int hidden_size, str "
       "direction=\"forward\", "
       "int[]? batch_sizes=None) -> (Tensor output, Tensor h, Tensor c)",
       quantized_lstm)

}  // namespace oxytorch
