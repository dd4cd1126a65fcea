// Some rows of bytes times some panels of a weight: what a thread does at a time.
#pragma once

#include "ops/_quantized/gemv.h"
#include "ops/_quantized/tiles.h"

namespace oxytorch::OXY_LEVEL {

// What a thread keeps from item to item.
struct ByteGemm {
  const ByteGemmArgs& args;
  FinishRows finish;
  ByteOutputs outputs[2];  // of an item, and of the one before, whose last block may wait
  int item = 0;
#if OXY_HAS_TILES
  WaitingBlock waiting;
#endif
};

static Finishing finishing_of(const ByteGemmArgs& args, const ByteChunk& chunk,
                              const ByteOutputs& outputs, std::int64_t offset) {
  const std::int64_t output = chunk.panel * kPanelOutputs;
  const std::int64_t left = args.weight.out_features - output;
  const std::int64_t most = chunk.panels * kPanelOutputs;
  return {
      .result = &args.result,
      .scales = outputs.scales + offset,
      .biases = outputs.biases + offset,
      .row_scales = args.x.scales,
      .sums = nullptr,
      .stride = kBlockOutputs,
      .row = chunk.row,
      .output = output,
      .outputs = left < most ? left : most,
      .fit = outputs.fit,
  };
}

// Panels of a block, as many as are given.
template <int panels = kBlockPanels>
OXY_INLINE void multiply_some_panels(const ByteGemm& gemm, const ByteChunk& chunk,
                                     const ByteOutputs& outputs, std::int64_t offset,
                                     const Finishing& finishing, std::int32_t* sums) {
  if (chunk.panels == panels || panels == 1) {
    return multiply_panels_of_bytes<panels>(gemm.args, chunk, outputs, offset, finishing,
                                            gemm.finish, sums);
  }
  if constexpr (panels > 1) {
    multiply_some_panels<panels - 1>(gemm, chunk, outputs, offset, finishing, sums);
  }
}

// In vector registers.
static void multiply_bytes(const ByteGemm& gemm, const ByteChunk& item, const ByteOutputs& outputs,
                           std::int32_t* sums) {
  const ByteGemmArgs& args = gemm.args;
  if (item.rows <= kGemvRows && !args.x.starts) {
    byte_gemv(args, item, outputs, sums);
    Finishing finishing = finishing_of(args, item, outputs, 0);
    if (finishing.row_scales) finishing.row_scales += item.row;
    finishing.sums = sums;
    finishing.stride = kItemOutputs;
    gemm.finish(finishing, 0, item.rows);
    return;
  }
  for (std::int64_t p = 0; p < item.panels;) {
    const std::int64_t left = item.panels - p, taken = left < kBlockPanels ? left : kBlockPanels;
    const ByteChunk chunk{item.row, item.rows, item.panel + p, taken};
    const std::int64_t offset = p * kPanelOutputs;
    Finishing finishing = finishing_of(args, chunk, outputs, offset);
    if (finishing.row_scales) finishing.row_scales += item.row;
    multiply_some_panels(gemm, chunk, outputs, offset, finishing, sums);
    p += taken;
  }
}

// At most kItemPanels panels.
static void multiply_chunk_of_bytes(ByteGemm& gemm, const ByteChunk& item, std::int32_t* sums) {
  const ByteGemmArgs& args = gemm.args;
  ByteOutputs& outputs = gemm.outputs[gemm.item];
  gemm.item ^= 1;
  read_outputs(args.weight, args.result, args.x.scale, args.x.zero_point, item.panel, item.panels,
               outputs, args.x.scales ? 0 : args.x.depth);
#if OXY_HAS_TILES
  if (args.x.in_tiles) {
    for (std::int64_t p = 0; p < item.panels; p += 2) {
      const std::int64_t left = item.panels - p, offset = p * kPanelOutputs;
      const ByteChunk chunk{item.row, item.rows, item.panel + p, left < 2 ? left : 2};
      multiply_pair_of_panels(args, chunk, outputs.starts + offset,
                              finishing_of(args, chunk, outputs, offset), gemm.waiting);
    }
    return;
  }
#endif
  multiply_bytes(gemm, item, outputs, sums);
}

}  // namespace oxytorch::OXY_LEVEL
