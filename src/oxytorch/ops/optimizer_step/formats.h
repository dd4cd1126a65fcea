// How operands are kept in memory. Each format is a class that a rule's loop reads and writes
// through: get(i, rest), put(i, value, rest), and finish(count) after the last. Element i lies at
// `offset` + i of the tensor; kScratch floats of scratch keep what is put until `finish`. Results
// are the same bits at every level.
#pragma once

#include "core/vec.h"
#include "ops/optimizer_step/kernel.h"

namespace oxytorch::OXY_LEVEL {

template <class T>
class Plain {
 public:
  static constexpr std::int64_t kScratch = 1;

  Plain(const Operand& operand, std::int64_t offset, float*)
      : data_(static_cast<T*>(operand.data) + offset), ahead_(operand.ahead) {}

  template <class Rest>
  OXY_MEMBER f32v get(std::int64_t i, Rest rest) const {
    __builtin_prefetch(data_ + i + ahead_);
    return load(data_ + i, rest);
  }
  template <class Rest>
  OXY_MEMBER void put(std::int64_t i, f32v value, Rest rest) {
    store(data_ + i, value, rest);
  }
  void finish(std::int64_t) {}

 protected:
  T* data_;
  std::int64_t ahead_;
};

// The nearest bfloat16 of a float32 in one tensor; in another what is added to its bits, as signed
// integers.
class Split {
 public:
  static constexpr std::int64_t kScratch = 1;

  Split(const Operand& operand, std::int64_t offset, float*)
      : upper_(static_cast<std::uint16_t*>(operand.data) + offset),
        low_(static_cast<std::uint16_t*>(operand.extra) + offset),
        ahead_(operand.ahead) {}

  template <class Rest>
  OXY_MEMBER f32v get(std::int64_t i, Rest rest) const {
    __builtin_prefetch(upper_ + i + ahead_);
    __builtin_prefetch(low_ + i + ahead_);
    const u32v upper = zero_extend(load_raw<u16v>(upper_ + i, rest));
    const u32v low = zero_extend(load_raw<u16v>(low_ + i, rest));
    return from_bits((upper << 16) + ((low ^ 0x8000) - 0x8000));
  }
  template <class Rest>
  OXY_MEMBER void put(std::int64_t i, f32v value, Rest rest) {
    const u32v bits = bits_of(value);
    // A NaN stays one whatever its lower bits are.
    const u32v nearest = value == value ? bits + 0x8000 : bits | 0x400000;
    store_raw(upper_ + i, truncate(nearest >> 16), rest);
    store_raw(low_ + i, truncate(bits & 0xffff), rest);
  }
  void finish(std::int64_t) {}

 private:
  std::uint16_t* upper_;
  std::uint16_t* low_;
  std::int64_t ahead_;
};

// Numbers for elements from `index` on that are spread evenly over 32 bits: a Weyl sequence. Its
// start is drawn again for every tensor and step, so that what an element gets is random.
OXY_INLINE u32v noise(std::int64_t index, std::uint32_t key) {
  constexpr std::uint32_t kStep = 0x9e3779b9u;  // 2^32 divided by the golden ratio
  return lane_numbers() * kStep + (static_cast<std::uint32_t>(index) * kStep + key);
}

// bfloat16, rounded up or down at random so that the mean is right.
class Stochastic : public Plain<bf16> {
 public:
  Stochastic(const Operand& operand, std::int64_t offset, float* scratch)
      : Plain(operand, offset, scratch), offset_(offset), key_(operand.key) {}

  template <class Rest>
  OXY_MEMBER void put(std::int64_t i, f32v value, Rest rest) {
    const u32v bits = bits_of(value);
    const u32v noisy = bits + (noise(offset_ + i, key_) >> 16);
    const u32v result = value == value ? noisy : bits | 0x400000;
    store_raw(reinterpret_cast<std::uint16_t*>(data_) + i, truncate(result >> 16), rest);
  }

 private:
  std::int64_t offset_;
  std::uint32_t key_;
};

// Codes of 8 bits: the upper bits of a float32 less those of a bound that kCodeBlock elements
// share, the value of the last code. Signed: a sign, 4 bits of exponent and 3 of mantissa, and 0 is
// zero; unsigned: 4 and 4, and the first code stands for everything below, since these values stand
// in denominators. Rounded up or down at random so that the mean is right. `offset` is a multiple
// of kCodeBlock, and at most that many elements are put.
template <bool has_sign>
class Codes {
 public:
  static constexpr std::int64_t kScratch = kCodeBlock;

  Codes(const Operand& operand, std::int64_t offset, float* scratch)
      : codes_(static_cast<std::uint8_t*>(operand.data) + offset),
        bound_(static_cast<std::uint32_t*>(operand.extra) + offset / kCodeBlock),
        values_(scratch),
        offset_(offset),
        ahead_(operand.ahead),
        key_(operand.key),
        zero_((*bound_ >> kShift) - kLast) {}

