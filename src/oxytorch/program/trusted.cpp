// See trusted.h. Found by calls with altered arguments (tests/program/altered_calls.py).
#include "program/trusted.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace oxytorch::runtime {

namespace {

using Call = std::vector<Given>;

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("expected ") + what);
}

// The shape of the tensor in a place.
const Shape& shape(const Call& call, std::size_t place) {
  require(call.at(place).shapes.size() == 1, "a tensor");
  return call[place].shapes[0];
}

std::int64_t numel(const Shape& shape) {
  std::int64_t found = 1;
  for (std::int64_t size : shape) {
    require(!__builtin_mul_overflow(found, size, &found), "sizes of a tensor");
  }
  return found;
}

std::int64_t number(const Call& call, std::size_t place) {
  require(call.at(place).numbers.size() == 1, "a number");
  return torch::stable::detail::to<std::int64_t>(call[place].numbers[0]);
}

bool flag(const Call& call, std::size_t place) {
  require(call.at(place).numbers.size() == 1, "true or false");
  return torch::stable::detail::to<bool>(call[place].numbers[0]);
}

std::vector<std::int64_t> numbers(const Call& call, std::size_t place) {
  std::vector<std::int64_t> found;
  for (StableIValue each : call.at(place).numbers) {
    found.push_back(torch::stable::detail::to<std::int64_t>(each));
  }
  return found;
}

bool lies_in(std::int64_t value, std::int64_t first, std::int64_t end) {
  return value >= first && value < end;
}

// The values of a tensor of integers of one dimension.
std::vector<std::int64_t> values(const Call& call, std::size_t place) {
  const Shape& sizes = shape(call, place);
  require(sizes.size() == 1, "integers in one dimension");
  AtenTensorHandle tensor = call[place].tensors[0];
  std::int32_t dtype = 0;
  std::int64_t* strides = nullptr;
  void* data = nullptr;
  check_call(aoti_torch_get_dtype(tensor, &dtype), "get_dtype");
  check_call(aoti_torch_get_strides(tensor, &strides), "get_strides");
  check_call(aoti_torch_get_data_ptr(tensor, &data), "get_data_ptr");
  const bool is_long = dtype == aoti_torch_dtype_int64();
  require(is_long || dtype == aoti_torch_dtype_int32(), "integers of 32 or 64 bits");
  const auto* wide = static_cast<const std::int64_t*>(data);
  const auto* narrow = static_cast<const std::int32_t*>(data);
  std::vector<std::int64_t> found(sizes[0]);
  for (std::int64_t i = 0; i < sizes[0]; ++i) {
    found[i] = is_long ? wide[i * strides[0]] : narrow[i * strides[0]];
  }
  return found;
}

// input, state or states, weights, has_biases, num_layers, dropout, train, bidirectional, and
// batch_first. kGates: 4 of an LSTM, 3 of a GRU.
template <std::int64_t kGates>
void check_recurrent(const Call& call) {
  const Shape& input = shape(call, 0);
  const std::vector<Shape>&states = call.at(1).shapes, &weights = call.at(2).shapes;
  const bool has_bias = flag(call, 3);
  const std::int64_t layers = number(call, 4), ways = flag(call, 7) ? 2 : 1;
  require(input.size() == 3, "an input of 3 dimensions");
  require(states.size() == (kGates == 4 ? 2U : 1U), "a state, and cells of an LSTM");
  const auto count = static_cast<std::int64_t>(weights.size());
  require(layers >= 1 && layers <= count, "at least one layer");
  const std::int64_t parts = layers * ways, of_each = count / parts;
  const std::int64_t plain = has_bias ? 4 : 2;
  const bool projects = kGates == 4 && of_each == plain + 1;
  require(of_each * parts == count && (of_each == plain || projects),
          "2 weights of each layer and direction, and 2 biases");
  const std::int64_t batch = input[flag(call, 8) ? 0 : 1];
  for (const Shape& state : states) {
    require(state.size() == 3 && state[0] == parts && state[1] == batch && state[2] >= 1,
            "states of [layers * directions, batch, size]");
  }
  const std::int64_t hidden = states.back()[2], output = states.front()[2];
  require(projects || hidden == output, "states of one size");
  for (std::int64_t part = 0; part < parts; ++part) {
    const Shape* own = weights.data() + part * of_each;
    const std::int64_t width = part < ways ? input[2] : output * ways;
    require(own[0] == Shape{kGates * hidden, width}, "weights [gates * size, width]");
    require(own[1] == Shape{kGates * hidden, output}, "hidden weights [gates * size, size]");
    for (std::int64_t bias = 2; bias < plain; ++bias) {
      require(own[bias] == Shape{kGates * hidden}, "biases [gates * size]");
    }
    require(!projects || own[plain] == Shape{output, hidden}, "a projection [output, size]");
  }
}

