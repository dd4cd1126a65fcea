#include "ops/mean_squares/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

template <class T>
static void sum_strip(const MeanSquaresArgs& args, std::int64_t item) {
  const std::int64_t matrix = item / args.strips_per_matrix;
  const std::int64_t begin = item % args.strips_per_matrix * args.kStrip;
  const std::int64_t rest = args.height - begin;
  const std::int64_t count = rest < args.kStrip ? rest : args.kStrip;
  const std::int64_t first = matrix * args.height + begin;
  float* columns = args.strips + item * args.width;
  for (std::int64_t row = first; row < first + count; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.width;
    f32v total{};
    sweep(0, args.width, [&](std::int64_t i, auto left) {
      const f32v value = fill_tail(load(x + i, left), left, 0.0f);
      const f32v square = value * value;
      total += square;
      store(columns + i, row == first ? square : load(columns + i, left) + square, left);
    });
    args.rows[row] = sum(total) / static_cast<float>(args.width);
  }
}

static void mean_squares(const MeanSquaresArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto zero) {
    for (std::int64_t item = begin; item < end; ++item) sum_strip<decltype(zero)>(args, item);
  });
}

}  // namespace oxytorch::OXY_LEVEL
