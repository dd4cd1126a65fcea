// Runs a program: a list of operator calls over numbered values, without Python between them.
//
// A program comes as text, one step a line (program.py describes it), is checked and translated
// once (op `load_program`), and then runs for any sizes (op `run_program`). Operators of torch are
// called by name through the stable ABI.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <string_view>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include "core/team.h"
#include "core/torch_api.h"

namespace oxytorch {

namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::runtime_error("oxytorch program: " + what);
}

// Owns a reference to a tensor, whose metadata nobody asks for.
class Value {
 public:
  Value() = default;
  explicit Value(AtenTensorHandle handle) : handle_(handle) {}
  Value(Value&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Value& operator=(Value&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;
  ~Value() { clear(); }

  void clear() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
    handle_ = nullptr;
  }
  AtenTensorHandle get() const { return handle_; }
  // Another reference to the same tensor.
  AtenTensorHandle share() const {
    AtenTensorHandle copy = nullptr;
    check_call(aoti_torch_new_tensor_handle(handle_, &copy), "new_tensor_handle");
    return copy;
  }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// An argument as it is written: a constant, a value or a size, or a list or optional of these.
struct Argument {
  enum Kind { kConstant, kTensor, kSize, kText, kNone, kSome, kList };
  Kind kind = kNone;
  StableIValue constant = 0;
  std::int32_t slot = 0;
  std::string text;
  std::vector<Argument> items;
};

enum class Kind { kOperator, kAdd, kSize, kArithmetic, kRequire };

// How a step works while this thread leads a team: with the team, on this thread alone as ever, or
// as torch's operators, which split no work then.
enum class Threads { kTeam, kOne, kTorchs };

struct Step {
  Kind kind = Kind::kOperator;
  std::string name, overload;
  std::vector<Argument> arguments;
  std::vector<std::int32_t> results;  // slots; -1 for none
  bool returns_list = false;
  char arithmetic = 0;
  Threads threads = Threads::kOne;
  bool gathers = false;  // another step for the team follows, and none of torch's before it
  std::vector<std::int32_t> dead;  // slots of tensors that no later step takes
};

template <class Function>
void for_each_tensor(const Argument& argument, const Function& function) {
  if (argument.kind == Argument::kTensor) function(argument.slot);
  for (const Argument& item : argument.items) for_each_tensor(item, function);
}

struct Program {
  std::int32_t tensor_inputs = 0, size_inputs = 0;
  std::int32_t tensor_slots = 0, size_slots = 0;
  std::vector<Value> constants;  // in the slots after the inputs
  std::vector<Step> steps;
  std::vector<std::int32_t> outputs, size_outputs;
  std::size_t largest_stack = 1;
};

// Reads the words of one line.
class Words {
 public:
  explicit Words(std::string_view line) : rest_(line) {}

  std::string_view next() {
    while (!rest_.empty() && rest_.front() == ' ') rest_.remove_prefix(1);
    const std::size_t end = std::min(rest_.find(' '), rest_.size());
    const std::string_view word = rest_.substr(0, end);
    rest_.remove_prefix(end);
    return word;
  }
  std::string_view expected() {
    const std::string_view word = next();
    if (word.empty()) refuse("a line ends too early");
    return word;
  }

 private:
  std::string_view rest_;
};

std::int64_t integer(std::string_view word) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) {
    refuse("expected an integer, got " + std::string(word));
  }
  return value;
}

struct Named {
  const char* name;
  std::int32_t (*code)();
};

constexpr Named kNamed[] = {
    {"float32", aoti_torch_dtype_float32},
    {"float64", aoti_torch_dtype_float64},
    {"float16", aoti_torch_dtype_float16},
    {"bfloat16", aoti_torch_dtype_bfloat16},
    {"int8", aoti_torch_dtype_int8},
    {"int16", aoti_torch_dtype_int16},
    {"int32", aoti_torch_dtype_int32},
    {"int64", aoti_torch_dtype_int64},
    {"uint8", aoti_torch_dtype_uint8},
    {"bool", aoti_torch_dtype_bool},
    {"complex64", aoti_torch_dtype_complex64},
    {"strided", aoti_torch_layout_strided},
    {"contiguous_format", aoti_torch_memory_format_contiguous_format},
    {"preserve_format", aoti_torch_memory_format_preserve_format},
    {"channels_last", aoti_torch_memory_format_channels_last},
    {"channels_last_3d", aoti_torch_memory_format_channels_last_3d},
};

