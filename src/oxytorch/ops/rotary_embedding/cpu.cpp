#include "core/check.h"
#include "core/parallel.h"
#include "ops/rotary_embedding/kernel.h"

namespace oxytorch {

static constexpr const char* kRotary = "rotary_embedding";

// Checks cos or sin: [positions, rotary_dim] or [batch, positions, rotary_dim].
static void describe_angles(const char* argument, const Tensor& angles, const Tensor& x,
                            std::int64_t rotary_dim, std::int64_t strides[2]) {
  const std::int64_t batch = x.size(0);
  const std::int64_t positions = x.size(2);
  const std::int64_t flat[] = {positions, rotary_dim};
  const std::int64_t batched[] = {batch, positions, rotary_dim};
  const std::int64_t shared[] = {1, positions, rotary_dim};
  if (angles.dim() == 2) {
    check_shape(kRotary, argument, angles, {flat, 2});
  } else if (angles.dim() == 3 && angles.size(0) == 1) {
    check_shape(kRotary, argument, angles, {shared, 3});
  } else {
    check_shape(kRotary, argument, angles, {batched, 3});
  }
  check_cpu(kRotary, argument, angles);
  strides[0] = angles.dim() == 3 && angles.size(0) != 1 ? angles.stride(0) : 0;
  strides[1] = angles.stride(-2);
}

static Tensor rotary_embedding(const Tensor& x, const Tensor& cos, const Tensor& sin,
                               bool interleaved) {
  RotaryEmbeddingArgs args{};
  args.dtype = check_dtype(kRotary, "x", x);
  if (x.dim() != 4) {
    fail(kRotary, "x", "of shape [batch, heads, positions, head_dim]", describe(x.sizes()));
  }
  check_minimum_dim(kRotary, "cos", cos, 2);
  args.angle_dtype = check_weight_dtype(kRotary, "cos", cos, args.dtype);
  check_same_dtype(kRotary, "sin", sin, cos);
  args.rotary_dim = cos.size(-1);
  args.head_dim = x.size(3);
  if (args.rotary_dim % 2 != 0 || args.rotary_dim > args.head_dim) {
    fail(kRotary, "cos", "with an even last dimension of at most " + std::to_string(args.head_dim),
         describe(cos.sizes()));
  }
  Tensor x_copy, cos_copy, sin_copy;
  const auto dense = [](const Tensor& tensor, Tensor& copy) -> const Tensor& {
    if (tensor.size(-1) <= 1 || tensor.stride(-1) == 1) return tensor;
    contiguous_data(tensor, copy);
    return copy;
  };
  const Tensor& rows = dense(x, x_copy);
  const Tensor& cosines = dense(cos, cos_copy);
  const Tensor& sines = dense(sin, sin_copy);
  describe_angles("cos", cosines, x, args.rotary_dim, args.cos_strides);
  describe_angles("sin", sines, x, args.rotary_dim, args.sin_strides);
  Tensor out = empty(x.sizes(), x.dtype_code());
  args.x = rows.data();
  args.cos = cosines.data();
  args.sin = sines.data();
  args.out = out.mutable_data();
  args.heads = x.size(1);
  args.positions = x.size(2);
  for (int i = 0; i < 3; ++i) args.x_strides[i] = rows.stride(i);
  args.heads_innermost = rows.stride(1) < rows.stride(2);
  args.interleaved = interleaved;
  const std::int64_t row_bytes = args.head_dim * size_of(args.dtype);
  const std::int64_t count = args.head_dim == 0 ? 0 : x.size(0) * x.size(1) * x.size(2);
  args.stream = should_stream(count * row_bytes);
  run(rotary_embedding_copies, args, count, 3 * row_bytes);
  return out;
}

OXY_OP(rotary_embedding, "(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor",
       rotary_embedding)

}  // namespace oxytorch
