#include "ops/optimizer_step/kernel.h"

#include "ops/optimizer_step/arithmetic.h"
#include "ops/optimizer_step/formats.h"

namespace oxytorch::OXY_LEVEL {

// A rule's loop over `count` elements from `offset` on; adds what a reduction sums to `sums`.
using Loop = void (*)(const Update& update, std::int64_t offset, std::int64_t count, double* sums);

// Which operands a loop reads and writes, as bits.
struct Traffic {
  unsigned reads;
  unsigned writes;
};

#include "oxytorch_rule_loops.h"

static bool is_codes(Format format) {
  return format == Format::signed_codes || format == Format::unsigned_codes;
}

// Processors without AVX2 take all formats but float32 by way of copies: five more tables of loops
// for them would take a quarter of the time of compiling oxytorch.
#if defined(__x86_64__) && !defined(__AVX2__)
inline constexpr bool kFusesFormats = false;
#else
inline constexpr bool kFusesFormats = true;
#endif

// The loops of the combinations of formats that are common; null for others.
static const Loop* fused_loops(const Update& update, Traffic traffic) {
  const Format parameter = update.operands[0].format;
  const Format gradient = update.operands[1].format;
  Format state = Format::float32;
  bool is_first = true;
  for (int i = 2; i < kMaxOperands; ++i) {
    if (!((traffic.reads | traffic.writes) >> i & 1)) continue;
    const Format own =
        is_codes(update.operands[i].format) ? Format::unsigned_codes : update.operands[i].format;
    if (!is_first && own != state) return nullptr;
    state = own;
    is_first = false;
  }
  using Float = Plain<float>;
  using Half = Plain<bf16>;
  using Floats = Same<Float>;
  using Stochastics = Same<Stochastic>;
  const bool is_float32 = parameter == Format::float32 && gradient == Format::float32;
  if (is_float32 && state == Format::float32) return Loops<Float, Float, Floats>::table;
  if constexpr (kFusesFormats) {
    if (is_float32) {
      if (state == Format::stochastic) return Loops<Float, Float, Stochastics>::table;
      if (state == Format::unsigned_codes) return Loops<Float, Float, BlockCodes>::table;
    }
    if (parameter == Format::split && gradient == Format::bfloat16) {
      if (state == Format::float32) return Loops<Split, Half, Floats>::table;
      if (state == Format::stochastic) return Loops<Split, Half, Stochastics>::table;
      if (state == Format::unsigned_codes) return Loops<Split, Half, BlockCodes>::table;
    }
  }
  return nullptr;
}

// Any other combination: by way of float32 in the first-level cache.
static void update_by_copies(const Update& update, int variant, Traffic traffic,
                             std::int64_t offset, std::int64_t count, double* sums) {
  alignas(64) float copies[kMaxOperands][kCodeBlock];
  Update copied = update;
  for (int i = 0; i < kMaxOperands; ++i) {
    if (!((traffic.reads | traffic.writes) >> i & 1)) continue;
    copied.operands[i] = {copies[i], nullptr, Format::float32, 0};
    if (traffic.reads >> i & 1) unpack(update.operands[i], offset, count, copies[i]);
  }
  using Float = Plain<float>;
  Loops<Float, Float, Same<Float>>::table[variant](copied, 0, count, sums);
  for (int i = 0; i < kMaxOperands; ++i) {
    if (traffic.writes >> i & 1) pack(update.operands[i], offset, count, copies[i]);
  }
}

static void update_block(const Update& update, std::int64_t offset, double* sums) {
  const std::int64_t end = offset + kBlock < update.count ? offset + kBlock : update.count;
  const int variant = sums ? update.reduction : update.variant;
  const Traffic traffic = kTraffic[variant];
  const Loop* loops = fused_loops(update, traffic);
  bool has_codes = false;
  for (int i = 2; i < kMaxOperands; ++i) {
    has_codes |= ((traffic.reads | traffic.writes) >> i & 1) && is_codes(update.operands[i].format);
  }
  // Norms of a split weight have the bits of a float32 one's: they are summed over as many
  // elements.
  const std::int64_t most = kFusesFormats && loops && !has_codes ? kBlock : kCodeBlock;
  for (std::int64_t i = offset; i < end; i += most) {
    const std::int64_t count = end - i < most ? end - i : most;
    if (loops) {
      loops[variant](update, i, count, sums);
    } else {
      update_by_copies(update, variant, traffic, i, count, sums);
    }
  }
}

// A reduction runs forwards and the update after it backwards, which begins with what the reduction
// left in the caches.
static void optimizer_step(const StepArgs& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t first = args.first_item;
  // The last update that starts at or before the first item.
  std::int64_t low = 0;
  std::int64_t high = args.update_count;
  const std::int64_t start = first + (args.backwards ? end - 1 : begin);
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (args.updates[middle].first_item <= start ? low : high) = middle;
  }
  const Update* update = args.updates + low;
  const Update* last = args.updates + args.update_count - 1;
  if (!args.backwards) {
    for (std::int64_t i = begin; i < end; ++i) {
      while (update < last && update[1].first_item <= first + i) ++update;
      double* sums = args.sums ? args.sums + kMaxSums * i : nullptr;
      update_block(*update, (first + i - update->first_item) * kBlock, sums);
    }
  } else {
    for (std::int64_t i = end - 1; i >= begin; --i) {
      while (update->first_item > first + i) --update;
      update_block(*update, (first + i - update->first_item) * kBlock, nullptr);
    }
  }
}

}  // namespace oxytorch::OXY_LEVEL
