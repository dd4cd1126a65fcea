#include <algorithm>

#include "core/parallel.h"
#include "ops/_quantized/entry.h"
#include "ops/_quantized/kernel.h"
#include "ops/panels/entry.h"
#include "ops/panels/split.h"

namespace oxytorch {

namespace {

// Quads of what neighbouring results read stay in the first cache.
constexpr std::int64_t kQuadsBytes = 16 << 10;
// Lines of a part from which on parts are lines: what made x had its threads make lines too.
constexpr std::int64_t kLinesOfPart = 7;
// Results that are summed at once, a multiple of those of every level.
constexpr std::int64_t kResults = 12;

// Neighbouring results of a line for whose windows quads are written at once.
std::int64_t results_of(const WindowDim& dim, std::int64_t column_bytes) {
  const std::int64_t reach = (dim.kernel - 1) * dim.dilation;
  const std::int64_t fit = (kQuadsBytes / column_bytes - reach) / dim.stride / kResults * kResults;
  const std::int64_t most = std::clamp(fit, kResults, kMostResults);
  const std::int64_t even = divide_up(dim.out_size, divide_up(dim.out_size, most));
  return std::min(round_up(even, kResults), dim.out_size);
}

// Lines of the result for which the same lines of the image are read, four or a multiple of them.
std::int64_t shared_lines_of(const WindowDim* dims, std::int64_t fours) {
  const bool are_neighbours = dims[0].kernel == 1 && dims[1].stride == 1 && dims[1].dilation == 1;
  return are_neighbours ? std::min(4 * fours - dims[1].kernel + 1, dims[1].out_size) : 1;
}

}  // namespace

void convolve_channels_of_bytes(const ByteChannels& call, const ByteOperand& operand) {
  const WindowDim& last = call.windows.dims[kWindowDims - 1];
  const std::int64_t fours = call.in_features / last.kernel / 4;
  const std::int64_t column_bytes = fours * 4 * kBlockChannels;
  const std::int64_t results = results_of(last, column_bytes);
  const std::int64_t columns = (results - 1) * last.stride + (last.kernel - 1) * last.dilation + 1;
  const std::int64_t lines = call.rows / last.out_size;
  const std::int64_t shared = shared_lines_of(call.windows.dims, fours);
  const std::int64_t weight_bytes = shared * last.kernel * column_bytes;
  // A result costs about as long as memory takes for two bytes where a kernel has 3 x 3.
  const std::int64_t work = call.rows * call.weight.out_features * (3 + fours * last.kernel) / 3;
  const std::int64_t threads = threads_for(work);
  ByteDepthwiseArgs args{
      .windows = {call.windows, operand.number, operand.zero_point},
      .scale = operand.scale,
      .weight = call.weight,
      .result = call.result,
      .lines = lines,
      .shared_lines = shared,
      .results = results,
      .scratch = nullptr,
      .scratch_bytes = weight_bytes + columns * column_bytes,
      .weight_bytes = weight_bytes,
      .parts = std::min(threads, lines * call.weight.panel_count),
      .by_lines = threads > 1 && lines >= kLinesOfPart * threads,
  };
  const Tensor memory = scratch_of_parts(args.parts, args.scratch_bytes, args.scratch);
  run_in_pieces(byte_depthwise_copies, args, args.parts, 1);
}

}  // namespace oxytorch
