#include "program/program_check.h"
#include "program/resampling.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <stdexcept>
#include <vector>

#include "oxytorch_allowed.h"

namespace oxytorch {

namespace {

using Text = std::string_view;

constexpr const char* kAgain =
    "; if another version of oxytorch saved the file, save it again with this one";

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

std::string quoted(Text text) {
  std::string made(1, '\'');
  made.append(text.substr(0, 100));
  made.append(text.size() > 100 ? "...'" : "'");
  return made;
}

bool is_digit(char each) { return each >= '0' && each <= '9'; }
bool are_digits(Text text) { return !text.empty() && std::ranges::all_of(text, is_digit); }

bool is_one_of(Text word, const auto& list) {
  return std::find(std::begin(list), std::end(list), word) != std::end(list);
}

bool is_integer(Text word) {
  const Text digits = word.substr(word.starts_with('-'));
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  return are_digits(digits) && (digits == "0" || digits[0] != '0') && error == std::errc() &&
         end == word.data() + word.size();
}

// With a point, an exponent, or no finite value.
bool is_float(Text word) {
  if (word == "nan") return true;
  Text rest = word.substr(word.starts_with('-'));
  if (rest == "inf") return true;
  const auto take_digits = [&] {
    std::size_t count = 0;
    while (count < rest.size() && is_digit(rest[count])) ++count;
    rest.remove_prefix(count);
    return count > 0;
  };
  if (!take_digits()) return false;
  const bool has_point = rest.starts_with('.');
  if (has_point && (rest.remove_prefix(1), !take_digits())) return false;
  const bool has_exponent = rest.starts_with('e');
  if (has_exponent) {
    rest.remove_prefix(1);
    if (rest.starts_with('-') || rest.starts_with('+')) rest.remove_prefix(1);
    if (!take_digits()) return false;
  }
  return rest.empty() && (has_point || has_exponent);
}

bool is_text(Text word) {
  if (word.size() < 3 || word.front() != '"' || word.back() != '"') return false;
  const Text inner = word.substr(1, word.size() - 2);
  return !is_digit(inner[0]) && std::ranges::all_of(inner, [](char each) {
    return is_digit(each) || each == '_' || ((each | 32) >= 'a' && (each | 32) <= 'z');
  });
}

// A value's name: % or $ and a number.
bool is_value(Text word, char sigil) {
  const Text digits = word.substr(std::min<std::size_t>(1, word.size()));
  return word.starts_with(sigil) && are_digits(digits) && digits.size() <= 7 &&
         (digits == "0" || digits[0] != '0');
}

std::int64_t number_of(Text word) {
  std::int64_t value = 0;
  std::from_chars(word.data() + 1, word.data() + word.size(), value);
  return value;
}

std::vector<Text> split(Text text, char divider) {
  std::vector<Text> parts;
  for (std::size_t end; (end = text.find(divider)) != Text::npos; text.remove_prefix(end + 1)) {
    parts.push_back(text.substr(0, end));
  }
  parts.push_back(text);
  return parts;
}

struct Operator {
  std::vector<std::string> arguments;
  std::size_t results = 0;
  bool returns_list = false;
  bool writes = false;
};

std::string why_refused(Text target, const Operator& made, const std::vector<Text>& returned) {
  const Text with_overload = target.substr(target.find("::") + 2);
  const Text own = with_overload.substr(0, with_overload.find('.'));
  const auto innermost = [](Text kind) { return kind.back(); };
  const bool has_lists = std::ranges::any_of(returned, [](Text kind) { return kind != "T"; });
  if (returned.empty() ||
      !std::ranges::all_of(returned, [&](Text k) { return innermost(k) == 'T'; }) ||
      (has_lists && returned.size() > 1)) {
    return "it does not return tensors";
  }
  if (made.writes && !is_one_of(own, kInPlace)) return "it writes to a tensor";
  bool has_text = false, has_tensor = false;
  for (const std::string& kind : made.arguments) {
    if (innermost(kind) == 'x') return "it takes what a program cannot pass";
    has_text |= innermost(kind) == 't';
    has_tensor |= innermost(kind) == 'T';
  }
  if (has_text && !has_tensor) return "it takes text and no tensor";
  const auto is_in = [&](Text part) { return own.find(part) != Text::npos; };
  const auto begins = [&](Text part) { return own.starts_with(part); };
  const bool is_torchs = !target.starts_with("oxytorch::");
  if (is_torchs && (std::ranges::any_of(kOtherParts, is_in) ||
                    std::ranges::any_of(kOtherBegins, begins) || is_one_of(own, kOtherNames))) {
    return "it makes tensors that are not dense, or are on another device";
  }
  if (own.starts_with('_') && !is_one_of(own, kPrivate)) return "it is internal to torch";
  const auto ends = [&](Text part) { return own.ends_with(part); };
  if (is_one_of(with_overload, kTrusting) || std::ranges::any_of(kTrustingEnds, ends)) {
    return "torch takes its arguments on trust";
  }
  return "";
}

class Checker {
 public:
  Checker(std::int64_t tensors, std::int64_t sizes, OperatorTypes types)
      : types_(types), tensors_(tensors), sizes_(sizes), first_made_(tensors) {}