std::int32_t named(std::string_view word) {
  for (const Named& each : kNamed) {
    if (word == each.name) return each.code();
  }
  refuse("unknown name " + std::string(word));
}

// Operators that only describe memory anew.
constexpr std::string_view kViews[] = {
    "aten::alias",  "aten::as_strided",     "aten::chunk",        "aten::detach",
    "aten::expand", "aten::narrow",         "aten::permute",      "aten::select",
    "aten::slice",  "aten::split",          "aten::squeeze",      "aten::split_with_sizes",
    "aten::t",      "aten::transpose",      "aten::unbind",       "aten::unsqueeze",
    "aten::view",   "aten::_reshape_alias", "aten::_unsafe_view",
};

Threads threads_of(const Step& step) {
  if (step.kind == Kind::kAdd) return Threads::kTorchs;
  if (step.kind != Kind::kOperator) return Threads::kOne;
  if (OwnOperators::have(step.name) && step.overload.empty()) return Threads::kTeam;
  const bool is_view =
      std::find(std::begin(kViews), std::end(kViews), step.name) != std::end(kViews);
  return is_view ? Threads::kOne : Threads::kTorchs;
}

StableIValue bits(double value) { return torch::stable::detail::from(value); }

// Translates the text, and checks that every value exists before it is taken.
class Reader {
 public:
  Reader(std::string_view text, std::vector<Value> constants) {
    program_->constants = std::move(constants);
    bool has_ended = false;
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      const std::string_view line = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      if (line.empty()) continue;
      if (has_ended) refuse("a line follows the outputs");
      has_ended = read(line);
    }
    if (!has_ended) refuse("the outputs are missing");
    note_last_uses();
    note_teams();
  }

  std::unique_ptr<Program> program() { return std::move(program_); }

 private:
  // Reads a line; returns whether it is the last one.
  bool read(std::string_view line) {
    Words words(line);
    const std::string_view first = words.next();
    if (!has_begun_) {
      if (first != "inputs") refuse("the inputs are missing");
      program_->tensor_inputs = count(words.expected());
      program_->size_inputs = count(words.expected());
      const std::int64_t constants = integer(words.expected());
      if (constants != static_cast<std::int64_t>(program_->constants.size())) {
        refuse("expected " + std::to_string(constants) + " constants, got " +
               std::to_string(program_->constants.size()));
      }
      tensors_.assign(program_->tensor_inputs + constants, true);
      sizes_.assign(program_->size_inputs, true);
      has_begun_ = true;
      return false;
    }
    if (first == "outputs") {
      for (std::string_view word = words.next(); !word.empty(); word = words.next()) {
        (word.front() == '$' ? program_->size_outputs : program_->outputs).push_back(taken(word));
      }
      return true;
    }
    step(first, words);
    return false;
  }

  std::int32_t count(std::string_view word) {
    const std::int64_t value = integer(word);
    if (value < 0 || value > kMost) refuse("a number is out of range: " + std::string(word));
    return static_cast<std::int32_t>(value);
  }

  void step(std::string_view word, Words& words) {
    Step step;
    std::vector<std::string_view> results;
    if (word == "[") {
      step.returns_list = true;
      for (word = words.expected(); word != "]"; word = words.expected()) results.push_back(word);
      word = words.expected();
    }
    for (; word != "="; word = words.expected()) results.push_back(word);
    const std::string_view target = words.expected();
    const std::size_t colons = target.find("::");
    if (target == "size") {
      step.kind = Kind::kSize;
    } else if (target == "add") {
      step.kind = Kind::kAdd;
    } else if (target == "require") {
      step.kind = Kind::kRequire;
    } else if (target.size() == 1) {
      step.kind = Kind::kArithmetic;
      step.arithmetic = target.front();
      if (!std::strchr("+-*/%<>", step.arithmetic)) refuse("no arithmetic " + std::string(target));
    } else if (colons == std::string_view::npos) {
      refuse("no operator " + std::string(target));
    } else {
      const std::size_t dot = std::min(target.find('.', colons), target.size());
      step.name = target.substr(0, dot);
      step.overload = target.substr(std::min(dot + 1, target.size()));
    }
    for (word = words.next(); !word.empty(); word = words.next()) {
      step.arguments.push_back(argument(word, words));
    }
    check(step, results);
    for (std::string_view result : results) step.results.push_back(made(result));
    program_->largest_stack =
        std::max({program_->largest_stack, step.arguments.size(), step.results.size()});
    program_->steps.push_back(std::move(step));
  }

  // Steps of our own have arguments of fixed kinds.
  void check(const Step& step, const std::vector<std::string_view>& results) {
    if (step.kind == Kind::kOperator) return;
    using Kinds = std::vector<Argument::Kind>;
    Kinds found;
    for (const Argument& each : step.arguments) {
      const bool is_size = step.kind == Kind::kArithmetic && each.kind == Argument::kConstant;
      found.push_back(is_size ? Argument::kSize : each.kind);
    }
    const bool is_required = step.kind == Kind::kRequire;
    const Kinds wanted = step.kind == Kind::kSize ? Kinds{Argument::kTensor, Argument::kConstant}
                         : is_required            ? Kinds{Argument::kTensor, Argument::kTensor}
                         : step.kind == Kind::kAdd
                             ? Kinds{Argument::kTensor, Argument::kTensor, Argument::kConstant}
                             : Kinds{Argument::kSize, Argument::kSize};
    const char sigil = step.kind == Kind::kAdd ? '%' : '$';
    const bool returns_one = results.size() == 1 && results[0].front() == sigil;
    if (found != wanted || (is_required ? !results.empty() : !returns_one)) {
      refuse("a step of our own has other arguments or results than it takes");
    }
  }

  Argument argument(std::string_view word, Words& words) {
    Argument made;
    const char first = word.front();
    if (word == "none") {
      made.kind = Argument::kNone;
    } else if (word == "some") {
      made.kind = Argument::kSome;
      made.items.push_back(argument(words.expected(), words));
    } else if (word == "[") {
      made.kind = Argument::kList;
      for (word = words.expected(); word != "]"; word = words.expected()) {
        made.items.push_back(argument(word, words));
      }
    } else if (first == '%' || first == '$') {
      made.kind = first == '%' ? Argument::kTensor : Argument::kSize;
      made.slot = taken(word);
    } else if (first == '"') {
      if (word.size() < 2 || word.back() != '"') refuse("a text does not end");
      made.kind = Argument::kText;
      made.text = word.substr(1, word.size() - 2);
    } else {
      made.kind = Argument::kConstant;
      made.constant = constant(word);
    }
    return made;
  }

  StableIValue constant(std::string_view word) {
    if (word == "true" || word == "false") return torch::stable::detail::from(word == "true");
    if (word == "cpu") {  // its index, none, lies in the lower half
      return static_cast<StableIValue>(aoti_torch_device_type_cpu()) << 32 | 0xffffffffu;
    }
    if (word.front() == '=') return torch::stable::detail::from(named(word.substr(1)));
    if (word == "inf" || word == "-inf") {
      return bits(word.front() == '-' ? -INFINITY : INFINITY);
    }
    if (word == "nan") return bits(NAN);
    if (word.find_first_of(".e") != std::string_view::npos) {
      double value = 0;
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
      if (error != std::errc() || end != word.data() + word.size()) {
        refuse("expected a number, got " + std::string(word));
      }
      return bits(value);
    }
    return torch::stable::detail::from(integer(word));
  }

  // The slot of a value that exists.
  std::int32_t taken(std::string_view word) {
    const std::int32_t slot = slot_of(word);
    const std::vector<bool>& known = word.front() == '$' ? sizes_ : tensors_;
    if (slot >= static_cast<std::int32_t>(known.size()) || !known[slot]) {
      refuse("a step takes " + std::string(word) + ", which nothing made before");
    }
    return slot;
  }

  // The slot of a new value, -1 for a result that nobody takes.
  std::int32_t made(std::string_view word) {
    if (word == "_") return -1;
    const std::int32_t slot = slot_of(word);
    std::vector<bool>& known = word.front() == '$' ? sizes_ : tensors_;
    if (slot != static_cast<std::int32_t>(known.size())) {
      refuse("values are numbered in the order in which they are made, got " + std::string(word));
    }
    known.push_back(true);
    return slot;
  }

  std::int32_t slot_of(std::string_view word) {
    if (word.size() < 2 || (word.front() != '%' && word.front() != '$')) {
      refuse("expected a value, got " + std::string(word));
    }
    return count(word.substr(1));
  }

  void note_teams() {
    bool follows = false;
    for (auto step = program_->steps.rbegin(); step != program_->steps.rend(); ++step) {
      step->threads = threads_of(*step);
      step->gathers = follows && step->threads == Threads::kTeam;
      if (step->threads != Threads::kOne) follows = step->threads == Threads::kTeam;
    }
  }

  void note_last_uses() {
    program_->tensor_slots = static_cast<std::int32_t>(tensors_.size());
    program_->size_slots = static_cast<std::int32_t>(sizes_.size());
    const std::int32_t kept =
        program_->tensor_inputs + static_cast<std::int32_t>(program_->constants.size());
    std::vector<bool> is_used(tensors_.size(), false);
    for (std::int32_t slot : program_->outputs) is_used[slot] = true;
    for (auto step = program_->steps.rbegin(); step != program_->steps.rend(); ++step) {
      const auto note = [&](std::int32_t slot) {
        if (slot >= kept && !is_used[slot]) step->dead.push_back(slot);
        is_used[slot] = true;
      };
      for (const Argument& each : step->arguments) for_each_tensor(each, note);
      if (step->kind == Kind::kOperator || step->kind == Kind::kAdd) {
        for (std::int32_t slot : step->results) {
          if (slot >= 0) note(slot);
        }
      }
    }
  }

  static constexpr std::int64_t kMost = 1 << 24;

  std::unique_ptr<Program> program_ = std::make_unique<Program>();
  std::vector<bool> tensors_, sizes_;
  bool has_begun_ = false;
};

