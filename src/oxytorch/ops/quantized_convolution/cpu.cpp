#include "ops/_quantized/result.h"
#include "ops/windows/entry.h"

namespace oxytorch {
namespace {

constexpr const char* kOp = "quantized_convolution";

struct Geometry {
  WindowArgs windows;
  std::int64_t in_features;  // of a result, as its weight is packed
  std::int64_t outputs;      // of a group
  bool are_pixels;           // windows are the pixels of the images
  bool is_depthwise;         // each channel for itself
};

// What is multiplied for a result: lines of a kernel, times columns and channels up to a multiple
// of 4; of each channel for itself columns, times lines up to a multiple of 4.
std::int64_t features_of(const WindowArgs& windows, bool is_depthwise) {
  const WindowDim* dims = windows.dims;
  const auto times = [](std::int64_t a, std::int64_t b) {
    if (a <= kMostProducts / b) return a * b;
    fail(kOp, "kernel_size",
         "with at most " + std::to_string(kMostProducts) + " products of a result", "more");
  };
  const std::int64_t lines = times(dims[0].kernel, dims[1].kernel);
  if (!is_depthwise) return times(lines, round_up(times(windows.channels, dims[2].kernel), 4));
  if (lines > kMostByteLines) {
    fail(kOp, "kernel_size",
         "of at most " + std::to_string(kMostByteLines) + " lines for each channel by itself",
         std::to_string(lines));
  }
  return times(dims[2].kernel, round_up(lines, 4));
}

// Kernels may have any size in a file.
Geometry describe(const Tensor& x, const Numbers& kernel_size, std::int64_t out_channels,
                  const Numbers& stride, const Numbers& padding, const Numbers& dilation,
                  std::int64_t groups) {
  Geometry found{};
  found.windows = describe_geometry(kOp, x, kernel_size, stride, padding, dilation, groups);
  if (out_channels < 1 || out_channels % groups != 0 || out_channels >= kMostFeatures) {
    fail(kOp, "out_channels",
         "a multiple of groups, " + std::to_string(groups) + ", below " +
             std::to_string(kMostFeatures),
         std::to_string(out_channels));
  }
  found.outputs = out_channels / groups;
  found.are_pixels = groups == 1;
  for (const WindowDim& dim : found.windows.dims) {
    found.are_pixels &= dim.kernel == 1 && dim.stride == 1 && dim.out_size == dim.size;
  }
  found.is_depthwise = groups > 1 && found.windows.channels == 1 && found.outputs == 1;
  found.in_features = features_of(found.windows, found.is_depthwise);
  return found;
}

// Whether windows are read from lines; else they are written side by side.
bool reads_lines(const ByteWindows& call) {
  return call.windows.dims[kWindowDims - 1].dilation == 1 &&
         !fits_tiles(call.rows, call.in_features);
}

// Writes the result, by the kernel for windows of this form.
void convolve(const Tensor& x, const ByteOperand& operand, const Geometry& geometry,
              ByteWindows& call) {
  const bool in_lines = !geometry.are_pixels && !geometry.is_depthwise && reads_lines(call);
  const Images images = images_of(x, geometry.are_pixels, in_lines && x.size(1) <= kFewChannels);
  if (geometry.are_pixels) {
    const Tensor& pixels = images.tensor();
    const Rows rows{Tensor(), pixels.data(), call.rows, pixels.size(1), pixel_stride(pixels)};
    return multiply_rows_of_bytes(rows, operand, call.weight, call.result);
  }
  set_data(call.windows, images.tensor());
  if (geometry.is_depthwise) {
    convolve_channels_of_bytes(
        {call.windows, call.weight, call.result, call.in_features, call.rows}, operand);
  } else if (in_lines) {
    multiply_lines_of_bytes(call, operand);
  } else {
    multiply_windows_of_bytes(call, operand);
  }
}

Tensor quantized_convolution(const Tensor& x, double x_scale, std::int64_t x_zero_point,
                             const Tensor& panels, const Tensor& channel_scales,
                             const Tensor& channel_sums, const Numbers& kernel_size,
                             std::int64_t out_channels, const std::optional<Tensor>& bias,
                             const std::optional<Tensor>& other, const Numbers& stride,
                             const Numbers& padding, const Numbers& dilation, std::int64_t groups,
                             std::optional<double> other_scale, std::int64_t other_zero_point,
                             const std::string& epilogue, const std::string& out_dtype,
                             std::optional<double> out_scale, std::int64_t out_zero_point) {
  const ByteOperand operand = check_operand(kOp, x, x_scale, x_zero_point);
  const Geometry geometry =
      describe(x, kernel_size, out_channels, stride, padding, dilation, groups);
  ByteWindows call{};
  call.windows = geometry.windows;
  call.groups = groups;
  call.in_features = geometry.in_features;
  const std::int64_t padded = round_up(geometry.outputs, kPanelOutputs);
  BytePanelCopies copies;
  call.weight =
      describe_byte_panels(kOp, panels, channel_scales, channel_sums, geometry.in_features,
                           geometry.is_depthwise ? out_channels : groups * padded, copies);
  if (!geometry.is_depthwise) {
    call.weight.panel_count /= groups;
    call.weight.out_features = geometry.outputs;
  }
  const Shape shape = shape_of_result(x, geometry.windows, out_channels);
  const Extents sizes{shape.data(), static_cast<std::int64_t>(shape.size())};
  call.result = describe_byte_result(kOp, {epilogue, out_dtype, out_scale, out_zero_point}, bias,
                                     out_channels, copies.bias);
  check_byte_other(kOp, epilogue, other, {other_scale, other_zero_point}, sizes, call.result);
  Images others{};
  if (other) {
    others = images_of(*other, true);
    call.result.other = others.tensor().data();
    call.result.other_stride = pixel_stride(others.tensor());
  }
  Tensor out = empty_images(shape, dtype_code_of(call.result.number));
  if (out.numel() == 0) return out;
  call.result.out = out.mutable_data();
  call.result.out_stride = out_channels;
  call.rows = out.numel() / out_channels;
  convolve(x, operand, geometry, call);
  return out;
}

}  // namespace

OXY_OP(quantized_convolution,
       "(Tensor x, float x_scale, int x_zero_point, Tensor panels, Tensor channel_scales, "
       "Tensor channel_sums, int[] kernel_size, int out_channels, Tensor? bias, Tensor? other, "
       "int[] stride, int[] padding, int[] dilation, int groups, float? other_scale=None, "
       "int other_zero_point=0, str epilogue=\"none\", str out_dtype=\"float32\", "
       "float? out_scale=None, int out_zero_point=0) -> Tensor",
       quantized_convolution)

}  // namespace oxytorch
