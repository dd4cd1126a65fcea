// Blocks of neighbouring results of square kernels: of one line of the result or of two, which
// share lines of the image, times some columns, whose sums stay in registers.
#pragma once

#include "ops/depthwise_convolution/finish.h"

namespace oxytorch::OXY_LEVEL {

// Columns of a block.
inline constexpr int kResults = kVectorBytes == 64 ? 7 : 3;
static_assert(kResults <= kBlockColumns);
// Lines of the result that a block may have.
inline constexpr int kBlockLines = kVectorBytes == 64 ? 2 : 1;
inline constexpr int kMostSquare = 7;

// A line of an image, or null where the kernel is outside.
template <class T>
struct ImageLine {
  const T* x;
  std::int64_t step;  // elements from a column to the next
};

// What blocks of some channels, one vector of them, have in common.
template <class T>
struct Block {
  ImageLine<T> lines[kMostSquare + kBlockLines - 1];
  const float* weights;        // of float32
  std::int64_t weight_stride;  // from a position of the kernel to the next
  const u32v* pairs;           // of bfloat16, see write_pairs
  Results<T> to;               // of the first line
  std::int64_t line_stride;    // from a line of the result to the next
  std::int64_t other_line_stride;
  std::int64_t padding, size;  // columns
  bool is_clamped;             // the epilogue leaves numbers between these as they are
  float least, most;
};

// How lines of an image meet those of a kernel: one after the other, in float32.
template <class T, int kernel>
struct SingleLines {
  using Element = T;
  static constexpr int kKernel = kernel;
  static constexpr int kPairs = 0;  // vectors of weights in an order of their own

  static constexpr int count(int lines) { return kernel + lines - 1; }
  // Whether a line of the result takes a source.
  static constexpr bool takes(int source, int line) {
    return source >= line && source - line < kernel;
  }
  OXY_INLINE bool is_outside(const Block<T>& block, int source) {
    return block.lines[source].x == nullptr;
  }
  OXY_INLINE f32v weight(const Block<T>& block, int source, int line, int column) {
    return load(block.weights + ((source - line) * kernel + column) * block.weight_stride);
  }

  // Columns of a source, one after the other.
  struct Reader {
    const T* x;
    std::int64_t step;

    OXY_MEMBER Reader(const Block<T>& block, int source, std::int64_t first)
        : x(block.lines[source].x + first * block.lines[source].step),
          step(block.lines[source].step) {}
    OXY_MEMBER f32v read() const { return load(x); }
    OXY_MEMBER void advance() { x += step; }
  };
  OXY_INLINE f32v multiply(f32v sum, f32v v, f32v weight) { return sum + v * weight; }
};

#if OXY_HAS_FAST_BF16_DOT
// In pairs: the first one alone, then two by two. Of two lines of the result the first one takes
// all but the last source, which is a line alone, and the second one all but the first: so no line
// of an image meets a weight in whose place there is none, for it may hold NaN.
template <int kernel>
struct PairsOfLines {
  using Element = bf16;
  static constexpr int kKernel = kernel;
  static constexpr int kSources = 1 + kernel / 2;
  static constexpr int kPairs = 2 * kSources * kernel;

  static constexpr int count(int lines) { return kSources + lines - 1; }
  static constexpr bool takes(int source, int line) {
    return source >= line && source - line < kSources;
  }
  static constexpr bool is_pair(int source) { return source > 0 && source < kSources; }
  static constexpr int first_line(int source) { return source == 0 ? 0 : 2 * source - 1; }

  OXY_INLINE bool is_outside(const Block<bf16>& block, int source) {
    const int line = first_line(source);
    return block.lines[line].x == nullptr &&
           (!is_pair(source) || block.lines[line + 1].x == nullptr);
  }
  OXY_INLINE f32v weight(const Block<bf16>& block, int source, int line, int column) {
    return reinterpret_cast<f32v>(block.pairs[(line * kSources + source - line) * kernel + column]);
  }

  struct Reader {
    alignas(32) static constexpr bf16 kZeros[kLanes] = {};
    const bf16 *x, *below;
    std::int64_t step, step_below;
    bool pairs;

    OXY_MEMBER Reader(const Block<bf16>& block, int source, std::int64_t first)
        : pairs(is_pair(source)) {
      place(block.lines[first_line(source)], first, x, step);
      if (pairs) place(block.lines[first_line(source) + 1], first, below, step_below);
    }
    OXY_INLINE void place(const ImageLine<bf16>& line, std::int64_t first, const bf16*& to,
                          std::int64_t& apart) {
      apart = line.x ? line.step : 0;
      to = line.x ? line.x + first * line.step : kZeros;
    }
    OXY_MEMBER f32v read() const {
      const __m256i low = load_as_bytes(x);
      if (!pairs) return reinterpret_cast<f32v>(_mm512_cvtepu16_epi32(low));
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), load_as_bytes(below), 1);
      return reinterpret_cast<f32v>(_mm512_permutexvar_epi16(interleaved(), both));
    }
    OXY_INLINE __m256i load_as_bytes(const bf16* from) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }
    OXY_INLINE __m512i interleaved() {
      return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                              22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    }
    OXY_MEMBER void advance() {
      x += step;
      if (pairs) below += step_below;
    }
  };
  OXY_INLINE f32v multiply(f32v sum, f32v v, f32v weight) {
    return reinterpret_cast<f32v>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                   reinterpret_cast<__m512bh>(v),
                                                   reinterpret_cast<__m512bh>(weight)));
  }
};

