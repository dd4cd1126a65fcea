#include "program/plan.h"

#include <algorithm>
#include <charconv>

#include "program/steps.h"

namespace oxytorch::runtime {

namespace {

constexpr std::int64_t kMostBytes = std::int64_t{1} << 46;

// Takes what stands before the next `mark` off a text.
std::string_view take_until(std::string_view& text, char mark) {
  const std::size_t end = std::min(text.find(mark), text.size());
  const std::string_view found = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return found;
}

std::int64_t number(std::string_view word, std::int64_t limit) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size() || std::abs(value) > limit) {
    refuse("expected a number in a formula of bytes, got " + std::string(word.substr(0, 50)));
  }
  return value;
}

InputSize size_of_input(std::string_view word, std::int32_t tensors, std::int32_t sizes) {
  const bool is_tensor = word.front() == '%';
  word.remove_prefix(1);
  const std::string_view name = take_until(word, is_tensor ? '.' : ' ');
  const std::int64_t input = number(name, 1 << 24);
  if (input < 0 || input >= (is_tensor ? tensors : sizes)) refuse("a formula names no input");
  const std::int64_t dim = is_tensor ? number(word, 63) : -1;
  if (is_tensor && dim < 0) refuse("a formula names no dimension");
  return {static_cast<std::int32_t>(input), static_cast<std::int32_t>(dim)};
}

// Computes formulas for the inputs of a call.
class Sizes {
 public:
  Sizes(const std::vector<TensorOwner>& tensors, const std::vector<std::int64_t>& sizes)
      : tensors_(tensors), sizes_(sizes) {}

  // Negative where there is no such number.
  std::int64_t value(const Formula& formula) {
    std::int64_t sum = 0;
    for (const Formula::Term& term : formula.terms) {
      std::int64_t product = term.factor;
      for (const InputSize& each : term.sizes) {
        const std::int64_t size = extent(each);
        if (size < 0 || __builtin_mul_overflow(product, size, &product)) return -1;
      }
      if (__builtin_add_overflow(sum, product, &sum)) return -1;
    }
    return sum;
  }

 private:
  std::int64_t extent(const InputSize& of) {
    if (of.dim < 0) return sizes_[of.input];
    if (of.input != last_) {
      check_call(aoti_torch_get_dim(tensors_[of.input].get(), &dim_), "get_dim");
      check_call(aoti_torch_get_sizes(tensors_[of.input].get(), &shape_), "get_sizes");
      last_ = of.input;
    }
    return of.dim < dim_ ? shape_[of.dim] : -1;
  }

  const std::vector<TensorOwner>& tensors_;
  const std::vector<std::int64_t>& sizes_;
  std::int32_t last_ = -1;  // the tensor that the next two are of
  std::int64_t dim_ = 0;
  std::int64_t* shape_ = nullptr;
};

}  // namespace

Formula read_formula(std::string_view word, std::int32_t tensors, std::int32_t sizes) {
  Formula formula;
  while (!word.empty()) {
    std::string_view product = take_until(word, '+');
    Formula::Term term;
    if (product.empty() || formula.terms.size() == 64) refuse("expected a formula of bytes");
    for (int count = 0; !product.empty(); ++count) {
      const std::string_view factor = take_until(product, '*');
      if (factor.empty() || count == 16) refuse("expected a factor in a formula of bytes");
      if (factor.front() == '%' || factor.front() == '$') {
        term.sizes.push_back(size_of_input(factor, tensors, sizes));
      } else if (__builtin_mul_overflow(term.factor, number(factor, kMostBytes), &term.factor)) {
        refuse("a number in a formula of bytes is too large");
      }
    }
    formula.terms.push_back(std::move(term));
  }
  return formula;
}

bool lay_out(const std::vector<Place>& places, std::int32_t buffers,
             const std::vector<TensorOwner>& tensors, const std::vector<std::int64_t>& sizes,
             std::vector<Arena::Spot>& spots, std::size_t& total) {
  std::vector<std::size_t> largest(buffers, 0), begins(buffers, 0);
  spots.assign(places.size(), {});
  Sizes given(tensors, sizes);
  for (std::size_t i = 0; i < places.size(); ++i) {
    const std::int64_t bytes = given.value(places[i].bytes);
    if (bytes < 0 || bytes > kMostBytes) return false;
    spots[i].bytes = static_cast<std::size_t>(bytes);
    std::size_t& size = largest[places[i].buffer];
    size = std::max(size, Arena::taken_for(spots[i].bytes));
  }
  total = 0;
  for (std::int32_t buffer = 0; buffer < buffers; ++buffer) {
    begins[buffer] = total;
    total += largest[buffer];
    if (total > static_cast<std::size_t>(kMostBytes)) return false;
  }
  for (std::size_t i = 0; i < places.size(); ++i) spots[i].begin = begins[places[i].buffer];
  return true;
}

}  // namespace oxytorch::runtime