// One call of a program, with its own values.
class Run {
 public:
  Run(const Program& program, std::vector<Value> tensors, const std::vector<std::int64_t>& sizes)
      : program_(program), values_(std::move(tensors)), sizes_(sizes) {
    values_.resize(program.tensor_slots);
    sizes_.resize(program.size_slots);
    stack_.resize(program.largest_stack);
    const std::int64_t threads = Team::of_this_thread() ? 1 : available_threads();
    while (next_ < program.steps.size() && holds_) {
      if (threads > 1 && program.steps[next_].gathers && stays(program.steps[next_])) {
        run_with_team(threads);
      } else {
        holds_ = run(program.steps[next_++]);
      }
    }
  }

  // Whether all values were those that the program requires; there are no outputs else.
  bool holds() const { return holds_; }

  std::vector<Value> outputs() {
    std::vector<Value> found;
    for (std::int32_t slot : program_.outputs) found.emplace_back(handle(slot, true));
    return found;
  }

  std::vector<std::int64_t> size_outputs() const {
    std::vector<std::int64_t> found;
    for (std::int32_t slot : program_.size_outputs) found.push_back(sizes_[slot]);
    return found;
  }

 private:
  // A tensor: an input, a constant, or what a step made. A new reference if it is to be shared.
  AtenTensorHandle handle(std::int32_t slot, bool share) {
    const std::int32_t constant = slot - program_.tensor_inputs;
    const bool is_constant =
        constant >= 0 && constant < static_cast<std::int32_t>(program_.constants.size());
    const Value& value = is_constant ? program_.constants[constant] : values_[slot];
    if (!value.get()) refuse("a result that is taken does not exist");
    return share ? value.share() : value.get();
  }

