#include "core/elementwise.h"
#include "ops/activation/kernel.h"

namespace oxytorch {

static constexpr const char* kOp = "activation";

static Activation parse(const std::string& name, const std::vector<double>& numbers) {
  std::string names;
  for (std::size_t i = 0; i < std::size(kActivations); ++i) {
    const ActivationRow& row = kActivations[i];
    names += (i ? ", '" : "'") + std::string(row.name) + "'";
    if (name != row.name) continue;
    if (static_cast<int>(numbers.size()) != row.numbers) {
      fail(kOp, "numbers", std::to_string(row.numbers) + " for '" + name + "'",
           std::to_string(numbers.size()));
    }
    return static_cast<Activation>(i);
  }
  fail(kOp, "name", "one of " + names, "'" + name + "'");
}

static Tensor activation(const Tensor& x, const std::string& name,
                         const std::vector<double>& numbers) {
  const DType dtype = check_dtype(kOp, "x", x);
  const Activation activation = parse(name, numbers);
  if (activation == Activation::power) {
    const double exponent = numbers[0];
    const bool is_whole = exponent == static_cast<double>(static_cast<int>(exponent));
    if (!(exponent >= kLeastPower && exponent <= kMostPower && is_whole)) {
      fail(kOp, "numbers", "a whole exponent from 2 to 8", std::to_string(exponent));
    }
  }
  ActivationArgs args{};
  args.activation = activation;
  args.dtype = dtype;
  for (std::size_t i = 0; i < numbers.size(); ++i) args.numbers[i] = static_cast<float>(numbers[i]);
  return run_over_elements(activation_copies, args, x, x.dtype_code(), 2 * size_of(dtype));
}

OXY_OP(activation, "(Tensor x, str name, float[] numbers) -> Tensor", activation)

}  // namespace oxytorch
