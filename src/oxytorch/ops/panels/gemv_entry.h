// The call of the kernels for few rows.
#pragma once

#include "core/check.h"
#include "core/parallel.h"
#include "ops/panels/kernel.h"

namespace oxytorch {

// Memory for the staged rows of the calling thread's products; it stays, a few hundred KiB at most
// for weights of usual width.
inline std::uint8_t* staging_memory(std::int64_t bytes) {
  constexpr std::int64_t kLine = 64;
  static thread_local std::vector<std::uint8_t> memory;
  if (static_cast<std::int64_t>(memory.size()) < bytes + kLine) memory.resize(bytes + kLine);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  return memory.data() + (-address & (kLine - 1));
}

// The most rows for which these kernels are faster than those for many rows, as measured. Tiles of
// AMX take as long for one row as for 16, so products of bfloat16 go there early.
inline std::int64_t most_gemv_rows(PanelFormat format, RowType type) {
  const bool has_codes = format == PanelFormat::int8 || format == PanelFormat::int4;
  const bool has_tiles = level_has(Capability::tiles);
  if (has_tiles && type != RowType::float32) return has_codes ? 8 : 2;
  return has_codes ? 12 : 8;
}

// Room for the factors of a staged row.
inline std::int64_t staged_blocks(std::int64_t groups, std::int64_t depth) {
  return groups + (depth + kStagedBlock - 1) / kStagedBlock;
}

// result = epilogue(x weight^T + bias) for at most kMostGemvRows rows of x, on torch's threads.
inline void run_gemv(const Rows& x, DType dtype, bool rounds_to_int8, const PanelsArgs& weight,
                     const PanelResultArgs& result) {
  const std::int64_t depth = (x.width + kPanelDepth - 1) / kPanelDepth * kPanelDepth;
  const std::int64_t blocks = staged_blocks(weight.groups, depth);
  const std::int64_t values = x.count * depth * 4;
  std::uint8_t* memory = staging_memory(values + x.count * blocks * 8);
  const GemvArgs args{
      .x = x.data,
      .x_stride = x.stride,
      .rows = x.count,
      .in_features = x.width,
      .depth = depth,
      .dtype = dtype,
      .rounds_to_int8 = rounds_to_int8,
      .staged =
          {
              .values = memory,
              .scales = reinterpret_cast<float*>(memory + values),
              .sums = reinterpret_cast<std::int32_t*>(memory + values + x.count * blocks * 4),
              .blocks = blocks,
          },
      .weight = weight,
      .result = result,
  };
  run(stage_gemv_copies, args, x.count, 1);
  const std::int64_t panels = is_gated(result.epilogue) ? 2 : 1;
  const std::int64_t scales = weight.groups * kPanelOutputs * 2;
  run(gemv_copies, args, weight.panel_count / panels,
      panels * (panel_bytes(weight.format, depth) + scales));
}

}  // namespace oxytorch
