#include "ops/moe/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

template <class T, class W>
static void add_rows(const WeightedRowsArgs& args, std::int64_t token) {
  const std::int64_t* places = args.places + token * args.chosen;
  const W* weights = static_cast<const W*>(args.weights) + token * args.chosen;
  T* out = static_cast<T*>(args.out) + token * args.width;
  sweep(0, args.width, [&](std::int64_t i, auto count) {
    f32v sum{};
    for (std::int64_t j = 0; j < args.chosen; ++j) {
      const float weight = load(weights + j, 1)[0];
      sum += weight * load(args.rows + places[j] * args.width + i, count);
    }
    store(out + i, sum, count);
  });
}

static void add_weighted_rows(const WeightedRowsArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.out_dtype, [&](auto element) {
    with_type(args.weight_dtype, [&](auto weight) {
      for (std::int64_t token = begin; token < end; ++token) {
        add_rows<decltype(element), decltype(weight)>(args, token);
      }
    });
  });
}

}  // namespace oxytorch::OXY_LEVEL
