// Checks that the attention ops share.
#pragma once

#include <string>

#include "core/check.h"
#include "ops/_attention/args.h"

namespace oxytorch {

// The tensor itself if its last dimension is dense, else a copy kept in `copy`.
inline const Tensor& dense_rows(const Tensor& tensor, Tensor& copy) {
  if (tensor.size(-1) <= 1 || tensor.stride(-1) == 1) return tensor;
  contiguous_data(tensor, copy);
  return copy;
}

inline AttentionStrides strides_of(const Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2), 1};
}

// `full`: [batch, heads, length, keys]. `may_be_longer`: in keys, of which the first are taken.
inline MaskView describe_mask(const char* op, const Tensor& mask, DType dtype,
                              const std::int64_t (&full)[4], bool may_be_longer) {
  MaskView view{};
  const bool keep = mask.dtype_code() == aoti_torch_dtype_bool();
  view.kind = keep ? AttentionMask::keep : AttentionMask::additive;
  if (!keep) view.dtype = check_weight_dtype(op, "mask", mask, dtype);
  check_cpu(op, "mask", mask);
  const std::int64_t lead = 4 - mask.dim();
  std::int64_t strides[4] = {};
  bool fits = lead >= 0;
  for (std::int64_t i = 0; fits && i < mask.dim(); ++i) {
    const std::int64_t wanted = full[lead + i];
    const bool longer = may_be_longer && lead + i == 3 && mask.size(i) > wanted;
    fits = mask.size(i) == 1 || mask.size(i) == wanted || longer;
    if (mask.size(i) != 1) strides[lead + i] = mask.stride(i);
  }
  if (!fits) {
    fail(op, "mask", "that broadcasts to shape " + describe(Extents{full, 4}),
         describe(mask.sizes()));
  }
  view.strides = {strides[0], strides[1], strides[2], strides[3]};
  view.data = mask.data();
  return view;
}

}  // namespace oxytorch
