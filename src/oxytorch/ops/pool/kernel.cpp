#include "ops/pool/kernel.h"

#include "ops/windows/inside.h"

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

// The largest bytes, of which there may be fewer than a vector has.
template <class T>
OXY_INLINE void pool_bytes(const PoolArgs& args, const Window& window, const T* image, T* to,
                           std::int64_t count) {
  typedef T bytes __attribute__((vector_size(kVectorBytes)));
  const bool is_whole = count >= kVectorBytes;
  bytes most = bytes{} + (__is_same(T, std::int8_t) ? -128 : 0);
  each_element(
      args, window, image,
      [&](const T* x) {
        const bytes v = is_whole ? load_raw<bytes>(x, Whole{}) : load_raw<bytes>(x, count);
        most = v > most ? v : most;
      },
      [] {});
  is_whole ? store_raw(to, most, Whole{}) : store_raw(to, most, count);
}

// Items of bytes have as many channels as vectors hold.
template <class T>
static void pool_line(const PoolArgs& args, Window& window, const T* from, T* to,
                      std::int64_t channels) {
  const WindowDim& dim = args.windows.dims[2];
  for (std::int64_t column = 0; column < dim.out_size; ++column, to += args.windows.channels) {
    place(args, 2, column, window);
    if constexpr (sizeof(T) == 1) {
      for (std::int64_t i = 0; i < channels; i += kVectorBytes) {
        pool_bytes(args, window, from + i, to + i, channels - i);
      }
    } else {
      sweep(0, channels, [&](std::int64_t i, auto count) {
        store(to + i, pooled(args, window, from + i, count), count);
      });
    }
  }
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
  pool_line(args, window, from, to, left < args.block ? left : args.block);
}

template <class T>
static void pool_items(const PoolArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t item = begin; item < end; ++item) pool_item<T>(args, item);
}

static void pool(const PoolArgs& args, std::int64_t begin, std::int64_t end) {
  switch (args.element) {
    case PoolElement::int8:
      return pool_items<std::int8_t>(args, begin, end);
    case PoolElement::uint8:
      return pool_items<std::uint8_t>(args, begin, end);
    case PoolElement::floating:
      with_type(args.windows.dtype,
                [&](auto element) { pool_items<decltype(element)>(args, begin, end); });
  }
}

}  // namespace oxytorch::OXY_LEVEL
