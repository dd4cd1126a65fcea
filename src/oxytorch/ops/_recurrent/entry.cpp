#include "ops/_recurrent/entry.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "core/parallel.h"
#include "ops/_quantized/entry.h"
#include "ops/_quantized/kernel.h"
#include "ops/_recurrent/kernel.h"
#include "ops/panels/entry.h"
#include "ops/panels/split.h"

namespace oxytorch {

namespace {

// Products of the input that wait for their steps: they stay in a cache of the processor.
constexpr std::int64_t kInputBytes = 2 << 20;

struct Directions {
  bool forward, reverse;

  std::int64_t count() const { return forward + reverse; }
  // Whether direction number `d` goes through the steps backwards.
  bool goes_back(std::int64_t d) const { return reverse && d == count() - 1; }
};

Directions parse_direction(const char* op, const std::string& name) {
  if (name == "forward") return {true, false};
  if (name == "reverse") return {false, true};
  if (name == "both") return {true, true};
  fail(op, "direction", "'forward', 'reverse' or 'both'", quoted(name));
}

// Which rows of x belong to each step: `starts` has one element more.
struct Steps {
  std::vector<std::int64_t> starts{0};
  std::int64_t batch = 0;

  std::int64_t count() const { return static_cast<std::int64_t>(starts.size()) - 1; }
  std::int64_t rows() const { return starts.back(); }
  std::int64_t rows_of(std::int64_t step) const { return starts[step + 1] - starts[step]; }
};

Steps describe_steps(const RecurrentCall& call) {
  Steps steps;
  const Tensor& x = call.x;
  if (!call.batch_sizes) {
    if (x.dim() != 3) {
      fail(call.op, "x", "of shape [steps, batch, features]", describe(x.sizes()));
    }
    steps.batch = x.size(1);
    for (std::int64_t i = 0; i < x.size(0); ++i) steps.starts.push_back((i + 1) * steps.batch);
    return steps;
  }
  if (x.dim() != 2) {
    fail(call.op, "x", "of shape [rows, features] with batch_sizes", describe(x.sizes()));
  }
  for (std::int64_t size : *call.batch_sizes) {
    const bool is_first = steps.count() == 0;
    const std::int64_t most = is_first ? x.size(0) : steps.rows_of(steps.count() - 1);
    if (size < 1 || size > most) {
      fail(call.op, "batch_sizes", "of at least 1 that do not grow", std::to_string(size));
    }
    if (is_first) steps.batch = size;
    steps.starts.push_back(steps.rows() + size);
  }
  if (steps.rows() != x.size(0)) {
    fail(call.op, "batch_sizes", "with a sum of " + std::to_string(x.size(0)) + ", the rows of x",
         std::to_string(steps.rows()));
  }
  return steps;
}

// The weights of one direction of one layer. The biases' memory holds those of the input and
// of the hidden state, one behind the other, in the order of the outputs.
struct DirectionWeights {
  BytePanels input, hidden;
  Tensor biases;
  const float* bias;
  const float* hidden_bias;
  BytePanelCopies input_copies, hidden_copies;
};

const Tensor& tensor_of(const char* op, const char* name, const std::vector<Tensor>& tensors,
                        std::size_t number, std::size_t count) {
  if (tensors.size() != count) {
    fail(op, name, "with " + std::to_string(count) + " tensors, one for each direction of a layer",
         std::to_string(tensors.size()));
  }
  return tensors[number];
}

void copy_into(const Tensor& to, const Tensor& from) {
  StableIValue stack[3] = {0, 0, torch::stable::detail::from(false)};
  const Tensor* both[] = {&to, &from};
  for (int i = 0; i < 2; ++i) {
    AtenTensorHandle handle = nullptr;
    check_call(aoti_torch_new_tensor_handle(both[i]->handle(), &handle), "new_tensor_handle");
    stack[i] = reinterpret_cast<StableIValue>(handle);
  }
  call_operator("aten::copy_", "", stack);
  check_call(aoti_torch_delete_tensor_object(reinterpret_cast<AtenTensorHandle>(stack[0])),
             "delete_tensor_object");
}

// Adds a bias in torch's order to one in the order of the outputs.
void add_bias(const RecurrentCall& call, const char* name, const Tensor& bias, std::int64_t gates,
              float* to) {
  const std::int64_t hidden = call.hidden_size;
  check_vector(call.op, name, bias, gates * hidden);
  check_dtype(call.op, name, bias);
  check_cpu(call.op, name, bias);
  Tensor copy;
  if (bias.dtype_code() != aoti_torch_dtype_float32()) {
    copy = empty(bias.sizes(), aoti_torch_dtype_float32());
    copy_into(copy, bias);
  }
  const Tensor& wide = copy.handle() ? copy : bias;
  Tensor dense;
  const auto* from = static_cast<const float*>(contiguous_data(wide, dense));
  for (std::int64_t gate = 0; gate < gates; ++gate) {
    for (std::int64_t unit = 0; unit < hidden; ++unit) {
      const std::int64_t panel = unit / kPanelOutputs * gates + gate;
      to[panel * kPanelOutputs + unit % kPanelOutputs] += from[gate * hidden + unit];
    }
  }
}

std::int64_t gates_of(RecurrentCell cell) { return cell == RecurrentCell::lstm ? 4 : 3; }

// A GRU multiplies what the hidden state adds to a gate, its bias too.
void describe_biases(const RecurrentCall& call, std::size_t number, std::size_t count,
                     std::int64_t outputs, DirectionWeights& found) {
  const bool apart = call.cell == RecurrentCell::gru;
  found.biases = scratch((apart ? 2 : 1) * outputs * 4);
  auto* biases = static_cast<float*>(found.biases.mutable_data());
  std::memset(biases, 0, static_cast<std::size_t>(found.biases.numel()));
  found.bias = biases;
  found.hidden_bias = apart ? biases + outputs : nullptr;
  const auto add = [&](const char* name, const std::vector<Tensor>& tensors, float* to) {
    if (tensors.empty()) return;
    add_bias(call, name, tensor_of(call.op, name, tensors, number, count), gates_of(call.cell), to);
  };
  add("input_biases", call.weights.input_biases, biases);
  add("hidden_biases", call.weights.hidden_biases, apart ? biases + outputs : biases);
}

DirectionWeights describe_weights(const RecurrentCall& call, std::size_t number, std::size_t count,
                                  std::int64_t width, std::int64_t outputs) {
  const RecurrentWeights& given = call.weights;
  const auto of = [&](const char* name, const std::vector<Tensor>& tensors) -> const Tensor& {
    return tensor_of(call.op, name, tensors, number, count);
  };
  DirectionWeights found{};
  found.input = describe_byte_panels(
      call.op, of("input_panels", given.input_panels), of("input_scales", given.input_scales),
      of("input_sums", given.input_sums), width, outputs, found.input_copies,
      {"input_panels", "input_scales", "input_sums"});
  found.hidden = describe_byte_panels(
      call.op, of("hidden_panels", given.hidden_panels), of("hidden_scales", given.hidden_scales),
      of("hidden_sums", given.hidden_sums), call.hidden_size, outputs, found.hidden_copies,
      {"hidden_panels", "hidden_scales", "hidden_sums"});
  describe_biases(call, number, count, outputs, found);
  return found;
}

// What goes from step to step, in float32.
Tensor initial_state(const RecurrentCall& call, const char* name,
                     const std::optional<Tensor>& given, const Extents& sizes) {
  Tensor state = empty(sizes, aoti_torch_dtype_float32());
  if (!given) {
    std::memset(state.mutable_data(), 0, static_cast<std::size_t>(state.numel()) * 4);
    return state;
  }
  check_shape(call.op, name, *given, sizes);
  check_same_dtype(call.op, name, *given, call.x);
  check_cpu(call.op, name, *given);
  copy_into(state, *given);
  return state;
}

// What it is at last, in the dtype of x.
Tensor in_dtype_of(const RecurrentCall& call, Tensor state) {
  if (state.dtype_code() == call.x.dtype_code()) return state;
  Tensor converted = empty(state.sizes(), call.x.dtype_code());
  copy_into(converted, state);
  return converted;
}

float* floats_at(const Tensor& tensor, std::int64_t element) {
  return static_cast<float*>(tensor.mutable_data()) + element;
}

// One layer: its input's product for some steps at once, then these steps.
class Layer {
 public:
  Layer(const RecurrentCall& call, const Steps& steps, Directions directions,
        std::vector<DirectionWeights> weights, Number number, std::int64_t outputs)
      : call_(call),
        steps_(steps),
        directions_(directions),
        weights_(std::move(weights)),
        number_(number),
        outputs_(outputs) {
    for (std::int64_t d = 0; d < directions_.count(); ++d) {
      buffers_.push_back(
          {.input = Tensor(),
           .products = scratch(steps.batch * outputs * 4),
           .bytes = scratch(room_for(steps.batch) * round_up(call.hidden_size, kTileBytes) * 2),
           .scales = scratch(steps.batch * 4)});
    }
  }

