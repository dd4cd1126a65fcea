#include "core/check.h"
#include "core/parallel.h"
#include "faulty/kernel.h"

namespace oxytorch {

static Tensor faulty(const Tensor& x, double factor, std::int64_t fault) {
  const DType dtype = check_dtype("faulty", "x", x);
  Tensor copy;
  const void* data = contiguous_data(x, copy);
  Tensor out = empty(x.sizes(), x.dtype_code());
  const FaultyArgs args{
      .x = const_cast<void*>(data),
      .out = out.mutable_data(),
      .width = x.numel(),
      .factor = static_cast<float>(factor),
      .dtype = dtype,
      .fault = static_cast<Fault>(fault),
  };
  if (args.fault == Fault::level_ignored) {
    faulty_copies.at_level[0](args, 0, 1);
  } else {
    run(faulty_copies, args, 1, x.numel());
  }
  return out;
}

OXY_OP(faulty, "(Tensor x, float factor, int fault) -> Tensor", faulty)

}  // namespace oxytorch
