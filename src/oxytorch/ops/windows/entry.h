// What the entries of convolutions share: their geometry, and tensors with channels side by side.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/sizes.h"
#include "ops/windows/args.h"

namespace oxytorch {

using Numbers = std::vector<std::int64_t>;

// A tensor [images, channels, spatial...] whose channels lie side by side.
struct Images {
  Tensor copy;
  const Tensor* given;

  const Tensor& tensor() const { return copy.handle() ? copy : *given; }
};

// A new tensor of these sizes whose channels lie side by side.
inline Tensor empty_images(const Shape& sizes, std::int32_t dtype_code) {
  Shape strides(sizes.size());
  std::int64_t step = 1;
  const auto place = [&](std::size_t i) {
    strides[i] = step;
    step *= std::max<std::int64_t>(sizes[i], 1);
  };
  place(1);
  for (std::size_t i = sizes.size() - 1; i >= 2; --i) place(i);
  place(0);
  return empty_strided(sizes.data(), strides.data(), static_cast<std::int64_t>(sizes.size()),
                       dtype_code);
}

// Elements between neighbouring pixels; 0 where they are not as many everywhere.
inline std::int64_t pixel_stride(const Tensor& x) {
  std::int64_t stride = 0, expected = 0;
  for (std::int64_t i = x.dim() - 1; i >= 0; i -= i == 2 ? 2 : 1) {  // images last, no channels
    if (x.size(i) == 1) continue;
    if (stride == 0) stride = x.stride(i);
    if (expected != 0 && x.stride(i) != expected) return 0;
    expected = x.stride(i) * x.size(i);
  }
  return expected == 0 ? x.size(1) : stride;
}

// Copies the tensor only where its channels do not lie side by side. `evenly`: nor where pixels
// are not as many elements apart everywhere. `apart`: only for that.
inline Images images_of(const Tensor& x, bool evenly = false, bool apart = false) {
  Images found{Tensor(), &x};
  if ((apart || x.size(1) == 1 || x.stride(1) == 1) && (!evenly || pixel_stride(x) > 0))
    return found;
  found.copy = empty_images(Shape(x.sizes().begin(), x.sizes().end()), x.dtype_code());
  check_call(aoti_torch_copy_(found.copy.handle(), x.handle(), 0), "copy_");
  return found;
}

// Numbers may come from a file: sums of products of two of these do not overflow.
inline constexpr std::int64_t kMostOfNumbers = (std::int64_t{1} << 31) - 1;

inline void check_numbers(const char* op, const char* argument, const Numbers& numbers,
                          std::int64_t count, std::int64_t least) {
  bool fits = static_cast<std::int64_t>(numbers.size()) == count;
  for (const std::int64_t number : numbers) fits &= number >= least && number <= kMostOfNumbers;
  if (fits) return;
  const Extents given{numbers.data(), static_cast<std::int64_t>(numbers.size())};
  fail(op, argument,
       "of " + std::to_string(count) + " numbers from " + std::to_string(least) + " to 2^31 - 1",
       describe(given));
}

inline void check_images(const char* op, const Tensor& x) {
  if (x.dim() < 3 || x.dim() > 2 + kWindowDims) {
    fail(op, "x", "of shape [images, channels, 1 to 3 spatial sizes]", describe(x.sizes()));
  }
}

// The windows of a convolution with kernels of a size, without the data and its dtype. `padding`:
// before and after, of each spatial dimension in turn.
inline WindowArgs describe_geometry(const char* op, const Tensor& x, const Numbers& kernel_size,
                                    const Numbers& stride, const Numbers& padding,
                                    const Numbers& dilation, std::int64_t groups) {
  check_images(op, x);
  const std::int64_t dims = x.dim() - 2;
  check_numbers(op, "kernel_size", kernel_size, dims, 1);
  check_numbers(op, "stride", stride, dims, 1);
  check_numbers(op, "padding", padding, 2 * dims, 0);
  check_numbers(op, "dilation", dilation, dims, 1);
  const std::int64_t channels = x.size(1);
  if (groups < 1 || channels < 1 || channels % groups != 0) {
    fail(op, "groups", "that divide the " + std::to_string(channels) + " channels of x",
         std::to_string(groups));
  }
  WindowArgs args{};
  args.channels = channels / groups;
  for (WindowDim& dim : args.dims) dim = {1, 1, 1, 1, 0, 1, 0};
  for (std::int64_t i = 0; i < dims; ++i) {
    WindowDim& dim = args.dims[kWindowDims - dims + i];
    dim = {x.size(2 + i), 0, kernel_size[i], stride[i], padding[2 * i], dilation[i], 0};
    const std::int64_t padded = dim.size + padding[2 * i] + padding[2 * i + 1];
    const std::int64_t reach = dim.dilation * (dim.kernel - 1) + 1;
    if (padded < reach) {
      fail(op, "x", "that kernels of " + std::to_string(reach) + " elements fit into",
           std::to_string(padded) + " with its padding");
    }
    dim.out_size = (padded - reach) / dim.stride + 1;
  }
  return args;
}

inline WindowArgs describe_windows(const char* op, const Tensor& x, const Numbers& kernel_size,
                                   const Numbers& stride, const Numbers& padding,
                                   const Numbers& dilation, std::int64_t groups) {
  WindowArgs args = describe_geometry(op, x, kernel_size, stride, padding, dilation, groups);
  args.dtype = check_dtype(op, "x", x);
  return args;
}

inline void set_data(WindowArgs& args, const Tensor& x) {
  args.x = x.data();
  args.image_stride = x.stride(0);
  args.channel_stride = x.size(1) == 1 ? 1 : x.stride(1);
  const std::int64_t missing = kWindowDims + 2 - x.dim();
  for (std::int64_t i = 2; i < x.dim(); ++i) args.dims[i - 2 + missing].x_stride = x.stride(i);
}

inline Shape shape_of_result(const Tensor& x, const WindowArgs& args, std::int64_t channels) {
  Shape shape{x.size(0), channels};
  for (std::int64_t i = kWindowDims + 2 - x.dim(); i < kWindowDims; ++i) {
    shape.push_back(args.dims[i].out_size);
  }
  return shape;
}

}  // namespace oxytorch
