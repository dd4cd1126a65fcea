#include "core/verbose.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "core/export.h"
#include "core/levels.h"

namespace oxytorch::verbose {

std::atomic<bool> is_on{false};

namespace {

thread_local Call* current = nullptr;
// What the calls of this thread belong to: a number, or nothing.
thread_local std::string label;

// Lines in the order in which calls ended: the label and a tab, and then oneDNN's as it writes
// them, or ours, whose fields are divided by tabs.
struct Notes {
  std::mutex mutex;
  std::vector<std::string> lines;
};

Notes& notes() {
  static auto* const all = new Notes;  // for threads that outlive static objects
  return *all;
}

void note(const std::string& line) {
  std::string labelled = label + '\t' + line;
  const std::lock_guard lock(notes().mutex);
  notes().lines.push_back(std::move(labelled));
}

#if defined(__GLIBC__)

// oneDNN prints to C's standard output and to nothing else. While calls are noted that is a stream
// of ours, which keeps oneDNN's lines and passes on the others.
FILE* real_output = nullptr;

ssize_t take(void*, const char* text, std::size_t size) {
  static constexpr std::string_view kMark = "onednn_verbose,";
  static std::string line;  // the stream is locked
  for (const char* at = text; at != text + size; ++at) {
    line += *at;
    if (*at != '\n') continue;
    if (line.starts_with(kMark)) {
      line.pop_back();
      note(line);
    } else {
      std::fwrite(line.data(), 1, line.size(), real_output);
    }
    line.clear();
  }
  // What cannot become a line of oneDNN's does not wait for its end: it may be a prompt.
  const std::size_t seen = std::min(line.size(), kMark.size());
  if (line.compare(0, seen, kMark.substr(0, seen)) != 0) {
    std::fwrite(line.data(), 1, line.size(), real_output);
    line.clear();
  }
  std::fflush(real_output);
  return static_cast<ssize_t>(size);
}

void take_output() {
  // Never closed: another thread may be about to print to it.
  static FILE* const ours = [] {
    cookie_io_functions_t functions{};
    functions.write = take;
    FILE* stream = fopencookie(nullptr, "w", functions);
    if (stream) std::setvbuf(stream, nullptr, _IOLBF, 0);
    return stream;
  }();
  if (!ours) return;
  std::fflush(stdout);
  real_output = std::exchange(stdout, ours);
}

void give_output_back() {
  if (!real_output) return;
  std::fflush(stdout);
  stdout = std::exchange(real_output, nullptr);
}

#else

void take_output() {}
void give_output_back() {}

#endif

}  // namespace

void Call::begin() {
  outer_ = std::exchange(current, this);
  start_ = std::chrono::steady_clock::now();
}

void Call::takes(const std::string& shape) {
  if (!shapes_.empty()) shapes_ += ' ';
  shapes_ += shape;
  start_ = std::chrono::steady_clock::now();
}

void Call::ran(const char* kernel, const char* level) {
  level_ = level;
  const std::string name = kernel;
  const std::string all = ' ' + kernels_ + ' ';
  if (all.find(' ' + name + ' ') != std::string::npos) return;
  if (!kernels_.empty()) kernels_ += ' ';
  kernels_ += name;
}

void Call::end() {
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start_;
  current = outer_;
  char time[32];
  std::snprintf(time, sizeof time, "%.3f", took.count());
  note(std::string("oxytorch\t") + op_ + '\t' + kernels_ + '\t' + level_ + '\t' + shapes_ + '\t' +
       time);
}

void note_kernel(const char* kernel, int level) {
  if (current) current->ran(kernel, oxytorch_level_name(level));
}

}  // namespace oxytorch::verbose

OXY_EXPORT void oxytorch_verbose_begin() {
  oxytorch::verbose::take_output();
  oxytorch::verbose::is_on.store(true, std::memory_order_relaxed);
}

OXY_EXPORT void oxytorch_verbose_end() {
  oxytorch::verbose::is_on.store(false, std::memory_order_relaxed);
  oxytorch::verbose::give_output_back();
}

// A number that stands before the lines of this thread's calls from here on; none where negative.
OXY_EXPORT void oxytorch_verbose_label(std::int64_t number) {
  oxytorch::verbose::label = number < 0 ? std::string() : std::to_string(number);
}

// All lines since the last call, each with its end; valid until the next call.
OXY_EXPORT const char* oxytorch_verbose_lines() {
  static std::string text;
  std::vector<std::string> lines;
  {
    const std::lock_guard lock(oxytorch::verbose::notes().mutex);
    lines.swap(oxytorch::verbose::notes().lines);
  }
  text.clear();
  for (const std::string& line : lines) text += line + '\n';
  return text.c_str();
}