// input, and tensors of its channels.
void check_batch_norm(const Call& call) {
  const Shape& input = shape(call, 0);
  require(input.size() >= 2, "an input of at least 2 dimensions");
  for (std::size_t place = 1; place < call.size(); ++place) {
    for (const Shape& own : call[place].shapes) {
      require(own == Shape{input[1]}, "weights and statistics of each channel");
    }
  }
}

// weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights,
// include_last_offset, and padding_idx where there is one.
void check_bags(const Call& call) {
  const Shape &table = shape(call, 0), &indices = shape(call, 1);
  require(table.size() == 2, "a weight of 2 dimensions");
  require(indices.size() == 1 && shape(call, 2).size() == 1, "indices and offsets of 1 dimension");
  require(lies_in(number(call, 4), 0, 3), "a mode of 0 to 2");
  for (const Shape& own : call.at(6).shapes) require(own == indices, "a weight of each index");
  const std::vector<std::int64_t> offsets = values(call, 2);
  require(!offsets.empty() || (indices[0] == 0 && !flag(call, 7)), "an offset");
  require(offsets.empty() || (offsets[0] == 0 && offsets.back() <= indices[0] &&
                              std::is_sorted(offsets.begin(), offsets.end())),
          "offsets that grow from 0 to the number of indices");
  if (call.size() > 8 && !call[8].numbers.empty()) {
    require(lies_in(number(call, 8), -table[0], table[0]), "a padding_idx that is a row");
  }
}

// self, dim, and normalization.
void check_fourier(const Call& call) {
  const auto rank = static_cast<std::int64_t>(shape(call, 0).size());
  std::vector<std::int64_t> dims = numbers(call, 1);
  std::sort(dims.begin(), dims.end());
  require(std::adjacent_find(dims.begin(), dims.end()) == dims.end() &&
              std::all_of(dims.begin(), dims.end(),
                          [&](std::int64_t dim) { return lies_in(dim, 0, rank); }),
          "dimensions of the input, each once");
  require(lies_in(number(call, 2), 0, 3), "a normalization of 0 to 2");
}

// The same, and the size of the last dimension.
void check_fourier_to_real(const Call& call) {
  check_fourier(call);
  const std::vector<std::int64_t> dims = numbers(call, 1);
  const std::int64_t size = number(call, 3);
  require(!dims.empty() && size >= 1, "a dimension, and its size");
  require(shape(call, 0)[dims.back()] == size / 2 + 1, "half as many frequencies as numbers");
}

// input, grid, interpolation_mode, padding_mode, and align_corners.
void check_grid(const Call& call) {
  require(lies_in(number(call, 2), 0, 3), "an interpolation_mode of 0 to 2");
  require(lies_in(number(call, 3), 0, 3), "a padding_mode of 0 to 2");
}

// self, output_size, align_corners, and scales, which are none or the ratio of the sizes.
void check_smooth_resampling(const Call& call) {
  const Shape& input = shape(call, 0);
  const std::vector<std::int64_t> sizes = numbers(call, 1);
  require(input.size() == 4 && sizes.size() == 2, "images, and 2 sizes");
  for (std::size_t i = 0; i < 2; ++i) {
    for (StableIValue given : call.at(3 + i).numbers) {
      const double scaled =
          static_cast<double>(input[2 + i]) * torch::stable::detail::to<double>(given);
      require(std::floor(scaled) == static_cast<double>(sizes[i]), "scales that give the sizes");
    }
  }
}

// v, g, and dim.
void check_weight_norm(const Call& call) {
  const Shape &v = shape(call, 0), &g = shape(call, 1);
  const std::int64_t dim = number(call, 2), last = static_cast<std::int64_t>(v.size()) - 1;
  require(last >= 0 && lies_in(dim, -1, last + 1), "a dimension of the weight");
  if (dim == 0 || dim == last) require(numel(g) == v[dim], "a norm of each row");
}

