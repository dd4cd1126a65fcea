#include "core/parallel.h"
#include "ops/convolution_panels/products.h"
#include "ops/panels/split.h"
#include "ops/windows/result.h"

namespace oxytorch {
namespace {

constexpr const char* kOp = "convolution_panels";

// Whether windows are the pixels of the images, one after the other.
bool takes_pixels(const Convolution& call, const Tensor& images) {
  bool same = call.groups == 1 && call.windows.channel_stride == 1 && pixel_stride(images) > 0;
  same &= call.rows * images.size(1) == images.numel();
  for (const WindowDim& dim : call.windows.dims) {
    same &= dim.kernel == 1 && dim.stride == 1 && dim.out_size == dim.size;
  }
  return same;
}

// Where kernels take one element, those that strides leave out are no part of the image.
void leave_out_strides(WindowArgs& windows) {
  for (WindowDim& dim : windows.dims) {
    const bool takes_some = dim.kernel == 1 && dim.padding == 0 && dim.stride > 1;
    if (!takes_some || (dim.out_size - 1) * dim.stride >= dim.size) continue;
    dim = {dim.out_size, dim.out_size, 1, 1, 0, 1, dim.x_stride * dim.stride};
  }
}

// The same as a convolution of one dimension, whose images are one.
Convolution in_one_line(Convolution call, std::int64_t stride) {
  for (WindowDim& dim : call.windows.dims) dim = {1, 1, 1, 1, 0, 1, 0};
  call.windows.dims[kWindowDims - 1] = {call.rows, call.rows, 1, 1, 0, 1, stride};
  call.images = 1;
  return call;
}

// Kernels may have any size in a file.
void check_kernel(const Convolution& call) {
  std::int64_t features = call.channels();
  for (const WindowDim& dim : call.windows.dims) {
    if (features >= kMostFeatures / dim.kernel) {
      fail(kOp, "kernel_size", "with fewer than " + std::to_string(kMostFeatures) + " in_features",
           "more");
    }
    features *= dim.kernel;
  }
}

void multiply(const Convolution& call, const Tensor& images) {
  const RowType type = row_type(call.windows.dtype, false, call.weight.codec);
  const bool are_pixels = takes_pixels(call, images);
  if (are_pixels) {
    const DType dtype = call.windows.dtype;
    const Rows rows{Tensor(), images.data(), call.rows, images.size(1), pixel_stride(images)};
    const RowsProduct product{call.weight, call.result, 0, call.rows};
    // What tiles cannot be loaded from multiply_lines copies just before it is read.
    if (!has_tiles(type) || holds_tiles(rows, dtype)) {
      return multiply_rows(rows, nullptr, dtype, false, {&product, 1});
    }
  }
  const std::int64_t outputs = call.groups * call.weight.panel_count * kPanelOutputs;
  const std::int64_t weight_bytes = call.groups * call.weight.panel_count * call.weight.panel_bytes;
  const std::int64_t work = work_of_product(call.rows, outputs * call.in_features(), type,
                                            weight_bytes, outputs * size_of(call.windows.dtype));
  const std::int64_t threads = threads_for(work);
  multiply_lines(are_pixels ? in_one_line(call, pixel_stride(images)) : call, type, threads);
}

Tensor convolution_panels(const Tensor& x, const std::string& format_name, const Tensor& panels,
                          const Numbers& kernel_size, std::int64_t out_channels,
                          const std::optional<Tensor>& bias, const std::optional<Tensor>& other,
                          const Numbers& stride, const Numbers& padding, const Numbers& dilation,
                          std::int64_t groups, const std::string& epilogue) {
  const PanelFormat& format = parse_format(kOp, "format", format_name);
  if (has_codes(format)) fail(kOp, "format", "'fp32' or 'bf16'", quoted(format_name));
  Convolution call{};
  call.windows = describe_windows(kOp, x, kernel_size, stride, padding, dilation, groups);
  call.groups = groups;
  if (out_channels < 1 || out_channels % groups != 0) {
    fail(kOp, "out_channels", "a multiple of groups, " + std::to_string(groups),
         std::to_string(out_channels));
  }
  call.weight.codec = codec_of(format);
  check_kernel(call);
  if (out_channels >= kMostFeatures) {
    fail(kOp, "out_channels", "below " + std::to_string(kMostFeatures),
         std::to_string(out_channels));
  }
  const std::int64_t in_features = call.in_features();
  const std::int64_t outputs = out_channels / groups;
  const std::int64_t padded = round_up(outputs, kPanelOutputs);
  PanelCopies copies;
  call.weight = describe_weight(kOp, format, {panels, {}, {}, {}}, in_features, groups * padded,
                                false, copies);
  call.weight.panel_count /= groups;
  call.weight.out_features = outputs;
  const Shape shape = shape_of_result(x, call.windows, out_channels);
  Images others{};
  call.result = describe_result(kOp, epilogue, x, call.windows.dtype, shape, bias, other, others,
                                copies.bias);
  Tensor out = empty_images(shape, x.dtype_code());
  if (out.numel() == 0) return out;
  const bool may_lie_apart = groups == 1 && call.windows.channels < kFewChannels;
  const Images copied = images_of(x, false, may_lie_apart);
  const Tensor& images = copied.tensor();
  set_data(call.windows, images);
  leave_out_strides(call.windows);
  call.result.out = out.mutable_data();
  call.images = x.size(0);
  call.rows = out.numel() / out_channels;
  multiply(call, images);
  return out;
}

}  // namespace

OXY_OP(convolution_panels,
       "(Tensor x, str format, Tensor panels, int[] kernel_size, int out_channels, "
       "Tensor? bias, Tensor? other, int[] stride, int[] padding, int[] dilation, int groups, "
       "str epilogue=\"none\") -> Tensor",
       convolution_panels)

}  // namespace oxytorch