  void check(const std::vector<Text>& words) {
    const auto equals = std::find(words.begin(), words.end(), "=");
    if (equals == words.end()) fail("expected results = operator and arguments");
    const std::vector<Text> results(words.begin(), equals);
    words_.assign(equals + 1, words.end());
    at_ = 0;
    const Text target = next();
    if (target.find("::") != Text::npos) {
      const Operator& found = operator_of(target);
      if (found.writes &&
          !(words_.size() > 1 && is_value(words_[1], '%') && number_of(words_[1]) >= first_made_)) {
        fail("expected " + std::string(target) + " of a tensor that a step has made");
      }
      for (const std::string& kind : found.arguments) argument(next(), kind);
      check_results(results, found);
    } else {
      own_step(target, results);
    }
    if (at_ != words_.size()) fail("expected no more arguments, got " + quoted(words_[at_]));
    for (Text word : results) {
      if (word.starts_with('%') || word.starts_with('$')) make(word);
    }
  }

  // A line of the plan, whose meaning `read_program` checks.
  void place(const std::vector<Text>& words) const {
    if (words.size() != 4) fail("expected place, a value, a buffer and its bytes");
    tensor(words[1]);
    if (!are_digits(words[2]) || words[2].size() > 7) {
      fail("expected the number of a buffer, got " + quoted(words[2]));
    }
  }

  void outputs(const std::vector<Text>& words, ProgramCounts& counts) const {
    if (words[0] != "outputs") fail("expected outputs, got " + quoted(words[0]));
    for (std::size_t i = 1; i < words.size(); ++i) {
      if (!exists(words[i])) fail("expected values that exist, got " + quoted(words[i]));
      ++(words[i][0] == '%' ? counts.tensor_results : counts.size_results);
    }
  }

 private:
  Text next() {
    if (at_ >= words_.size() || words_[at_].empty()) {
      fail("it ends too early, or has two spaces in a row");
    }
    return words_[at_++];
  }

  bool exists(Text word) const {
    return (is_value(word, '%') && number_of(word) < tensors_) ||
           (is_value(word, '$') && number_of(word) < sizes_);
  }

  void tensor(Text word) const {
    if (!word.starts_with('%') || !exists(word)) {
      fail("expected a tensor that exists, got " + quoted(word));
    }
  }

  void size(Text word) const {
    if (word.starts_with('$') ? !exists(word) : !is_integer(word)) {
      fail("expected a size or an integer, got " + quoted(word));
    }
  }

  void make(Text word) {
    std::int64_t& known = word[0] == '%' ? tensors_ : sizes_;
    if (number_of(word) != known) {
      fail("expected " + std::to_string(known) + " as the next, got " + quoted(word));
    }
    ++known;
  }

  void argument(Text word, Text kind) {
    switch (kind[0]) {
      case '?':
        if (word == "some") {
          argument(next(), kind.substr(1));
        } else if (word != "none") {
          fail("expected none or some, got " + quoted(word));
        }
        return;
      case '[':
        if (word != "[") fail("expected a list, got " + quoted(word));
        for (Text inner = next(); inner != "]"; inner = next()) argument(inner, kind.substr(1));
        return;
      case 'T':
        return tensor(word);
      case 's':
        return size(word);
      case 'i':
        if (word.starts_with('$')) return size(word);
    }
    constant(word, kind[0]);
  }

  static void constant(Text word, char kind) {
    const bool is_right =
        kind == 'i'   ? is_integer(word)
        : kind == 'f' ? is_float(word)
        : kind == 't' ? is_text(word)
        : kind == 'b' ? word == "true" || word == "false"
        : kind == 'd' ? word.starts_with('=') && is_one_of(word.substr(1), kDtypes)
        : kind == 'l' ? word == "=strided"
        : kind == 'm' ? word.starts_with('=') && is_one_of(word.substr(1), kFormats)
                      : kind == 'c' && word == "cpu";
    if (!is_right) fail("expected another kind of constant, got " + quoted(word));
  }

  void check_results(const std::vector<Text>& given, const Operator& found) const {
    std::vector<Text> results = given;
    if (found.returns_list) {
      if (results.size() < 2 || results.front() != "[" || results.back() != "]") {
        fail("expected results in [ ]");
      }
      results = {given.begin() + 1, given.end() - 1};
    } else if (results.size() != found.results) {
      fail("expected " + std::to_string(found.results) + " results, got " +
           std::to_string(results.size()));
    }
    for (Text word : results) {
      if (word != "_" && !is_value(word, '%')) {
        fail("expected a tensor as result, got " + quoted(word));
      }
    }
  }