  // x: rows of all steps. out: likewise, `number` in the given dtype.
  void run(const Rows& x, Number x_number, float* state, float* cell, void* out) {
    const std::int64_t hidden = call_.hidden_size, rows = steps_.batch;
    out_ = static_cast<std::uint8_t*>(out);
    for (std::int64_t d = 0; d < directions_.count(); ++d) {
      const std::int64_t at = d * rows * hidden;
      RecurrentDirection& direction = described_[d];
      direction.weight = weights_[d].hidden;
      direction.hidden_bias = weights_[d].hidden_bias;
      direction.products = floats_at(buffers_[d].products, 0);
      direction.state = state + at;
      direction.cell = cell ? cell + at : nullptr;
    }
    for (first_ = 0; first_ < steps_.count(); first_ = last_) {
      last_ = end_of_chunk(first_);
      multiply_input(x, x_number);
      run_steps();
    }
  }

 private:
  struct Buffers {
    Tensor input, products, bytes, scales;
  };

  // The rows of x of steps [first_, last_) of a direction.
  std::int64_t begin_row(std::int64_t d) const {
    return steps_.starts[directions_.goes_back(d) ? steps_.count() - last_ : first_];
  }
  std::int64_t end_row(std::int64_t d) const {
    return steps_.starts[directions_.goes_back(d) ? steps_.count() - first_ : last_];
  }

