// Reads a program's text into steps.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "program/number.h"
#include "program/steps.h"

namespace oxytorch::runtime {

void refuse(const std::string& what) { throw std::runtime_error("oxytorch program: " + what); }

namespace {

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

// Operators that only describe the same memory in another way.
constexpr std::string_view kViews[] = {
    "aten::alias",  "aten::as_strided",     "aten::chunk",        "aten::detach",
    "aten::expand", "aten::narrow",         "aten::permute",      "aten::select",
    "aten::slice",  "aten::split",          "aten::squeeze",      "aten::split_with_sizes",
    "aten::t",      "aten::transpose",      "aten::unbind",       "aten::unsqueeze",
    "aten::view",   "aten::_reshape_alias", "aten::_unsafe_view",
};

bool is_view(const Step& step) {
  return std::find(std::begin(kViews), std::end(kViews), step.name) != std::end(kViews);
}

// Operators whose results may be their arguments, or lie in their memory.
bool may_show(const Step& step) {
  constexpr std::string_view kMay[] = {
      "aten::contiguous", "aten::dropout", "aten::expand_as", "aten::flatten", "aten::real",
      "aten::reshape",    "aten::to",      "aten::unfold",    "aten::view_as", "aten::diagonal",
  };
  return is_view(step) || step.view != ViewKind::none || step.name.back() == '_' ||
         std::find(std::begin(kMay), std::end(kMay), step.name) != std::end(kMay);
}

// Operators that give a tensor other memory, which that of an arena is not.
bool changes_memory(const Step& step) {
  return step.name.find("resize") != std::string::npos ||
         step.name.find("::set_") != std::string::npos ||
         step.overload.find("out") != std::string::npos;
}

Threads threads_of(const Step& step) {
  if (step.kind == Kind::kAdd || step.kind == Kind::kResample) return Threads::kTorchs;
  if (step.kind != Kind::kOperator) return Threads::kOne;
  if (step.own) return Threads::kTeam;
  return is_view(step) ? Threads::kOne : Threads::kTorchs;
}

StableIValue bits(double value) { return torch::stable::detail::from(value); }

// Translates the text, and checks that every value exists before it is taken.
class Reader {
 public:
  Reader(std::string_view text, std::vector<TensorOwner> constants) {
    program_->constants = std::move(constants);
    bool has_ended = false;
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      const std::string_view line = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      if (line.empty()) continue;
      if (has_ended) {
        place(line);
      } else {
        has_ended = read(line);
      }
    }
    if (!has_ended) refuse("the outputs are missing");
    note_last_uses();
    note_teams();
    note_arena();
    note_plan();
    for (Step& step : program_->steps) note_lent(step);
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
    } else if (target == "resample") {
      step.kind = Kind::kResample;
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
      if (step.overload.empty()) step.own = OwnOperator::find(step.name);
      step.view = view_kind(target);
      step.check = trusted_check(target);
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
    if (step.kind == Kind::kResample) return check_resampling(step, results);
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

  static void check_resampling(const Step& step, const std::vector<std::string_view>& results) {
    const std::vector<Argument>& given = step.arguments;
    const bool are_four = given.size() == 4 && given[0].kind == Argument::kTensor &&
                          given[1].kind == Argument::kText && given[2].kind == Argument::kList;
    const auto found = Resampling::find(are_four ? given[1].text : std::string());
    const auto is_size = [](const Argument& each) {
      return each.kind == Argument::kSize || each.kind == Argument::kConstant;
    };
    if (!found || results.size() != 1 || results[0].front() != '%' ||
        given[2].items.size() != static_cast<std::size_t>(found->dims) ||
        !std::all_of(given[2].items.begin(), given[2].items.end(), is_size) ||
        given[3].kind != (found->aligns ? Argument::kConstant : Argument::kNone)) {
      refuse("a step that resamples has other arguments or results than it takes");
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
      if (!read_number(word, value)) refuse("expected a number, got " + std::string(word));
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

  // Reads a line of the plan: place VALUE BUFFER BYTES.
  void place(std::string_view line) {
    Words words(line);
    if (words.next() != "place") refuse("a line that is no place follows the outputs");
    Place made;
    const std::string_view value = words.expected();
    made.slot = taken(value);
    if (value.front() != '%') refuse("the plan has a place for a size");
    made.buffer = count(words.expected());
    if (made.buffer > program_->buffers) refuse("buffers are numbered in order");
    program_->buffers = std::max(program_->buffers, made.buffer + 1);
    made.bytes = read_formula(words.expected(), program_->tensor_inputs, program_->size_inputs);
    if (!words.next().empty()) refuse("a place has more words than it takes");
    program_->places.push_back(std::move(made));
  }

  // Checks the plan: places are for results of our operators, which stay in the program, in the
  // order of their steps, and what lies in a buffer is not needed any more when the next result
  // comes there.
  void note_plan() {
    if (program_->places.empty()) return;
    const std::vector<std::size_t> last = last_uses();
    std::vector<std::size_t> is_free(program_->buffers, 0);  // the first step that may take it
    std::size_t at = 0;
    for (std::size_t i = 0; i < program_->steps.size() && at < program_->places.size(); ++i) {
      Step& step = program_->steps[i];
      step.first_place = static_cast<std::int32_t>(at);
      const auto makes = [&](std::int32_t slot) {
        return std::find(step.results.begin(), step.results.end(), slot) != step.results.end();
      };
      while (at < program_->places.size() && step.kind == Kind::kOperator && step.own &&
             makes(program_->places[at].slot)) {
        const Place& each = program_->places[at++];
        for (std::size_t other = step.first_place; other + 1 < at; ++other) {
          if (program_->places[other].slot == each.slot) refuse("the plan has a place twice");
        }
        const std::string number = std::to_string(each.slot);
        if (program_->leaves[i]) refuse("the plan has a place for an output, %" + number);
        if (is_free[each.buffer] > i) {
          refuse("the plan puts %" + number + " where another value lies that is needed still");
        }
        is_free[each.buffer] = last[each.slot] + 1;
        ++step.places;
      }
    }
    if (at < program_->places.size()) {
      refuse("the plan has a place for %" + std::to_string(program_->places[at].slot) +
             ", which is no result of an operator of ours, or not in order");
    }
  }

  // The last step that takes each tensor, or one that may lie in its memory.
  std::vector<std::size_t> last_uses() const {
    std::vector<std::size_t> last(tensors_.size(), 0);
    for (std::int32_t slot : program_->outputs) last[slot] = program_->steps.size();
    for (std::size_t i = program_->steps.size(); i-- > 0;) {
      const Step& step = program_->steps[i];
      std::size_t until = i;
      if (step.kind == Kind::kOperator) {
        for (std::int32_t slot : step.results) {
          if (slot < 0) continue;
          last[slot] = std::max(last[slot], i);
          if (may_show(step)) until = std::max(until, last[slot]);
        }
      }
      const auto note = [&](std::int32_t slot) { last[slot] = std::max(last[slot], until); };
      for (const Argument& each : step.arguments) for_each_tensor(each, note);
    }
    return last;
  }

  void note_teams() {
    program_->is_split = std::vector<std::atomic<bool>>(program_->steps.size());
    bool follows = false;
    for (auto step = program_->steps.rbegin(); step != program_->steps.rend(); ++step) {
      step->threads = threads_of(*step);
      step->gathers = follows && step->threads == Threads::kTeam;
      if (step->threads != Threads::kOne) follows = step->threads == Threads::kTeam;
    }
  }

  // What is given out, or shown by a view that is, leaves the program.
  void note_arena() {
    program_->leaves = std::vector<std::atomic<bool>>(program_->steps.size());
    std::vector<bool> leaves(tensors_.size(), false);
    for (std::int32_t slot : program_->outputs) leaves[slot] = true;
    bool is_needed = false;
    for (std::size_t i = program_->steps.size(); i-- > 0;) {
      const Step& step = program_->steps[i];
      if (step.kind != Kind::kOperator) continue;  // other results are sizes, or torch's
      const bool does = std::any_of(step.results.begin(), step.results.end(),
                                    [&](std::int32_t slot) { return slot >= 0 && leaves[slot]; });
      program_->leaves[i] = does;
      if (does && is_view(step)) {
        const auto note = [&](std::int32_t slot) { leaves[slot] = true; };
        for (const Argument& each : step.arguments) for_each_tensor(each, note);
      }
      is_needed = is_needed || (step.own && !does);
    }
    program_->takes_arena =
        is_needed && std::none_of(program_->steps.begin(), program_->steps.end(), changes_memory);
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

}  // namespace

std::unique_ptr<Program> read_program(std::string_view text, std::vector<TensorOwner> constants) {
  return Reader(text, std::move(constants)).program();
}

}  // namespace oxytorch::runtime
