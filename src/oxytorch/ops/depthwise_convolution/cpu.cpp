#include "core/parallel.h"
#include "ops/depthwise_convolution/kernel.h"
#include "ops/windows/result.h"

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

// Whether blocks of columns are made for such a kernel.
static bool is_square(const WindowArgs& windows) {
  const WindowDim &outer = windows.dims[0], &inner = windows.dims[1], &last = windows.dims[2];
  const std::int64_t kernel = last.kernel, stride = last.stride;
  // What the last column's kernel needs beyond the image.
  const std::int64_t beyond = (last.out_size - 1) * stride - last.padding + kernel - last.size;
  return outer.kernel == 1 && outer.padding == 0 && inner.kernel == kernel &&
         inner.stride == stride && inner.dilation == 1 && last.dilation == 1 &&
         (kernel == 3 || kernel == 5 || kernel == 7) && (stride == 1 || stride == 2) &&
         last.padding <= kernel / 2 && beyond <= kernel / 2 && last.out_size >= kBlockColumns;
}

// Neighbouring lines share what they read, and weights are arranged once for an item; yet there
// are to be a few items for each thread.
static std::int64_t lines_of_item(std::int64_t lines, std::int64_t others) {
  constexpr std::int64_t kMostLines = 16, kItemsOfThread = 4;
  std::int64_t taken = std::min(round_up(lines, 2), kMostLines);
  while (taken > 2 && divide_up(lines, taken) * others < kItemsOfThread * available_threads()) {
    taken = round_up(taken / 2, 2);
  }
  return taken;
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
  args.is_square = is_square(args.windows);
  const WindowDim* dims = args.windows.dims;
  const std::int64_t planes = out.size(0) * dims[0].out_size;
  const std::int64_t blocks = divide_up(args.channels, kBlockChannels);
  args.lines = lines_of_item(dims[1].out_size, planes * blocks);
  const std::int64_t items = planes * divide_up(dims[1].out_size, args.lines) * blocks;
  const std::int64_t positions = weight.numel() / args.channels;
  const std::int64_t results = out.numel() / items;
  run(depthwise_convolution_copies, args, items, results * 4 * positions / 2);
  return out;
}

OXY_OP(depthwise_convolution,
       "(Tensor x, Tensor weight, Tensor? bias, Tensor? other, int[] stride, int[] padding, "
       "int[] dilation, str epilogue=\"none\") -> Tensor",
       depthwise_convolution)

}  // namespace oxytorch
