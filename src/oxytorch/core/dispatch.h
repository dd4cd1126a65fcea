// How a kernel is declared once and called at the active level.
#pragma once

#include <cstdint>

namespace oxytorch {

// Works on the items [begin, end) of a call described by Args; items are independent.
template <class Args>
using Kernel = void (*)(const Args&, std::int64_t begin, std::int64_t end);

// Index of the level whose code ran last in this process; tests read it.
extern int last_level;

}  // namespace oxytorch

// A kernel of its op's name; OXY_KERNEL_OF takes another name. `op` is the folder of the
// kernel.cpp.
#define OXY_KERNEL(op, Args) OXY_KERNEL_OF(op, op, Args)

// OXY_LEVEL is the namespace of one op's code at one level, such as avx2::attention. All that a
// kernel.cpp includes lies in it too, so that no two object files define the same function.
#if defined(OXY_LEVEL)

// In a kernel.cpp: declares the kernel to be defined there, and the entry that the table points to.
#define OXY_KERNEL_OF(op, name, Args)                                            \
  namespace oxytorch::OXY_LEVEL {                                                \
  static void name(const Args&, std::int64_t, std::int64_t);                     \
  void name##_at_level(const Args& args, std::int64_t begin, std::int64_t end) { \
    if (__atomic_load_n(&last_level, __ATOMIC_RELAXED) != OXY_LEVEL_INDEX) {     \
      __atomic_store_n(&last_level, OXY_LEVEL_INDEX, __ATOMIC_RELAXED);          \
    }                                                                            \
    name(args, begin, end);                                                      \
  }                                                                              \
  }

#else

// Not above: kernels are not compiled again where another level is built too.
#include "oxytorch_levels.h"

namespace oxytorch {

// A kernel's name, and what was compiled of it for each level.
template <class Args>
struct Copies {
  const char* name;
  Kernel<Args> at_level[OXY_LEVEL_COUNT];
};

}  // namespace oxytorch

#define OXY_DECLARE_COPY(level, op, name, Args)                  \
  namespace oxytorch::level::op {                                \
  void name##_at_level(const Args&, std::int64_t, std::int64_t); \
  }
#define OXY_LIST_COPY(level, op, name, Args) level::op::name##_at_level,
#define OXY_LIST_NONE(level, op, name, Args) nullptr,

// Elsewhere: declares the copies and `name_copies`, which has them by level; a level that is not
// built is never the active one.
#define OXY_KERNEL_OF(op, name, Args)                                           \
  OXY_FOR_EACH_LEVEL(OXY_DECLARE_COPY, op, name, Args)                          \
  namespace oxytorch {                                                          \
  inline constexpr Copies<Args> name##_copies{                                  \
      #name, {OXY_FOR_EACH_ROW(OXY_LIST_COPY, OXY_LIST_NONE, op, name, Args)}}; \
  }

#endif
