// Kernels over plain memory, without libtorch: a linear layer with GELU, and a normalization.
#include <oxytorch/kernels.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

static void check(int succeeded) {
  if (succeeded) return;
  std::fprintf(stderr, "kernels: %s\n", oxytorch_kernels_error());
  std::exit(1);
}

// The same in plain loops, for one row.
static std::vector<double> by_hand(const float* x, const std::vector<float>& weight,
                                   const std::vector<float>& bias) {
  const std::size_t width = weight.size() / bias.size();
  std::vector<double> out;
  for (std::size_t i = 0; i < bias.size(); ++i) {
    double sum = bias[i];
    for (std::size_t k = 0; k < width; ++k) sum += double{x[k]} * weight[i * width + k];
    out.push_back(sum / 2 * (1 + std::erf(sum / std::sqrt(2.0))));
  }
  double mean = 0, square = 0;
  for (double each : out) mean += each / out.size();
  for (double each : out) square += (each - mean) * (each - mean) / out.size();
  for (double& each : out) each = (each - mean) / std::sqrt(square + 1e-5);
  return out;
}

int main() {
  constexpr std::int64_t rows = 64, in = 768, features = 3072;
  std::vector<float> x(rows * in), weight(features * in), bias(features), out(rows * features);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.1f * i);
  for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = 0.05f * std::cos(0.7f * i);
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = 0.1f * std::sin(1.0f * i);

  const std::int64_t bytes = oxytorch_kernels_packed_bytes(OXYTORCH_FLOAT32, features, in);
  const std::unique_ptr<void, void (*)(void*)> packed(std::aligned_alloc(64, bytes), std::free);
  check(oxytorch_kernels_pack(OXYTORCH_FLOAT32, weight.data(), features, in, packed.get()));
  const auto run = [&] {
    check(oxytorch_kernels_linear(OXYTORCH_FLOAT32, x.data(), rows, in, OXYTORCH_FLOAT32,
                                  packed.get(), features, bias.data(), "gelu", nullptr,
                                  out.data()));
  };
  run();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) run();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  std::vector<float> normed(out.size());
  check(oxytorch_kernels_layer_norm(OXYTORCH_FLOAT32, out.data(), rows, features, nullptr, nullptr,
                                    1e-5, normed.data()));
  double error = 0;
  for (const std::int64_t row : {std::int64_t{0}, rows - 1}) {
    const std::vector<double> wanted = by_hand(x.data() + row * in, weight, bias);
    for (std::int64_t i = 0; i < features; ++i) {
      error = std::fmax(error, std::fabs(wanted[i] - normed[row * features + i]));
    }
  }
  std::printf("level %s, %d threads, %.0f billion operations a second, largest error %.1e\n",
              oxytorch_kernels_level(), oxytorch_kernels_threads(),
              20 * 2e-9 * rows * in * features / taken.count(), error);
  return error < 1e-4 ? 0 : 1;
}