  static std::int64_t available_threads() {
    std::uint32_t threads = 1;
    check_call(torch_get_num_threads(&threads), "get_num_threads");
    return threads;
  }

  // Runs the next steps, up to one that needs torch's own threads.
  void run_with_team(std::int64_t threads) {
    const auto lead = [](void* data) {
      auto& run = *static_cast<Run*>(data);
      try {
        do {
          run.holds_ = run.run(run.program_.steps[run.next_++]);
        } while (run.holds_ && run.next_ < run.program_.steps.size() &&
                 run.stays(run.program_.steps[run.next_]));
      } catch (...) {
        run.error_ = std::current_exception();
      }
    };
    Team::gather(threads, lead, this);
    if (error_) std::rethrow_exception(error_);
  }

  // Whether a step is as fast while this thread leads a team: torch's operators on so little that
  // they split no work are, and ours where they do not call torch's (for float64).
  bool stays(const Step& step) {
    static const std::int32_t float64 = aoti_torch_dtype_float64();
    if (step.threads == Threads::kOne) return true;
    bool does = true;
    const auto look = [&](std::int32_t slot) {
      const AtenTensorHandle tensor = handle(slot, false);
      std::int64_t count = 0;
      std::int32_t dtype = 0;
      if (step.threads == Threads::kTeam) {
        check_call(aoti_torch_get_dtype(tensor, &dtype), "get_dtype");
        does = does && dtype != float64;
      } else {
        check_call(aoti_torch_get_numel(tensor, &count), "get_numel");
        does = does && count <= kLittle;
      }
    };
    for (const Argument& each : step.arguments) for_each_tensor(each, look);
    return does;
  }