// The weights of a vector of channels in the order of the sources of both lines of the result.
// Returns whether they are finite numbers of bfloat16: others would not stay what they are, or make
// NaN of the zeros outside of images.
static bool write_pairs(const float* weights, std::int64_t stride, int kernel, u32v* pairs) {
  u32v wrong{};
  const auto bits = [&](int line, int column) {
    const u32v found = bits_of(load(weights + (line * kernel + column) * stride));
    wrong |= found & 0xffff;
    wrong |= (found & 0x7f800000) == 0x7f800000 ? u32v{} + 1 : u32v{};
    return found;
  };
  const int sources = 1 + kernel / 2;
  for (int column = 0; column < kernel; ++column) {
    u32v* first = pairs + column;
    u32v* second = first + sources * kernel;
    first[0] = bits(0, column) >> 16;
    second[(sources - 1) * kernel] = bits(kernel - 1, column) >> 16;
    for (int pair = 1; pair < sources; ++pair) {
      first[pair * kernel] = bits(2 * pair - 1, column) >> 16 | bits(2 * pair, column);
      second[(pair - 1) * kernel] = bits(2 * pair - 2, column) >> 16 | bits(2 * pair - 1, column);
    }
  }
  for (int i = 0; i < kLanes; ++i) {
    if (wrong[i]) return false;
  }
  return true;
}
#endif

// Where the activation is none of the usual ones, or something is added.
template <class T>
__attribute__((noinline)) static void finish_block_of_sums(const Results<T>& to, std::int64_t at,
                                                           const float* sums) {
  for (int r = 0; r < kResults; ++r) finish(to, at + r, load(sums + r * kLanes), Whole{});
}

// Adds what sources from `source` on give to sums of columns that begin with `first` in the image.
template <class From, int stride, int lines, int source = 0>
OXY_INLINE void add_sources(const Block<typename From::Element>& block, std::int64_t first,
                            f32v (&sums)[lines][kResults]) {
  constexpr int kernel = From::kKernel;
  constexpr int kColumns = (kResults - 1) * stride + kernel;
  if (!From::is_outside(block, source)) {
    f32v weights[lines][kernel];
#pragma GCC unroll 2
    for (int line = 0; line < lines; ++line) {
#pragma GCC unroll 8
      for (int j = 0; j < kernel; ++j) {
        if (From::takes(source, line)) weights[line][j] = From::weight(block, source, line, j);
      }
    }
    typename From::Reader reader(block, source, first);
    const std::int64_t end = block.size - first;
#pragma GCC unroll 32
    for (int column = 0; column < kColumns; ++column) {
      const bool is_there = (column >= kernel / 2 || first + column >= 0) &&
                            (column < kColumns - kernel / 2 || column < end);
      if (is_there) {
        const f32v v = reader.read();
#pragma GCC unroll 2
        for (int line = 0; line < lines; ++line) {
#pragma GCC unroll 8
          for (int r = 0; r < kResults; ++r) {
            const int j = column - r * stride;
            if (j >= 0 && j < kernel && From::takes(source, line)) {
              sums[line][r] = From::multiply(sums[line][r], v, weights[line][j]);
            }
          }
        }
      }
      reader.advance();
    }
  }
  if constexpr (source + 1 < From::count(lines)) {
    add_sources<From, stride, lines, source + 1>(block, first, sums);
  }
}

// `kResults` neighbours from `at` on, of `lines` lines of the result. At most kernel / 2 columns on
// either side are outside of the image.
template <class From, int stride, int lines>
static void convolve_block(const Block<typename From::Element>& block, std::int64_t at) {
  using T = typename From::Element;
  f32v sums[lines][kResults];
#pragma GCC unroll 16
  for (int i = 0; i < lines * kResults; ++i) sums[i / kResults][i % kResults] = block.to.bias;
  add_sources<From, stride, lines>(block, at * stride - block.padding, sums);
  Results<T> to = block.to;
#pragma GCC unroll 2
  for (int line = 0; line < lines; ++line) {
    if (block.is_clamped) {
      T* out = to.out + at * to.out_stride;
#pragma GCC unroll 8
      for (int r = 0; r < kResults; ++r, out += to.out_stride) {
        store(out, minimum(splat(block.most), maximum(splat(block.least), sums[line][r])));
      }
    } else {
      float spilled[kResults * kLanes];
#pragma GCC unroll 8
      for (int r = 0; r < kResults; ++r) store(spilled + r * kLanes, sums[line][r]);
      finish_block_of_sums(to, at, spilled);
    }
    to.out += block.line_stride;
    if (to.other) to.other += block.other_line_stride;
  }
}

// All columns; the last block may repeat some of the one before.
template <class From, int stride, int lines>
static void convolve_lines(const Block<typename From::Element>& block, std::int64_t columns) {
  std::int64_t at = 0;
  for (; at + kResults <= columns; at += kResults) {
    convolve_block<From, stride, lines>(block, at);
  }
  if (at < columns) convolve_block<From, stride, lines>(block, columns - kResults);
}

template <class From>
OXY_INLINE void convolve_square(const Block<typename From::Element>& block, int stride,
                                bool is_two_lines, std::int64_t columns) {
  if (stride == 2) {
    convolve_lines<From, 2, 1>(block, columns);
  } else if (is_two_lines) {
    convolve_lines<From, 1, kBlockLines>(block, columns);
  } else {
    convolve_lines<From, 1, 1>(block, columns);
  }
}

}  // namespace oxytorch::OXY_LEVEL
