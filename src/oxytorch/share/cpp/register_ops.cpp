// Compiled in programs that link oxytorch::ops: the library registers the operators' CPU kernels,
// and this file the plain-PyTorch formulas for float64, other devices and gradients.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cmath>
#include <set>
#include <string>
#include <tuple>

extern "C" int oxytorch_active_level();

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// So that the linker keeps the library, whose operators are registered when it is loaded.
[[maybe_unused]] const int level = oxytorch_active_level();

at::ScalarType wide(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps) {
  // Not at::layer_norm, which has no meta kernel without Python.
  const at::ScalarType dtype = wide(x);
  const Tensor values = x.to(dtype), centered = values - values.mean(-1, true);
  Tensor normed = centered * (centered.square().mean(-1, true) + eps).rsqrt();
  if (weight) normed = normed * weight->to(dtype);
  if (bias) normed = normed + bias->to(dtype);
  return normed.to(x.scalar_type());
}

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps) {
  const Tensor values = x.to(wide(x));
  const Tensor normed = values * (values.square().mean(-1, true) + eps).rsqrt();
  return (weight ? normed * weight->to(values.scalar_type()) : normed).to(x.scalar_type());
}

Tensor total_or_none(const Tensor& total, bool wanted) {
  return wanted ? total : at::empty({0}, total.options());
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps, bool return_total) {
  const Tensor total = x + residual;
  return {layer_norm(total, weight, bias, eps), total_or_none(total, return_total)};
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const OptionalTensor& weight, double eps,
                                        bool return_total) {
  const Tensor total = x + residual;
  return {rms_norm(total, weight, eps), total_or_none(total, return_total)};
}

Tensor softmax(const Tensor& x, double scale, const OptionalTensor& mask) {
  Tensor scores = x.to(wide(x)) * scale;
  if (mask && mask->scalar_type() == at::kBool) {
    scores = scores.masked_fill(mask->logical_not(), -INFINITY);
  } else if (mask) {
    scores = scores + *mask;
  }
  return at::softmax(scores, -1).to(x.scalar_type());
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  const at::ScalarType dtype = wide(gate);
  return (at::silu(gate.to(dtype)) * up.to(dtype)).to(gate.scalar_type());
}

Tensor gelu_mul(const Tensor& gate, const Tensor& up, c10::string_view approximate) {
  const at::ScalarType dtype = wide(gate);
  return (at::gelu(gate.to(dtype), approximate) * up.to(dtype)).to(gate.scalar_type());
}

// Where no formula is here.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(
      false, op.schema().name(),
      ": expected float32, bfloat16 or float16 tensors on the CPU that need no gradients: a "
      "program without Python has no formula of this operator for others");
}

// With gradients the formula runs, whose operators torch knows the gradients of.
void above_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  bool needs_gradient = false;
  for (const c10::IValue& each : torch::jit::last(*stack, count)) {
    needs_gradient |=
        each.isTensor() && each.toTensor().defined() && each.toTensor().requires_grad();
    if (!each.isTensorList()) continue;
    for (const Tensor& tensor : each.toTensorVector()) needs_gradient |= tensor.requires_grad();
  }
  if (at::GradMode::is_enabled() && needs_gradient) {
    const std::string name = op.schema().name();
    c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "reference").callBoxed(stack);
    return;
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Stays until the process ends, as what is registered does.
torch::Library& library_of(c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, "oxytorch", key, __FILE__, __LINE__);
}

bool register_all() {
  // Python registers its own, in processes that have it too.
  torch::Library& others = library_of(c10::DispatchKey::CompositeExplicitAutograd);
  torch::Library& formulas = library_of(c10::DispatchKey::CompositeImplicitAutograd);
  torch::Library& gradients = library_of(c10::DispatchKey::Autograd);
  std::set<std::string> known;
  const auto formula = [&](const char* name, auto function) {
    others.impl(name, function);
    formulas.impl((std::string(name) + ".reference").c_str(), function);
    known.insert(name);
  };
  formula("layer_norm", TORCH_FN(layer_norm));
  formula("rms_norm", TORCH_FN(rms_norm));
  formula("add_layer_norm", TORCH_FN(add_layer_norm));
  formula("add_rms_norm", TORCH_FN(add_rms_norm));
  formula("softmax", TORCH_FN(softmax));
  formula("silu_mul", TORCH_FN(silu_mul));
  formula("gelu_mul", TORCH_FN(gelu_mul));
  const std::string own = "oxytorch::";
  for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames()) {
    if (each.name.rfind(own, 0) != 0 || each.overload_name != "reference") continue;
    const std::string name = each.name.substr(own.size());
    gradients.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&above_kernel>());
    if (known.count(name) > 0) continue;
    others.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse>());
    formulas.impl((name + ".reference").c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
  return true;
}

[[maybe_unused]] const bool is_registered = register_all();

}  // namespace