  // Returns whether the program goes on.
  bool run(const Step& step) {
    switch (step.kind) {
      case Kind::kRequire:
        if (!is_same(handle(step.arguments[0].slot, false), handle(step.arguments[1].slot, false)))
          return false;
        break;
      case Kind::kSize:
        sizes_[step.results[0]] = extent(step);
        break;
      case Kind::kArithmetic:
        sizes_[step.results[0]] = arithmetic(step);
        break;
      case Kind::kAdd:
        add(step);
        break;
      case Kind::kOperator:
        call(step);
        break;
    }
    for (std::int32_t slot : step.dead) values_[slot].clear();
    return true;
  }

  // Whether two tensors hold the same bits, as contiguous ones of one dtype.
  static bool is_same(AtenTensorHandle value, AtenTensorHandle wanted) {
    std::array<std::int64_t, 2> bytes{};
    std::array<std::int32_t, 2> dtypes{};
    std::array<void*, 2> data{};
    const std::array<AtenTensorHandle, 2> both{value, wanted};
    for (std::size_t i = 0; i < 2; ++i) {
      bool is_contiguous = false;
      check_call(aoti_torch_is_contiguous(both[i], &is_contiguous), "is_contiguous");
      check_call(aoti_torch_get_numel(both[i], &bytes[i]), "get_numel");
      check_call(aoti_torch_get_dtype(both[i], &dtypes[i]), "get_dtype");
      check_call(aoti_torch_get_data_ptr(both[i], &data[i]), "get_data_ptr");
      if (!is_contiguous) return false;
      bytes[i] *= static_cast<std::int64_t>(aoti_torch_dtype_element_size(dtypes[i]));
    }
    return bytes[0] == bytes[1] && dtypes[0] == dtypes[1] &&
           std::memcmp(data[0], data[1], bytes[0]) == 0;
  }

