#include "core/parallel.h"
#include "ops/_windows/result.h"
#include "ops/depthwise_convolution/kernel.h"

namespace oxytorch {

static constexpr const char* kOp = "depthwise_convolution";

static void check_weight(const Tensor& weight, const Tensor& x) {
  check_cpu(kOp, "weight", weight);
  if (weight.dim() != x.dim() - 1 || weight.size(-1) != x.size(1)) {
    fail(kOp, "weight", "of shape [*kernel_size, " + std::to_string(x.size(1)) + "]",
         describe(weight.sizes()));
  }
  if (weight.dtype_code() != aoti_torch_dtype_float32()) {
    fail(kOp, "weight", "of dtype float32", dtype_name(weight.dtype_code()));
  }
  std::int64_t lines = 1;
  for (std::int64_t i = 0; i < weight.dim() - 2; ++i) lines *= weight.size(i);
  if (lines > kMostKernelLines) {
    fail(kOp, "weight", "of at most " + std::to_string(kMostKernelLines) + " lines",
         std::to_string(lines));
  }
}

static Tensor depthwise_convolution(const Tensor& x, const Tensor& weight,
                                    const std::optional<Tensor>& bias,
                                    const std::optional<Tensor>& other, const Numbers& stride,
                                    const Numbers& padding, const Numbers& dilation,
                                    const std::string& epilogue) {
  check_images(kOp, x);
  check_weight(weight, x);
  const Numbers kernel_size(weight.sizes().begin(), weight.sizes().end() - 1);
  DepthwiseArgs args{};
  args.windows = describe_windows(kOp, x, kernel_size, stride, padding, dilation, 1);
  args.channels = x.size(1);
  const Shape shape = shape_of_result(x, args.windows, args.channels);
  Images others{};
  Tensor bias_copy, weight_copy;
  args.result =
      describe_result(kOp, epilogue, x, args.windows.dtype, shape, bias, other, others, bias_copy);
  Tensor out = empty_images(shape, x.dtype_code());
  if (out.numel() == 0) return out;
  const Images images = images_of(x);
  set_data(args.windows, images.tensor());
  args.weight = static_cast<const float*>(contiguous_data(weight, weight_copy));
  args.result.out = out.mutable_data();
  const std::int64_t width = args.windows.dims[kWindowDims - 1].out_size;
  const std::int64_t lines = out.numel() / args.channels / width;
  constexpr std::int64_t kBlock = 64;
  args.block = kBlock;
  const std::int64_t bytes = kBlock * width * 4 * weight.numel() / args.channels / 2;
  run(depthwise_convolution_copies, args, lines * divide_up(args.channels, kBlock), bytes);
  return out;
}

OXY_OP(depthwise_convolution,
       "(Tensor x, Tensor weight, Tensor? bias, Tensor? other, int[] stride, int[] padding, "
       "int[] dilation, str epilogue=\"none\") -> Tensor",
       depthwise_convolution)

}  // namespace oxytorch
