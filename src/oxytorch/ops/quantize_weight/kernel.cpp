#include "ops/quantize_weight/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

// Numbers of __init__.py, which says why they are these.
inline constexpr float kLeastScale = 0x1p-100f;
inline constexpr float kSymmetricRanges[] = {7.2f / 8,  7.7f / 8,  8.3f / 8,  8.9f / 8,
                                             9.6f / 8,  10.4f / 8, 11.3f / 8, 12.5f / 8,
                                             14.0f / 8, 16.5f / 8, 20.0f / 8};
inline constexpr int kAsymmetricFractions = 11;

struct Range {
  float low;   // of the values and zero
  float high;  // of the values and zero
  bool is_finite;
};

template <class T>
static Range range_of(const T* x, std::int64_t size) {
  f32v low{}, high{}, differences{};
  sweep(0, size, [&](std::int64_t i, auto count) {
    const f32v v = load(x + i, count);
    low = minimum(low, v);
    high = maximum(high, v);
    differences += v - v;
  });
  return {-maximum(-low), maximum(high), sum(differences) == 0.0f};
}

struct Choice {
  float scale = 0.0f;
  float zero = 0.0f;
  float gain = -1.0f;
};

// Offers a scale and a zero point: keeps them, the scale improved by least squares, if no other had
// a smaller squared error.
template <class T>
static void offer(const QuantizeWeightArgs& args, const T* x, float scale, float zero,
                  Choice& best) {
  const bool is_zero = -kLeastScale < scale && scale < kLeastScale;
  const float inverse = 1.0f / (is_zero ? 1.0f : scale);
  const f32v least = splat(-zero), most = splat(args.last - zero);
  f32v products{}, squares{};
  sweep(0, args.group_size, [&](std::int64_t i, auto count) {
    const f32v v = load(x + i, count);
    const f32v q = minimum(maximum(nearest(v * inverse), least), most);
    products += v * q;
    squares += q * q;
  });
  const float wq = sum(products);
  const float qq = sum(squares) < 1.0f ? 1.0f : sum(squares);
  const float gain = wq * wq / qq;
  if (gain > best.gain) best = {wq / qq, zero, gain};
}

static float whole(float value, float most) {
  const float rounded = nearest(splat(value))[0];
  return rounded < 0.0f ? 0.0f : rounded > most ? most : rounded;
}

template <class T>
static Choice search(const QuantizeWeightArgs& args, const T* x, Range range) {
  Choice best;
  if (args.symmetric) {
    const float larger = -range.low >= range.high ? range.low : range.high;
    const float unit = larger / args.middle;
    for (const float length : kSymmetricRanges) offer(args, x, unit / -length, args.middle, best);
    return best;
  }
  for (int step = 0; step < kAsymmetricFractions; ++step) {
    const double fraction = 1.0 - 0.05 * step;
    const float scale = (range.high - range.low) * static_cast<float>(fraction / args.last);
    const float least = scale < kLeastScale ? kLeastScale : scale;
    const float zero = whole(-range.low * static_cast<float>(fraction) / least, args.last);
    offer(args, x, scale, zero, best);
  }
  return best;
}

// The scale as it is kept: not zero, and with 11 significant bits where there are groups.
static float kept(const QuantizeWeightArgs& args, float scale) {
  if (-kLeastScale < scale && scale < kLeastScale)
    scale = scale < 0.0f ? -kLeastScale : kLeastScale;
  if (args.group_size == args.width) return scale;
  std::uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

template <class T>
static Choice choose(const QuantizeWeightArgs& args, const T* x, Range range) {
  const float magnitude = -range.low > range.high ? -range.low : range.high;
  if (args.table || args.has_floats) return {kept(args, magnitude / args.largest), 0.0f};
  if (args.search) {
    const Choice best = search(args, x, range);
    return {kept(args, best.scale), best.zero};
  }
  if (args.symmetric) return {kept(args, magnitude / (args.middle - 1.0f)), args.middle};
  const float scale = kept(args, (range.high - range.low) / args.last);
  return {scale, whole(-range.low / scale, args.last)};
}

// Integers below 2^31.
OXY_INLINE u32v whole_of(f32v v) {
  return reinterpret_cast<u32v>(__builtin_convertvector(v, i32v));
}

OXY_INLINE u32v code_of(f32v v, float zero, float last) {
  return whole_of(minimum(maximum(nearest(v) + zero, f32v{}), splat(last)));
}

// Between neighbouring values of a table, up to that of the last code.
struct Bounds {
  float values[15];

  Bounds(const float* table, float last) {
    for (int i = 0; i < 15; ++i) {
      values[i] = i < last ? (table[i] + table[i + 1]) / 2 : __builtin_huge_valf();
    }
  }

  OXY_MEMBER u32v code_of(f32v v) const {
    f32v code{};
    for (const float bound : values) code += v > splat(bound) ? splat(1.0f) : f32v{};
    return whole_of(code);
  }
};

// The bits of the nearest E4M3 number, to even where two are as near, up to the largest one.
OXY_INLINE u32v float8_code_of(f32v v, float largest) {
  const u32v sign = bits_of(v) >> 24 & 0x80;
  const f32v size = minimum(magnitude(v), splat(largest));
  // Codes below 16 are multiples of 2^-9; the others have 3 bits of mantissa.
  const u32v bits = bits_of(size);
  const u32v normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  const u32v small = whole_of(nearest(size * 512.0f));
  return (size < 0x1p-6f ? small : normal) | sign;
}

template <class T>
static void quantize_group(const QuantizeWeightArgs& args, const T* x, std::int64_t group,
                           std::uint8_t* codes) {
  const Range range = range_of(x, args.group_size);
  const Choice choice = choose(args, x, range);
  const auto put_codes = [&](auto code_of) {
    sweep(0, args.group_size, [&](std::int64_t i, auto count) {
      const u32v code = code_of(load(x + i, count) / choice.scale);
      store_raw(codes + i, truncate_8_bits(code), count);
    });
  };
  if (args.table) {
    const Bounds bounds(args.table, args.last);
    put_codes([&](f32v v) { return bounds.code_of(v); });
  } else if (args.has_floats) {
    put_codes([&](f32v v) { return float8_code_of(v, args.largest); });
  } else {
    put_codes([&](f32v v) { return code_of(v, choice.zero, args.last); });
  }
  args.scales[group] = range.is_finite ? choice.scale : __builtin_nanf("");
  args.zero_points[group] = static_cast<std::uint8_t>(choice.zero);
}

template <class T>
static void quantize_row(const QuantizeWeightArgs& args, std::int64_t row) {
  const T* x = static_cast<const T*>(args.weight) + row * args.weight_stride;
  const std::int64_t groups = args.width / args.group_size;
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t start = group * args.group_size;
    quantize_group(args, x + start, row * groups + group, args.codes + row * args.width + start);
  }
}

static void quantize_weight(const QuantizeWeightArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto zero) {
    for (std::int64_t row = begin; row < end; ++row) quantize_row<decltype(zero)>(args, row);
  });
}

}  // namespace oxytorch::OXY_LEVEL
