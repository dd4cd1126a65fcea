// Written by ops/optimizer_step/translation from rules.py.
#pragma once

static void sgd_constants(double, const double* hyper, float* scalars, unsigned* flags) {
  [[maybe_unused]] const auto lr = hyper[0];
  [[maybe_unused]] const auto momentum = hyper[1];
  [[maybe_unused]] const auto dampening = hyper[2];
  [[maybe_unused]] const auto weight_decay = hyper[3];
  [[maybe_unused]] const auto nesterov = hyper[4] != 0;
  [[maybe_unused]] const auto first = hyper[5] != 0;
  scalars[0] = static_cast<float>(weight_decay);
  scalars[1] = static_cast<float>(momentum);
  scalars[2] = static_cast<float>((1.0 - dampening));
  scalars[3] = static_cast<float>((-lr));
  *flags = static_cast<unsigned>((weight_decay != 0.0)) << 0 | static_cast<unsigned>((momentum != 0.0)) << 1 | static_cast<unsigned>(first) << 2 | static_cast<unsigned>(nesterov) << 3;
}

inline constexpr int sgd_variants[] = {0, 1, 2, 3, 0, 1, 4, 5, 0, 1, 6, 7, 0, 1, 8, 9};

static void adam_constants(double step, const double* hyper, float* scalars, unsigned* flags) {
  [[maybe_unused]] const auto lr = hyper[0];
  [[maybe_unused]] const auto beta1 = hyper[1];
  [[maybe_unused]] const auto beta2 = hyper[2];
  [[maybe_unused]] const auto eps = hyper[3];
  [[maybe_unused]] const auto weight_decay = hyper[4];
  [[maybe_unused]] const auto amsgrad = hyper[5] != 0;
  [[maybe_unused]] const auto decoupled_weight_decay = hyper[6] != 0;
  scalars[0] = static_cast<float>((1.0 - (lr * weight_decay)));
  scalars[1] = static_cast<float>(weight_decay);
  scalars[2] = static_cast<float>((1.0 - beta1));
  scalars[3] = static_cast<float>(beta2);
  scalars[4] = static_cast<float>((1.0 - beta2));
  scalars[5] = static_cast<float>(std::pow((1.0 - std::pow(beta2, step)), 0.5));
  scalars[6] = static_cast<float>(eps);
  scalars[7] = static_cast<float>((-(lr / (1.0 - std::pow(beta1, step)))));
  *flags = static_cast<unsigned>(((weight_decay != 0.0) && decoupled_weight_decay)) << 0 | static_cast<unsigned>(((weight_decay != 0.0) && (!decoupled_weight_decay))) << 1 | static_cast<unsigned>(amsgrad) << 2;
}

inline constexpr int adam_variants[] = {10, 11, 12, 13, 14, 15, 16, 17};

static void adagrad_constants(double step, const double* hyper, float* scalars, unsigned* flags) {
  [[maybe_unused]] const auto lr = hyper[0];
  [[maybe_unused]] const auto lr_decay = hyper[1];
  [[maybe_unused]] const auto weight_decay = hyper[2];
  [[maybe_unused]] const auto eps = hyper[3];
  scalars[0] = static_cast<float>(weight_decay);
  scalars[1] = static_cast<float>(eps);
  scalars[2] = static_cast<float>((-(lr / (1.0 + ((step - 1.0) * lr_decay)))));
  *flags = static_cast<unsigned>((weight_decay != 0.0)) << 0;
}

inline constexpr int adagrad_variants[] = {18, 19};

static void rmsprop_constants(double, const double* hyper, float* scalars, unsigned* flags) {
  [[maybe_unused]] const auto lr = hyper[0];
  [[maybe_unused]] const auto alpha = hyper[1];
  [[maybe_unused]] const auto eps = hyper[2];
  [[maybe_unused]] const auto weight_decay = hyper[3];
  [[maybe_unused]] const auto momentum = hyper[4];
  [[maybe_unused]] const auto centered = hyper[5] != 0;
  scalars[0] = static_cast<float>(weight_decay);
  scalars[1] = static_cast<float>(alpha);
  scalars[2] = static_cast<float>((1.0 - alpha));
  scalars[3] = static_cast<float>(eps);
  scalars[4] = static_cast<float>(momentum);
  scalars[5] = static_cast<float>((-lr));
  *flags = static_cast<unsigned>((weight_decay != 0.0)) << 0 | static_cast<unsigned>(centered) << 1 | static_cast<unsigned>((momentum > 0.0)) << 2;
}

inline constexpr int rmsprop_variants[] = {20, 21, 22, 23, 24, 25, 26, 27};