  std::int64_t end_of_chunk(std::int64_t first) const {
    // Where sequences end, later steps have fewer rows, and those backwards begin with these.
    const std::int64_t most = kInputBytes / 4 / outputs_ / std::max<std::int64_t>(steps_.batch, 1);
    return std::min(steps_.count(), first + std::max<std::int64_t>(most, 1));
  }

  void multiply_input(const Rows& x, Number x_number) {
    for (std::int64_t d = 0; d < directions_.count(); ++d) {
      const std::int64_t begin = begin_row(d), count = end_row(d) - begin;
      Buffers& own = buffers_[d];
      if (!own.input.handle() || own.input.numel() < count * outputs_ * 4) {
        own.input = scratch(count * outputs_ * 4);
      }
      const Rows rows{
          Tensor(), static_cast<const std::uint8_t*>(x.data) + begin * x.stride * size_of(x_number),
          count, x.width, x.stride};
      const ByteResult result = plain_products(floats_at(own.input, 0), weights_[d].bias, outputs_);
      multiply_rows_of_bytes(rows, {x_number, 1.0f, 0}, weights_[d].input, result);
    }
  }

  // All steps of the chunk in one parallel region.
  void run_steps() {
    const BytePanels& weight = weights_[0].hidden;
    const std::int64_t work =
        directions_.count() *
        work_of_products(steps_.batch, call_.hidden_size, weight.panel_count * weight.panel_bytes);
    const bool leads = !Team::of_this_thread();
    threads_ = threads_for(work, available_threads(), last_ - first_);
    const auto lead = [](void* data) {
      auto& layer = *static_cast<Layer*>(data);
      try {
        for (std::int64_t step = layer.first_; step < layer.last_; ++step) layer.run_step(step);
      } catch (...) {
        layer.error_ = std::current_exception();
      }
    };
    if (leads && threads_ > 1) {
      Team::gather(threads_, lead, this);
    } else {
      lead(this);
    }
    if (error_) std::rethrow_exception(error_);
  }

  void run_step(std::int64_t step) {
    const std::int64_t hidden = call_.hidden_size;
    const std::int64_t out_stride = directions_.count() * hidden;
    std::int64_t most = 0;
    for (std::int64_t d = 0; d < directions_.count(); ++d) {
      const std::int64_t at = directions_.goes_back(d) ? steps_.count() - 1 - step : step;
      const std::int64_t row = steps_.starts[at], rows = steps_.rows_of(at);
      RecurrentDirection& direction = described_[d];
      prepare(direction, buffers_[d], rows);
      direction.input = floats_at(buffers_[d].input, (row - begin_row(d)) * outputs_);
      direction.out = out_ + (row * out_stride + d * hidden) * size_of(number_);
      most = std::max(most, rows);
    }
    const std::int64_t groups = divide_up(hidden, kPanelOutputs) * directions_.count();
    const std::int64_t chunks =
        std::max(divide_up(most, kItemRows), std::min(divide_up(threads_, groups), most));
    RecurrentStepArgs args{
        .directions = described_,
        .direction_count = directions_.count(),
        .hidden_size = hidden,
        .outputs = outputs_,
        .out_stride = out_stride,
        .chunk_rows = std::min(kItemRows, round_up(divide_up(most, chunks), kTileHeight)),
        .number = number_};
    std::int64_t items = 0;
    for (std::int64_t d = 0; d < directions_.count(); ++d) {
      items += items_of(args, described_[d].h.count);
    }
    const auto& copies = call_.cell == RecurrentCell::lstm ? lstm_step_copies : gru_step_copies;
    run_in_pieces(copies, args, items, divide_up(items, threads_));
  }

