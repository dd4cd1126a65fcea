// Written by ops/optimizer_step/translation from optim/rules.py.
#pragma once

OXY_INLINE f32v lerp(f32v start, f32v end, f32v weight) {
  const f32v nearer = ((weight < splat(0.5f)) ? start : end);
  return fused_multiply_add((end - start), ((weight < splat(0.5f)) ? weight : (weight - splat(1.0f))), nearer);
}

OXY_INLINE f32v lamb_direction(f32v exp_avg, f32v exp_avg_sq, f32v first_correction, f32v second_correction, f32v eps, f32v first_correction_inverse, f32v second_correction_inverse) {
  return (divide(exp_avg, first_correction, first_correction_inverse) / (square_root(divide(exp_avg_sq, second_correction, second_correction_inverse)) + eps));
}

OXY_INLINE f32v adafactor_direction(f32v gradient, f32v variance, f32v least) {
  return (gradient / square_root(((variance < least) ? least : variance)));
}

template <class Parameter, class Gradient, class State>
static void sgd_0(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
  });
  parameter_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void sgd_1(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    gradient = fused_multiply_add(parameter, penalty, gradient);
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
  });
  parameter_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void sgd_2(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v momentum = splat(update.scalars[1]);
  const f32v gradient_weight = splat(update.scalars[2]);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v momentum_buffer = momentum_buffer_at.get(i, rest);
    momentum_buffer = fused_multiply_add(gradient, gradient_weight, (momentum_buffer * momentum));
    gradient = momentum_buffer;
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void sgd_3(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v momentum = splat(update.scalars[1]);
  const f32v gradient_weight = splat(update.scalars[2]);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v momentum_buffer = momentum_buffer_at.get(i, rest);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    momentum_buffer = fused_multiply_add(gradient, gradient_weight, (momentum_buffer * momentum));
    gradient = momentum_buffer;
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void sgd_4(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v momentum_buffer = gradient;
    gradient = momentum_buffer;
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void sgd_5(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    gradient = fused_multiply_add(parameter, penalty, gradient);
    f32v momentum_buffer = gradient;
    gradient = momentum_buffer;
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void sgd_6(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v momentum = splat(update.scalars[1]);
  const f32v gradient_weight = splat(update.scalars[2]);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v momentum_buffer = momentum_buffer_at.get(i, rest);
    momentum_buffer = fused_multiply_add(gradient, gradient_weight, (momentum_buffer * momentum));
    gradient = fused_multiply_add(momentum_buffer, momentum, gradient);
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void sgd_7(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v momentum = splat(update.scalars[1]);
  const f32v gradient_weight = splat(update.scalars[2]);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v momentum_buffer = momentum_buffer_at.get(i, rest);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    momentum_buffer = fused_multiply_add(gradient, gradient_weight, (momentum_buffer * momentum));
    gradient = fused_multiply_add(momentum_buffer, momentum, gradient);
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void sgd_8(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v momentum = splat(update.scalars[1]);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v momentum_buffer = gradient;
    gradient = fused_multiply_add(momentum_buffer, momentum, gradient);
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void sgd_9(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v momentum = splat(update.scalars[1]);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    gradient = fused_multiply_add(parameter, penalty, gradient);
    f32v momentum_buffer = gradient;
    gradient = fused_multiply_add(momentum_buffer, momentum, gradient);
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adam_0(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  const f32v first_weight = splat(update.scalars[2]);
  const f32v beta2 = splat(update.scalars[3]);
  const f32v second_weight = splat(update.scalars[4]);
  const f32v correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v step_size = splat(update.scalars[7]);
  const f32v correction_inverse = 1.0f / correction;
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    exp_avg = lerp(exp_avg, gradient, first_weight);
    exp_avg_sq = fused_multiply_add((gradient * second_weight), gradient, (exp_avg_sq * beta2));
    f32v denominator = (divide(square_root(exp_avg_sq), correction, correction_inverse) + eps);
    parameter = (parameter + ((exp_avg * step_size) / denominator));
    parameter_at.put(i, parameter, rest);
    exp_avg_at.put(i, exp_avg, rest);
    exp_avg_sq_at.put(i, exp_avg_sq, rest);
  });
  parameter_at.finish(count);
  exp_avg_at.finish(count);
  exp_avg_sq_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adam_1(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  const f32v decay = splat(update.scalars[0]);
  const f32v first_weight = splat(update.scalars[2]);
  const f32v beta2 = splat(update.scalars[3]);
  const f32v second_weight = splat(update.scalars[4]);
  const f32v correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v step_size = splat(update.scalars[7]);
  const f32v correction_inverse = 1.0f / correction;
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    parameter = (parameter * decay);
    exp_avg = lerp(exp_avg, gradient, first_weight);
    exp_avg_sq = fused_multiply_add((gradient * second_weight), gradient, (exp_avg_sq * beta2));
    f32v denominator = (divide(square_root(exp_avg_sq), correction, correction_inverse) + eps);
    parameter = (parameter + ((exp_avg * step_size) / denominator));
    parameter_at.put(i, parameter, rest);
    exp_avg_at.put(i, exp_avg, rest);
    exp_avg_sq_at.put(i, exp_avg_sq, rest);
  });
  parameter_at.finish(count);
  exp_avg_at.finish(count);
  exp_avg_sq_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adam_2(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  const f32v penalty = splat(update.scalars[1]);
  const f32v first_weight = splat(update.scalars[2]);
  const f32v beta2 = splat(update.scalars[3]);
  const f32v second_weight = splat(update.scalars[4]);
  const f32v correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v step_size = splat(update.scalars[7]);
  const f32v correction_inverse = 1.0f / correction;
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    exp_avg = lerp(exp_avg, gradient, first_weight);
    exp_avg_sq = fused_multiply_add((gradient * second_weight), gradient, (exp_avg_sq * beta2));
    f32v denominator = (divide(square_root(exp_avg_sq), correction, correction_inverse) + eps);
    parameter = (parameter + ((exp_avg * step_size) / denominator));
    parameter_at.put(i, parameter, rest);
    exp_avg_at.put(i, exp_avg, rest);
    exp_avg_sq_at.put(i, exp_avg_sq, rest);
  });
  parameter_at.finish(count);
  exp_avg_at.finish(count);
  exp_avg_sq_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adam_3(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  const f32v decay = splat(update.scalars[0]);
  const f32v penalty = splat(update.scalars[1]);
  const f32v first_weight = splat(update.scalars[2]);
  const f32v beta2 = splat(update.scalars[3]);
  const f32v second_weight = splat(update.scalars[4]);
  const f32v correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v step_size = splat(update.scalars[7]);
  const f32v correction_inverse = 1.0f / correction;
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    parameter = (parameter * decay);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    exp_avg = lerp(exp_avg, gradient, first_weight);
    exp_avg_sq = fused_multiply_add((gradient * second_weight), gradient, (exp_avg_sq * beta2));
    f32v denominator = (divide(square_root(exp_avg_sq), correction, correction_inverse) + eps);
    parameter = (parameter + ((exp_avg * step_size) / denominator));
    parameter_at.put(i, parameter, rest);
    exp_avg_at.put(i, exp_avg, rest);
    exp_avg_sq_at.put(i, exp_avg_sq, rest);
  });
  parameter_at.finish(count);
  exp_avg_at.finish(count);
  exp_avg_sq_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adam_4(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  using max_exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float max_exp_avg_sq_scratch[max_exp_avg_sq_format::kScratch];
  max_exp_avg_sq_format max_exp_avg_sq_at(update.operands[4], offset, max_exp_avg_sq_scratch);
  const f32v first_weight = splat(update.scalars[2]);
  const f32v beta2 = splat(update.scalars[3]);
  const f32v second_weight = splat(update.scalars[4]);
  const f32v correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v step_size = splat(update.scalars[7]);
  const f32v correction_inverse = 1.0f / correction;
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    f32v max_exp_avg_sq = max_exp_avg_sq_at.get(i, rest);
    exp_avg = lerp(exp_avg, gradient, first_weight);
    exp_avg_sq = fused_multiply_add((gradient * second_weight), gradient, (exp_avg_sq * beta2));
    max_exp_avg_sq = larger(max_exp_avg_sq, exp_avg_sq);
    f32v denominator = (divide(square_root(max_exp_avg_sq), correction, correction_inverse) + eps);
    parameter = (parameter + ((exp_avg * step_size) / denominator));
    parameter_at.put(i, parameter, rest);
    exp_avg_at.put(i, exp_avg, rest);
    exp_avg_sq_at.put(i, exp_avg_sq, rest);
    max_exp_avg_sq_at.put(i, max_exp_avg_sq, rest);
  });
  parameter_at.finish(count);
  exp_avg_at.finish(count);
  exp_avg_sq_at.finish(count);
  max_exp_avg_sq_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adam_5(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  using max_exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float max_exp_avg_sq_scratch[max_exp_avg_sq_format::kScratch];
  max_exp_avg_sq_format max_exp_avg_sq_at(update.operands[4], offset, max_exp_avg_sq_scratch);
  const f32v decay = splat(update.scalars[0]);
  const f32v first_weight = splat(update.scalars[2]);
  const f32v beta2 = splat(update.scalars[3]);
  const f32v second_weight = splat(update.scalars[4]);
  const f32v correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v step_size = splat(update.scalars[7]);
  const f32v correction_inverse = 1.0f / correction;
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    f32v max_exp_avg_sq = max_exp_avg_sq_at.get(i, rest);
    parameter = (parameter * decay);
    exp_avg = lerp(exp_avg, gradient, first_weight);
    exp_avg_sq = fused_multiply_add((gradient * second_weight), gradient, (exp_avg_sq * beta2));
    max_exp_avg_sq = larger(max_exp_avg_sq, exp_avg_sq);
    f32v denominator = (divide(square_root(max_exp_avg_sq), correction, correction_inverse) + eps);
    parameter = (parameter + ((exp_avg * step_size) / denominator));
    parameter_at.put(i, parameter, rest);
    exp_avg_at.put(i, exp_avg, rest);
    exp_avg_sq_at.put(i, exp_avg_sq, rest);
    max_exp_avg_sq_at.put(i, max_exp_avg_sq, rest);
  });
  parameter_at.finish(count);
  exp_avg_at.finish(count);
  exp_avg_sq_at.finish(count);
  max_exp_avg_sq_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adam_6(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  using max_exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float max_exp_avg_sq_scratch[max_exp_avg_sq_format::kScratch];
  max_exp_avg_sq_format max_exp_avg_sq_at(update.operands[4], offset, max_exp_avg_sq_scratch);
  const f32v penalty = splat(update.scalars[1]);
  const f32v first_weight = splat(update.scalars[2]);
  const f32v beta2 = splat(update.scalars[3]);
  const f32v second_weight = splat(update.scalars[4]);
  const f32v correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v step_size = splat(update.scalars[7]);
  const f32v correction_inverse = 1.0f / correction;
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    f32v max_exp_avg_sq = max_exp_avg_sq_at.get(i, rest);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    exp_avg = lerp(exp_avg, gradient, first_weight);
    exp_avg_sq = fused_multiply_add((gradient * second_weight), gradient, (exp_avg_sq * beta2));
    max_exp_avg_sq = larger(max_exp_avg_sq, exp_avg_sq);
    f32v denominator = (divide(square_root(max_exp_avg_sq), correction, correction_inverse) + eps);
    parameter = (parameter + ((exp_avg * step_size) / denominator));
    parameter_at.put(i, parameter, rest);
    exp_avg_at.put(i, exp_avg, rest);
    exp_avg_sq_at.put(i, exp_avg_sq, rest);
    max_exp_avg_sq_at.put(i, max_exp_avg_sq, rest);
  });
  parameter_at.finish(count);
  exp_avg_at.finish(count);
  exp_avg_sq_at.finish(count);
  max_exp_avg_sq_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adam_7(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  using max_exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float max_exp_avg_sq_scratch[max_exp_avg_sq_format::kScratch];
  max_exp_avg_sq_format max_exp_avg_sq_at(update.operands[4], offset, max_exp_avg_sq_scratch);
  const f32v decay = splat(update.scalars[0]);
  const f32v penalty = splat(update.scalars[1]);
  const f32v first_weight = splat(update.scalars[2]);
  const f32v beta2 = splat(update.scalars[3]);
  const f32v second_weight = splat(update.scalars[4]);
  const f32v correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v step_size = splat(update.scalars[7]);
  const f32v correction_inverse = 1.0f / correction;
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    f32v max_exp_avg_sq = max_exp_avg_sq_at.get(i, rest);
    parameter = (parameter * decay);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    exp_avg = lerp(exp_avg, gradient, first_weight);
    exp_avg_sq = fused_multiply_add((gradient * second_weight), gradient, (exp_avg_sq * beta2));
    max_exp_avg_sq = larger(max_exp_avg_sq, exp_avg_sq);
    f32v denominator = (divide(square_root(max_exp_avg_sq), correction, correction_inverse) + eps);
    parameter = (parameter + ((exp_avg * step_size) / denominator));
    parameter_at.put(i, parameter, rest);
    exp_avg_at.put(i, exp_avg, rest);
    exp_avg_sq_at.put(i, exp_avg_sq, rest);
    max_exp_avg_sq_at.put(i, max_exp_avg_sq, rest);
  });
  parameter_at.finish(count);
  exp_avg_at.finish(count);
  exp_avg_sq_at.finish(count);
  max_exp_avg_sq_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adagrad_0(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using total_format = typename State::Unsigned;
  alignas(64) float total_scratch[total_format::kScratch];
  total_format total_at(update.operands[2], offset, total_scratch);
  const f32v eps = splat(update.scalars[1]);
  const f32v step_size = splat(update.scalars[2]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v total = total_at.get(i, rest);
    total = fused_multiply_add(gradient, gradient, total);
    parameter = (parameter + ((gradient * step_size) / (square_root(total) + eps)));
    parameter_at.put(i, parameter, rest);
    total_at.put(i, total, rest);
  });
  parameter_at.finish(count);
  total_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adagrad_1(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using total_format = typename State::Unsigned;
  alignas(64) float total_scratch[total_format::kScratch];
  total_format total_at(update.operands[2], offset, total_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v eps = splat(update.scalars[1]);
  const f32v step_size = splat(update.scalars[2]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v total = total_at.get(i, rest);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    total = fused_multiply_add(gradient, gradient, total);
    parameter = (parameter + ((gradient * step_size) / (square_root(total) + eps)));
    parameter_at.put(i, parameter, rest);
    total_at.put(i, total, rest);
  });
  parameter_at.finish(count);
  total_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void rmsprop_0(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using square_avg_format = typename State::Unsigned;
  alignas(64) float square_avg_scratch[square_avg_format::kScratch];
  square_avg_format square_avg_at(update.operands[2], offset, square_avg_scratch);
  const f32v alpha = splat(update.scalars[1]);
  const f32v weight = splat(update.scalars[2]);
  const f32v eps = splat(update.scalars[3]);
  const f32v step_size = splat(update.scalars[5]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v square_avg = square_avg_at.get(i, rest);
    square_avg = fused_multiply_add((gradient * weight), gradient, (square_avg * alpha));
    f32v average = (square_root(square_avg) + eps);
    parameter = (parameter + ((gradient * step_size) / average));
    parameter_at.put(i, parameter, rest);
    square_avg_at.put(i, square_avg, rest);
  });
  parameter_at.finish(count);
  square_avg_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void rmsprop_1(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using square_avg_format = typename State::Unsigned;
  alignas(64) float square_avg_scratch[square_avg_format::kScratch];
  square_avg_format square_avg_at(update.operands[2], offset, square_avg_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v alpha = splat(update.scalars[1]);
  const f32v weight = splat(update.scalars[2]);
  const f32v eps = splat(update.scalars[3]);
  const f32v step_size = splat(update.scalars[5]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v square_avg = square_avg_at.get(i, rest);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    square_avg = fused_multiply_add((gradient * weight), gradient, (square_avg * alpha));
    f32v average = (square_root(square_avg) + eps);
    parameter = (parameter + ((gradient * step_size) / average));
    parameter_at.put(i, parameter, rest);
    square_avg_at.put(i, square_avg, rest);
  });
  parameter_at.finish(count);
  square_avg_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void rmsprop_2(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using square_avg_format = typename State::Unsigned;
  alignas(64) float square_avg_scratch[square_avg_format::kScratch];
  square_avg_format square_avg_at(update.operands[2], offset, square_avg_scratch);
  using grad_avg_format = typename State::Signed;
  alignas(64) float grad_avg_scratch[grad_avg_format::kScratch];
  grad_avg_format grad_avg_at(update.operands[4], offset, grad_avg_scratch);
  const f32v alpha = splat(update.scalars[1]);
  const f32v weight = splat(update.scalars[2]);
  const f32v eps = splat(update.scalars[3]);
  const f32v step_size = splat(update.scalars[5]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v square_avg = square_avg_at.get(i, rest);
    f32v grad_avg = grad_avg_at.get(i, rest);
    square_avg = fused_multiply_add((gradient * weight), gradient, (square_avg * alpha));
    grad_avg = lerp(grad_avg, gradient, weight);
    f32v average = (square_root(fused_multiply_add((-grad_avg), grad_avg, square_avg)) + eps);
    parameter = (parameter + ((gradient * step_size) / average));
    parameter_at.put(i, parameter, rest);
    square_avg_at.put(i, square_avg, rest);
    grad_avg_at.put(i, grad_avg, rest);
  });
  parameter_at.finish(count);
  square_avg_at.finish(count);
  grad_avg_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void rmsprop_3(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using square_avg_format = typename State::Unsigned;
  alignas(64) float square_avg_scratch[square_avg_format::kScratch];
  square_avg_format square_avg_at(update.operands[2], offset, square_avg_scratch);
  using grad_avg_format = typename State::Signed;
  alignas(64) float grad_avg_scratch[grad_avg_format::kScratch];
  grad_avg_format grad_avg_at(update.operands[4], offset, grad_avg_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v alpha = splat(update.scalars[1]);
  const f32v weight = splat(update.scalars[2]);
  const f32v eps = splat(update.scalars[3]);
  const f32v step_size = splat(update.scalars[5]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v square_avg = square_avg_at.get(i, rest);
    f32v grad_avg = grad_avg_at.get(i, rest);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    square_avg = fused_multiply_add((gradient * weight), gradient, (square_avg * alpha));
    grad_avg = lerp(grad_avg, gradient, weight);
    f32v average = (square_root(fused_multiply_add((-grad_avg), grad_avg, square_avg)) + eps);
    parameter = (parameter + ((gradient * step_size) / average));
    parameter_at.put(i, parameter, rest);
    square_avg_at.put(i, square_avg, rest);
    grad_avg_at.put(i, grad_avg, rest);
  });
  parameter_at.finish(count);
  square_avg_at.finish(count);
  grad_avg_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void rmsprop_4(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using square_avg_format = typename State::Unsigned;
  alignas(64) float square_avg_scratch[square_avg_format::kScratch];
  square_avg_format square_avg_at(update.operands[2], offset, square_avg_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[3], offset, momentum_buffer_scratch);
  const f32v alpha = splat(update.scalars[1]);
  const f32v weight = splat(update.scalars[2]);
  const f32v eps = splat(update.scalars[3]);
  const f32v momentum = splat(update.scalars[4]);
  const f32v step_size = splat(update.scalars[5]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v square_avg = square_avg_at.get(i, rest);
    f32v momentum_buffer = momentum_buffer_at.get(i, rest);
    square_avg = fused_multiply_add((gradient * weight), gradient, (square_avg * alpha));
    f32v average = (square_root(square_avg) + eps);
    momentum_buffer = ((momentum_buffer * momentum) + (gradient / average));
    parameter = fused_multiply_add(momentum_buffer, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    square_avg_at.put(i, square_avg, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  square_avg_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void rmsprop_5(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using square_avg_format = typename State::Unsigned;
  alignas(64) float square_avg_scratch[square_avg_format::kScratch];
  square_avg_format square_avg_at(update.operands[2], offset, square_avg_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[3], offset, momentum_buffer_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v alpha = splat(update.scalars[1]);
  const f32v weight = splat(update.scalars[2]);
  const f32v eps = splat(update.scalars[3]);
  const f32v momentum = splat(update.scalars[4]);
  const f32v step_size = splat(update.scalars[5]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v square_avg = square_avg_at.get(i, rest);
    f32v momentum_buffer = momentum_buffer_at.get(i, rest);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    square_avg = fused_multiply_add((gradient * weight), gradient, (square_avg * alpha));
    f32v average = (square_root(square_avg) + eps);
    momentum_buffer = ((momentum_buffer * momentum) + (gradient / average));
    parameter = fused_multiply_add(momentum_buffer, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    square_avg_at.put(i, square_avg, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  square_avg_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void rmsprop_6(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using square_avg_format = typename State::Unsigned;
  alignas(64) float square_avg_scratch[square_avg_format::kScratch];
  square_avg_format square_avg_at(update.operands[2], offset, square_avg_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[3], offset, momentum_buffer_scratch);
  using grad_avg_format = typename State::Signed;
  alignas(64) float grad_avg_scratch[grad_avg_format::kScratch];
  grad_avg_format grad_avg_at(update.operands[4], offset, grad_avg_scratch);
  const f32v alpha = splat(update.scalars[1]);
  const f32v weight = splat(update.scalars[2]);
  const f32v eps = splat(update.scalars[3]);
  const f32v momentum = splat(update.scalars[4]);
  const f32v step_size = splat(update.scalars[5]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v square_avg = square_avg_at.get(i, rest);
    f32v momentum_buffer = momentum_buffer_at.get(i, rest);
    f32v grad_avg = grad_avg_at.get(i, rest);
    square_avg = fused_multiply_add((gradient * weight), gradient, (square_avg * alpha));
    grad_avg = lerp(grad_avg, gradient, weight);
    f32v average = (square_root(fused_multiply_add((-grad_avg), grad_avg, square_avg)) + eps);
    momentum_buffer = ((momentum_buffer * momentum) + (gradient / average));
    parameter = fused_multiply_add(momentum_buffer, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    square_avg_at.put(i, square_avg, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
    grad_avg_at.put(i, grad_avg, rest);
  });
  parameter_at.finish(count);
  square_avg_at.finish(count);
  momentum_buffer_at.finish(count);
  grad_avg_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void rmsprop_7(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using square_avg_format = typename State::Unsigned;
  alignas(64) float square_avg_scratch[square_avg_format::kScratch];
  square_avg_format square_avg_at(update.operands[2], offset, square_avg_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[3], offset, momentum_buffer_scratch);
  using grad_avg_format = typename State::Signed;
  alignas(64) float grad_avg_scratch[grad_avg_format::kScratch];
  grad_avg_format grad_avg_at(update.operands[4], offset, grad_avg_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v alpha = splat(update.scalars[1]);
  const f32v weight = splat(update.scalars[2]);
  const f32v eps = splat(update.scalars[3]);
  const f32v momentum = splat(update.scalars[4]);
  const f32v step_size = splat(update.scalars[5]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v square_avg = square_avg_at.get(i, rest);
    f32v momentum_buffer = momentum_buffer_at.get(i, rest);
    f32v grad_avg = grad_avg_at.get(i, rest);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    square_avg = fused_multiply_add((gradient * weight), gradient, (square_avg * alpha));
    grad_avg = lerp(grad_avg, gradient, weight);
    f32v average = (square_root(fused_multiply_add((-grad_avg), grad_avg, square_avg)) + eps);
    momentum_buffer = ((momentum_buffer * momentum) + (gradient / average));
    parameter = fused_multiply_add(momentum_buffer, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    square_avg_at.put(i, square_avg, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
    grad_avg_at.put(i, grad_avg, rest);
  });
  parameter_at.finish(count);
  square_avg_at.finish(count);
  momentum_buffer_at.finish(count);
  grad_avg_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void lion_0(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  const f32v beta1 = splat(update.scalars[1]);
  const f32v first_weight = splat(update.scalars[2]);
  const f32v beta2 = splat(update.scalars[3]);
  const f32v second_weight = splat(update.scalars[4]);
  const f32v step_size = splat(update.scalars[5]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v mixed = fused_multiply_add(gradient, first_weight, (exp_avg * beta1));
    f32v sign = ((mixed > splat(0.0f)) ? splat(1.0f) : ((mixed < splat(0.0f)) ? (-splat(1.0f)) : mixed));
    parameter = fused_multiply_add(sign, step_size, parameter);
    exp_avg = fused_multiply_add(gradient, second_weight, (exp_avg * beta2));
    parameter_at.put(i, parameter, rest);
    exp_avg_at.put(i, exp_avg, rest);
  });
  parameter_at.finish(count);
  exp_avg_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void lion_1(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  const f32v decay = splat(update.scalars[0]);
  const f32v beta1 = splat(update.scalars[1]);
  const f32v first_weight = splat(update.scalars[2]);
  const f32v beta2 = splat(update.scalars[3]);
  const f32v second_weight = splat(update.scalars[4]);
  const f32v step_size = splat(update.scalars[5]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    parameter = (parameter * decay);
    f32v mixed = fused_multiply_add(gradient, first_weight, (exp_avg * beta1));
    f32v sign = ((mixed > splat(0.0f)) ? splat(1.0f) : ((mixed < splat(0.0f)) ? (-splat(1.0f)) : mixed));
    parameter = fused_multiply_add(sign, step_size, parameter);
    exp_avg = fused_multiply_add(gradient, second_weight, (exp_avg * beta2));
    parameter_at.put(i, parameter, rest);
    exp_avg_at.put(i, exp_avg, rest);
  });
  parameter_at.finish(count);
  exp_avg_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void lamb_measure_0(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  const f32v beta1 = splat(update.scalars[0]);
  const f32v first_weight = splat(update.scalars[1]);
  const f32v beta2 = splat(update.scalars[2]);
  const f32v second_weight = splat(update.scalars[3]);
  const f32v first_correction = splat(update.scalars[4]);
  const f32v second_correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v first_correction_inverse = 1.0f / first_correction;
  const f32v second_correction_inverse = 1.0f / second_correction;
  f32v sum_0{};
  f32v sum_1{};
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    exp_avg = fused_multiply_add(gradient, first_weight, (exp_avg * beta1));
    exp_avg_sq = fused_multiply_add((gradient * second_weight), gradient, (exp_avg_sq * beta2));
    f32v direction = lamb_direction(exp_avg, exp_avg_sq, first_correction, second_correction, eps, first_correction_inverse, second_correction_inverse);
    exp_avg_at.put(i, exp_avg, rest);
    exp_avg_sq_at.put(i, exp_avg_sq, rest);
    sum_0 += fill_tail((parameter * parameter), rest, 0.0f);
    sum_1 += fill_tail((direction * direction), rest, 0.0f);
  });
  exp_avg_at.finish(count);
  exp_avg_sq_at.finish(count);
  sums[0] += sum(sum_0);
  sums[1] += sum(sum_1);
}

template <class Parameter, class Gradient, class State>
static void lamb_measure_1(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  const f32v beta1 = splat(update.scalars[0]);
  const f32v first_weight = splat(update.scalars[1]);
  const f32v beta2 = splat(update.scalars[2]);
  const f32v second_weight = splat(update.scalars[3]);
  const f32v first_correction = splat(update.scalars[4]);
  const f32v second_correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v penalty = splat(update.scalars[7]);
  const f32v first_correction_inverse = 1.0f / first_correction;
  const f32v second_correction_inverse = 1.0f / second_correction;
  f32v sum_0{};
  f32v sum_1{};
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    exp_avg = fused_multiply_add(gradient, first_weight, (exp_avg * beta1));
    exp_avg_sq = fused_multiply_add((gradient * second_weight), gradient, (exp_avg_sq * beta2));
    f32v direction = lamb_direction(exp_avg, exp_avg_sq, first_correction, second_correction, eps, first_correction_inverse, second_correction_inverse);
    direction = fused_multiply_add(parameter, penalty, direction);
    exp_avg_at.put(i, exp_avg, rest);
    exp_avg_sq_at.put(i, exp_avg_sq, rest);
    sum_0 += fill_tail((parameter * parameter), rest, 0.0f);
    sum_1 += fill_tail((direction * direction), rest, 0.0f);
  });
  exp_avg_at.finish(count);
  exp_avg_sq_at.finish(count);
  sums[0] += sum(sum_0);
  sums[1] += sum(sum_1);
}

template <class Parameter, class Gradient, class State>
static void lamb_0(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  const f32v first_correction = splat(update.scalars[4]);
  const f32v second_correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v step_size = splat(update.scalars[8]);
  const f32v first_correction_inverse = 1.0f / first_correction;
  const f32v second_correction_inverse = 1.0f / second_correction;
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    f32v direction = lamb_direction(exp_avg, exp_avg_sq, first_correction, second_correction, eps, first_correction_inverse, second_correction_inverse);
    parameter = fused_multiply_add(direction, step_size, parameter);
    parameter_at.put(i, parameter, rest);
  });
  parameter_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void lamb_1(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  using exp_avg_format = typename State::Signed;
  alignas(64) float exp_avg_scratch[exp_avg_format::kScratch];
  exp_avg_format exp_avg_at(update.operands[2], offset, exp_avg_scratch);
  using exp_avg_sq_format = typename State::Unsigned;
  alignas(64) float exp_avg_sq_scratch[exp_avg_sq_format::kScratch];
  exp_avg_sq_format exp_avg_sq_at(update.operands[3], offset, exp_avg_sq_scratch);
  const f32v first_correction = splat(update.scalars[4]);
  const f32v second_correction = splat(update.scalars[5]);
  const f32v eps = splat(update.scalars[6]);
  const f32v penalty = splat(update.scalars[7]);
  const f32v step_size = splat(update.scalars[8]);
  const f32v first_correction_inverse = 1.0f / first_correction;
  const f32v second_correction_inverse = 1.0f / second_correction;
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v exp_avg = exp_avg_at.get(i, rest);
    f32v exp_avg_sq = exp_avg_sq_at.get(i, rest);
    f32v direction = lamb_direction(exp_avg, exp_avg_sq, first_correction, second_correction, eps, first_correction_inverse, second_correction_inverse);
    direction = fused_multiply_add(parameter, penalty, direction);
    parameter = fused_multiply_add(direction, step_size, parameter);
    parameter_at.put(i, parameter, rest);
  });
  parameter_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void lars_measure_0(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  f32v sum_0{};
  f32v sum_1{};
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    sum_0 += fill_tail((parameter * parameter), rest, 0.0f);
    sum_1 += fill_tail((gradient * gradient), rest, 0.0f);
  });
  sums[0] += sum(sum_0);
  sums[1] += sum(sum_1);
}

template <class Parameter, class Gradient, class State>
static void lars_0(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  const f32v step_size = splat(update.scalars[2]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
  });
  parameter_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void lars_1(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v step_size = splat(update.scalars[2]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    gradient = fused_multiply_add(parameter, penalty, gradient);
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
  });
  parameter_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void lars_2(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v momentum = splat(update.scalars[1]);
  const f32v step_size = splat(update.scalars[2]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v momentum_buffer = momentum_buffer_at.get(i, rest);
    momentum_buffer = ((momentum_buffer * momentum) + gradient);
    gradient = momentum_buffer;
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void lars_3(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v momentum = splat(update.scalars[1]);
  const f32v step_size = splat(update.scalars[2]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v momentum_buffer = momentum_buffer_at.get(i, rest);
    gradient = fused_multiply_add(parameter, penalty, gradient);
    momentum_buffer = ((momentum_buffer * momentum) + gradient);
    gradient = momentum_buffer;
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void lars_4(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v step_size = splat(update.scalars[2]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v momentum_buffer = gradient;
    gradient = momentum_buffer;
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void lars_5(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using momentum_buffer_format = typename State::Signed;
  alignas(64) float momentum_buffer_scratch[momentum_buffer_format::kScratch];
  momentum_buffer_format momentum_buffer_at(update.operands[2], offset, momentum_buffer_scratch);
  const f32v penalty = splat(update.scalars[0]);
  const f32v step_size = splat(update.scalars[2]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    gradient = fused_multiply_add(parameter, penalty, gradient);
    f32v momentum_buffer = gradient;
    gradient = momentum_buffer;
    parameter = fused_multiply_add(gradient, step_size, parameter);
    parameter_at.put(i, parameter, rest);
    momentum_buffer_at.put(i, momentum_buffer, rest);
  });
  parameter_at.finish(count);
  momentum_buffer_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adafactor_measure_0(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using variance_format = typename State::Unsigned;
  alignas(64) float variance_scratch[variance_format::kScratch];
  variance_format variance_at(update.operands[2], offset, variance_scratch);
  const f32v least = splat(update.scalars[2]);
  f32v sum_0{};
  f32v sum_1{};
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v variance = variance_at.get(i, rest);
    f32v direction = adafactor_direction(gradient, variance, least);
    sum_0 += fill_tail((parameter * parameter), rest, 0.0f);
    sum_1 += fill_tail((direction * direction), rest, 0.0f);
  });
  sums[0] += sum(sum_0);
  sums[1] += sum(sum_1);
}

template <class Parameter, class Gradient, class State>
static void adafactor_measure_1(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using variance_format = typename State::Unsigned;
  alignas(64) float variance_scratch[variance_format::kScratch];
  variance_format variance_at(update.operands[2], offset, variance_scratch);
  const f32v weight = splat(update.scalars[1]);
  const f32v least = splat(update.scalars[2]);
  f32v sum_0{};
  f32v sum_1{};
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v variance = variance_at.get(i, rest);
    variance = lerp(variance, (gradient * gradient), weight);
    f32v direction = adafactor_direction(gradient, variance, least);
    variance_at.put(i, variance, rest);
    sum_0 += fill_tail((parameter * parameter), rest, 0.0f);
    sum_1 += fill_tail((direction * direction), rest, 0.0f);
  });
  variance_at.finish(count);
  sums[0] += sum(sum_0);
  sums[1] += sum(sum_1);
}

template <class Parameter, class Gradient, class State>
static void adafactor_0(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using variance_format = typename State::Unsigned;
  alignas(64) float variance_scratch[variance_format::kScratch];
  variance_format variance_at(update.operands[2], offset, variance_scratch);
  const f32v least = splat(update.scalars[2]);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v variance = variance_at.get(i, rest);
    f32v direction = adafactor_direction(gradient, variance, least);
    parameter = fused_multiply_add(direction, step_size, parameter);
    parameter_at.put(i, parameter, rest);
  });
  parameter_at.finish(count);
}

template <class Parameter, class Gradient, class State>
static void adafactor_1(const Update& update, std::int64_t offset,
    std::int64_t count, double* sums) {
  const float factor = update.factor;
  alignas(64) float parameter_scratch[Parameter::kScratch];
  Parameter parameter_at(update.operands[0], offset, parameter_scratch);
  alignas(64) float gradient_scratch[Gradient::kScratch];
  Gradient gradient_at(update.operands[1], offset, gradient_scratch);
  using variance_format = typename State::Unsigned;
  alignas(64) float variance_scratch[variance_format::kScratch];
  variance_format variance_at(update.operands[2], offset, variance_scratch);
  const f32v decay = splat(update.scalars[0]);
  const f32v least = splat(update.scalars[2]);
  const f32v step_size = splat(update.scalars[3]);
  sweep(0, count, [&](std::int64_t i, auto rest) {
    f32v parameter = parameter_at.get(i, rest);
    f32v gradient = gradient_at.get(i, rest) * factor;
    f32v variance = variance_at.get(i, rest);
    parameter = (parameter * decay);
    f32v direction = adafactor_direction(gradient, variance, least);
    parameter = fused_multiply_add(direction, step_size, parameter);
    parameter_at.put(i, parameter, rest);
  });
  parameter_at.finish(count);
}

template <class P, class G, class S>
struct Loops {
  static constexpr Loop table[] = {
      sgd_0<P, G, S>, sgd_1<P, G, S>, sgd_2<P, G, S>, sgd_3<P, G, S>, sgd_4<P, G, S>, sgd_5<P, G, S>, sgd_6<P, G, S>, sgd_7<P, G, S>, sgd_8<P, G, S>, sgd_9<P, G, S>, adam_0<P, G, S>, adam_1<P, G, S>, adam_2<P, G, S>, adam_3<P, G, S>, adam_4<P, G, S>, adam_5<P, G, S>, adam_6<P, G, S>, adam_7<P, G, S>, adagrad_0<P, G, S>, adagrad_1<P, G, S>, rmsprop_0<P, G, S>, rmsprop_1<P, G, S>, rmsprop_2<P, G, S>, rmsprop_3<P, G, S>, rmsprop_4<P, G, S>, rmsprop_5<P, G, S>, rmsprop_6<P, G, S>, rmsprop_7<P, G, S>, lion_0<P, G, S>, lion_1<P, G, S>, lamb_measure_0<P, G, S>, lamb_measure_1<P, G, S>, lamb_0<P, G, S>, lamb_1<P, G, S>, lars_measure_0<P, G, S>, lars_0<P, G, S>, lars_1<P, G, S>, lars_2<P, G, S>, lars_3<P, G, S>, lars_4<P, G, S>, lars_5<P, G, S>, adafactor_measure_0<P, G, S>, adafactor_measure_1<P, G, S>, adafactor_0<P, G, S>, adafactor_1<P, G, S>
  };
};

static constexpr Traffic kTraffic[] = {
    {3, 1},
    {3, 1},
    {7, 5},
    {7, 5},
    {3, 5},
    {3, 5},
    {7, 5},
    {7, 5},
    {3, 5},
    {3, 5},
    {15, 13},
    {15, 13},
    {15, 13},
    {15, 13},
    {31, 29},
    {31, 29},
    {31, 29},
    {31, 29},
    {7, 5},
    {7, 5},
    {7, 5},
    {7, 5},
    {23, 21},
    {23, 21},
    {15, 13},
    {15, 13},
    {31, 29},
    {31, 29},
    {7, 5},
    {7, 5},
    {15, 12},
    {15, 12},
    {13, 1},
    {13, 1},
    {3, 0},
    {3, 1},
    {3, 1},
    {7, 5},
    {7, 5},
    {3, 5},
    {3, 5},
    {7, 0},
    {7, 4},
    {7, 1},
    {7, 1},
};
