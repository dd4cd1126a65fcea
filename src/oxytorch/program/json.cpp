#include "program/json.h"

#include <charconv>

#include "program/number.h"

namespace oxytorch::json {

namespace {

constexpr int kDeepest = 200;

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Value all() {
    Value found = value(0);
    skip();
    if (at_ != text_.size()) fail("more after its end");
    return found;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("expected JSON, got " + what + " at byte " + std::to_string(at_));
  }

  void skip() {
    while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != text_.npos) ++at_;
  }

  char peek() {
    skip();
    if (at_ == text_.size()) fail("an early end");
    return text_[at_];
  }

  bool takes(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }

  void expect(char wanted) {
    if (peek() != wanted) fail(std::string("no ") + wanted);
    ++at_;
  }

  Value value(int depth) {
    if (depth > kDeepest) fail("too many levels");
    Value made;
    const char first = peek();
    if (first == '{') {
      made.kind = Kind::object;
      members(made, depth);
    } else if (first == '[') {
      made.kind = Kind::list;
      items(made, depth);
    } else if (first == '"') {
      made.kind = Kind::text;
      made.text = text();
    } else if (takes("true") || takes("false")) {
      made.kind = Kind::boolean;
      made.integer = first == 't';
    } else if (takes("NaN") || takes("Infinity") || takes("-Infinity")) {
      made.kind = Kind::number;
      made.number = first == 'N' ? NAN : first == '-' ? -INFINITY : INFINITY;
    } else if (!takes("null")) {
      number(made);
    }
    return made;
  }

  void items(Value& made, int depth) {
    each_until(']', [&] { made.items.push_back(value(depth + 1)); });
  }

  void members(Value& made, int depth) {
    each_until('}', [&] {
      if (peek() != '"') fail("a name without quotes");
      std::string name = text();
      expect(':');
      made.members.emplace_back(std::move(name), value(depth + 1));
    });
  }

  // What lies between brackets, with commas between.
  template <class Read>
  void each_until(char end, Read read) {
    ++at_;
    if (peek() != end) {
      read();
      while (peek() != end) {
        expect(',');
        read();
      }
    }
    ++at_;
  }

  std::size_t digits() {
    const std::size_t begin = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    return at_ - begin;
  }

  void number(Value& made) {
    const std::size_t begin = at_;
    takes("-");
    const bool has_zero = text_.substr(at_).starts_with('0');
    const std::size_t count = digits();
    if (count == 0 || (has_zero && count > 1)) fail("no value");
    made.kind = Kind::integer;
    if (text_.substr(at_).starts_with('.')) {
      ++at_;
      made.kind = Kind::number;
      if (digits() == 0) fail("a number that ends with a point");
    }
    if (takes("e") || takes("E")) {
      if (!takes("-")) takes("+");
      made.kind = Kind::number;
      if (digits() == 0) fail("a number without an exponent");
    }
    const char* from = text_.data() + begin;
    const char* to = text_.data() + at_;
    if (made.kind == Kind::integer && std::from_chars(from, to, made.integer).ec != std::errc()) {
      made.kind = Kind::number;  // beyond 64 bits, which no integer of a file is
    }
    read_number({from, to}, made.number);
  }

  std::uint32_t code() {
    std::uint32_t made = 0;
    const char* begin = text_.data() + at_;
    if (text_.size() - at_ < 4) fail("an early end");
    const auto [end, error] = std::from_chars(begin, begin + 4, made, 16);
    if (error != std::errc() || end != begin + 4) fail("a code that is no number");
    at_ += 4;
    return made;
  }

  static void put(std::string& made, std::uint32_t point) {
    if (point < 0x80) {
      made += static_cast<char>(point);
      return;
    }
    const int rest = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    constexpr std::uint32_t kFirst[] = {0, 0xc0, 0xe0, 0xf0};
    made += static_cast<char>(kFirst[rest] | point >> 6 * rest);
    for (int i = rest - 1; i >= 0; --i) made += static_cast<char>(0x80 | (point >> 6 * i & 0x3f));
  }

  std::string text() {
    std::string made;
    for (++at_;;) {
      if (at_ == text_.size()) fail("a text without an end");
      const char each = text_[at_++];
      if (each == '"') return made;
      if (static_cast<unsigned char>(each) < 0x20) fail("a control character");
      if (each != '\\') {
        made += each;
        continue;
      }
      if (at_ == text_.size()) fail("a text without an end");
      const char escaped = text_[at_++];
      constexpr std::string_view kMarks = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
      const std::size_t place = kMarks.find(escaped);
      if (place != kMarks.npos) {
        made += kMeant[place];
      } else if (escaped == 'u') {
        std::uint32_t point = code();
        if (point >> 10 == 0x36 && takes("\\u")) {
          point = 0x10000 + ((point & 0x3ff) << 10 | (code() & 0x3ff));
        }
        put(made, point);
      } else {
        fail("an unknown escape");
      }
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

namespace {

// Of the character that begins a text, 0 if it is none. Source: RFC 3629, section 4.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  if (length == 0 || first > 0xf4 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (byte(i) >> 6 != 2) return 0;
  }
  const bool is_short = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xf0 && byte(1) < 0x90);
  const bool is_none = (first == 0xed && byte(1) > 0x9f) || (first == 0xf4 && byte(1) > 0x8f);
  return is_short || is_none ? 0 : length;
}

}  // namespace

Value read(std::string_view text) {
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t length = utf8_length(rest);
    if (length == 0) throw std::runtime_error("expected JSON, got bytes that are no UTF-8");
    rest.remove_prefix(length);
  }
  return Reader(text).all();
}

const Value* Value::find(std::string_view name) const {
  for (auto member = members.rbegin(); member != members.rend(); ++member) {
    if (member->first == name) return &member->second;
  }
  return nullptr;
}

const Value& Value::at(std::string_view name, Kind wanted) const {
  const Value* found = find(name);
  const std::string what(name);
  if (!found) throw std::runtime_error("expected " + what + ", got nothing of that name");
  return found->expect(wanted, what.c_str());
}

const Value& Value::expect(Kind wanted, const char* what) const {
  if (kind == wanted) return *this;
  throw std::runtime_error(std::string("expected ") + what + " to be " + name_of(wanted) +
                           ", got " + name_of(kind));
}

}  // namespace oxytorch::json
