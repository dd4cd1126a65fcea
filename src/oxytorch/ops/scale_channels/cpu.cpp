#include "core/parallel.h"
#include "ops/scale_channels/kernel.h"
#include "ops/windows/entry.h"

namespace oxytorch {

static constexpr const char* kOp = "scale_channels";

static Tensor scale_channels(const Tensor& x, const Tensor& factors) {
  check_cpu(kOp, "x", x);
  check_images(kOp, x);
  const DType dtype = check_dtype(kOp, "x", x);
  Shape sizes(x.sizes().begin(), x.sizes().end()), single(sizes.size(), 1);
  single[0] = sizes[0], single[1] = sizes[1];
  check_cpu(kOp, "factors", factors);
  check_shape(kOp, "factors", factors,
              Extents{single.data(), static_cast<std::int64_t>(single.size())});
  check_same_dtype(kOp, "factors", factors, x);
  Tensor out = empty_images(sizes, x.dtype_code());
  if (out.numel() == 0) return out;
  const Images images = images_of(x, true);
  Tensor copy;
  const std::int64_t channels = x.size(1), pixels = x.numel() / x.size(0) / channels;
  constexpr std::int64_t kElements = 4096;  // of an item
  const std::int64_t stretch = std::max<std::int64_t>(1, kElements / channels);
  const ScaleChannelsArgs args{
      .x = images.tensor().data(),
      .factors = contiguous_data(factors, copy),
      .out = out.mutable_data(),
      .channels = channels,
      .pixels = pixels,
      .x_stride = pixel_stride(images.tensor()),
      .stretch = stretch,
      .dtype = dtype,
  };
  run(scale_channels_copies, args, x.size(0) * divide_up(pixels, stretch),
      2 * stretch * channels * size_of(dtype));
  return out;
}

OXY_OP(scale_channels, "(Tensor x, Tensor factors) -> Tensor", scale_channels)

}  // namespace oxytorch
