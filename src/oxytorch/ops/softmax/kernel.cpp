#include "ops/softmax/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

// The exponentials of a row are kept here between the passes, if they fit.
inline constexpr std::int64_t kSoftmaxScratch = 8 << 10;

inline constexpr float kMinusInfinity = -__builtin_huge_valf();

static std::int64_t mask_offset(const SoftmaxArgs& args, std::int64_t row) {
  std::int64_t offset = 0;
  for (int i = args.row_dim - 1; i >= 0; --i) {
    offset += row % args.row_sizes[i] * args.mask_strides[i];
    row /= args.row_sizes[i];
  }
  return offset;
}

// Masks: what is added to the scaled row at element i.

struct NoMask {
  template <class Count>
  f32v apply(f32v v, std::int64_t, Count) const {
    return v;
  }
};

template <class M>
struct AdditiveMask {
  const M* values;
  bool scalar;

  template <class Count>
  f32v apply(f32v v, std::int64_t i, Count count) const {
    if (scalar) {
      M copies[kLanes];
      for (M& copy : copies) copy = *values;
      return v + load(copies);
    }
    return v + load(values + i, count);
  }
};

struct KeepMask {
  const std::uint8_t* values;
  bool scalar;

  f32v apply(f32v v, std::int64_t i, Whole) const { return apply(v, i, std::int64_t{kLanes}); }
  f32v apply(f32v v, std::int64_t i, std::int64_t count) const {
    std::uint8_t kept[kLanes] = {};
    for (std::int64_t k = 0; k < count; ++k) kept[k] = values[scalar ? 0 : i + k];
    typedef std::uint8_t u8v __attribute__((vector_size(kLanes)));
    u8v bytes;
    std::memcpy(&bytes, kept, sizeof bytes);
    return __builtin_convertvector(bytes, i32v) != 0 ? v : splat(kMinusInfinity);
  }
};

template <class T, class Mask>
static void softmax_row(const SoftmaxArgs& args, const T* x, T* out, Mask mask) {
  const std::int64_t width = args.width;
  const f32v scale = splat(args.scale);
  const auto score = [&](std::int64_t i, auto count) {
    const f32v v = mask.apply(load(x + i, count) * scale, i, count);
    return fill_tail(v, count, kMinusInfinity);
  };
  f32v largest = splat(kMinusInfinity);
  sweep(0, width, [&](std::int64_t i, auto count) { largest = maximum(score(i, count), largest); });
  const f32v top = splat(maximum(largest));

  alignas(64) float scratch[kSoftmaxScratch];
  const bool kept = width <= kSoftmaxScratch;
  f32v total[4] = {};
  sweep_in_chains(width, [&](std::int64_t i, auto count, int chain) {
    const f32v e = exponential(score(i, count) - top);
    if (kept) store(scratch + i, e, count);
    total[chain] += fill_tail(e, count, 0.0f);
  });
  const f32v inverse = splat(1.0f / sum(total));
  const auto result = [&](std::int64_t i, auto count) {
    return (kept ? load(scratch + i, count) : exponential(score(i, count) - top)) * inverse;
  };
  if (args.stream && width % kLanes == 0 && is_aligned(out, kLanes * sizeof(T))) {
    for (std::int64_t i = 0; i < width; i += kLanes) stream(out + i, result(i, Whole{}));
  } else {
    sweep(0, width, [&](std::int64_t i, auto count) { store(out + i, result(i, count), count); });
  }
}

template <class T>
static void softmax_rows(const SoftmaxArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* out = static_cast<T*>(args.out) + row * args.width;
    if (args.mask_kind == MaskKind::none) {
      softmax_row(args, x, out, NoMask{});
      continue;
    }
    const std::int64_t offset = mask_offset(args, row);
    const bool scalar = args.mask_is_scalar;
    if (args.mask_kind == MaskKind::keep) {
      const auto* values = static_cast<const std::uint8_t*>(args.mask) + offset;
      softmax_row(args, x, out, KeepMask{values, scalar});
    } else if (args.mask_dtype == DType::float32) {
      const auto* values = static_cast<const float*>(args.mask) + offset;
      softmax_row(args, x, out, AdditiveMask<float>{values, scalar});
    } else {
      const auto* values = static_cast<const T*>(args.mask) + offset;
      softmax_row(args, x, out, AdditiveMask<T>{values, scalar});
    }
  }
  if (args.stream) stream_end();
}

static void softmax(const SoftmaxArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto element) { softmax_rows<decltype(element)>(args, begin, end); });
}

}  // namespace oxytorch::OXY_LEVEL
