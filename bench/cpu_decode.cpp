// Decoding steps out of a cache on the CPU, and plain reads of the same memory, for bench/cpu_decode.py.
//
// A line of input is answered by a line of JSON:
//
//   cell BATCH SEQLEN QUERIES HEADS HEADS_KV HEAD_DIM PAGE_SIZE THREADS    makes the memory of a cell
//   round NAME MILLISECONDS                                                times NAME for about so long
//
// NAME is `read`, which adds up all bytes of k and v; `contiguous` and `paged`, which attend in bf16; `e4m3`
// or `s8`, paged caches with half as many bytes; `e4m3-contiguous` and `s8-contiguous`. All share one memory:
// pages are those of the contiguous cache in a random order, and 8-bit values lie in the bytes of the bf16
// ones. Times are microseconds of single calls, by the wall clock and in CPU time divided by the threads.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <iostream>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tandem/attention.hpp"

namespace {

using tandem::DType;

struct Cell {
  std::int64_t batch = 0, seqlen = 0, queries = 0, heads = 0, heads_kv = 0, head_dim = 0, page_size = 0;
  int threads = 1;

  std::vector<std::uint16_t> k, v, q, out;
  std::vector<std::int32_t> page_table;
  std::vector<float> scale;
  std::vector<std::byte> workspace;

  [[nodiscard]] std::size_t cache_numbers() const {
    return static_cast<std::size_t>(batch * seqlen * heads_kv * head_dim);
  }
  void fill();
  [[nodiscard]] tandem::ForwardArgs args(DType keys, bool paged);
};

/// bf16 numbers between 2^-7 and 2 whose bytes are moderate e4m3 and s8 values, too.
void fill_numbers(std::vector<std::uint16_t>& numbers, std::uint64_t state) {
  for (std::uint16_t& number : numbers) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const auto bits = static_cast<std::uint16_t>(state >> 48);
    number = static_cast<std::uint16_t>(0x3C00U | (bits & 0x83BFU));
  }
}

void Cell::fill() {
  k.resize(cache_numbers());
  v.resize(cache_numbers());
#pragma omp parallel sections num_threads(2)
  {
#pragma omp section
    fill_numbers(k, 1);
#pragma omp section
    fill_numbers(v, 2);
  }
  q.resize(static_cast<std::size_t>(batch * queries * heads * head_dim));
  out.resize(q.size());
  fill_numbers(q, 3);
  scale = {1.0F / 64.0F};
  page_table.resize(static_cast<std::size_t>(batch * seqlen / page_size));
  std::iota(page_table.begin(), page_table.end(), 0);
}

tandem::ForwardArgs Cell::args(DType keys, bool paged) {
  tandem::ForwardArgs a;
  const std::int64_t pages = batch * seqlen / page_size;
  a.q = {q.data(), DType::bf16, {batch, queries, heads, head_dim}};
  a.out = {out.data(), DType::bf16, {batch, queries, heads, head_dim}};
  if (paged) {
    a.k = {k.data(), keys, {pages, page_size, heads_kv, head_dim}};
    a.v = {v.data(), keys, {pages, page_size, heads_kv, head_dim}};
    a.page_table = {page_table.data(), DType::i32, {batch, seqlen / page_size}};
  } else {
    a.k = {k.data(), keys, {batch, seqlen, heads_kv, head_dim}};
    a.v = {v.data(), keys, {batch, seqlen, heads_kv, head_dim}};
  }
  if (keys != DType::bf16) a.k_scale = a.v_scale = {scale.data(), DType::f32, {1}};
  a.options.causal = true;
  return a;
}

/// The sum of all words, on all threads. Four accumulators of whole cache lines keep several lines in flight.
std::uint64_t read_all(const std::vector<std::uint16_t>& numbers, int threads) {
  constexpr std::int64_t words = 32;
  const auto* const data = reinterpret_cast<const std::uint64_t*>(numbers.data());
  const auto count = static_cast<std::int64_t>(numbers.size() / 4 / words);
  std::uint64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    std::uint64_t sums[words] = {};
#pragma omp for schedule(static) nowait
    for (std::int64_t i = 0; i < count; ++i) {
#pragma omp simd
      for (std::int64_t j = 0; j < words; ++j) sums[j] += data[i * words + j];
    }
    for (const std::uint64_t sum : sums) total += sum;
  }
  return total;
}

double seconds_of(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

std::uint64_t kept = 0;  ///< what is read is printed at the end, so that it is not optimised away

void run(Cell& cell, const std::string& name) {
  if (name == "read") {
    kept += read_all(cell.k, cell.threads) + read_all(cell.v, cell.threads);
    return;
  }
  const DType keys = name.starts_with("e4m3") ? DType::e4m3
                     : name.starts_with("s8") ? DType::s8
                                              : DType::bf16;
  tandem::Execution execution{.threads = cell.threads};
  const tandem::ForwardArgs args = cell.args(keys, !name.ends_with("contiguous"));
  const std::size_t bytes = tandem::workspace_bytes(args, execution);
  if (cell.workspace.size() < bytes + 256) cell.workspace.resize(bytes + 256);
  const auto address = reinterpret_cast<std::uintptr_t>(cell.workspace.data());
  execution.workspace = cell.workspace.data() + (256 - address % 256);
  execution.workspace_bytes = bytes;
  tandem::forward(args, execution);
}

void round(Cell& cell, const std::string& name, double milliseconds) {
  std::vector<double> wall, cpu;
  const double end = seconds_of(CLOCK_MONOTONIC) + 1e-3 * milliseconds;
  do {
    const double wall_start = seconds_of(CLOCK_MONOTONIC);
    const double cpu_start = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    run(cell, name);
    cpu.push_back(1e6 * (seconds_of(CLOCK_PROCESS_CPUTIME_ID) - cpu_start) / cell.threads);
    wall.push_back(1e6 * (seconds_of(CLOCK_MONOTONIC) - wall_start));
  } while (seconds_of(CLOCK_MONOTONIC) < end);
  fmt::print("{{\"wall\": [{:.3f}], \"cpu\": [{:.3f}]}}\n", fmt::join(wall, ", "), fmt::join(cpu, ", "));
}

/// Makes the cell; whether pages in order have the bits of the contiguous cache. They are then shuffled.
bool make(Cell& cell) {
  cell.fill();
  run(cell, "contiguous");
  const std::vector<std::uint16_t> want = cell.out;
  std::fill(cell.out.begin(), cell.out.end(), std::uint16_t{0xFFFF});
  run(cell, "paged");
  std::shuffle(cell.page_table.begin(), cell.page_table.end(), std::mt19937(1));
  return want == cell.out;
}

}  // namespace

int main() {
  Cell cell;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string what, name;
    in >> what;
    if (what == "cell") {
      cell = {};
      in >> cell.batch >> cell.seqlen >> cell.queries >> cell.heads >> cell.heads_kv >> cell.head_dim >>
          cell.page_size >> cell.threads;
      const bool right = make(cell);
      fmt::print("{{\"bytes\": {}, \"right\": {}}}\n", 4 * cell.cache_numbers(), right);
    } else {
      double milliseconds = 0.0;
      in >> name >> milliseconds;
      round(cell, name, milliseconds);
    }
    std::fflush(stdout);
  }
  fmt::print("{}\n", kept % 10);
  return 0;
}
