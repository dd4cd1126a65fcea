#include "ops/scale_channels/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

template <class T>
static void scale_stretch(const ScaleChannelsArgs& args, std::int64_t item) {
  const std::int64_t stretches = (args.pixels + args.stretch - 1) / args.stretch;
  const std::int64_t image = item / stretches, first = item % stretches * args.stretch;
  const std::int64_t left = args.pixels - first;
  const std::int64_t begin = image * args.pixels + first;
  const std::int64_t end = begin + (left < args.stretch ? left : args.stretch);
  const T* factors = static_cast<const T*>(args.factors) + image * args.channels;
  for (std::int64_t pixel = begin; pixel < end; ++pixel) {
    const T* x = static_cast<const T*>(args.x) + pixel * args.x_stride;
    T* out = static_cast<T*>(args.out) + pixel * args.channels;
    sweep(0, args.channels, [&](std::int64_t c, auto count) {
      store(out + c, load(x + c, count) * load(factors + c, count), count);
    });
  }
}

static void scale_channels(const ScaleChannelsArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto element) {
    for (std::int64_t item = begin; item < end; ++item) {
      scale_stretch<decltype(element)>(args, item);
    }
  });
}

}  // namespace oxytorch::OXY_LEVEL
