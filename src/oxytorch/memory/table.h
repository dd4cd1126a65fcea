// Finds a block by the address at which it begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace oxytorch::memory {

// Open addressing, linear probing. Addresses are multiples of 512.
template <typename Value>
class Table {
 public:
  Table() : entries_(1024) {}

  Value* find(const void* key) const {
    for (std::size_t at = home(key);; at = (at + 1) & mask()) {
      if (entries_[at].key == key) return entries_[at].value;
      if (!entries_[at].key) return nullptr;
    }
  }

  // The key must not be there yet.
  void insert(const void* key, Value* value) {
    if ((count_ + 1) * 2 > entries_.size()) grow();
    put(key, value);
    ++count_;
  }

  void erase(const void* key) {
    std::size_t at = home(key);
    while (entries_[at].key != key) at = (at + 1) & mask();
    --count_;
    // Entries behind it move up, so that no search ends early.
    for (std::size_t next = (at + 1) & mask(); entries_[next].key; next = (next + 1) & mask()) {
      const std::size_t wanted = home(entries_[next].key);
      if (((next - wanted) & mask()) < ((next - at) & mask())) continue;
      entries_[at] = entries_[next];
      at = next;
    }
    entries_[at] = {};
  }

  template <typename Function>
  void for_each(Function function) const {
    for (const Entry& entry : entries_)
      if (entry.key) function(entry.value);
  }

  std::size_t size() const { return count_; }

 private:
  struct Entry {
    const void* key = nullptr;
    Value* value = nullptr;
  };

  std::size_t mask() const { return entries_.size() - 1; }
  std::size_t home(const void* key) const {
    const std::uint64_t mixed = (reinterpret_cast<std::uint64_t>(key) >> 9) * 0x9E3779B97F4A7C15u;
    return (mixed >> 32) & mask();
  }
  void put(const void* key, Value* value) {
    std::size_t at = home(key);
    while (entries_[at].key) at = (at + 1) & mask();
    entries_[at] = {key, value};
  }
  void grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    for (const Entry& entry : old)
      if (entry.key) put(entry.key, entry.value);
  }

  std::vector<Entry> entries_;
  std::size_t count_ = 0;
};

}  // namespace oxytorch::memory
