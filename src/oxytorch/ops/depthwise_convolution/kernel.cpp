#include "ops/depthwise_convolution/kernel.h"

#include "ops/_windows/inside.h"
#include "ops/panels/activation.h"

namespace oxytorch::OXY_LEVEL {

// Lines of images that an item reads, and of the kernel that meet them; some channels.
template <class T>
struct Lines {
  const T* x[kMostKernelLines];  // from where the last dimension begins
  const float* weights[kMostKernelLines];
  int count = 0;
};

// Where neighbouring results go, of a vector of channels.
template <class T>
struct Results {
  T* out;
  const T* other;  // or null
  std::int64_t out_stride;
  std::int64_t other_stride;
  f32v bias;
  PanelEpilogue epilogue;
};

template <class T, class Count>
OXY_INLINE void finish(const Results<T>& to, std::int64_t at, f32v sum, Count count) {
  f32v v = activate(to.epilogue, sum, T{});
  if (to.other) v = total(to.epilogue, v, load(to.other + at * to.other_stride, count));
  store(to.out + at * to.out_stride, v, count);
}

// One result from the kernel's columns within the image.
template <class T, class Count>
static void convolve_one(const DepthwiseArgs& args, const Lines<T>& lines, const Results<T>& to,
                         std::int64_t at, Count count) {
  const WindowDim& dim = args.windows.dims[kWindowDims - 1];
  const std::int64_t first = at * dim.stride - dim.padding;
  const Inside columns = inside(dim, first);
  f32v sum = to.bias;
  for (int line = 0; line < lines.count; ++line) {
    const T* x = lines.x[line] + (first + columns.begin * dim.dilation) * dim.x_stride;
    const float* weights = lines.weights[line] + columns.begin * args.channels;
    for (std::int64_t j = columns.begin; j < columns.end; ++j) {
      sum += load(x, count) * load(weights, count);
      x += dim.dilation * dim.x_stride;
      weights += args.channels;
    }
  }
  finish(to, at, sum, count);
}

// `results` neighbours whose windows lie within the image, of a kernel of `width` columns.
template <int width, int stride, int results, class T, class Count>
OXY_INLINE void convolve_some(const DepthwiseArgs& args, const Lines<T>& lines,
                              const Results<T>& to, std::int64_t at, Count count) {
  constexpr int kColumns = (results - 1) * stride + width;
  const WindowDim& dim = args.windows.dims[kWindowDims - 1];
  const std::int64_t first = at * stride - dim.padding;
  f32v sums[results];
  for (f32v& sum : sums) sum = to.bias;
  for (int line = 0; line < lines.count; ++line) {
    const T* x = lines.x[line] + first * dim.x_stride;
    f32v weights[width];
#pragma GCC unroll 8
    for (int j = 0; j < width; ++j) {
      weights[j] = load(lines.weights[line] + j * args.channels, count);
    }
#pragma GCC unroll 16
    for (int column = 0; column < kColumns; ++column) {
      const f32v v = load(x + column * dim.x_stride, count);
#pragma GCC unroll 8
      for (int r = 0; r < results; ++r) {
        const int j = column - r * stride;
        if (j >= 0 && j < width) sums[r] += v * weights[j];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < results; ++r) finish(to, at + r, sums[r], count);
}

inline constexpr int kNeighbours = kVectorBytes == 64 ? 6 : 3;

// All results of a line, of a vector of channels.
template <int width, int stride, class T, class Count>
static void convolve_line(const DepthwiseArgs& args, const Lines<T>& lines, const Results<T>& to,
                          Count count) {
  const WindowDim& dim = args.windows.dims[kWindowDims - 1];
  std::int64_t at = 0;
  if constexpr (width > 0) {
    // Results whose windows lie within the image.
    const std::int64_t begin = (dim.padding + stride - 1) / stride;
    const std::int64_t room = dim.size + dim.padding - width;
    const std::int64_t end = room < 0 ? 0 : room / stride + 1;
    for (; at < begin && at < dim.out_size; ++at) convolve_one(args, lines, to, at, count);
    for (; at + kNeighbours <= end && at + kNeighbours <= dim.out_size; at += kNeighbours) {
      convolve_some<width, stride, kNeighbours>(args, lines, to, at, count);
    }
    for (; at + 2 <= end && at + 2 <= dim.out_size; at += 2) {
      convolve_some<width, stride, 2>(args, lines, to, at, count);
    }
  }
  for (; at < dim.out_size; ++at) convolve_one(args, lines, to, at, count);
}

template <class T, class Count>
static void convolve_channels(const DepthwiseArgs& args, const Lines<T>& lines,
                              const Results<T>& to, Count count) {
  const WindowDim& dim = args.windows.dims[kWindowDims - 1];
  const auto is = [&](std::int64_t width, std::int64_t stride) {
    return dim.kernel == width && dim.stride == stride && dim.dilation == 1;
  };
  if (is(3, 1)) return convolve_line<3, 1>(args, lines, to, count);
  if (is(3, 2)) return convolve_line<3, 2>(args, lines, to, count);
  if (is(5, 1)) return convolve_line<5, 1>(args, lines, to, count);
  if (is(5, 2)) return convolve_line<5, 2>(args, lines, to, count);
  if (is(7, 1)) return convolve_line<7, 1>(args, lines, to, count);
  convolve_line<0, 0>(args, lines, to, count);
}

// The lines that windows of a line of the result read; `place`: of image, and of the outer
// dimensions.
template <class T>
static void find_lines(const DepthwiseArgs& args, const std::int64_t* place, std::int64_t channel,
                       Lines<T>& lines) {
  const WindowArgs& windows = args.windows;
  const WindowDim &outer = windows.dims[0], &inner = windows.dims[1], &last = windows.dims[2];
  const std::int64_t plane = place[1] * outer.stride - outer.padding;
  const std::int64_t row = place[2] * inner.stride - inner.padding;
  const Inside planes = inside(outer, plane), rows = inside(inner, row);
  const T* image = static_cast<const T*>(windows.x) + place[0] * windows.image_stride + channel;
  lines.count = 0;
  for (std::int64_t i = planes.begin; i < planes.end; ++i) {
    for (std::int64_t j = rows.begin; j < rows.end; ++j) {
      lines.x[lines.count] = image + (plane + i * outer.dilation) * outer.x_stride +
                             (row + j * inner.dilation) * inner.x_stride;
      lines.weights[lines.count] =
          args.weight + (i * inner.kernel + j) * last.kernel * args.channels + channel;
      ++lines.count;
    }
  }
}

template <class T>
static void convolve_item(const DepthwiseArgs& args, std::int64_t item) {
  const std::int64_t blocks = (args.channels + args.block - 1) / args.block;
  const std::int64_t line = item / blocks, first = item % blocks * args.block;
  const std::int64_t left = args.channels - first;
  const WindowDim* dims = args.windows.dims;
  const std::int64_t place[] = {line / dims[1].out_size / dims[0].out_size,
                                line / dims[1].out_size % dims[0].out_size,
                                line % dims[1].out_size};
  const std::int64_t begin = line * dims[kWindowDims - 1].out_size;
  const PanelResultArgs& result = args.result;
  Lines<T> lines;
  find_lines(args, place, first, lines);
  sweep(0, left < args.block ? left : args.block, [&](std::int64_t i, auto count) {
    Results<T> to{
        .out = static_cast<T*>(result.out) + begin * result.out_stride + first + i,
        .other = nullptr,
        .out_stride = result.out_stride,
        .other_stride = result.other_stride,
        .bias = add_from(f32v{}, result.bias, result.bias_dtype, first + i, count),
        .epilogue = result.epilogue,
    };
    if (result.other) {
      to.other = static_cast<const T*>(result.other) + begin * result.other_stride + first + i;
    }
    convolve_channels(args, lines, to, count);
    for (int l = 0; l < lines.count; ++l) {
      lines.x[l] += kLanes;
      lines.weights[l] += kLanes;
    }
  });
}

static void depthwise_convolution(const DepthwiseArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.windows.dtype, [&](auto element) {
    for (std::int64_t item = begin; item < end; ++item) {
      convolve_item<decltype(element)>(args, item);
    }
  });
}

}  // namespace oxytorch::OXY_LEVEL
