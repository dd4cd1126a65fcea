// Calls oxytorch's operators from a program with libtorch, by their names.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <iostream>

int main() {
  using LayerNorm = at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&,
                               const std::optional<at::Tensor>&, double);
  const auto layer_norm =
      c10::Dispatcher::singleton().findSchemaOrThrow("oxytorch::layer_norm", "").typed<LayerNorm>();
  const at::Tensor x = at::randn({8, 768}), weight = at::randn({768}), bias = at::randn({768});
  const at::Tensor wanted = at::layer_norm(x, {768}, weight, bias, 1e-5);
  const auto error = [&](const at::Tensor& found) {
    return (found.to(at::kFloat) - wanted).abs().max().item<double>();
  };
  std::cout << "float32 " << error(layer_norm.call(x, weight, bias, 1e-5)) << "\n";
  const auto wide = [](const at::Tensor& each) { return each.to(at::kDouble); };
  std::cout << "float64 " << error(layer_norm.call(wide(x), wide(weight), wide(bias), 1e-5))
            << "\n";
  const at::Tensor meta = layer_norm.call(x.to(at::kMeta), std::nullopt, std::nullopt, 1e-5);
  std::cout << "meta " << meta.sizes() << "\n";
  const at::Tensor leaf = x.clone().requires_grad_();
  layer_norm.call(leaf, weight, bias, 1e-5).square().sum().backward();
  std::cout << "gradient " << leaf.grad().sizes() << "\n";
  try {
    layer_norm.call(x, at::randn({5}), bias, 1e-5);
  } catch (const std::exception& refused) {
    std::cout << "refused: " << std::string(refused.what()).substr(0, 60) << "\n";
  }
  try {
    using Pack = at::Tensor(const at::Tensor&, c10::string_view, bool);
    c10::Dispatcher::singleton()
        .findSchemaOrThrow("oxytorch::pack_panels", "")
        .typed<Pack>()
        .call(at::randn({16, 64}, at::kDouble), "fp32", false);
  } catch (const std::exception& refused) {
    std::cout << "refused: " << std::string(refused.what()).substr(0, 60) << "\n";
  }
}
