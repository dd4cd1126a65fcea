// Rows of bytes times a weight of bytes in panels.
#pragma once

#include "ops/_quantized/blocks.h"
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

// In vector registers.
static void multiply_bytes(ByteGemm& gemm, const ByteChunk& item, const ByteOutputs& outputs,
                           std::int32_t* sums) {
  const ByteGemmArgs& args = gemm.args;
  for (std::int64_t p = 0; p < item.panels;) {
    const std::int64_t left = item.panels - p, offset = p * kPanelOutputs;
    const std::int64_t most = left < kBlockPanels ? left : kBlockPanels;
    const ByteChunk chunk{item.row, item.rows, item.panel + p, panels_at_once(most)};
    Finishing finishing = finishing_of(args, chunk, outputs, offset);
    if (finishing.row_scales) finishing.row_scales += item.row;
    multiply_some_panels(args, chunk, outputs, offset, finishing, gemm.finish, sums);
    p += chunk.panels;
  }
}

static void multiply_item_of_bytes(ByteGemm& gemm, std::int64_t number, std::int32_t* sums) {
  const ByteGemmArgs& args = gemm.args;
  const std::int64_t groups = (args.weight.panel_count + kItemPanels - 1) / kItemPanels;
  ByteChunk item{number / groups * args.chunk_rows, args.chunk_rows, number % groups * kItemPanels,
                 kItemPanels};
  if (item.rows > args.x.count - item.row) item.rows = args.x.count - item.row;
  if (item.panels > args.weight.panel_count - item.panel) {
    item.panels = args.weight.panel_count - item.panel;
  }
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

static void byte_gemm(const ByteGemmArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) std::int32_t sums[kItemRows * kBlockOutputs];
  ByteGemm gemm{.args = args, .finish = finish_of(args.result)};
#if OXY_HAS_TILES
  gemm.waiting.finish = gemm.finish;
  if (args.x.in_tiles) configure_tiles();
#endif
  for (std::int64_t item = begin; item < end; ++item) multiply_item_of_bytes(gemm, item, sums);
#if OXY_HAS_TILES
  gemm.waiting.finish_all();
  if (args.x.in_tiles) release_tiles();
#endif
}

}  // namespace oxytorch::OXY_LEVEL
