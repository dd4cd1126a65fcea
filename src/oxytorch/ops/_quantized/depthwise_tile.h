// Neighbouring results of a convolution of each channel for itself, summed in registers.
#pragma once

#include "ops/_quantized/finish.h"

namespace oxytorch::OXY_LEVEL {

// Results and vectors of channels that are summed at once, as many as registers allow.
inline constexpr int kTileResults = OXY_HAS_VECTORS_512 ? 6 : 4;
inline constexpr int kTileVectors = OXY_HAS_VECTORS_512 ? 4 : 2;

// Signed bytes that are multiplied with quads of unsigned ones.
#if OXY_HAS_INT8_DOT
struct QuadWeights {
  i32v bytes;

  OXY_MEMBER i32v multiply(i32v sum, u32v quads) const {
    return QuadOf<std::uint8_t>::multiply(sum, bytes, reinterpret_cast<i32v>(quads));
  }
};

OXY_INLINE QuadWeights quad_weights(const std::uint8_t* p) { return {load_as<i32v>(p)}; }
#else
struct QuadWeights {
  i32v even, odd;  // bytes of each lane, as integers of 16 bits

  OXY_MEMBER i32v multiply(i32v sum, u32v quads) const {
    sum = Int16Pair::multiply(sum, even, reinterpret_cast<i32v>(quads & 0x00ff00ff));
    return Int16Pair::multiply(sum, odd, reinterpret_cast<i32v>(quads >> 8 & 0x00ff00ff));
  }
};

OXY_INLINE QuadWeights quad_weights(const std::uint8_t* p) {
  typedef std::int16_t pairs __attribute__((vector_size(kVectorBytes)));
  const auto both = load_as<pairs>(p);
  return {reinterpret_cast<i32v>(both << 8 >> 8), reinterpret_cast<i32v>(both >> 8)};
}
#endif

// Neighbouring results of some channels.
struct DepthwiseTile {
  const std::uint8_t* quads;    // [columns, fours of lines, channels] of the first result
  std::int64_t quad_bytes;      // of the channels
  std::int64_t column_bytes;    // between columns that a kernel takes
  std::int64_t result_bytes;    // between the first columns of results
  const std::uint8_t* weights;  // [columns of the kernel, fours, channels]
  std::int64_t columns;
  std::int64_t fours;
  const std::int32_t* starts;
  std::int32_t* sums;  // those of results are kBlockChannels apart
};

template <int results, int vectors>
OXY_INLINE void sum_results(const DepthwiseTile& tile, i32v (&sums)[results][vectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    const i32v start = load_as<i32v>(tile.starts + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < results; ++r) sums[r][v] = start;
  }
  const std::uint8_t *weights = tile.weights, *quads = tile.quads;
  const std::uint8_t* const end = weights + tile.columns * tile.fours * tile.quad_bytes;
  const std::int64_t gap = tile.column_bytes - tile.fours * tile.quad_bytes;
  // One loop that always runs, because otherwise the compiler keeps sums in memory around it.
  std::int64_t left = tile.fours;
  do {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      const QuadWeights factors = quad_weights(weights + v * sizeof(i32v));
#pragma GCC unroll 8
      for (int r = 0; r < results; ++r) {
        const u32v given = load_as<u32v>(quads + r * tile.result_bytes + v * sizeof(u32v));
        sums[r][v] = factors.multiply(sums[r][v], given);
      }
    }
    weights += tile.quad_bytes, quads += tile.quad_bytes;
    if (--left == 0) quads += gap, left = tile.fours;
  } while (weights < end);
}

template <int results, int vectors>
__attribute__((noinline)) static void sum_tile(const DepthwiseTile& given) {
  // A copy, because what is stored below could otherwise be the tile.
  const DepthwiseTile tile = given;
  i32v sums[results][vectors];
  sum_results<results, vectors>(tile, sums);
#pragma GCC unroll 8
  for (int r = 0; r < results; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      std::memcpy(tile.sums + r * kBlockChannels + v * kLanes, &sums[r][v], sizeof(i32v));
    }
  }
}

template <int vectors, int results = kTileResults>
OXY_INLINE void sum_some_results(const DepthwiseTile& tile, std::int64_t given) {
  if constexpr (results > 0) {
    if (given == results) return sum_tile<results, vectors>(tile);
    sum_some_results<vectors, results - 1>(tile, given);
  }
}

// The sums of `results` neighbours and what becomes of them, in registers; job: of these rows.
using FinishTile = void (*)(const DepthwiseTile& tile, std::int64_t results, const Finishing& job);

#if OXY_HAS_VECTORS_512

template <class Out, int vectors, int results>
__attribute__((noinline)) static void sum_and_finish(const DepthwiseTile& given,
                                                     const Finishing& finishing) {
  const DepthwiseTile tile = given;
  const Finishing job = finishing;
  const ByteResult result = *finishing.result;
  i32v sums[results][vectors];
  sum_results<results, vectors>(tile, sums);
  const ByteVectors<PanelEpilogue::none, Out, float, vectors, true> finish(job, result, 0);
  constexpr int kTogether = 4 / vectors;
#pragma GCC unroll 8
  for (int r = 0; r < results; r += kTogether) {
    const int next = r + kTogether <= results ? 1 : 0;  // else the last row twice
    i32v some[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) some[i] = sums[r + i / vectors * next][i % vectors];
    finish.finish(some, r, next);
  }
}

template <class Out, int vectors, int results = kTileResults>
static void sum_and_finish_some(const DepthwiseTile& tile, std::int64_t given,
                                const Finishing& job) {
  if constexpr (results > 0) {
    if (given == results) return sum_and_finish<Out, vectors, results>(tile, job);
    sum_and_finish_some<Out, vectors, results - 1>(tile, given, job);
  }
}

#endif

// Null where it is not worth the code.
template <int vectors>
static FinishTile finish_tile_of([[maybe_unused]] const Finishing& job) {
#if OXY_HAS_VECTORS_512
  if constexpr (vectors > 1) {
    const bool fits = job.fit && job.outputs == vectors * kLanes;
    if (fits && job.result->epilogue == PanelEpilogue::none) {
      if (job.result->number == Number::uint8) return &sum_and_finish_some<std::uint8_t, vectors>;
      if (job.result->number == Number::int8) return &sum_and_finish_some<std::int8_t, vectors>;
    }
  }
#endif
  return nullptr;
}

}  // namespace oxytorch::OXY_LEVEL
