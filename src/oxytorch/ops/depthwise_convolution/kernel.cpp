#include "ops/depthwise_convolution/kernel.h"

#include <type_traits>

#include "ops/depthwise_convolution/blocks.h"
#include "ops/panels/clamped.h"
#include "ops/windows/inside.h"

namespace oxytorch::OXY_LEVEL {

// Lines of images that an item reads, and of the kernel that meet them; some channels.
template <class T>
struct Lines {
  const T* x[kMostKernelLines];  // from where the last dimension begins
  const float* weights[kMostKernelLines];
  int count = 0;
};

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

// Writes where the results of a line begin, of a vector of channels. Member by member: a copy of
// the whole would wait for what has just been written to it.
template <class T, class Count>
OXY_INLINE void find_results(const PanelResultArgs& result, std::int64_t row, std::int64_t channel,
                             Count count, Results<T>& to) {
  to.out = static_cast<T*>(result.out) + row * result.out_stride + channel;
  to.other = result.other
                 ? static_cast<const T*>(result.other) + row * result.other_stride + channel
                 : nullptr;
  to.out_stride = result.out_stride;
  to.other_stride = result.other_stride;
  to.bias = add_from(f32v{}, result.bias, result.bias_dtype, channel, count);
  to.epilogue = result.epilogue;
}

// Some channels of neighbouring lines of the result, all of one plane.
struct Item {
  std::int64_t image, plane, line, lines, channel, channels;

  std::int64_t row(const WindowDim* dims, std::int64_t of_line) const {
    return ((image * dims[0].out_size + plane) * dims[1].out_size + of_line) * dims[2].out_size;
  }
};

// A line, channels from `first` of the item's on.
template <class T>
static void convolve_plainly(const DepthwiseArgs& args, const Item& item, std::int64_t line,
                             std::int64_t first) {
  const std::int64_t place[] = {item.image, item.plane, line};
  Lines<T> lines;
  find_lines(args, place, item.channel + first, lines);
  const std::int64_t row = item.row(args.windows.dims, line);
  sweep(first, item.channels, [&](std::int64_t i, auto count) {
    Results<T> to;
    find_results(args.result, row, item.channel + i, count, to);
    convolve_channels(args, lines, to, count);
    for (int l = 0; l < lines.count; ++l) {
      lines.x[l] += kLanes;
      lines.weights[l] += kLanes;
    }
  });
}

template <class T>
static void find_block(const DepthwiseArgs& args, const Item& item, std::int64_t line,
                       std::int64_t channel, Block<T>& block) {
  const WindowDim &outer = args.windows.dims[0], &inner = args.windows.dims[1],
                  &last = args.windows.dims[2];
  const std::int64_t row = line * inner.stride - inner.padding;
  const T* plane = static_cast<const T*>(args.windows.x) + item.image * args.windows.image_stride +
                   item.plane * outer.stride * outer.x_stride + channel;
  for (std::int64_t l = 0; l < inner.kernel + kBlockLines - 1; ++l) {
    const bool is_there = row + l >= 0 && row + l < inner.size;
    block.lines[l] = {is_there ? plane + (row + l) * inner.x_stride : nullptr, last.x_stride};
  }
  block.weights = args.weight + channel;
  find_results(args.result, item.row(args.windows.dims, line), channel, Whole{}, block.to);
}

// The item's lines, of all whole vectors of channels that can be; returns the channels.
template <class From>
static std::int64_t convolve_in_blocks(const DepthwiseArgs& args, const Item& item) {
  using T = typename From::Element;
  const WindowDim* dims = args.windows.dims;
  Block<T> block{};
  block.weight_stride = args.channels;
  block.line_stride = dims[2].out_size * args.result.out_stride;
  block.other_line_stride = dims[2].out_size * args.result.other_stride;
  block.padding = dims[2].padding;
  block.size = dims[2].size;
  block.is_clamped = !args.result.other && clamps(args.result.epilogue, block.least, block.most);
  const std::int64_t channels = item.channels / kLanes * kLanes;
  alignas(64) u32v pairs[From::kPairs > 0 ? kBlockChannels / kLanes * From::kPairs : 1];
  if constexpr (From::kPairs > 0) {
    for (std::int64_t i = 0; i < channels; i += kLanes) {
      const float* weights = args.weight + item.channel + i;
      if (!write_pairs(weights, args.channels, From::kKernel, pairs + i / kLanes * From::kPairs))
        return 0;
    }
  }
  const std::int64_t end = item.line + item.lines;
  const std::int64_t step = dims[1].stride == 1 ? kBlockLines : 1;
  for (std::int64_t line = item.line; line < end; line += step) {
    for (std::int64_t i = 0; i < channels; i += kLanes) {
      find_block(args, item, line, item.channel + i, block);
      if constexpr (From::kPairs > 0) block.pairs = pairs + i / kLanes * From::kPairs;
      convolve_square<From>(block, dims[1].stride, end - line >= kBlockLines, dims[2].out_size);
    }
  }
  return channels;
}

// As convolve_in_blocks, of a square kernel of that many columns.
template <int kernel, class T>
static std::int64_t convolve_square_kernel(const DepthwiseArgs& args, const Item& item) {
#if OXY_HAS_FAST_BF16_DOT
  if constexpr (std::is_same_v<T, bf16>) {
    const std::int64_t done = convolve_in_blocks<PairsOfLines<kernel>>(args, item);
    if (done > 0) return done;
  }
#endif
  // Narrow vectors share too few columns of so small a kernel to gain by it.
  if constexpr (kVectorBytes < 64 && kernel == 3 && !std::is_same_v<T, float>) return 0;
  return convolve_in_blocks<SingleLines<T, kernel>>(args, item);
}

template <class T>
static std::int64_t convolve_square_kernel(const DepthwiseArgs& args, const Item& item) {
  switch (args.windows.dims[kWindowDims - 1].kernel) {
    case 3:
      return convolve_square_kernel<3, T>(args, item);
    case 5:
      return convolve_square_kernel<5, T>(args, item);
    default:
      return convolve_square_kernel<7, T>(args, item);
  }
}

template <class T>
static void convolve_item(const DepthwiseArgs& args, std::int64_t number) {
  const WindowDim* dims = args.windows.dims;
  const std::int64_t blocks = (args.channels + kBlockChannels - 1) / kBlockChannels;
  const std::int64_t groups = (dims[1].out_size + args.lines - 1) / args.lines;
  const std::int64_t first = number % blocks * kBlockChannels, group = number / blocks % groups;
  const std::int64_t plane = number / blocks / groups, line = group * args.lines;
  const std::int64_t left = dims[1].out_size - line, channels = args.channels - first;
  const Item item{plane / dims[0].out_size,
                  plane % dims[0].out_size,
                  line,
                  left < args.lines ? left : args.lines,
                  first,
                  channels < kBlockChannels ? channels : kBlockChannels};
  const std::int64_t done = args.is_square ? convolve_square_kernel<T>(args, item) : 0;
  if (done == item.channels) return;
  for (std::int64_t l = 0; l < item.lines; ++l) {
    convolve_plainly<T>(args, item, item.line + l, done);
  }
}

static void depthwise_convolution(const DepthwiseArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.windows.dtype, [&](auto element) {
    for (std::int64_t item = begin; item < end; ++item) {
      convolve_item<decltype(element)>(args, item);
    }
  });
}

}  // namespace oxytorch::OXY_LEVEL
