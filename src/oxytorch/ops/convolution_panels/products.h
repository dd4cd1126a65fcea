// How a convolution is multiplied.
#pragma once

#include "core/levels.h"
#include "ops/panels/entry.h"
#include "ops/windows/args.h"

namespace oxytorch {

struct Convolution {
  WindowArgs windows;
  PanelsArgs weight;  // of the first group
  PanelResultArgs result;
  std::int64_t images;
  std::int64_t rows;  // results of a channel
  std::int64_t groups;

  // In memory and in panels. Those of bfloat16 hold pairs, which two positions do not share.
  std::int64_t channels() const {
    return weight.codec == PanelCodec::bf16 ? round_up(windows.channels, 2) : windows.channels;
  }
  std::int64_t in_features() const {
    std::int64_t product = channels();
    for (const WindowDim& dim : windows.dims) product *= dim.kernel;
    return product;
  }
};

// Times of an element in units of a multiplication, on one thread: written to a chunk's scratch,
// and read of a panel's output. Products take a multiple of `row_step` rows.
struct ChunkCosts {
  std::int64_t row_step;
  std::int64_t write;
  std::int64_t read;
};

inline constexpr ChunkCosts kTileCosts{.row_step = kTileHeight, .write = 64, .read = 64};
inline constexpr ChunkCosts kVectorCosts{.row_step = 6, .write = 4, .read = 8};

inline bool has_tiles(RowType type) {
  return type == RowType::bfloat16 && level_has(Capability::tiles);
}

inline const ChunkCosts& chunk_costs(RowType type) {
  return has_tiles(type) ? kTileCosts : kVectorCosts;
}

// A level without bfloat16 takes float32.
inline std::int64_t bytes_of_element(RowType type) { return has_tiles(type) ? 2 : 4; }

// Bytes of a chunk's scratch, which is to stay in the second cache.
inline constexpr std::int64_t kChunkBytes = 512 << 10;

// Rows of a chunk, whose sums are to stay in the nearest cache.
inline constexpr std::int64_t kChunkRows = 96;

// Computes a convolution whose threads read windows from the lines of images.
void multiply_lines(const Convolution& call, RowType type, std::int64_t threads);

}  // namespace oxytorch