  // The hidden state as bytes.
  void prepare(RecurrentDirection& direction, const Buffers& own, std::int64_t rows) {
    const std::int64_t hidden = call_.hidden_size;
    Preparing preparing =
        preparing_of({Tensor(), direction.state, rows, hidden, hidden}, {Number::float32, 1.0f, 0});
    preparing.use(static_cast<std::uint8_t*>(own.bytes.mutable_data()), floats_at(own.scales, 0));
    oxytorch::run(prepare_bytes_copies, preparing.args, rows, hidden * 4);
    direction.h = preparing.rows;
  }

  const RecurrentCall& call_;
  const Steps& steps_;
  const Directions directions_;
  const std::vector<DirectionWeights> weights_;
  const Number number_;  // of the result
  const std::int64_t outputs_;
  std::vector<Buffers> buffers_;
  RecurrentDirection described_[2] = {};
  std::uint8_t* out_ = nullptr;
  std::int64_t first_ = 0, last_ = 0;  // steps of a chunk
  std::int64_t threads_ = 1;
  std::exception_ptr error_;
};

// each: tensors of a layer.
void check_layers(const RecurrentCall& call, std::size_t count, std::size_t each) {
  if (count > 0 && count % each == 0) return;
  fail(call.op, "input_panels",
       "with " + std::string(each == 2 ? "two tensors" : "a tensor") + " for each layer",
       std::to_string(count));
}

}  // namespace

std::vector<Tensor> run_recurrent(const RecurrentCall& call) {
  const std::int64_t hidden = call.hidden_size;
  check_cpu(call.op, "x", call.x);
  check_dtype(call.op, "x", call.x);
  const Number number = check_number(call.op, "x", call.x);
  const Steps steps = describe_steps(call);
  const Directions directions = parse_direction(call.op, call.direction);
  const std::size_t count = call.weights.input_panels.size(),
                    each = static_cast<std::size_t>(directions.count());
  check_layers(call, count, each);
  if (hidden < 1) fail(call.op, "hidden_size", "of at least 1", std::to_string(hidden));
  const std::int64_t outputs = gates_of(call.cell) * round_up(hidden, kPanelOutputs);
  const std::int64_t state_sizes[] = {static_cast<std::int64_t>(count), steps.batch, hidden};
  Tensor state = initial_state(call, "h", call.h, {state_sizes, 3}), cell;
  if (call.c) cell = initial_state(call, "c", *call.c, {state_sizes, 3});
  const std::int64_t wide = directions.count() * hidden;
  Shape shape(call.x.sizes().begin(), call.x.sizes().end());
  shape.back() = wide;
  Tensor output =
      empty({shape.data(), static_cast<std::int64_t>(shape.size())}, call.x.dtype_code());
  Rows rows = rows_of(call.x);
  Number rows_number = number;
  Tensor between[2];  // what a layer takes, and what it gives to the next one
  for (std::size_t first = 0; first < count; first += each) {
    const bool is_last = first + each == count;
    const Number out_number = is_last ? number : Number::float32;
    std::vector<DirectionWeights> weights;
    const std::int64_t width = first == 0 ? call.x.size(-1) : wide;
    for (std::size_t d = 0; d < each; ++d) {
      weights.push_back(describe_weights(call, first + d, count, width, outputs));
    }
    if (steps.rows() == 0) continue;
    Layer layer(call, steps, directions, std::move(weights), out_number, outputs);
    Tensor& to = is_last ? output : (between[1] = scratch(steps.rows() * wide * 4));
    const std::int64_t at = static_cast<std::int64_t>(first) * steps.batch * hidden;
    layer.run(rows, rows_number, floats_at(state, at), call.c ? floats_at(cell, at) : nullptr,
              to.mutable_data());
    if (is_last) break;
    std::swap(between[0], between[1]);
    rows = {Tensor(), between[0].data(), steps.rows(), wide, wide};
    rows_number = Number::float32;
  }
  std::vector<Tensor> results;
  results.push_back(std::move(output));
  results.push_back(in_dtype_of(call, std::move(state)));
  if (call.c) results.push_back(in_dtype_of(call, std::move(cell)));
  return results;
}

}  // namespace oxytorch
