// What `oxytorch.verbose` tells: calls of ops, and the lines that oneDNN prints between them.
#pragma once

#include <atomic>
#include <chrono>
#include <string>

namespace oxytorch::verbose {

// Whether calls are noted; all that they cost otherwise is to look here.
extern std::atomic<bool> is_on;

inline bool on() { return is_on.load(std::memory_order_relaxed); }

// One call of an op. It is noted when it ends, if notes were wanted when it began.
class Call {
 public:
  explicit Call(const char* op) : op_(on() ? op : nullptr) {
    if (op_) [[unlikely]] {
      begin();
    }
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    if (op_) [[unlikely]] {
      end();
    }
  }

  bool is_noted() const { return op_ != nullptr; }
  // Adds an argument's shape; time is counted from the last one on.
  void takes(const std::string& shape);
  void ran(const char* kernel, const char* level);

 private:
  void begin();
  void end();

  const char* op_;
  Call* outer_ = nullptr;
  const char* level_ = "-";
  std::string kernels_, shapes_;
  std::chrono::steady_clock::time_point start_;
};

// Notes a kernel in the call that this thread is in.
void note_kernel(const char* kernel, int level);

}  // namespace oxytorch::verbose