  void call(const Step& step) {
    for (std::size_t i = 0; i < step.arguments.size(); ++i) stack_[i] = boxed(step.arguments[i]);
    try {
      call_operator(step.name.c_str(), step.overload.c_str(), stack_.data());
    } catch (const std::exception& error) {
      refuse(step.name + " fails: " + reason(error));
    }
    if (step.returns_list) {
      std::vector<Tensor> parts = unboxing::Take<std::vector<Tensor>>::from(stack_[0]);
      if (parts.size() != step.results.size()) refuse(step.name + " returns another count");
      for (std::size_t i = 0; i < parts.size(); ++i) keep(step.results[i], parts[i].release());
      return;
    }
    for (std::size_t i = 0; i < step.results.size(); ++i) {
      keep(step.results[i], reinterpret_cast<AtenTensorHandle>(stack_[i]));
    }
  }

  // What torch says of an error; through this way in it says nothing of some.
  static std::string reason(const std::exception& error) {
    const std::string text = error.what();
    return text.empty() ? "the same call without torch.compile tells why" : text;
  }

  void keep(std::int32_t slot, AtenTensorHandle handle) {
    Value value(handle);
    if (slot >= 0) values_[slot] = std::move(value);
  }

  // a + alpha b: the stable ABI passes no `Scalar`, but has this function.
  void add(const Step& step) {
    AtenTensorHandle sum = nullptr;
    const double alpha = torch::stable::detail::to<double>(step.arguments[2].constant);
    check_call(aoti_torch_aten_subtract_Tensor(handle(step.arguments[0].slot, false),
                                               handle(step.arguments[1].slot, false), -alpha, &sum),
               "add");
    keep(step.results[0], sum);
  }

  std::int64_t extent(const Step& step) {
    const AtenTensorHandle tensor = handle(step.arguments[0].slot, false);
    std::int64_t dim = 0, at = static_cast<std::int64_t>(step.arguments[1].constant);
    std::int64_t* sizes = nullptr;
    check_call(aoti_torch_get_dim(tensor, &dim), "get_dim");
    check_call(aoti_torch_get_sizes(tensor, &sizes), "get_sizes");
    if (at < -dim || at >= dim) refuse("a tensor has no such dimension");
    return sizes[at < 0 ? at + dim : at];
  }

  static std::int64_t negative(std::int64_t value) {
    return static_cast<std::int64_t>(0 - static_cast<std::uint64_t>(value));
  }

  std::int64_t arithmetic(const Step& step) const {
    const std::int64_t a = size(step.arguments[0]), b = size(step.arguments[1]);
    const bool divides = step.arithmetic == '/' || step.arithmetic == '%';
    if (divides && b == 0) refuse("division by zero");
    // The processor traps where a quotient is out of range.
    if (divides && b == -1) return step.arithmetic == '/' ? negative(a) : 0;
    switch (step.arithmetic) {
      case '+':
        return a + b;
      case '-':
        return a - b;
      case '*':
        return a * b;
      case '/':  // rounds down, as Python does
        return a / b - (a % b != 0 && (a < 0) != (b < 0));
      case '%':
        return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
      case '<':
        return std::min(a, b);
      default:
        return std::max(a, b);
    }
  }

  std::int64_t size(const Argument& argument) const {
    return argument.kind == Argument::kSize ? sizes_[argument.slot]
                                            : static_cast<std::int64_t>(argument.constant);
  }

  // What the stack of a call holds for an argument; the callee owns it.
  StableIValue boxed(const Argument& argument) {
    switch (argument.kind) {
      case Argument::kConstant:
        return argument.constant;
      case Argument::kTensor:
        return torch::stable::detail::from(handle(argument.slot, true));
      case Argument::kSize:
        return torch::stable::detail::from(sizes_[argument.slot]);
      case Argument::kText: {
        StringHandle text = nullptr;
        check_call(torch_new_string_handle(argument.text.data(), argument.text.size(), &text),
                   "new_string_handle");
        return torch::stable::detail::from(text);
      }
      case Argument::kNone:
        return torch::stable::detail::from(std::nullopt);
      case Argument::kSome:
        return torch::stable::detail::from(std::optional<StableIValue>(boxed(argument.items[0])));
      case Argument::kList:
        break;
    }
    StableListHandle list = nullptr;
    check_call(torch_new_list_reserve_size(argument.items.size(), &list), "new_list");
    for (const Argument& item : argument.items) {
      check_call(torch_list_push_back(list, boxed(item)), "list_push_back");
    }
    return torch::stable::detail::from(list);
  }

