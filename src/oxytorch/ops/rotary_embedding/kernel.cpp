#include "ops/rotary_embedding/kernel.h"

#include "core/vec.h"
#include "ops/_rotary/rotate.h"

namespace oxytorch::OXY_LEVEL {

template <class T, class Angle>
static void rotary_rows(const RotaryEmbeddingArgs& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t rotary = args.rotary_dim;
  const std::int64_t half = rotary / 2;
  const std::int64_t inner_size = args.heads_innermost ? args.heads : args.positions;
  const std::int64_t outer_size = args.heads_innermost ? args.positions : args.heads;
  std::int64_t inner = begin % inner_size;
  std::int64_t outer = begin / inner_size % outer_size;
  std::int64_t batch = begin / inner_size / outer_size;
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t head = args.heads_innermost ? inner : outer;
    const std::int64_t position = args.heads_innermost ? outer : inner;
    const T* x = static_cast<const T*>(args.x) + batch * args.x_strides[0] +
                 head * args.x_strides[1] + position * args.x_strides[2];
    const Angle* cos = static_cast<const Angle*>(args.cos) + batch * args.cos_strides[0] +
                       position * args.cos_strides[1];
    const Angle* sin = static_cast<const Angle*>(args.sin) + batch * args.sin_strides[0] +
                       position * args.sin_strides[1];
    T* out = static_cast<T*>(args.out) +
             ((batch * args.heads + head) * args.positions + position) * args.head_dim;
    const auto put = [&](std::int64_t i, f32v v, auto count) { store(out + i, v, count); };
    const auto put_streaming = [&](std::int64_t i, f32v v, auto) { stream(out + i, v); };
    const bool streaming = args.stream && rotary == args.head_dim && half % kLanes == 0 &&
                           is_aligned(out, kLanes * sizeof(T));
    if (args.interleaved) {
      if (streaming) {
        rotate_neighbours(x, cos, sin, rotary, put_streaming);
      } else {
        rotate_neighbours(x, cos, sin, rotary, put);
      }
    } else if (streaming) {
      rotate_halves(x, cos, sin, half, put_streaming);
    } else {
      rotate_halves(x, cos, sin, half, put);
    }
    std::memcpy(out + rotary, x + rotary, (args.head_dim - rotary) * sizeof(T));
    if (++inner == inner_size) {
      inner = 0;
      if (++outer == outer_size) {
        outer = 0;
        ++batch;
      }
    }
  }
  if (args.stream) stream_end();
}

static void rotary_embedding(const RotaryEmbeddingArgs& args, std::int64_t begin,
                             std::int64_t end) {
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    if (args.angle_dtype == DType::float32) {
      rotary_rows<T, float>(args, begin, end);
    } else {
      rotary_rows<T, T>(args, begin, end);
    }
  });
}

}  // namespace oxytorch::OXY_LEVEL
