#include "ops/pool/kernel.h"

#include "ops/_windows/inside.h"

namespace oxytorch::OXY_LEVEL {

// The larger one, or NaN.
OXY_INLINE f32v larger(f32v most, f32v v) { return v == v ? maximum(v, most) : v; }

// Where a window lies within an image, by dimension, and the first one's place.
struct Window {
  Inside inside[kWindowDims];
  std::int64_t first[kWindowDims];
};

OXY_INLINE void place(const PoolArgs& args, int dim, std::int64_t at, Window& window) {
  const WindowDim& of = args.windows.dims[dim];
  window.first[dim] = at * of.stride - of.padding;
  window.inside[dim] = inside(of, window.first[dim]);
}

// Calls body(x) with each element of a window, `x` being the image's; `end` after each line.
template <class T, class Body, class End>
OXY_INLINE void each_element(const PoolArgs& args, const Window& window, const T* image,
                             const Body& body, const End& end) {
  const WindowDim* dims = args.windows.dims;
  const auto at = [&](int dim, std::int64_t i) {
    return (window.first[dim] + i * dims[dim].dilation) * dims[dim].x_stride;
  };
  for (std::int64_t i = window.inside[0].begin; i < window.inside[0].end; ++i) {
    for (std::int64_t j = window.inside[1].begin; j < window.inside[1].end; ++j) {
      const T* line = image + at(0, i) + at(1, j);
      for (std::int64_t k = window.inside[2].begin; k < window.inside[2].end; ++k) {
        body(line + at(2, k));
      }
      end();
    }
  }
}

// Sums of lines are added up by themselves: short sums err less.
template <class T, class Count>
OXY_INLINE f32v pooled(const PoolArgs& args, const Window& window, const T* image, Count count) {
  if (args.kind == PoolKind::max) {
    f32v most = splat(kMinusInfinity);
    each_element(
        args, window, image, [&](const T* x) { most = larger(most, load(x, count)); }, [] {});
    return most;
  }
  f32v sum{}, line{};
  each_element(
      args, window, image, [&](const T* x) { line += load(x, count); },
      [&] { sum += line, line = f32v{}; });
  const WindowDim* dims = args.windows.dims;
  float positions = 1.0f;
  for (int dim = 0; dim < kWindowDims; ++dim) positions *= static_cast<float>(dims[dim].kernel);
  return sum / positions;
}

template <class T>
static void pool_item(const PoolArgs& args, std::int64_t item) {
  const WindowArgs& windows = args.windows;
  const WindowDim* dims = windows.dims;
  const std::int64_t blocks = (windows.channels + args.block - 1) / args.block;
  const std::int64_t line = item / blocks, first = item % blocks * args.block;
  const std::int64_t left = windows.channels - first;
  const std::int64_t image = line / dims[1].out_size / dims[0].out_size;
  Window window;
  place(args, 0, line / dims[1].out_size % dims[0].out_size, window);
  place(args, 1, line % dims[1].out_size, window);
  const T* from = static_cast<const T*>(windows.x) + image * windows.image_stride + first;
  T* to = static_cast<T*>(args.out) + line * dims[2].out_size * windows.channels + first;
  for (std::int64_t column = 0; column < dims[2].out_size; ++column, to += windows.channels) {
    place(args, 2, column, window);
    sweep(0, left < args.block ? left : args.block, [&](std::int64_t i, auto count) {
      store(to + i, pooled(args, window, from + i, count), count);
    });
  }
}

static void pool(const PoolArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.windows.dtype, [&](auto element) {
    for (std::int64_t item = begin; item < end; ++item) pool_item<decltype(element)>(args, item);
  });
}

}  // namespace oxytorch::OXY_LEVEL
