// Memory of the nodes of sets, kept for the next node. std::pmr has this too, but not in the
// libstdc++ of manylinux_2_28.
#pragma once

#include <cstddef>
#include <deque>

namespace oxytorch::memory {

class NodeStore {
 public:
  void* take() {
    if (!spare_) return &all_.emplace_back();
    Node* node = spare_;
    spare_ = node->next;
    return node;
  }
  void give(void* memory) { spare_ = new (memory) Node{spare_}; }

  static constexpr std::size_t kLargest = 48;

 private:
  union Node {
    Node* next = nullptr;
    alignas(std::max_align_t) std::byte memory[kLargest];
  };

  std::deque<Node> all_;
  Node* spare_ = nullptr;
};

// The allocator of a set whose nodes lie in a store that outlives it.
template <class T>
class Nodes {
 public:
  using value_type = T;

  explicit Nodes(NodeStore* store) : store(store) {}
  template <class U>
  Nodes(const Nodes<U>& other) : store(other.store) {}  // NOLINT: a set converts it

  T* allocate(std::size_t) {
    static_assert(sizeof(T) <= NodeStore::kLargest);
    return static_cast<T*>(store->take());
  }
  void deallocate(T* node, std::size_t) { store->give(node); }
  bool operator==(const Nodes&) const = default;

  NodeStore* store;
};

}  // namespace oxytorch::memory
