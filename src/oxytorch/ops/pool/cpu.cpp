#include "core/parallel.h"
#include "ops/pool/kernel.h"
#include "ops/windows/entry.h"

namespace oxytorch {

static constexpr const char* kOp = "pool";

static PoolKind parse_kind(const std::string& name) {
  if (name == "max") return PoolKind::max;
  if (name != "mean") fail(kOp, "kind", "'max' or 'mean'", "'" + name + "'");
  return PoolKind::mean;
}

static PoolElement element_of(const Tensor& x, PoolKind kind) {
  if (kind != PoolKind::max) return PoolElement::floating;
  if (x.dtype_code() == aoti_torch_dtype_int8()) return PoolElement::int8;
  return x.dtype_code() == aoti_torch_dtype_uint8() ? PoolElement::uint8 : PoolElement::floating;
}

static Tensor pool(const Tensor& x, const Numbers& kernel_size, const Numbers& stride,
                   const Numbers& padding, const Numbers& dilation, const std::string& kind) {
  check_cpu(kOp, "x", x);
  PoolArgs args{};
  args.kind = parse_kind(kind);
  args.element = element_of(x, args.kind);
  const bool is_floating = args.element == PoolElement::floating;
  args.windows = describe_geometry(kOp, x, kernel_size, stride, padding, dilation, 1);
  if (is_floating) args.windows.dtype = check_dtype(kOp, "x", x);
  for (const std::int64_t step : dilation) {
    if (args.kind == PoolKind::mean && step != 1) {
      fail(kOp, "dilation", "of ones for 'mean'", std::to_string(step));
    }
  }
  const std::int64_t channels = x.size(1);
  const Shape shape = shape_of_result(x, args.windows, channels);
  std::int64_t positions = 1;
  for (const WindowDim& dim : args.windows.dims) positions *= dim.out_size;
  // Of one position in torch's order, which is the same.
  Tensor out = positions == 1 ? empty(shape.data(), x.dim(), x.dtype_code())
                              : empty_images(shape, x.dtype_code());
  if (out.numel() == 0) return out;
  const Images images = images_of(x);
  set_data(args.windows, images.tensor());
  args.out = out.mutable_data();
  constexpr std::int64_t kBlock = 64;
  args.block = kBlock;
  std::int64_t reads = args.windows.dims[kWindowDims - 1].out_size * kBlock * (is_floating ? 4 : 1);
  for (const WindowDim& dim : args.windows.dims) reads *= std::min(dim.kernel, dim.size);
  const std::int64_t lines = out.numel() / channels / args.windows.dims[kWindowDims - 1].out_size;
  run(pool_copies, args, lines * divide_up(channels, kBlock), reads / 2);
  return out;
}

OXY_OP(pool,
       "(Tensor x, int[] kernel_size, int[] stride, int[] padding, int[] dilation, str kind) -> "
       "Tensor",
       pool)

}  // namespace oxytorch
