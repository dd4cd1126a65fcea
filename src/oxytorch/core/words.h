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

// A look at them reads little else, since a model's weights push all of it out of the caches.
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
  void add(const void* at, Group group) { added_.push_back({at, group}); }

  // Notes what the words are, once all are added. compare(group): with what it is to be.
  template <class Compare>
  void close(std::size_t groups, const Compare& compare) {
    std::sort(required_.begin(), required_.end(),
              [](const Word& a, const Word& b) { return a.at < b.at; });
    std::sort(added_.begin(), added_.end());
    for (std::size_t i = 0; i < added_.size(); ++i) {
      const bool is_new = i == 0 || added_[i].first != added_[i - 1].first;
      if (is_new) {
        words_.push_back({added_[i].first, read_word(added_[i].first)});
        begins_.push_back(static_cast<std::uint32_t>(groups_.size()));
      }
      if (is_new || added_[i].second != added_[i - 1].second) groups_.push_back(added_[i].second);
    }
    begins_.push_back(static_cast<std::uint32_t>(groups_.size()));
    added_ = {};
    std::vector<char> is_told(groups);
    for (Group group = 0; group < groups; ++group) is_told[group] = compare(group) == Found::kSame;
    for (std::size_t i = 0; i < words_.size(); ++i) {
      for (std::uint32_t at = begins_[i]; at < begins_[i + 1]; ++at) {
        if (!is_told[groups_[at]]) words_[i].value = ~read_word(words_[i].at);
      }
    }
  }

  template <class Compare>
  bool are_same(const Compare& compare) {
    for (std::size_t i = 0; i < words_.size(); ++i) {
      if (i + kAhead < words_.size()) __builtin_prefetch(words_[i + kAhead].at);
      const std::uint64_t now = read_word(words_[i].at);
      if (now != words_[i].value && !are_groups_same(i, now, compare)) return false;
    }
    for (std::size_t i = 0; i < required_.size(); ++i) {
      if (i + kAhead < required_.size()) __builtin_prefetch(required_[i + kAhead].at);
      if (read_word(required_[i].at) != required_[i].value) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kAhead = 64;

  struct Word {
    const void* at;
    std::uint64_t value;
  };

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
    if (is_told) words_[i].value = now;
    return true;
  }

  std::vector<std::pair<const void*, Group>> added_;
  std::vector<Word> words_;            // by address
  std::vector<std::uint32_t> begins_;  // of each one's groups
  std::vector<Group> groups_;
  std::vector<Word> required_;  // by address
};

}  // namespace oxytorch