static void lion_constants(double, const double* hyper, float* scalars, unsigned* flags) {
  [[maybe_unused]] const auto lr = hyper[0];
  [[maybe_unused]] const auto beta1 = hyper[1];
  [[maybe_unused]] const auto beta2 = hyper[2];
  [[maybe_unused]] const auto weight_decay = hyper[3];
  scalars[0] = static_cast<float>((1.0 - (lr * weight_decay)));
  scalars[1] = static_cast<float>(beta1);
  scalars[2] = static_cast<float>((1.0 - beta1));
  scalars[3] = static_cast<float>(beta2);
  scalars[4] = static_cast<float>((1.0 - beta2));
  scalars[5] = static_cast<float>((-lr));
  *flags = static_cast<unsigned>((weight_decay != 0.0)) << 0;
}

inline constexpr int lion_variants[] = {28, 29};

static void lamb_constants(double step, const double* hyper, float* scalars, unsigned* flags) {
  [[maybe_unused]] const auto lr = hyper[0];
  [[maybe_unused]] const auto beta1 = hyper[1];
  [[maybe_unused]] const auto beta2 = hyper[2];
  [[maybe_unused]] const auto eps = hyper[3];
  [[maybe_unused]] const auto weight_decay = hyper[4];
  scalars[0] = static_cast<float>(beta1);
  scalars[1] = static_cast<float>((1.0 - beta1));
  scalars[2] = static_cast<float>(beta2);
  scalars[3] = static_cast<float>((1.0 - beta2));
  scalars[4] = static_cast<float>((1.0 - std::pow(beta1, step)));
  scalars[5] = static_cast<float>((1.0 - std::pow(beta2, step)));
  scalars[6] = static_cast<float>(eps);
  scalars[7] = static_cast<float>(weight_decay);
  scalars[8] = static_cast<float>((-lr));
  *flags = static_cast<unsigned>((weight_decay != 0.0)) << 0;
}

inline constexpr int lamb_reduce_norms_variants[] = {30, 31};

inline constexpr int lamb_variants[] = {32, 33};

static double lamb_trust_ratio(const double* sums,
    [[maybe_unused]] double count, const double* hyper) {
  [[maybe_unused]] const double weight_squares = sums[0];
  [[maybe_unused]] const double direction_squares = sums[1];
  [[maybe_unused]] const double lr = hyper[0];
  [[maybe_unused]] const double beta1 = hyper[1];
  [[maybe_unused]] const double beta2 = hyper[2];
  [[maybe_unused]] const double eps = hyper[3];
  [[maybe_unused]] const double weight_decay = hyper[4];
  return (((weight_squares > 0.0) && (direction_squares > 0.0)) ? (std::pow(weight_squares, 0.5) / std::pow(direction_squares, 0.5)) : 1.0);
}

static void lars_constants(double, const double* hyper, float* scalars, unsigned* flags) {
  [[maybe_unused]] const auto lr = hyper[0];
  [[maybe_unused]] const auto momentum = hyper[1];
  [[maybe_unused]] const auto eeta = hyper[2];
  [[maybe_unused]] const auto weight_decay = hyper[3];
  [[maybe_unused]] const auto epsilon = hyper[4];
  [[maybe_unused]] const auto first = hyper[5] != 0;
  scalars[0] = static_cast<float>(weight_decay);
  scalars[1] = static_cast<float>(momentum);
  scalars[2] = static_cast<float>((-lr));
  *flags = static_cast<unsigned>((weight_decay != 0.0)) << 0 | static_cast<unsigned>((momentum != 0.0)) << 1 | static_cast<unsigned>(first) << 2;
}

inline constexpr int lars_reduce_norms_variants[] = {34, 34, 34, 34, 34, 34, 34, 34};

inline constexpr int lars_variants[] = {35, 36, 37, 38, 35, 36, 39, 40};

static double lars_trust_ratio(const double* sums,
    [[maybe_unused]] double count, const double* hyper) {
  [[maybe_unused]] const double weight_squares = sums[0];
  [[maybe_unused]] const double gradient_squares = sums[1];
  [[maybe_unused]] const double lr = hyper[0];
  [[maybe_unused]] const double momentum = hyper[1];
  [[maybe_unused]] const double eeta = hyper[2];
  [[maybe_unused]] const double weight_decay = hyper[3];
  [[maybe_unused]] const double epsilon = hyper[4];
  [[maybe_unused]] const double first = hyper[5];
  return (((weight_squares > 0.0) && (gradient_squares > 0.0)) ? ((eeta * std::pow(weight_squares, 0.5)) / ((std::pow(gradient_squares, 0.5) + (weight_decay * std::pow(weight_squares, 0.5))) + epsilon)) : 1.0);
}

