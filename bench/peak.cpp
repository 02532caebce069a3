#include "peak.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <numeric>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tandem::bench {
namespace {

// Twelve chains hide the latency of 4 (f32) and 6 (bf16) cycles at two instructions a cycle, and fit 16
// registers.
constexpr int chains = 12;
// About 50 us a run: long against the clock's resolution, short against a scheduler's time slice.
constexpr int rounds = 20'000;

using Kernel = float (*)(float);

// A chain converges to b / (1 - a), so no value leaves the normal range, whatever the number of rounds.
constexpr float slope = 0.5F;

struct Variant {
  const char* name;
  Kernel kernel;
  double flops_per_instruction;
};

#if defined(__x86_64__)
[[gnu::target("avx512f")]] float f32_avx512(float seed) {
  __m512 sum[chains];
  std::fill_n(sum, chains, _mm512_set1_ps(seed));
  const __m512 a = _mm512_set1_ps(seed * slope);
  for (int r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (auto& s : sum) s = _mm512_fmadd_ps(s, a, a);
  }
  for (const auto& s : sum) sum[0] = _mm512_add_ps(sum[0], s);
  return _mm512_cvtss_f32(sum[0]);
}

[[gnu::target("avx2,fma")]] float f32_avx2(float seed) {
  __m256 sum[chains];
  std::fill_n(sum, chains, _mm256_set1_ps(seed));
  const __m256 a = _mm256_set1_ps(seed * slope);
  for (int r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (auto& s : sum) s = _mm256_fmadd_ps(s, a, a);
  }
  for (const auto& s : sum) sum[0] = _mm256_add_ps(sum[0], s);
  return _mm256_cvtss_f32(sum[0]);
}

[[gnu::target("avx512f,avx512bf16")]] float bf16_avx512(float seed) {
  __m512 sum[chains];
  std::fill_n(sum, chains, _mm512_set1_ps(seed));
  const __m512 value = _mm512_set1_ps(seed * slope);
  const __m512bh a = _mm512_cvtne2ps_pbh(value, value);
  for (int r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (auto& s : sum) s = _mm512_dpbf16_ps(s, a, a);
  }
  for (const auto& s : sum) sum[0] = _mm512_add_ps(sum[0], s);
  return _mm512_cvtss_f32(sum[0]);
}
#endif

// Vectors of four, which the compiler maps to SSE2 or NEON; contraction to one instruction is allowed for
// this file.
float f32_portable(float seed) {
  using Vector [[gnu::vector_size(16)]] = float;
  Vector sum[chains];
  std::fill_n(sum, chains, Vector{seed, seed, seed, seed});
  const Vector a = sum[0] * slope;
  for (int r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (auto& s : sum) s = s * a + a;
  }
  for (const auto& s : sum) sum[0] += s;
  return sum[0][0];
}

Variant f32_variant() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {"avx512f", f32_avx512, 32.0};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {"avx2+fma", f32_avx2, 16.0};
#endif
  return {"portable", f32_portable, 8.0};
}

Variant bf16_variant() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) return {"avx512bf16", bf16_avx512, 64.0};
#endif
  return {"none", nullptr, 0.0};
}

// The best run of this thread within `seconds` of wall time, in GFLOP/s.
double best_of_thread(const Variant& variant, double seconds) {
  volatile float seed = 1.0F;
  double best = 0.0;
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  std::chrono::duration<double> elapsed{};
  do {
    const auto start = Clock::now();
    seed = std::clamp(variant.kernel(seed), 0.5F, 1.0F);
    const auto now = Clock::now();
    const double time = std::chrono::duration<double>(now - start).count();
    const double flops = variant.flops_per_instruction * chains * rounds;
    best = std::max(best, time > 0.0 ? 1e-9 * flops / time : 0.0);
    elapsed = now - begin;
  } while (elapsed.count() < seconds);
  return best;
}

double measure(const Variant& variant, int threads, double seconds) {
  if (variant.kernel == nullptr) return 0.0;
  std::vector<double> best(static_cast<std::size_t>(threads));
  std::vector<std::jthread> pool;
  pool.reserve(best.size());
  for (double& b : best) pool.emplace_back([&b, &variant, seconds] { b = best_of_thread(variant, seconds); });
  pool.clear();  // joins
  return std::accumulate(best.begin(), best.end(), 0.0);
}

}  // namespace

Peak measure_peak(int threads, double seconds) {
  threads = std::max(threads, 1);
  const Variant f32 = f32_variant();
  Peak peak;
  peak.threads = threads;
  peak.f32_gflops = measure(f32, threads, seconds);
  peak.bf16_gflops = measure(bf16_variant(), threads, seconds);
  peak.f32_instructions = f32.name;
  return peak;
}

}  // namespace tandem::bench
