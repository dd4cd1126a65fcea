// Products of bfloat16 in the tile registers of AMX, two by two of them as kernels take them: what
// no kernel of this machine can exceed, by where the operands lie, and what storing the sums costs.
//
//   g++ -O2 -march=sapphirerapids -pthread benchmarks/tile_limits.cpp -o limits && ./limits
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr long kPermission = 0x1023, kTileData = 18;
constexpr long kTile = 1024, kStep = 2 * kTile;  // bytes; of a step, two tiles of an operand

struct alignas(64) Configuration {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct Operand {
  char* data;
  long bytes;  // after which it begins again
};

Operand random_operand(long bytes) {
  auto* data = static_cast<std::uint16_t*>(std::aligned_alloc(4096, bytes));
  std::uint32_t state = 1;
  for (long i = 0; i < bytes / 2; ++i) {
    state = state * 1664525 + 1013904223;
    data[i] = static_cast<std::uint16_t>(0x3f00 | (state >> 16 & 0x80ff));
  }
  return {reinterpret_cast<char*>(data), bytes};
}

void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// block: steps after which sums begin again, and are stored if `stores`. again: how often a block
// of b is read before the next one, as panels are for all rows.
template <bool loads, bool stores>
void multiply(long steps, Operand a, Operand b, long block, long again, char* sums) {
  Configuration configuration;
  asm volatile("" : : "r"(&configuration) : "memory");
  _tile_loadconfig(&configuration);
  clear_sums();
  _tile_loadd(4, a.data, 64);
  _tile_loadd(5, a.data + kTile, 64);
  _tile_loadd(6, b.data, 64);
  _tile_loadd(7, b.data + kTile, 64);
  long at_a = 0, at_b = 0, left = block, times = again;
  for (; steps > 0; --steps) {
    if (loads) {
      _tile_loadd(6, b.data + at_b, 64);
      _tile_loadd(4, a.data + at_a, 64);
    }
    _tile_dpbf16ps(0, 4, 6);
    if (loads) _tile_loadd(7, b.data + at_b + kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (loads) _tile_loadd(5, a.data + at_a + kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    at_a += kStep, at_b += kStep;
    if (at_a >= a.bytes) at_a = 0;
    if (--left > 0) continue;
    left = block;
    if (--times > 0) {
      at_b -= block * kStep;
    } else {
      times = again;
      if (at_b >= b.bytes) at_b = 0;
    }
    if (stores) {
      _tile_stored(0, sums, 128);
      _tile_stored(1, sums + 64, 128);
      _tile_stored(2, sums + 2048, 128);
      _tile_stored(3, sums + 2048 + 64, 128);
    }
    clear_sums();
  }
  _tile_release();
}

template <bool loads, bool stores>
void show(const char* name, long a_steps, long b_steps, long block, long again) {
  for (int threads : {1, static_cast<int>(std::thread::hardware_concurrency())}) {
    constexpr long kSteps = 400'000;
    double least = 1e9;
    std::vector<Operand> a, b;
    for (int i = 0; i < threads; ++i) {
      a.push_back(random_operand(a_steps * kStep)), b.push_back(random_operand(b_steps * kStep));
    }
    for (int round = 0; round < 5; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      std::vector<std::thread> all;
      for (int i = 0; i < threads; ++i) {
        all.emplace_back([&, i] {
          alignas(64) char sums[4 * kTile] = {};
          multiply<loads, stores>(kSteps, a[i], b[i], block, again, sums);
        });
      }
      for (std::thread& each : all) each.join();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      least = std::min(least, taken.count());
    }
    for (Operand& each : a) std::free(each.data);
    for (Operand& each : b) std::free(each.data);
    const double products = 4.0 * 16 * 16 * 32 * 2 * kSteps * threads;
    std::printf("%-62s %2d threads: %.2f trillion operations a second\n", name, threads,
                products / least / 1e12);
  }
}

}  // namespace

int main() {
  if (syscall(SYS_arch_prctl, kPermission, kTileData) != 0) return 1;
  show<false, false>("in registers", 8, 8, 8, 1);
  show<true, false>("both from the first cache", 8, 8, 8, 1);
  show<true, false>("one from the first cache, one from the second", 8, 576, 8, 1);
  show<true, false>("both from the second cache", 96, 576, 576, 1);
  show<true, true>("both from the first cache, sums stored every 12 steps", 12, 12, 12, 1);
  show<true, true>("rows from the second, panels four times, stored every 12", 96, 576, 12, 4);
  show<true, true>("rows from the second, panels four times, stored every 24", 96, 576, 24, 4);
}