static void adafactor_constants(double step, const double* hyper, float* scalars, unsigned* flags) {
  [[maybe_unused]] const auto lr = hyper[0];
  [[maybe_unused]] const auto beta2_decay = hyper[1];
  [[maybe_unused]] const auto eps1 = hyper[2];
  [[maybe_unused]] const auto eps2 = hyper[3];
  [[maybe_unused]] const auto d = hyper[4];
  [[maybe_unused]] const auto weight_decay = hyper[5];
  [[maybe_unused]] const auto is_factored = hyper[6] != 0;
  scalars[0] = static_cast<float>((1.0 - (lr * weight_decay)));
  scalars[1] = static_cast<float>(std::pow(step, beta2_decay));
  scalars[2] = static_cast<float>((eps1 * eps1));
  scalars[3] = static_cast<float>((-std::min<double>(lr, (1.0 / std::pow(step, 0.5)))));
  *flags = static_cast<unsigned>((weight_decay != 0.0)) << 0 | static_cast<unsigned>((!is_factored)) << 1;
}

inline constexpr int adafactor_reduce_norms_variants[] = {41, 41, 42, 42};

inline constexpr int adafactor_variants[] = {43, 44, 43, 44};

static double adafactor_trust_ratio(const double* sums,
    [[maybe_unused]] double count, const double* hyper) {
  [[maybe_unused]] const double weight_squares = sums[0];
  [[maybe_unused]] const double direction_squares = sums[1];
  [[maybe_unused]] const double lr = hyper[0];
  [[maybe_unused]] const double beta2_decay = hyper[1];
  [[maybe_unused]] const double eps1 = hyper[2];
  [[maybe_unused]] const double eps2 = hyper[3];
  [[maybe_unused]] const double d = hyper[4];
  [[maybe_unused]] const double weight_decay = hyper[5];
  [[maybe_unused]] const double is_factored = hyper[6];
  return (std::max<double>(eps2, std::pow((weight_squares / count), 0.5)) / std::max<double>(1.0, (std::pow((direction_squares / count), 0.5) / d)));
}

// Operands of each variant, as bits.
inline constexpr unsigned kUsed[] = {3, 3, 7, 7, 7, 7, 7, 7, 7, 7, 15, 15, 15, 15, 31, 31, 31, 31, 7, 7, 7, 7, 23, 23, 15, 15, 31, 31, 7, 7, 15, 15, 13, 13, 3, 3, 3, 7, 7, 7, 7, 7, 7, 7, 7};

inline constexpr Rule kRules[] = {
    {"sgd_step", "ffffbb", 1, false, sgd_constants, sgd_variants, nullptr, nullptr, 0},
    {"adam_step", "fffffbb", 3, true, adam_constants, adam_variants, nullptr, nullptr, 0},
    {"adagrad_step", "ffff", 1, true, adagrad_constants, adagrad_variants, nullptr, nullptr, 0},
    {"rmsprop_step", "fffffb", 3, false, rmsprop_constants, rmsprop_variants, nullptr, nullptr, 0},
    {"lion_step", "ffff", 1, false, lion_constants, lion_variants, nullptr, nullptr, 0},
    {"lamb_step", "fffff", 2, true, lamb_constants, lamb_variants, lamb_reduce_norms_variants, lamb_trust_ratio, 8},
    {"lars_step", "fffffb", 1, false, lars_constants, lars_variants, lars_reduce_norms_variants, lars_trust_ratio, 2},
    {"adafactor_step", "ffffffb", 1, true, adafactor_constants, adafactor_variants, adafactor_reduce_norms_variants, adafactor_trust_ratio, 3},
};

#define OXY_FOR_EACH_RULE(OP) \
  OP(sgd_step, 0, "float lr, float momentum, float dampening, float weight_decay, bool nesterov, bool first") \
  OP(adam_step, 1, "float lr, float beta1, float beta2, float eps, float weight_decay, bool amsgrad, bool decoupled_weight_decay") \
  OP(adagrad_step, 2, "float lr, float lr_decay, float weight_decay, float eps") \
  OP(rmsprop_step, 3, "float lr, float alpha, float eps, float weight_decay, float momentum, bool centered") \
  OP(lion_step, 4, "float lr, float beta1, float beta2, float weight_decay") \
  OP(lamb_step, 5, "float lr, float beta1, float beta2, float eps, float weight_decay") \
  OP(lars_step, 6, "float lr, float momentum, float eeta, float weight_decay, float epsilon, bool first") \
  OP(adafactor_step, 7, "float lr, float beta2_decay, float eps1, float eps2, float d, float weight_decay, bool is_factored")
