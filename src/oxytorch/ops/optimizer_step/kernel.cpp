#include "ops/optimizer_step/kernel.h"

#include "ops/optimizer_step/arithmetic.h"
#include "ops/optimizer_step/formats.h"

namespace oxytorch::OXY_LEVEL {

// A rule's loop over float32 operands; adds what a measure sums to `sums`.
using Loop = void (*)(float* const* operands, const float* scalars, float factor,
                      std::int64_t count, double* sums);

// Which operands a loop reads and writes, as bits.
struct Traffic {
  unsigned reads;
  unsigned writes;
};

#include "oxytorch_rule_loops.h"

// The rule reads and writes float32 operands where they are, and others in a block of float32 that
// stays in the first-level cache.
static void update_block(const Update& update, std::int64_t offset, double* sums) {
  alignas(64) float blocks[kMaxOperands][kBlock];
  float* operands[kMaxOperands];
  const std::int64_t rest = update.count - offset;
  const std::int64_t count = rest < kBlock ? rest : kBlock;
  const Traffic traffic = kTraffic[update.variant];
  for (int i = 0; i < kMaxOperands; ++i) {
    const Operand& operand = update.operands[i];
    if (!((traffic.reads | traffic.writes) >> i & 1)) continue;
    if (operand.format == Format::float32) {
      operands[i] = static_cast<float*>(operand.data) + offset;
      continue;
    }
    operands[i] = blocks[i];
    if (traffic.reads >> i & 1) unpack(operand, offset, count, blocks[i]);
  }
  kLoops[update.variant](operands, update.scalars, update.factor, count, sums);
  for (int i = 0; i < kMaxOperands; ++i) {
    if (traffic.writes >> i & 1) pack(update.operands[i], offset, count, operands[i]);
  }
}

static void optimizer_step(const StepArgs& args, std::int64_t begin, std::int64_t end) {
  // The last update that starts at or before `begin`.
  std::int64_t low = 0;
  std::int64_t high = args.update_count;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (args.updates[middle].first_item <= begin ? low : high) = middle;
  }
  const Update* update = args.updates + low;
  const Update* last = args.updates + args.update_count - 1;
  for (std::int64_t item = begin; item < end; ++item) {
    while (update < last && update[1].first_item <= item) ++update;
    double* sums = args.sums ? args.sums + kMaxSums * item : nullptr;
    update_block(*update, (item - update->first_item) * kBlock, sums);
  }
}

}  // namespace oxytorch::OXY_LEVEL
