// The tile registers of AMX.
#pragma once

#include <cstdint>

#if defined(__AMX_TILE__)

#include <immintrin.h>

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
static inline __attribute__((always_inline)) void finish_stores(const void* read) {
  __asm__ volatile("" : : "r"(read) : "memory");
}

// The registers of this thread are in use until `release_tiles`.
static inline __attribute__((always_inline)) void configure_tiles() {
  alignas(64) TileConfiguration configuration;
  finish_stores(&configuration);
  _tile_loadconfig(&configuration);
}

static inline __attribute__((always_inline)) void release_tiles() { _tile_release(); }

}  // namespace oxytorch::OXY_LEVEL

#endif
