#include "ops/_recurrent/kernel.h"

#include "core/functions.h"
#include "ops/_quantized/chunks.h"

namespace oxytorch::OXY_LEVEL {

// What the gates of some units are made of, in one row.
struct Units {
  const float* input;
  const float* products;

  OXY_MEMBER f32v input_of(int gate, std::int64_t i) const {
    return load(input + gate * kPanelOutputs + i);
  }
  OXY_MEMBER f32v product_of(int gate, std::int64_t i) const {
    return load(products + gate * kPanelOutputs + i);
  }
  OXY_MEMBER f32v sum_of(int gate, std::int64_t i) const {
    return input_of(gate, i) + product_of(gate, i);
  }
};

// The gates are input, forget, cell and output.
// Source: torch.nn.LSTM's documentation; Hochreiter and Schmidhuber, 1997; Gers et al., 2000.
struct LstmCell {
  static constexpr int kGates = 4;
  static constexpr bool kHasCell = true;

  template <class Count>
  static OXY_MEMBER f32v next(const Units& units, std::int64_t i, f32v, float* cell, Count count) {
    const f32v input = sigmoid(units.sum_of(0, i), float{});
    const f32v forget = sigmoid(units.sum_of(1, i), float{});
    const f32v candidate = hyperbolic_tangent(units.sum_of(2, i), float{});
    const f32v output = sigmoid(units.sum_of(3, i), float{});
    const f32v kept = forget * load(cell + i, count) + input * candidate;
    store(cell + i, kept, count);
    return output * hyperbolic_tangent(kept, float{});
  }
};

// The gates are reset, update and new.
// Source: torch.nn.GRU's documentation; Cho et al., 2014.
struct GruCell {
  static constexpr int kGates = 3;
  static constexpr bool kHasCell = false;

  template <class Count>
  static OXY_MEMBER f32v next(const Units& units, std::int64_t i, f32v state, float*, Count) {
    const f32v reset = sigmoid(units.sum_of(0, i), float{});
    const f32v update = sigmoid(units.sum_of(1, i), float{});
    const f32v fresh =
        hyperbolic_tangent(units.input_of(2, i) + reset * units.product_of(2, i), float{});
    return fresh + update * (state - fresh);
  }
};

// Some rows of one direction, and the units of one item.
struct RecurrentItem {
  const RecurrentDirection* direction;
  std::int64_t row, rows;
  std::int64_t unit;  // the first one
};

static RecurrentItem recurrent_item(const RecurrentStepArgs& args, std::int64_t number) {
  const RecurrentDirection* direction = args.directions;
  while (number >= items_of(args, direction->h.count)) {
    number -= items_of(args, direction->h.count);
    ++direction;
  }
  const std::int64_t groups = (args.hidden_size + kPanelOutputs - 1) / kPanelOutputs;
  const std::int64_t row = number / groups * args.chunk_rows, left = direction->h.count - row;
  return {direction, row, left < args.chunk_rows ? left : args.chunk_rows,
          number % groups * kPanelOutputs};
}

template <class Cell, class T>
static void finish_units(const RecurrentStepArgs& args, const RecurrentItem& item) {
  // A copy, because what is stored below could otherwise be the direction.
  const RecurrentDirection direction = *item.direction;
  const std::int64_t left = args.hidden_size - item.unit;
  const std::int64_t units = left < kPanelOutputs ? left : kPanelOutputs;
  const std::int64_t hidden = args.hidden_size, stride = args.outputs, apart = args.out_stride;
  for (std::int64_t row = item.row; row < item.row + item.rows; ++row) {
    const std::int64_t first = row * stride + item.unit * Cell::kGates;
    const Units given{direction.input + first, direction.products + first};
    const std::int64_t at = row * hidden + item.unit;
    float* state = direction.state + at;
    float* cell = Cell::kHasCell ? direction.cell + at : nullptr;
    T* out = static_cast<T*>(direction.out) + row * apart + item.unit;
    sweep(0, units, [&](std::int64_t i, auto count) {
      const f32v next = Cell::next(given, i, load(state + i, count), cell, count);
      store(state + i, next, count);
      store(out + i, next, count);
    });
  }
}

template <class Cell, class T>
static void finish_items(const RecurrentStepArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t number = begin; number < end; ++number) {
    finish_units<Cell, T>(args, recurrent_item(args, number));
  }
}

// The products of items [begin, end) of one direction.
template <int gates>
static void multiply_items(const RecurrentStepArgs& args, const RecurrentDirection& direction,
                           std::int64_t begin, std::int64_t end, std::int32_t* sums) {
  const ByteGemmArgs product{
      .x = direction.h,
      .weight = direction.weight,
      .result = plain_products(direction.products, direction.hidden_bias, args.outputs),
      .chunk_rows = args.chunk_rows,
  };
  ByteGemm gemm{.args = product, .finish = &finish_byte_rows<PanelEpilogue::none, float, float>};
#if OXY_HAS_TILES
  gemm.waiting.finish = gemm.finish;
  if (direction.h.in_tiles) configure_tiles();
#endif
  for (std::int64_t number = begin; number < end; ++number) {
    const RecurrentItem item = recurrent_item(args, number);
    multiply_chunk_of_bytes(gemm, {item.row, item.rows, item.unit / kPanelOutputs * gates, gates},
                            sums);
  }
#if OXY_HAS_TILES
  gemm.waiting.finish_all();
  if (direction.h.in_tiles) release_tiles();
#endif
}

template <class Cell>
static void recurrent_step(const RecurrentStepArgs& args, std::int64_t begin, std::int64_t end) {
  static_assert(Cell::kGates <= kItemPanels);
  alignas(64) std::int32_t sums[kItemRows * kBlockOutputs];
  std::int64_t first = 0;
  for (std::int64_t d = 0; d < args.direction_count; ++d) {
    const RecurrentDirection& direction = args.directions[d];
    const std::int64_t last = first + items_of(args, direction.h.count);
    const std::int64_t from = begin > first ? begin : first, to = end < last ? end : last;
    if (from < to) multiply_items<Cell::kGates>(args, direction, from, to, sums);
    first = last;
  }
  switch (args.number) {
    case Number::bfloat16:
      return finish_items<Cell, bf16>(args, begin, end);
    case Number::float16:
      return finish_items<Cell, f16>(args, begin, end);
    default:
      return finish_items<Cell, float>(args, begin, end);
  }
}

static void lstm_step(const RecurrentStepArgs& args, std::int64_t begin, std::int64_t end) {
  recurrent_step<LstmCell>(args, begin, end);
}

static void gru_step(const RecurrentStepArgs& args, std::int64_t begin, std::int64_t end) {
  recurrent_step<GruCell>(args, begin, end);
}

}  // namespace oxytorch::OXY_LEVEL