  void own_step(Text target, const std::vector<Text>& results) {
    const bool makes_tensor = target == "add" || target == "resample";
    if (results.size() != 1 || !is_value(results[0], makes_tensor ? '%' : '$')) {
      fail("expected one result");
    }
    if (target == "add") {
      tensor(next());
      tensor(next());
      constant(next(), 'f');
    } else if (target == "resample") {
      resample();
    } else if (target == "size") {
      tensor(next());
      constant(next(), 'i');
      extents_.insert(std::string(results[0]));
    } else if (target.size() == 1 && Text("+-*/%<>").find(target) != Text::npos) {
      size(next());
      const Text second = next();
      size(second);
      if ((target == "/" || target == "%") && !extents_.contains(std::string(second)) &&
          !are_digits(second)) {
        fail("expected to divide by a tensor's size or a constant above 0, got " + quoted(second));
      }
    } else {
      fail("expected an operator, got " + quoted(target));
    }
  }

  void resample() {
    tensor(next());
    const Text name = next();
    const auto found = Resampling::find(is_text(name) ? name.substr(1, name.size() - 2) : Text());
    if (!found) fail("expected an operator that resamples, got " + quoted(name));
    if (next() != "[") fail("expected sizes in [ ]");
    for (std::int64_t i = 0; i < found->dims; ++i) size(next());
    if (next() != "]") fail("expected as many sizes as are resampled");
    const Text align = next();
    if (found->aligns ? align != "true" && align != "false" : align != "none") {
      fail("expected whether corners are aligned, got " + quoted(align));
    }
  }

  const Operator& operator_of(Text target) {
    const auto known = operators_.find(target);
    if (known != operators_.end()) return known->second;
    const std::size_t colons = target.find("::");
    const std::size_t dot = std::min(target.find('.'), target.size());
    if (dot < colons) fail("expected an operator, got " + quoted(target));
    const std::string name(target.substr(0, dot));
    const std::string overload(target.substr(std::min(dot + 1, target.size())));
    const bool is_known = is_one_of(target.substr(0, colons), kNamespaces);
    const char* types = is_known ? types_(name.c_str(), overload.c_str()) : nullptr;
    if (!types) fail("expected an operator of this torch or of oxytorch, got " + quoted(target));
    const Text all(types);
    const std::size_t arrow = all.find('>');
    const auto kinds = [](Text part) {
      return part.empty() ? std::vector<Text>{} : split(part, ',');
    };
    Operator made;
    made.writes = all[0] == 'w';
    for (Text kind : kinds(all.substr(1, arrow - 1))) made.arguments.emplace_back(kind);
    const std::vector<Text> returned = kinds(all.substr(arrow + 1));
    made.results = returned.size();
    made.returns_list = returned == std::vector<Text>{"[T"};
    const std::string why = why_refused(target, made, returned);
    if (!why.empty()) fail("a file may not call " + std::string(target) + ": " + why);
    return operators_.emplace(target, std::move(made)).first->second;
  }

  OperatorTypes types_;
  std::int64_t tensors_, sizes_, first_made_;
  std::set<std::string> extents_;
  std::map<std::string, Operator, std::less<>> operators_;
  std::vector<Text> words_;
  std::size_t at_ = 0;
};

}  // namespace

ProgramCounts check_program(std::string_view text, OperatorTypes types) {
  const std::vector<Text> lines = split(text, '\n');
  const std::vector<Text> first = split(lines[0], ' ');
  bool is_head = first.size() == 4 && first[0] == "inputs" && lines.size() > 1;
  std::int64_t numbers[3] = {};
  for (std::size_t i = 1; is_head && i < 4; ++i) {
    std::string word(1, '%');
    word.append(first[i]);
    is_head = is_value(word, '%');
    numbers[i - 1] = is_head ? number_of(word) : 0;
  }
  if (!is_head) fail("line 1: expected inputs and three numbers, got " + quoted(lines[0]));
  ProgramCounts counts{numbers[0], numbers[1], numbers[2], 0, 0};
  Checker steps(counts.tensors + counts.constants, counts.sizes, types);
  std::size_t last = lines.size() - 1;  // the line of the outputs, which the plan follows
  while (last > 1 && lines[last].starts_with("place ")) --last;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    try {
      const std::vector<Text> words = split(lines[i], ' ');
      i < last ? steps.check(words) : i == last ? steps.outputs(words, counts) : steps.place(words);
    } catch (const std::exception& error) {
      // Operators of ours may take other arguments in another version.
      const bool is_ours = lines[i].find(" = oxytorch::") != Text::npos;
      fail("line " + std::to_string(i + 1) + ", " + quoted(lines[i]) + ": " + error.what() +
           (is_ours ? kAgain : ""));
    }
  }
  return counts;
}

}  // namespace oxytorch
