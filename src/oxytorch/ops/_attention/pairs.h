// Whether a product of pairs of bfloat16 in vector registers is worth its instruction.
#pragma once

// Processors with AMX or FP16 have it, but take about six cycles for one (measured on a Xeon with
// both), so that float32 is faster there.
#if defined(__AVX512BF16__) && !defined(__AVX512FP16__) && !defined(__AMX_TILE__)
#define OXY_FAST_PAIRS 1
#endif