  // Elements up to which torch's operators work on one thread.
  static constexpr std::int64_t kLittle = 2048;

  const Program& program_;
  bool holds_ = true;
  std::size_t next_ = 0;
  std::exception_ptr error_;
  std::vector<Value> values_;
  std::vector<std::int64_t> sizes_;
  std::vector<StableIValue> stack_;
};

std::vector<Value> values_of(StableIValue list) {
  std::vector<Tensor> tensors = unboxing::Take<std::vector<Tensor>>::from(list);
  std::vector<Value> values;
  values.reserve(tensors.size());
  for (Tensor& tensor : tensors) values.emplace_back(tensor.release());
  return values;
}

void load_program(StableIValue* stack, uint64_t, uint64_t) {
  const std::string text = unboxing::Take<std::string>::from(stack[0]);
  Reader reader(text, values_of(stack[1]));
  stack[0] =
      static_cast<StableIValue>(reinterpret_cast<std::uintptr_t>(reader.program().release()));
}

}  // namespace

// Declared in saved_program.cpp too.
void run_program(StableIValue* stack, uint64_t, uint64_t) {
  const auto* program = reinterpret_cast<const Program*>(static_cast<std::uintptr_t>(stack[0]));
  std::vector<Value> tensors = values_of(stack[1]);
  const auto sizes = unboxing::Take<std::vector<std::int64_t>>::from(stack[2]);
  if (static_cast<std::int32_t>(tensors.size()) != program->tensor_inputs ||
      static_cast<std::int32_t>(sizes.size()) != program->size_inputs) {
    refuse("expected " + std::to_string(program->tensor_inputs) + " tensors and " +
           std::to_string(program->size_inputs) + " sizes, got " + std::to_string(tensors.size()) +
           " and " + std::to_string(sizes.size()));
  }
  Run run(*program, std::move(tensors), sizes);
  StableListHandle outputs = nullptr, size_outputs = nullptr;
  check_call(torch_new_list_reserve_size(program->outputs.size(), &outputs), "new_list");
  check_call(torch_new_list_reserve_size(program->size_outputs.size(), &size_outputs), "new_list");
  if (run.holds()) {
    for (Value& value : run.outputs()) {
      check_call(torch_list_push_back(outputs, torch::stable::detail::from(value.release())),
                 "list_push_back");
    }
    for (std::int64_t size : run.size_outputs()) {
      check_call(torch_list_push_back(size_outputs, torch::stable::detail::from(size)),
                 "list_push_back");
    }
  }
  stack[0] = torch::stable::detail::from(run.holds());
  stack[1] = torch::stable::detail::from(outputs);
  stack[2] = torch::stable::detail::from(size_outputs);
}

STABLE_TORCH_LIBRARY_FRAGMENT(oxytorch, library) {
  library.def("load_program(str text, Tensor[] constants) -> int");
  // Its results may be views of its inputs and of each other.
  library.def(
      "run_program(int program, Tensor(a -> *)[] tensors, int[] sizes) -> (bool, Tensor(a)[], "
      "int[])");
}

// Implicit: autograd asks of a kernel that it does not know that no result is a view.
STABLE_TORCH_LIBRARY_IMPL(oxytorch, CompositeImplicitAutograd, library) {
  library.impl("load_program", &load_program);
  library.impl("run_program", &run_program);
}

}  // namespace oxytorch

extern "C" __attribute__((visibility("default"))) void oxytorch_forget_program(void* program) {
  delete static_cast<oxytorch::Program*>(program);
}
