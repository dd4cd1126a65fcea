#include <cstring>
#include <vector>

#include "core/check.h"
#include "core/old_runtime.h"
#include "core/parallel.h"
#include "ops/optimizer_step/kernel.h"
#include "ops/optimizer_step/rules.h"

namespace oxytorch {

namespace {

using Tensors = std::vector<Tensor>;

constexpr const char* kOp = "optimizer_step";

// The arguments of the op beside its rule.
struct Call {
  const Tensors& parameters;
  const Tensors& low_bits;
  const Tensors& gradients;
  const Tensors& states;
  const Tensors& scales;
  const Tensors& steps;
  const std::vector<std::int64_t>& rng_streams;
  const std::vector<double>& hyper;
  const std::optional<Tensor>& gradient_scale;
  const std::optional<Tensor>& found_inf;
  double gradient_factor;
  bool stochastic;
  std::int64_t seed;
  const std::optional<Tensor>& sums;
  std::int64_t phase;
};

// What a call of a rule with norms does: both sweeps, or one of them.
enum Phase : std::int64_t { kWhole, kReduceNorms, kUpdate };

// Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

std::uint32_t random_key(std::int64_t seed, std::int64_t rng_stream, double step, int operand) {
  std::uint64_t key = mix(static_cast<std::uint64_t>(seed));
  key = mix(key ^ static_cast<std::uint64_t>(rng_stream));
  key = mix(key ^ static_cast<std::uint64_t>(step));
  return static_cast<std::uint32_t>(mix(key ^ static_cast<std::uint64_t>(operand)));
}

void check_length(const char* argument, const Tensors& list, std::size_t length,
                  bool may_be_empty) {
  if (list.size() == length || (may_be_empty && list.empty())) return;
  fail(kOp, argument, "with " + std::to_string(length) + " tensors", std::to_string(list.size()));
}

// Refuses a tensor whose elements do not lie where those of the parameter do.
void check_like(const char* argument, const Tensor& tensor, const Tensor& like) {
  check_cpu(kOp, argument, tensor);
  check_shape(kOp, argument, tensor, like.sizes());
  for (std::int64_t i = 0; i < like.dim(); ++i) {
    if (like.size(i) > 1 && tensor.stride(i) != like.stride(i)) {
      fail(kOp, argument, "with the parameter's strides " + describe(like.strides()),
           describe(tensor.strides()));
    }
  }
}

Format float_format(const char* argument, const Tensor& tensor) {
  switch (check_dtype(kOp, argument, tensor)) {
    case DType::bfloat16:
      return Format::bfloat16;
    case DType::float16:
      return Format::float16;
    default:
      return Format::float32;
  }
}

void check_code(const char* argument, const Tensor& tensor, std::int32_t code) {
  if (tensor.dtype_code() != code) {
    fail(kOp, argument, "of dtype " + dtype_name(code), dtype_name(tensor.dtype_code()));
  }
}

Operand describe_parameter(const Call& call, std::size_t i) {
  const Tensor& parameter = call.parameters[i];
  check_cpu(kOp, "parameters", parameter);
  if (!is_dense(parameter)) {
    fail(kOp, "parameters", "without holes between their elements",
         "strides " + describe(parameter.strides()));
  }
  Operand operand{nullptr, nullptr, float_format("parameters", parameter), 0};
  if (!call.low_bits.empty() && call.low_bits[i].numel() > 0) {
    const Tensor& low_bits = call.low_bits[i];
    check_code("parameters", parameter, aoti_torch_dtype_bfloat16());
    check_code("low_bits", low_bits, aoti_torch_dtype_int16());
    check_like("low_bits", low_bits, parameter);
    operand.format = Format::split;
    operand.extra = low_bits.mutable_data();
  }
  operand.data = parameter.mutable_data();
  return operand;
}

// A state of the parameter's size that is kept as a column and a row for each of its matrices.
Operand describe_factors(const Tensor& columns, const Tensor& rows, const Tensor& like) {
  check_minimum_dim(kOp, "parameters", like, 2);
  if (!like.is_contiguous()) {
    fail(kOp, "parameters", "contiguous beside factored states", describe(like.strides()));
  }
  const std::int64_t height = like.size(-2);
  const std::int64_t width = like.size(-1);
  for (const auto& [factor, length] : {std::pair{&columns, height}, std::pair{&rows, width}}) {
    check_cpu(kOp, "states", *factor);
    check_code("states", *factor, aoti_torch_dtype_float32());
    if (!factor->is_contiguous() || factor->numel() * length != like.numel()) {
      fail(kOp, "states", "contiguous factors of " + describe(like.sizes()),
           describe(factor->sizes()));
    }
  }
  return {const_cast<void*>(columns.data()),
          const_cast<void*>(rows.data()),
          Format::factored,
          0,
          height,
          width};
}

Operand describe_state(const Call& call, std::size_t index, const Tensor& like) {
  const Tensor& state = call.states[index];
  if (!call.scales.empty() && call.scales[index].numel() > 0 &&
      state.dtype_code() == aoti_torch_dtype_float32()) {
    return describe_factors(state, call.scales[index], like);
  }
  check_like("states", state, like);
  Operand operand{nullptr, nullptr, Format::float32, 0};
  const std::int32_t code = state.dtype_code();
  if (code == aoti_torch_dtype_int8() || code == aoti_torch_dtype_uint8()) {
    operand.format =
        code == aoti_torch_dtype_int8() ? Format::signed_codes : Format::unsigned_codes;
    const std::int64_t blocks = (like.numel() + kCodeBlock - 1) / kCodeBlock;
    if (call.scales.empty()) fail(kOp, "scales", "for states of 8 bits", "none");
    const Tensor& scales = call.scales[index];
    check_cpu(kOp, "scales", scales);
    check_code("scales", scales, aoti_torch_dtype_float32());
    check_vector(kOp, "scales", scales, blocks);
    if (!scales.is_contiguous()) fail(kOp, "scales", "contiguous", describe(scales.strides()));
    operand.extra = scales.mutable_data();
  } else {
    operand.format = float_format("states", state);
    if (operand.format == Format::bfloat16 && call.stochastic) operand.format = Format::stochastic;
  }
  operand.data = state.mutable_data();
  return operand;
}

double scalar_value(const char* argument, const Tensor& tensor) {
  check_cpu(kOp, argument, tensor);
  if (tensor.numel() != 1) fail(kOp, argument, "with one element", describe(tensor.sizes()));
  if (tensor.dtype_code() == aoti_torch_dtype_float64()) {
    return *static_cast<const double*>(tensor.data());
  }
  check_code(argument, tensor, aoti_torch_dtype_float32());
  return *static_cast<const float*>(tensor.data());
}

void write_step(const Tensor& tensor, double value) {
  if (tensor.dtype_code() == aoti_torch_dtype_float64()) {
    *static_cast<double*>(tensor.mutable_data()) = value;
  } else {
    *static_cast<float*>(tensor.mutable_data()) = static_cast<float>(value);
  }
}

// Returns the number of states of each parameter.
std::size_t check_lengths(const Rule& rule, const Call& call) {
  const std::size_t count = call.parameters.size();
  check_length("low_bits", call.low_bits, count, true);
  check_length("gradients", call.gradients, count, false);
  check_length("steps", call.steps, count, !rule.has_step);
  // A rule's last states may be left out where its flags do not use them.
  const std::size_t states = count ? call.states.size() / count : 0;
  if (count && (states > static_cast<std::size_t>(rule.states) || call.states.size() % count)) {
    fail(kOp, "states", "with at most " + std::to_string(rule.states) + " tensors per parameter",
         std::to_string(call.states.size()));
  }
  check_length("scales", call.scales, call.states.size(), true);
  if (!call.rng_streams.empty() && call.rng_streams.size() != count) {
    fail(kOp, "rng_streams", "with " + std::to_string(count) + " numbers",
         std::to_string(call.rng_streams.size()));
  }
  return states;
}

// The tensors of parameter i, and random numbers of this step.
void describe_operands(const Call& call, std::size_t i, std::size_t states, double step,
                       Update& update) {
  const Tensor& parameter = call.parameters[i];
  update.operands[0] = describe_parameter(call, i);
  check_like("gradients", call.gradients[i], parameter);
  update.operands[1] = {const_cast<void*>(call.gradients[i].data()), nullptr,
                        float_format("gradients", call.gradients[i]), 0};
  const std::int64_t rng_stream =
      call.rng_streams.empty() ? static_cast<std::int64_t>(i) : call.rng_streams[i];
  for (std::size_t k = 0; k < states; ++k) {
    Operand& operand = update.operands[2 + k];
    operand = describe_state(call, k * call.parameters.size() + i, parameter);
    operand.key = random_key(call.seed, rng_stream, step, static_cast<int>(k));
  }
  update.count = parameter.numel();
}

// Checks everything and describes every tensor's update; modifies nothing.
std::vector<Update> describe_updates(const Rule& rule, const Call& call,
                                     std::vector<double>& step_values) {
  const std::size_t count = call.parameters.size(), states = check_lengths(rule, call);
  double factor = call.gradient_factor;
  if (call.gradient_scale) factor /= scalar_value("gradient_scale", *call.gradient_scale);
  std::vector<Update> updates(count);
  step_values.resize(call.steps.size());
  std::int64_t items = 0;
  unsigned flags = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Update& update = updates[i];
    double step = 0;
    // The first phase counts the step, the second finds it counted.
    if (!call.steps.empty()) {
      const double done = scalar_value("steps", call.steps[i]);
      step = step_values[i] = call.phase == kUpdate ? done : done + 1;
    }
    describe_operands(call, i, states, step, update);
    if (i > 0 && (!rule.has_step || step == step_values[i - 1])) {
      std::memcpy(update.scalars, updates[i - 1].scalars, sizeof update.scalars);
    } else {
      rule.constants(step, call.hyper.data(), update.scalars, &flags);
    }
    update.variant = rule.variants[flags];
    update.reduction = rule.reductions ? rule.reductions[flags] : update.variant;
    if ((kUsed[update.variant] | kUsed[update.reduction]) >> (2 + states)) {
      fail(kOp, "states", "with every state that the options use",
           std::to_string(states) + " per parameter");
    }
    update.factor = static_cast<float>(factor);
    update.first_item = items;
    items += (update.count + kBlock - 1) / kBlock;
  }
  return updates;
}

std::int64_t item_count(const Update& update) { return (update.count + kBlock - 1) / kBlock; }

// Runs the loops over updates [begin, end); `sums` as in StepArgs.
void sweep(std::vector<Update>& updates, std::size_t begin, std::size_t end, double* sums,
           bool backwards = false) {
  for (std::size_t i = begin; i < end; ++i) {
    for (Operand& operand : updates[i].operands) operand.ahead = backwards ? -kBlock : kBlock;
  }
  const std::int64_t first = updates[begin].first_item;
  const Update& last = updates[end - 1];
  const StepArgs args{updates.data(), static_cast<std::int64_t>(updates.size()), first, sums,
                      backwards};
  constexpr std::int64_t kBytesPerItem = 28 * kBlock;
  run(optimizer_step_copies, args, last.first_item + item_count(last) - first, kBytesPerItem);
}

// The sums of each tensor, in an order that does not depend on threads.
void reduce_norms(std::vector<Update>& updates, std::size_t begin, std::size_t end,
                  double* totals) {
  const std::int64_t first = updates[begin].first_item;
  const Update& last = updates[end - 1];
  std::vector<double> sums(kMaxSums * (last.first_item + item_count(last) - first), 0.0);
  sweep(updates, begin, end, sums.data());
  for (std::size_t i = begin; i < end; ++i) {
    double* total = totals + kMaxSums * i;
    std::fill(total, total + kMaxSums, 0.0);
    const double* item = sums.data() + kMaxSums * (updates[i].first_item - first);
    for (std::int64_t k = 0; k < item_count(updates[i]); ++k) {
      for (int n = 0; n < kMaxSums; ++n) total[n] += item[kMaxSums * k + n];
    }
  }
}

// Two sweeps, over as many tensors at a time as stay in the cache in between.
void step_with_norms(const Rule& rule, const Call& call, std::vector<Update>& updates) {
  std::vector<double> own;
  double* totals = nullptr;
  if (call.sums) {
    const std::int64_t shape[] = {static_cast<std::int64_t>(updates.size()), kMaxSums};
    check_shape(kOp, "sums", *call.sums, Extents{shape, 2});
    check_code("sums", *call.sums, aoti_torch_dtype_float64());
    check_cpu(kOp, "sums", *call.sums);
    if (!call.sums->is_contiguous()) {
      fail(kOp, "sums", "contiguous", describe(call.sums->strides()));
    }
    totals = static_cast<double*>(call.sums->mutable_data());
  } else {
    own.resize(kMaxSums * updates.size());
    totals = own.data();
  }
  // What the second sweep reads of an element: the parameter and at most two states.
  constexpr std::int64_t kBytesPerElement = 12;
  for (std::size_t begin = 0; begin < updates.size();) {
    std::int64_t bytes = kBytesPerElement * updates[begin].count;
    std::size_t end = begin + 1;
    while (end < updates.size() &&
           bytes + kBytesPerElement * updates[end].count <= tuning.stream_bytes) {
      bytes += kBytesPerElement * updates[end++].count;
    }
    if (call.phase != kUpdate) reduce_norms(updates, begin, end, totals);
    if (call.phase != kReduceNorms) {
      for (std::size_t i = begin; i < end; ++i) {
        float& step_size = updates[i].scalars[rule.step_size];
        const double ratio = rule.trust_ratio(
            totals + kMaxSums * i, static_cast<double>(updates[i].count), call.hyper.data());
        step_size = static_cast<float>(step_size * ratio);
      }
      sweep(updates, begin, end, nullptr, true);
    }
    begin = end;
  }
}

void step(const Rule& rule, const Call& call) {
  if (call.found_inf && scalar_value("found_inf", *call.found_inf) != 0) return;
  if (call.hyper.size() != static_cast<std::size_t>(rule.hyper)) {
    fail(kOp, "hyper", std::string("of ") + rule.hyper_names,
         std::to_string(call.hyper.size()) + " numbers");
  }
  if (call.phase != kWhole && (!rule.reductions || !call.sums)) {
    fail(kOp, "phase", "0 for a rule without sums", std::to_string(call.phase));
  }
  std::vector<double> step_values;
  std::vector<Update> updates = describe_updates(rule, call, step_values);
  if (updates.empty()) return;
  for (std::size_t i = 0; i < step_values.size(); ++i) write_step(call.steps[i], step_values[i]);
  if (rule.reductions) {
    step_with_norms(rule, call, updates);
  } else {
    sweep(updates, 0, updates.size(), nullptr);
  }
}

const Rule& rule_of(const std::string& name) {
  std::string names;
  for (const Rule& rule : kRules) {
    if (name == rule.name) return rule;
    names += (names.empty() ? "'" : ", '") + std::string(rule.name) + "'";
  }
  fail(kOp, "rule", "from " + names, "'" + name + "'");
}

}  // namespace

