#include "ops/interaction/kernel.h"

#include "core/dot_unit.h"

namespace oxytorch::OXY_LEVEL {

// Dot products are computed in tiles of kTileRows x kTileColumns, as many as registers hold.
inline constexpr int kTileRows = OXY_HAS_VECTORS_512 ? 4 : 2;
inline constexpr int kTileColumns = 4;

#if defined(__AVX512F__)

// Four sums per argument, one in each 128-bit lane, still four numbers wide.
OXY_INLINE __m512 fold(const f32v v[4]) {
  const auto half = [](f32v a, f32v b) {
    const auto x = reinterpret_cast<__m512>(a);
    const auto y = reinterpret_cast<__m512>(b);
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  };
  const __m512 low = half(v[0], v[1]);
  const __m512 high = half(v[2], v[3]);
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                       _mm512_shuffle_f32x4(low, high, 0xdd));
}

// Writes the sums of the lanes of sums[row][column] to out[row * stride + column].
OXY_INLINE void store_sums(f32v sums[kTileRows][kTileColumns], float* out, std::int64_t stride) {
  // Folding over rows puts row r into lane r; the shuffles then add up within lanes.
  __m512 folded[4];
  for (int column = 0; column < 4; ++column) {
    const f32v rows[4] = {sums[0][column], sums[1][column], sums[2][column], sums[3][column]};
    folded[column] = fold(rows);
  }
  const __m512 left = _mm512_add_ps(_mm512_shuffle_ps(folded[0], folded[1], 0x44),
                                    _mm512_shuffle_ps(folded[0], folded[1], 0xee));
  const __m512 right = _mm512_add_ps(_mm512_shuffle_ps(folded[2], folded[3], 0x44),
                                     _mm512_shuffle_ps(folded[2], folded[3], 0xee));
  const __m512 all =
      _mm512_add_ps(_mm512_shuffle_ps(left, right, 0x88), _mm512_shuffle_ps(left, right, 0xdd));
  _mm_storeu_ps(out, _mm512_castps512_ps128(all));
  _mm_storeu_ps(out + stride, _mm512_extractf32x4_ps(all, 1));
  _mm_storeu_ps(out + 2 * stride, _mm512_extractf32x4_ps(all, 2));
  _mm_storeu_ps(out + 3 * stride, _mm512_extractf32x4_ps(all, 3));
}

#else

OXY_INLINE void store_sums(f32v sums[kTileRows][kTileColumns], float* out, std::int64_t stride) {
  for (int row = 0; row < kTileRows; ++row) {
    for (int column = 0; column < kTileColumns; ++column) {
      out[row * stride + column] = sum(sums[row][column]);
    }
  }
}

#endif

// One step of the dot products: elements [i, i + count) of each row.

template <class T>
struct Step {
  static constexpr std::int64_t length = kLanes;
  using Part = f32v;

  template <class Count>
  static Part read(const T* row, std::int64_t i, Count count) {
    return load(row + i, count);
  }
  static void add(f32v& total, Part a, Part b) { total += a * b; }
};

#if OXY_HAS_BF16_DOT

template <>
struct Step<bf16> {
  static constexpr std::int64_t length = 2 * kLanes;
  using Part = f32v;

  static Part read(const bf16* row, std::int64_t i, Whole) { return load_as<f32v>(row + i); }
  static Part read(const bf16* row, std::int64_t i, std::int64_t count) {
    return reinterpret_cast<f32v>(_mm512_maskz_loadu_epi16((1u << count) - 1, row + i));
  }
  static void add(f32v& total, Part a, Part b) { total = Bf16Pair::multiply(total, a, b); }
};

#endif

template <class T>
static void tile(const T* const* rows, const T* const* columns, std::int64_t dim, float* out,
                 std::int64_t stride) {
  f32v sums[kTileRows][kTileColumns] = {};
  const auto step = [&](std::int64_t i, auto count) {
    typename Step<T>::Part right[kTileColumns];
    for (int c = 0; c < kTileColumns; ++c) right[c] = Step<T>::read(columns[c], i, count);
    for (int r = 0; r < kTileRows; ++r) {
      const auto left = Step<T>::read(rows[r], i, count);
      for (int c = 0; c < kTileColumns; ++c) Step<T>::add(sums[r][c], left, right[c]);
    }
  };
  std::int64_t i = 0;
  for (; i + Step<T>::length <= dim; i += Step<T>::length) step(i, Whole{});
  if (i < dim) step(i, dim - i);
  store_sums(sums, out, stride);
}

template <class T>
static void samples(const InteractionArgs& args, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kMax = InteractionArgs::kMaxInputs;
  const std::int64_t count = args.input_count;
  const std::int64_t width = args.dim + count * (count - 1) / 2;
  const T* rows[kMax + kTileColumns];
  alignas(64) float products[kTileRows][kMax + kTileColumns];
  for (std::int64_t sample = begin; sample < end; ++sample) {
    for (std::int64_t i = 0; i < count; ++i) {
      rows[i] = static_cast<const T*>(args.inputs[i].data) + sample * args.inputs[i].stride;
    }
    // Tiles that reach beyond the last input multiply it once more; nobody reads those products.
    for (int i = 0; i < kTileColumns; ++i) rows[count + i] = rows[count - 1];
    // Asks for the next sample; its rows lie in as many places as there are inputs.
    for (std::int64_t i = 0; i < count; ++i) {
      const auto* next = reinterpret_cast<const char*>(rows[i] + args.inputs[i].stride);
      for (std::int64_t byte = 0; byte < args.dim * std::int64_t{sizeof(T)}; byte += 64) {
        __builtin_prefetch(next + byte, 0, 2);
      }
    }
    T* out = static_cast<T*>(args.out) + sample * width;
    std::memcpy(out, rows[0], args.dim * sizeof(T));
    T* next = out + args.dim;
    for (std::int64_t i = 0; i < count; i += kTileRows) {
      for (std::int64_t j = 0; j < i + kTileRows - 1; j += kTileColumns) {
        tile(rows + i, rows + j, args.dim, &products[0][j], kMax + kTileColumns);
      }
      for (std::int64_t r = i; r < i + kTileRows && r < count; ++r) {
        sweep(0, r,
              [&](std::int64_t j, auto n) { store(next + j, load(&products[r - i][j], n), n); });
        next += r;
      }
    }
  }
}

static void interaction(const InteractionArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto element) { samples<decltype(element)>(args, begin, end); });
}

}  // namespace oxytorch::OXY_LEVEL
