// The tile registers of AMX.
#pragma once

#include "core/vec.h"

#if OXY_HAS_TILES

namespace oxytorch::OXY_LEVEL {

// Operand of ldtilecfg (Intel 64 Architectures Software Developer's Manual, volume 1, chapter 18):
// all registers as 16 rows of 64 bytes.
struct TileConfiguration {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The compiler does not know that tile instructions read memory: what was stored there has to be
// there before.
OXY_INLINE void finish_stores(const void* read) { __asm__ volatile("" : : "r"(read) : "memory"); }

// Registers 0 to 3 get sums, 4 and 5 left operands of 16 rows, 6 and 7 right ones; `units` of 4
// bytes along the sum. With 16 all registers are alike. They are this thread's until
// `release_tiles`.
OXY_INLINE void configure_tiles(std::int64_t units = 16) {
  alignas(64) TileConfiguration configuration;
  for (int i = 4; i < 6; ++i) configuration.row_bytes[i] = static_cast<std::uint16_t>(units * 4);
  for (int i = 6; i < 8; ++i) configuration.rows[i] = static_cast<std::uint8_t>(units);
  finish_stores(&configuration);
  _tile_loadconfig(&configuration);
}

OXY_INLINE void release_tiles() { _tile_release(); }

}  // namespace oxytorch::OXY_LEVEL

#endif
