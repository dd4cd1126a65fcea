#include "ops/softmax/kernel.h"

#include <type_traits>

#include "core/functions.h"

namespace oxytorch::OXY_LEVEL {

// A row is kept in float32 between the sweeps, if it fits.
inline constexpr std::int64_t kKeptRow = 8 << 10;

// Rows asked for ahead of their use.
inline constexpr std::int64_t kAhead = 2;

static std::int64_t mask_offset(const SoftmaxArgs& args, std::int64_t row) {
  std::int64_t offset = 0;
  for (int i = args.row_dim - 1; i >= 0; --i) {
    offset += row % args.row_sizes[i] * args.mask_strides[i];
    row /= args.row_sizes[i];
  }
  return offset;
}

// Masks: what becomes of the scaled row at element i. Cheap masks are applied again in each sweep.

struct NoMask {
  static constexpr bool cheap = true;

  template <class Count>
  f32v apply(f32v v, std::int64_t, Count) const {
    return v;
  }
};

template <class M>
struct AdditiveMask {
  static constexpr bool cheap = false;
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
  static constexpr bool cheap = false;
  const std::uint8_t* values;
  bool scalar;

  static f32v select(const std::uint8_t* kept, f32v v) {
    typedef std::uint8_t u8v __attribute__((vector_size(kLanes)));
    u8v bytes;
    std::memcpy(&bytes, kept, sizeof bytes);
    return __builtin_convertvector(bytes, i32v) != 0 ? v : splat(kMinusInfinity);
  }
  f32v apply(f32v v, std::int64_t i, Whole) const {
    if (scalar) return *values ? v : splat(kMinusInfinity);
    return select(values + i, v);
  }
  f32v apply(f32v v, std::int64_t i, std::int64_t count) const {
    std::uint8_t kept[kLanes] = {};
    for (std::int64_t k = 0; k < count; ++k) kept[k] = values[scalar ? 0 : i + k];
    return select(kept, v);
  }
};

// exp(v) for v <= 0, as accurate as a result of type T needs. Not before, since the lowest number
// that hides a key is infinite in powers of two.
OXY_INLINE f32v exponential_of(f32v v, float) { return exponential(v); }

template <class T>
OXY_INLINE f32v exponential_of(f32v v, T) {
  return coarse_power_of_two(v * 1.44269504f);
}

// A row whose exponentials are known and whose results are still to be written.
template <class T>
struct Unwritten {
  const float* values;
  T* out;
  f32v factor;
};

template <class T, class Result>
OXY_INLINE void write_row(const SoftmaxArgs& args, T* out, const Result& result) {
  const std::int64_t width = args.width;
  if (args.stream && width % kLanes == 0 && is_aligned(out, kLanes * sizeof(T))) {
    for (std::int64_t i = 0; i < width; i += kLanes) stream(out + i, result(i, Whole{}));
  } else {
    sweep(0, width, [&](std::int64_t i, auto count) { store(out + i, result(i, count), count); });
  }
}

// Where `fits`, the row is kept in `row` between the sweeps. With `before`, results go past the
// caches: those of the row before while the exponentials of this one are computed, so that the
// memory is written to all the time; this row's own are left in `before`.
template <bool fits, bool defers, class T, class Mask>
static void one_row(const SoftmaxArgs& args, const T* x, T* out, Mask mask, float* row,
                    Unwritten<T>* before) {
  constexpr bool keeps_scores = fits && !Mask::cheap;
  const std::int64_t width = args.width;
  const f32v scale = splat(args.scale);
  const auto score = [&](std::int64_t i, auto count) {
    const f32v v = mask.apply(rounded_product(load(x + i, count) * scale), i, count);
    return fill_tail(v, count, kMinusInfinity);
  };

  f32v largest[4];
  for (f32v& v : largest) v = splat(kMinusInfinity);
  sweep_in_chains(width, [&](std::int64_t i, auto count, int chain) {
    const f32v v = score(i, count);
    if (keeps_scores) store(row + i, v, count);
    largest[chain] = maximum(v, largest[chain]);
  });
  const f32v top = splat(maximum(largest));

  f32v total[4] = {};
  const T* later = x + kAhead * args.x_stride;
  const auto exponentials = [&](auto writes) {
    sweep_in_chains(width, [&](std::int64_t i, auto count, int chain) {
      const f32v v = keeps_scores ? load(row + i, count) : score(i, count);
      const f32v e = exponential_of(v - top, T{});
      if (defers) __builtin_prefetch(later + i, 0, 2);
      if (fits) store(row + i, e, count);
      if (writes) stream(before->out + i, load(before->values + i) * before->factor);
      total[chain] += fill_tail(e, count, 0.0f);
    });
  };
  if (defers && before->out != nullptr) {
    exponentials(std::true_type{});
  } else {
    exponentials(std::false_type{});
  }
  const f32v factor = splat(1.0f / sum(total));
  if (defers) {
    *before = {row, out, factor};
    return;
  }
  const auto result = [&](std::int64_t i, auto count) {
    const f32v e = fits ? load(row + i, count) : exponential_of(score(i, count) - top, T{});
    return e * factor;
  };
  write_row(args, out, result);
}

template <class T>
static void softmax_rows(const SoftmaxArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) float kept[2][kKeptRow];
  Unwritten<T> before{kept[0], nullptr, {}};
  const bool fits = args.width <= kKeptRow;
  const bool defers =
      fits && args.stream && args.width % kLanes == 0 && is_aligned(args.out, kLanes * sizeof(T));
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* out = static_cast<T*>(args.out) + row * args.width;
    const auto masked = [&](auto mask) {
      float* buffer = kept[(row - begin) % 2];
      if (defers) {
        one_row<true, true>(args, x, out, mask, buffer, &before);
      } else if (fits) {
        one_row<true, false>(args, x, out, mask, buffer, &before);
      } else {
        one_row<false, false>(args, x, out, mask, buffer, &before);
      }
    };
    if (args.mask_kind == MaskKind::none) {
      masked(NoMask{});
      continue;
    }
    const std::int64_t offset = mask_offset(args, row);
    const bool scalar = args.mask_is_scalar;
    if (args.mask_kind == MaskKind::keep) {
      masked(KeepMask{static_cast<const std::uint8_t*>(args.mask) + offset, scalar});
    } else if (args.mask_dtype == DType::float32) {
      const auto* values = static_cast<const float*>(args.mask) + offset;
      masked(AdditiveMask<float>{values, scalar});
    } else {
      masked(AdditiveMask<T>{static_cast<const T*>(args.mask) + offset, scalar});
    }
  }
  if (before.out != nullptr) {
    for (std::int64_t i = 0; i < args.width; i += kLanes) {
      stream(before.out + i, load(before.values + i) * before.factor);
    }
  }
  if (args.stream) stream_end();
}

static void softmax(const SoftmaxArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto element) { softmax_rows<decltype(element)>(args, begin, end); });
}

}  // namespace oxytorch::OXY_LEVEL
