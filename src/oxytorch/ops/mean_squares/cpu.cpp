#include "ops/mean_squares/kernel.h"

#include <array>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"

namespace oxytorch {

// Means from the sums of a matrix's strips, added in the order of the strips.
static void add_strips(const MeanSquaresArgs& args, std::int64_t matrix, float* columns) {
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

static std::array<Tensor, 2> mean_squares(const Tensor& x) {
  constexpr const char* kOp = "mean_squares";
  check_cpu(kOp, "x", x);
  MeanSquaresArgs args{};
  args.dtype = check_dtype(kOp, "x", x);
  check_minimum_dim(kOp, "x", x, 2);
  Tensor copy;
  args.x = contiguous_data(x, copy);
  args.height = x.size(-2);
  args.width = x.size(-1);
  args.strips_per_matrix = (args.height + args.kStrip - 1) / args.kStrip;
  std::vector<std::int64_t> of_rows(x.sizes().begin(), x.sizes().end());
  std::vector<std::int64_t> of_columns = of_rows;
  of_rows.back() = 1;
  of_columns[of_columns.size() - 2] = 1;
  Tensor rows = empty(of_rows.data(), x.dim(), aoti_torch_dtype_float32());
  Tensor columns = empty(of_columns.data(), x.dim(), aoti_torch_dtype_float32());
  std::int64_t matrices = 1;
  for (std::int64_t i = 0; i < x.dim() - 2; ++i) matrices *= x.size(i);
  const std::int64_t items = matrices * args.strips_per_matrix;
  std::vector<float> strips(items * args.width);
  args.strips = strips.data();
  args.rows = static_cast<float*>(rows.mutable_data());
  run(mean_squares_copies, args, items, 4 * args.kStrip * args.width);
  auto* out = static_cast<float*>(columns.mutable_data());
  for (std::int64_t i = 0; i < matrices; ++i) add_strips(args, i, out);
  return {std::move(rows), std::move(columns)};
}

OXY_OP(mean_squares, "(Tensor x) -> (Tensor rows, Tensor columns)", mean_squares)

}  // namespace oxytorch
