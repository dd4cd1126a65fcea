// Asks the processor and the system what they support. Built without any instruction-set flag.
#include "core/levels.h"
#include "oxytorch_levels.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace oxytorch::probe {
namespace {

// Linux, arch/x86/include/uapi/asm/prctl.h.
constexpr int kGetSupportedState = 0x1021;
constexpr int kRequestPermission = 0x1023;
constexpr int kTileData = 18;

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// XCR0: which register states the system saves when it switches threads.
std::uint64_t saved_states(const Registers& leaf1) {
  if (!(leaf1.ecx >> 27 & 1)) return 0;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

bool tiles_offered() {
  std::uint64_t states = 0;
  return syscall(SYS_arch_prctl, kGetSupportedState, &states) == 0 && (states >> kTileData & 1);
}

}  // namespace

std::uint32_t supported_levels() {
  const Registers leaf1 = cpuid(1, 0);
  const Registers leaf7 = cpuid(7, 0);
  const Registers leaf7_1 = cpuid(7, 1);
  const Registers extended = cpuid(0x80000001, 0);
  const std::uint64_t saved = saved_states(leaf1);

  const bool os_avx = (saved & 0x6) == 0x6;
  const bool os_avx512 = (saved & 0xe6) == 0xe6;
  const bool os_amx = (saved & 0x60000) == 0x60000 && tiles_offered();
  const bool sse3 = leaf1.ecx & 1u << 0;
  const bool ssse3 = leaf1.ecx & 1u << 9;
  const bool fma = leaf1.ecx & 1u << 12;
  const bool cx16 = leaf1.ecx & 1u << 13;
  const bool sse4_1 = leaf1.ecx & 1u << 19;
  const bool sse4_2 = leaf1.ecx & 1u << 20;
  const bool movbe = leaf1.ecx & 1u << 22;
  const bool popcnt = leaf1.ecx & 1u << 23;
  const bool avx = leaf1.ecx & 1u << 28;
  const bool f16c = leaf1.ecx & 1u << 29;
  const bool lzcnt = extended.ecx & 1u << 5;
  const bool bmi1 = leaf7.ebx & 1u << 3;
  const bool avx2 = leaf7.ebx & 1u << 5;
  const bool bmi2 = leaf7.ebx & 1u << 8;
  const bool avx512f = leaf7.ebx & 1u << 16;
  const bool avx512dq = leaf7.ebx & 1u << 17;
  const bool avx512cd = leaf7.ebx & 1u << 28;
  const bool avx512bw = leaf7.ebx & 1u << 30;
  const bool avx512vl = leaf7.ebx & 1u << 31;
  const bool avx512_vnni = leaf7.ecx & 1u << 11;
  const bool amx_bf16 = leaf7.edx & 1u << 22;
  const bool avx512_fp16 = leaf7.edx & 1u << 23;
  const bool amx_tile = leaf7.edx & 1u << 24;
  const bool amx_int8 = leaf7.edx & 1u << 25;
  const bool avx_vnni = leaf7_1.eax & 1u << 4;
  const bool avx512_bf16 = leaf7_1.eax & 1u << 5;

  std::uint32_t result = 0;
  int index = 0;
#define OXY_FEATURE(feature) &&feature
#define OXY_LEVEL_ROW(level, implied, has, features) \
  if (true features) result |= 1u << index;          \
  ++index;
  OXY_LEVEL_TABLE(OXY_LEVEL_ROW, OXY_FEATURE)
#undef OXY_LEVEL_ROW
#undef OXY_FEATURE
  return result;
}

bool request_tiles() { return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0; }

}  // namespace oxytorch::probe

#else

namespace oxytorch::probe {

std::uint32_t supported_levels() { return 1; }

bool request_tiles() { return false; }

}  // namespace oxytorch::probe

#endif