  template <class Rest>
  OXY_MEMBER f32v get(std::int64_t i, Rest rest) const {
    __builtin_prefetch(codes_ + i + ahead_);
    const u32v code = zero_extend(load_raw<u8v>(codes_ + i, rest));
    if constexpr (!has_sign) return from_bits((code + zero_) << kShift);
    const u32v magnitude = code & kLast;
    const u32v bits = (magnitude + zero_) << kShift;
    return from_bits((magnitude != 0 ? bits : u32v{}) | (code & 128) << 24);
  }
  template <class Rest>
  OXY_MEMBER void put(std::int64_t i, f32v value, Rest rest) {
    store(values_ + i, fill_tail(value, rest, 0.0f));
  }
  void finish(std::int64_t count) {
    const float* values = values_;
    const std::int64_t offset = offset_;
    const std::uint32_t key = key_;
    std::uint8_t* codes = codes_;
    u32v largest{};
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const u32v bits = bits_of(load(values + i)) & 0x7fffffff;
      largest = largest > bits ? largest : bits;
    }
    constexpr std::uint32_t kRoundUp = (1u << kShift) - 1;
    // The bits of a NaN may be so large that rounded up they are those of -0.
    constexpr std::uint32_t kLargest = 0x7fc00000;
    const std::uint32_t most = maximum(largest);
    const std::uint32_t bound = ((most < kLargest ? most : kLargest) + kRoundUp) & ~kRoundUp;
    *bound_ = bound;
    const auto zero = static_cast<std::int32_t>((bound >> kShift) - kLast);
    sweep(0, count, [&](std::int64_t i, auto rest) {
      const u32v value = bits_of(load(values + i));
      // Of values that are never negative a NaN may have the sign.
      const u32v magnitude = value & 0x7fffffff;
      const u32v noisy = magnitude + (noise(offset + i, key) >> (32 - kShift));
      const i32v code = clamp(reinterpret_cast<i32v>(noisy >> kShift) - zero, kFirst, kLast);
      u32v result = reinterpret_cast<u32v>(code);
      if constexpr (has_sign) result |= value >> 31 << 7;
      store_raw(codes + i, truncate_8_bits(result), rest);
    });
  }

 private:
  static constexpr int kShift = has_sign ? 20 : 19;
  static constexpr int kFirst = has_sign ? 0 : 1;
  static constexpr int kLast = has_sign ? 127 : 255;

  std::uint8_t* codes_;
  std::uint32_t* bound_;
  float* values_;
  std::int64_t offset_;
  std::int64_t ahead_;
  std::uint32_t key_;
  std::uint32_t zero_;  // the upper bits that code 0 would stand for
};

// The formats of states, of which some are never negative.
template <class T>
struct Same {
  using Signed = T;
  using Unsigned = T;
};

struct BlockCodes {
  using Signed = Codes<true>;
  using Unsigned = Codes<false>;
};

// Calls body(Same<Class>{}) with the class of a format.
template <class Body>
OXY_INLINE void with_format(Format format, Body body) {
  switch (format) {
    case Format::float32:
      return body(Same<Plain<float>>{});
    case Format::bfloat16:
      return body(Same<Plain<bf16>>{});
    case Format::float16:
      return body(Same<Plain<f16>>{});
    case Format::stochastic:
      return body(Same<Stochastic>{});
    case Format::split:
      return body(Same<Split>{});
    case Format::signed_codes:
      return body(Same<Codes<true>>{});
    case Format::unsigned_codes:
      return body(Same<Codes<false>>{});
    case Format::factored:
      return;
  }
}

// The rows of a factored operand that `count` elements from `offset` on lie in.
static void multiply_factors(const Operand& operand, std::int64_t offset, std::int64_t count,
                             float* out) {
  std::int64_t row = offset / operand.width;
  std::int64_t column = offset % operand.width;
  while (count > 0) {
    const std::int64_t left = operand.width - column;
    const std::int64_t length = left < count ? left : count;
    const float* columns =
        static_cast<const float*>(operand.data) + row / operand.height * operand.width + column;
    const f32v factor = splat(static_cast<const float*>(operand.extra)[row]);
    sweep(0, length, [&](std::int64_t i, auto rest) {
      store(out + i, factor * load(columns + i, rest), rest);
    });
    out += length;
    count -= length;
    column = 0;
    ++row;
  }
}

// Copies `count` elements of an operand to float32.
static void unpack(const Operand& operand, std::int64_t offset, std::int64_t count, float* out) {
  if (operand.format == Format::factored) {
    multiply_factors(operand, offset, count, out);
    return;
  }
  with_format(operand.format, [&](auto tag) {
    const typename decltype(tag)::Signed source(operand, offset, nullptr);
    sweep(0, count, [&](std::int64_t i, auto rest) { store(out + i, source.get(i, rest), rest); });
  });
}

static void pack(const Operand& operand, std::int64_t offset, std::int64_t count,
                 const float* values) {
  with_format(operand.format, [&](auto tag) {
    using Type = typename decltype(tag)::Signed;
    alignas(64) float scratch[Type::kScratch];
    Type target(operand, offset, scratch);
    sweep(0, count,
          [&](std::int64_t i, auto rest) { target.put(i, load(values + i, rest), rest); });
    target.finish(count);
  });
}

}  // namespace oxytorch::OXY_LEVEL