static void optimizer_step(const Tensors& parameters, const Tensors& low_bits,
                           const Tensors& gradients, const Tensors& states, const Tensors& scales,
                           const Tensors& steps, const std::vector<std::int64_t>& rng_streams,
                           const std::string& rule, const std::vector<double>& hyper,
                           const std::optional<Tensor>& gradient_scale,
                           const std::optional<Tensor>& found_inf, double gradient_factor,
                           bool stochastic, std::int64_t seed, const std::optional<Tensor>& sums,
                           std::int64_t phase) {
  step(rule_of(rule), {parameters, low_bits, gradients, states, scales, steps, rng_streams, hyper,
                       gradient_scale, found_inf, gradient_factor, stochastic, seed, sums, phase});
}

OXY_OP(optimizer_step,
       "(Tensor(a!)[] parameters, Tensor(b!)[] low_bits, Tensor[] gradients, Tensor(c!)[] states, "
       "Tensor(d!)[] scales, Tensor(e!)[] steps, int[] rng_streams, str rule, float[] hyper, "
       "Tensor? gradient_scale=None, Tensor? found_inf=None, float gradient_factor=1.0, "
       "bool stochastic=False, int seed=0, Tensor(f!)? sums=None, int phase=0) -> ()",
       optimizer_step)

}  // namespace oxytorch
