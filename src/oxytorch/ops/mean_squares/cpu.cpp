#include "ops/mean_squares/kernel.h"

#include <vector>

#include "core/check.h"
#include "core/parallel.h"

namespace oxytorch {

namespace {

constexpr const char* kName = "mean_squares";

using Tensors = std::vector<Tensor>;

void check_factor(const char* argument, const Tensor& factor, std::int64_t length) {
  check_cpu(kName, argument, factor);
  if (factor.dtype_code() != aoti_torch_dtype_float32() || !factor.is_contiguous() ||
      factor.numel() != length) {
    fail(kName, argument, "float32, contiguous, with " + std::to_string(length) + " elements",
         dtype_name(factor.dtype_code()) + " " + describe(factor.sizes()));
  }
}

void check_one(const Tensor& x, const Tensor& rows, const Tensor& columns) {
  check_cpu(kName, "x", x);
  check_dtype(kName, "x", x);
  check_minimum_dim(kName, "x", x, 2);
  if (!x.is_contiguous()) fail(kName, "x", "contiguous", "strides " + describe(x.strides()));
  const bool is_empty = x.numel() == 0;
  check_factor("rows", rows, is_empty ? rows.numel() : x.numel() / x.size(-1));
  check_factor("columns", columns, is_empty ? columns.numel() : x.numel() / x.size(-2));
}

// Means from the sums of a matrix's strips, added in the order of the strips.
void add_strips(const MeanSquaresArgs& args, std::int64_t matrix, float* columns) {
  std::vector<double> totals(args.width, 0.0);
  const float* strip = args.strips + matrix * args.strips_per_matrix * args.width;
  for (std::int64_t k = 0; k < args.strips_per_matrix; ++k, strip += args.width) {
    for (std::int64_t i = 0; i < args.width; ++i) totals[i] += strip[i];
  }
  for (std::int64_t i = 0; i < args.width; ++i) {
    columns[matrix * args.width + i] =
        static_cast<float>(totals[i] / static_cast<double>(args.height));
  }
}

void compute(const Tensor& x, const Tensor& rows, const Tensor& columns) {
  if (x.numel() == 0) return;
  MeanSquaresArgs args{};
  args.dtype = check_dtype(kName, "x", x);
  args.x = x.data();
  args.height = x.size(-2);
  args.width = x.size(-1);
  args.strips_per_matrix = (args.height + args.kStrip - 1) / args.kStrip;
  const std::int64_t matrices = x.numel() / (args.height * args.width);
  const std::int64_t items = matrices * args.strips_per_matrix;
  std::vector<float> strips(items * args.width);
  args.strips = strips.data();
  args.rows = static_cast<float*>(rows.mutable_data());
  run(mean_squares_copies, args, items, 4 * args.kStrip * args.width);
  auto* out = static_cast<float*>(columns.mutable_data());
  for (std::int64_t i = 0; i < matrices; ++i) add_strips(args, i, out);
}

void boxed_mean_squares(StableIValue* stack, uint64_t, uint64_t) {
  const auto x = unboxing::Take<Tensors>::from(stack[0]);
  const auto rows = unboxing::Take<Tensors>::from(stack[1]);
  const auto columns = unboxing::Take<Tensors>::from(stack[2]);
  if (rows.size() != x.size() || columns.size() != x.size()) {
    fail(kName, "rows", "and columns for each of " + std::to_string(x.size()) + " tensors",
         std::to_string(rows.size()) + " and " + std::to_string(columns.size()));
  }
  for (std::size_t i = 0; i < x.size(); ++i) check_one(x[i], rows[i], columns[i]);
  for (std::size_t i = 0; i < x.size(); ++i) compute(x[i], rows[i], columns[i]);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oxytorch, library) {
  library.def("mean_squares(Tensor[] x, Tensor(a!)[] rows, Tensor(b!)[] columns) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(oxytorch, CPU, library) {
  library.impl("mean_squares", &boxed_mean_squares);
}

}  // namespace oxytorch
