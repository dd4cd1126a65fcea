// Products of bytes, of pairs of bfloat16 and of float32 in registers alone, on one core and on
// all: what no kernel of this machine can exceed. Needs AVX512_VNNI and AVX512_BF16.
//
//   g++ -O2 -march=native -pthread benchmarks/product_limits.cpp -o limits && ./limits
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

// Sixteen independent sums, which stay in the registers: compilers spill those of intrinsics.
#define SUMS(op)                                                                                  \
  op "%%zmm30,%%zmm31,%%zmm0\n" op "%%zmm30,%%zmm31,%%zmm1\n" op "%%zmm30,%%zmm31,%%zmm2\n" op    \
     "%%zmm30,%%zmm31,%%zmm3\n" op "%%zmm30,%%zmm31,%%zmm4\n" op "%%zmm30,%%zmm31,%%zmm5\n" op    \
     "%%zmm30,%%zmm31,%%zmm6\n" op "%%zmm30,%%zmm31,%%zmm7\n" op "%%zmm30,%%zmm31,%%zmm8\n" op    \
     "%%zmm30,%%zmm31,%%zmm9\n" op "%%zmm30,%%zmm31,%%zmm10\n" op "%%zmm30,%%zmm31,%%zmm11\n" op  \
     "%%zmm30,%%zmm31,%%zmm12\n" op "%%zmm30,%%zmm31,%%zmm13\n" op "%%zmm30,%%zmm31,%%zmm14\n" op \
     "%%zmm30,%%zmm31,%%zmm15\n"
#define LOOP(name, op)                                                                            \
  void name(long turns) {                                                                         \
    asm volatile("vpxord %%zmm30,%%zmm30,%%zmm30\nvpxord %%zmm31,%%zmm31,%%zmm31\n1:\n" SUMS(     \
                     op) "dec %0\njnz 1b\n"                                                       \
                 : "+r"(turns)::"zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7",   \
                   "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15", "zmm30", \
                   "zmm31", "cc");                                                                \
  }
LOOP(bytes, "vpdpbusd ")
LOOP(pairs, "vdpbf16ps ")
LOOP(floats, "vfmadd231ps ")

static void show(const char* name, void (*loop)(long), double operations, int threads) {
  constexpr long kTurns = 20'000'000;
  double least = 1e9;
  for (int round = 0; round < 5; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i) all.emplace_back(loop, kTurns);
    for (std::thread& each : all) each.join();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    least = std::min(least, taken.count());
  }
  const double rate = 16 * operations * kTurns * threads / least / 1e12;
  std::printf("%s, %d threads: %.2f trillion operations a second\n", name, threads, rate);
}

int main() {
  const int all = static_cast<int>(std::thread::hardware_concurrency());
  for (const int threads : {1, all}) {
    show("bytes", bytes, 128, threads);
    show("pairs of bfloat16", pairs, 64, threads);
    show("float32", floats, 32, threads);
  }
}