// self, and pad: before and after each dimension, from the last one.
void check_circular_pad(const Call& call) {
  const Shape& input = shape(call, 0);
  const std::vector<std::int64_t> pads = numbers(call, 1);
  require(pads.size() % 2 == 0 && pads.size() / 2 <= input.size(), "2 numbers for each dimension");
  for (std::size_t i = 0; i < pads.size(); ++i) {
    const std::int64_t size = input[input.size() - 1 - i / 2];
    require(lies_in(pads[i], -size, size + 1), "pads that are no larger than the input");
    require(i % 2 == 0 || size + pads[i - 1] + pads[i] >= 0, "pads that leave something");
  }
}

// repeats, and output_size: their sum.
void check_repeats(const Call& call) {
  if (call.at(1).numbers.empty()) return;
  std::int64_t sum = 0;
  for (std::int64_t each : values(call, 0)) {
    require(lies_in(each, 0, std::int64_t{1} << 40), "repeats that are not negative");
    sum += each;
  }
  require(sum == number(call, 1), "an output_size that is the sum of the repeats");
}

// self, size, and stride.
void check_alias(const Call& call) {
  const Shape& from = shape(call, 0);
  const std::vector<std::int64_t> sizes = numbers(call, 1), strides = numbers(call, 2);
  std::int64_t* own = nullptr;
  check_call(aoti_torch_get_strides(call[0].tensors[0], &own), "get_strides");
  const auto reach = [](const auto& lengths, const auto& steps, std::size_t count) {
    double last = 0;
    for (std::size_t i = 0; i < count; ++i) {
      require(lengths[i] >= 0 && steps[i] >= 0, "sizes and strides that are not negative");
      last += static_cast<double>(lengths[i] - 1) * static_cast<double>(steps[i]);
    }
    return last;
  };
  require(sizes.size() == strides.size() && numel(sizes) == numel(from), "as many elements");
  require(numel(from) == 0 || reach(sizes, strides, sizes.size()) <= reach(from, own, from.size()),
          "elements of the tensor");
}

void check_not_empty(const Call& call) {
  require(numel(shape(call, 0)) > 0, "an input that is not empty");
}

struct Named {
  std::string_view target;
  TrustedCheck check;
};

constexpr Named kChecks[] = {
    {"aten::lstm.input", check_recurrent<4>},
    {"aten::gru.input", check_recurrent<3>},
    {"aten::rnn_tanh.input", check_recurrent<1>},
    {"aten::rnn_relu.input", check_recurrent<1>},
    {"aten::native_batch_norm", check_batch_norm},
    {"aten::_native_batch_norm_legit", check_batch_norm},
    {"aten::_native_batch_norm_legit.no_stats", check_batch_norm},
    {"aten::_native_batch_norm_legit_no_training", check_batch_norm},
    {"aten::embedding_bag", check_bags},
    {"aten::embedding_bag.padding_idx", check_bags},
    {"aten::_embedding_bag", check_bags},
    {"aten::_embedding_bag_forward_only", check_bags},
    {"aten::_fft_r2c", check_fourier},
    {"aten::_fft_c2c", check_fourier},
    {"aten::_fft_c2r", check_fourier_to_real},
    {"aten::grid_sampler", check_grid},
    {"aten::grid_sampler_2d", check_grid},
    {"aten::grid_sampler_3d", check_grid},
    {"aten::_upsample_bilinear2d_aa", check_smooth_resampling},
    {"aten::_upsample_bicubic2d_aa", check_smooth_resampling},
    {"aten::_weight_norm", check_weight_norm},
    {"aten::_weight_norm_interface", check_weight_norm},
    {"aten::_pad_circular", check_circular_pad},
    {"aten::repeat_interleave.Tensor", check_repeats},
    {"aten::_reshape_alias", check_alias},
    {"aten::binary_cross_entropy", check_not_empty},
};

}  // namespace

TrustedCheck trusted_check(std::string_view target) {
  for (const Named& each : kChecks) {
    if (each.target == target) return each.check;
  }
  return nullptr;
}

}  // namespace oxytorch::runtime
