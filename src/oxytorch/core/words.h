// Words of memory that say, as long as they are what they were, that something has not changed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace oxytorch {

inline std::uint64_t read_word(const void* at) {
  return *static_cast<const volatile std::uint64_t*>(at);
}

constexpr std::uintptr_t kLine = 64;  // bytes

// Addresses of words, by size, in four bytes each: reading them is to take little of a look.
class Addresses {
 public:
  static constexpr std::size_t kAhead = 64;

  std::size_t size() const { return offsets_.size(); }

  // None is less than one before it.
  void push(const void* at) {
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    if (parts_.empty() || (address - parts_.back().base) / kWord > UINT32_MAX) {
      parts_.push_back({address, offsets_.size()});
    }
    offsets_.push_back(static_cast<std::uint32_t>((address - parts_.back().base) / kWord));
    parts_.back().end = offsets_.size();
  }

  void erase(std::size_t index) {
    offsets_.erase(offsets_.begin() + static_cast<std::ptrdiff_t>(index));
    for (Part& part : parts_) part.end -= index < part.end;
  }

  // Calls is_same(index, address) for one after the other while that says yes, and has memory read
  // ahead: a model's weights push all of it out of the caches.
  template <class IsSame>
  bool all(const IsSame& is_same) const {
    std::size_t i = 0;
    for (const Part& part : parts_) {
      const auto at = [&](std::size_t index) {
        return reinterpret_cast<const char*>(part.base + kWord * offsets_[index]);
      };
      for (std::size_t ahead = i; ahead < std::min(i + kAhead, part.end); ++ahead) {
        __builtin_prefetch(at(ahead));
      }
      for (; i < part.end; ++i) {
        if (i + kAhead < part.end) __builtin_prefetch(at(i + kAhead));
        if (!is_same(i, at(i))) return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::uintptr_t kWord = sizeof(std::uint64_t);

  struct Part {
    std::uintptr_t base;  // which offsets count from, in words
    std::size_t end;
  };

  std::vector<Part> parts_;
  std::vector<std::uint32_t> offsets_;
};

// Python's lock is held while anything here runs.
class Words {
 public:
  using Group = std::uint32_t;

  // What a comparison of a group found: another state; the same; the same, though words do not
  // tell of it any more.
  enum class Found { kOther, kSame, kSameUntold };

  // A word that has to be what it is to be, whatever else is compared.
  void require(const void* at, std::uint64_t value) { required_.push_back({at, value}); }

  // A word that becomes another one with each change of a group of places.
  void add(const void* at, Group group) { added_.push_back({at, group, false}); }

  // The same; it becomes greater than any such word was before.
  void add_growing(const void* at, Group group) { added_.push_back({at, group, true}); }

  // Notes what the words are, once all are added. compare(group): with what it is to be.
  template <class Compare>
  void close(std::size_t groups, const Compare& compare) {
    std::sort(required_.begin(), required_.end(),
              [](const Word& a, const Word& b) { return a.at < b.at; });
    for (const Word& word : required_) add_to_runs(word);
    required_ = {};
    std::sort(added_.begin(), added_.end());
    std::vector<char> is_growing;
    for (std::size_t i = 0; i < added_.size(); ++i) {
      const bool is_new = i == 0 || added_[i].at != added_[i - 1].at;
      if (is_new) {
        words_.push_back({added_[i].at, read_word(added_[i].at)});
        begins_.push_back(static_cast<std::uint32_t>(groups_.size()));
        is_growing.push_back(added_[i].is_growing);
      }
      if (is_new || added_[i].group != added_[i - 1].group) groups_.push_back(added_[i].group);
    }
    begins_.push_back(static_cast<std::uint32_t>(groups_.size()));
    added_ = {};
    std::vector<char> is_told(groups);
    for (Group group = 0; group < groups; ++group) is_told[group] = compare(group) == Found::kSame;
    for (std::size_t i = 0; i < words_.size(); ++i) {
      for (std::uint32_t at = begins_[i]; at < begins_[i + 1]; ++at) {
        if (is_told[groups_[at]]) continue;
        words_[i].value = ~read_word(words_[i].at);
        is_growing[i] = false;
      }
      // A number that grew while the groups were compared is not one of a known state.
      if (is_growing[i] && read_word(words_[i].at) == words_[i].value) {
        newest_ = std::max(newest_, words_[i].value);
        growing_.push(words_[i].at);
        numbers_.push_back(static_cast<std::uint32_t>(i));
      } else {
        valued_.push_back(static_cast<std::uint32_t>(i));
      }
    }
  }

  template <class Compare>
  bool are_same(const Compare& compare) {
    return are_grown_same(compare) && are_valued_same(compare) && are_required_same();
  }

 private:
  struct Word {
    const void* at;
    std::uint64_t value;
  };

  struct Added {
    const void* at;
    Group group;
    bool is_growing;
    bool operator<(const Added& other) const {
      return std::pair(at, group) < std::pair(other.at, other.group);
    }
  };

  // Words one after the other that lie in one line.
  void add_to_runs(const Word& word) {
    const auto address = reinterpret_cast<std::uintptr_t>(word.at);
    const auto last = reinterpret_cast<std::uintptr_t>(last_required_);
    const bool is_next = !values_.empty() && address == last + sizeof(std::uint64_t);
    if (!values_.empty() && address == last && values_.back() == word.value) return;
    if (is_next && address / kLine == last / kLine) {
      ++counts_.back();
    } else {
      runs_.push(word.at);
      counts_.push_back(1);
    }
    values_.push_back(word.value);
    last_required_ = word.at;
  }

  bool are_required_same() const {
    const std::uint64_t* value = values_.data();
    return runs_.all([&](std::size_t run, const char* at) {
      std::uint64_t differing = 0;
      for (std::uint8_t i = 0; i < counts_[run]; ++i) {
        differing |= read_word(at + i * sizeof(std::uint64_t)) ^ *value++;
      }
      return differing == 0;
    });
  }

  template <class Compare>
  bool are_grown_same(const Compare& compare) {
    for (;;) {
      std::size_t place = 0;
      std::uint64_t now = 0;
      const bool is_none_grown = growing_.all([&](std::size_t i, const char* at) {
        place = i;
        return (now = read_word(at)) <= newest_;
      });
      if (is_none_grown) return true;
      const std::uint32_t number = numbers_[place];
      if (!are_groups_same(number, now, compare)) return false;
      // From here on it is compared with a value of its own. Another thread may have come before.
      const auto found = std::find(numbers_.begin(), numbers_.end(), number);
      if (found == numbers_.end()) continue;
      growing_.erase(static_cast<std::size_t>(found - numbers_.begin()));
      numbers_.erase(found);
      valued_.push_back(number);
    }
  }

  template <class Compare>
  bool are_valued_same(const Compare& compare) {
    for (std::size_t i = 0; i < valued_.size(); ++i) {
      if (i + Addresses::kAhead < valued_.size()) {
        __builtin_prefetch(words_[valued_[i + Addresses::kAhead]].at);
      }
      const Word& word = words_[valued_[i]];
      const std::uint64_t now = read_word(word.at);
      if (now != word.value && !are_groups_same(valued_[i], now, compare)) return false;
    }
    return true;
  }

  // What changes while groups are compared, which may let other threads run, is found by the next
  // look: `now` is from before.
  template <class Compare>
  bool are_groups_same(std::size_t i, std::uint64_t now, const Compare& compare) {
    bool is_told = true;
    for (std::uint32_t at = begins_[i]; at < begins_[i + 1]; ++at) {
      const Found found = compare(groups_[at]);
      if (found == Found::kOther) return false;
      is_told &= found == Found::kSame;
    }
    words_[i].value = is_told ? now : ~now;
    return true;
  }

  Addresses growing_;  // of those that only have to be no newer than `newest_`
  std::uint64_t newest_ = 0;
  Addresses runs_;
  std::vector<std::uint8_t> counts_;    // of words in each run
  std::vector<std::uint64_t> values_;   // which they are to have
  std::vector<std::uint32_t> valued_;   // which of `words_` are compared with their values
  std::vector<std::uint32_t> numbers_;  // of those in `growing_`, which of `words_` they are
  std::vector<Word> words_;             // that were added, by address
  std::vector<std::uint32_t> begins_;   // of each one's groups
  std::vector<Group> groups_;
  std::vector<Word> required_;
  std::vector<Added> added_;
  const void* last_required_ = nullptr;
};

}  // namespace oxytorch
