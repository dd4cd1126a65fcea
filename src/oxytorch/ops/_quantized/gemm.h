// Rows of bytes times a weight of bytes in panels.
#pragma once

#include "ops/_quantized/chunks.h"

namespace oxytorch::OXY_LEVEL {

static void multiply_item_of_bytes(ByteGemm& gemm, std::int64_t number, std::int32_t* sums) {
  const ByteGemmArgs& args = gemm.args;
  const std::int64_t groups = (args.weight.panel_count + kItemPanels - 1) / kItemPanels;
  ByteChunk item{number / groups * args.chunk_rows, args.chunk_rows, number % groups * kItemPanels,
                 kItemPanels};
  if (item.rows > args.x.count - item.row) item.rows = args.x.count - item.row;
  if (item.panels > args.weight.panel_count - item.panel) {
    item.panels = args.weight.panel_count - item.panel;
  }
  multiply_chunk_of_bytes(gemm, item, sums);
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
