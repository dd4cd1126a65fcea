#include "ops/_template/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

template <class T>
static void scale_rows(const ScaleArgs& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t width = args.width;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* out = static_cast<T*>(args.out) + row * width;
    const auto scaled = [&](std::int64_t i, auto count) {
      return load(x + i, count) * args.factor;
    };
    if (args.stream && width % kLanes == 0 && is_aligned(out, kLanes * sizeof(T))) {
      for (std::int64_t i = 0; i < width; i += kLanes) stream(out + i, scaled(i, Whole{}));
    } else {
      sweep(0, width, [&](std::int64_t i, auto count) { store(out + i, scaled(i, count), count); });
    }
  }
  if (args.stream) stream_end();
}

static void scale(const ScaleArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto element) { scale_rows<decltype(element)>(args, begin, end); });
}

}  // namespace oxytorch::OXY_LEVEL
