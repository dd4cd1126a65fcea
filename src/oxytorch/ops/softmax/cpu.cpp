#include "core/check.h"
#include "core/parallel.h"
#include "ops/softmax/kernel.h"

namespace oxytorch {

static constexpr const char* kSoftmax = "softmax";

// Fills in how the mask, broadcast to the shape of x, is laid out.
static void describe_mask(SoftmaxArgs& args, const Tensor& x, const Tensor& mask) {
  const bool keep = mask.dtype_code() == aoti_torch_dtype_bool();
  args.mask_kind = keep ? MaskKind::keep : MaskKind::additive;
  if (!keep) args.mask_dtype = check_weight_dtype(kSoftmax, "mask", mask, args.dtype);
  check_cpu(kSoftmax, "mask", mask);
  const std::int64_t lead = x.dim() - mask.dim();
  bool fits = lead >= 0;
  for (std::int64_t i = 0; fits && i < mask.dim(); ++i) {
    fits = mask.size(i) == 1 || mask.size(i) == x.size(lead + i);
  }
  if (!fits) {
    fail(kSoftmax, "mask", "that broadcasts to shape " + describe(x.sizes()),
         describe(mask.sizes()));
  }
  args.row_dim = 0;
  for (std::int64_t i = 0; i < x.dim() - 1; ++i) {
    const bool varies = i >= lead && mask.size(i - lead) != 1;
    const std::int64_t stride = varies ? mask.stride(i - lead) : 0;
    int& last = args.row_dim;
    // Dimensions that continue each other are one.
    if (last > 0 && args.mask_strides[last - 1] == stride * x.size(i)) {
      args.row_sizes[last - 1] *= x.size(i);
      args.mask_strides[last - 1] = stride;
      continue;
    }
    if (last == SoftmaxArgs::kMaxDim) {
      fail(kSoftmax, "mask", "with at most 8 separate dimensions", describe(mask.sizes()));
    }
    args.row_sizes[last] = x.size(i);
    args.mask_strides[last] = stride;
    ++last;
  }
  args.mask_is_scalar = mask.dim() == 0 || (mask.size(-1) == 1 && x.size(-1) != 1);
}

static Tensor softmax(const Tensor& x, double scale, const std::optional<Tensor>& mask) {
  SoftmaxArgs args{};
  args.dtype = check_dtype(kSoftmax, "x", x);
  check_minimum_dim(kSoftmax, "x", x, 1);
  Tensor mask_copy;
  if (mask) {
    const bool dense = mask->dim() == 0 || mask->size(-1) == 1 || mask->stride(-1) == 1;
    if (!dense) contiguous_data(*mask, mask_copy);
    describe_mask(args, x, dense ? *mask : mask_copy);
    args.mask = (dense ? *mask : mask_copy).data();
  }
  const Rows rows = rows_of(x);
  Tensor out = empty(x.sizes(), x.dtype_code());
  const std::int64_t row_bytes = rows.width * size_of(args.dtype);
  args.x = rows.data;
  args.out = out.mutable_data();
  args.width = rows.width;
  args.x_stride = rows.stride;
  args.scale = static_cast<float>(scale);
  args.stream = should_stream(rows.count * row_bytes);
  run(softmax_copies, args, rows.count, 4 * row_bytes);
  return out;
}

OXY_OP(softmax, "(Tensor x, float scale=1.0, Tensor? mask=None) -> Tensor", softmax)

}  // namespace oxytorch
