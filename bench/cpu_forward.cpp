// The CPU forward pass of one shape: GFLOP/s on one thread, and as a share of the measured peak.
//
//   cpu_forward --dtype bf16 --seqlen 2048 --head-dim 128 --causal
//
// Times are CPU time of the thread, the best of many runs: neighbours on the machine disturb neither.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <random>
#include <vector>

#include "api/problem.hpp"
#include "cpu/convert.hpp"
#include "cpu/cpu.hpp"
#include "peak.hpp"

namespace {

struct Shape {
  std::string dtype = "f32";
  std::int64_t batch = 1, heads = 1, heads_kv = 0, seqlen_q = 1024, seqlen_k = 0, head_dim = 128,
               head_dim_v = 0;
  bool causal = false;
  bool by_rows = false;
  std::int64_t window = -1;
  int block_q = 0, block_k = 0;
  double seconds = 0.5;
};

double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

tandem::DType parse_dtype(const std::string& name) {
  using tandem::DType;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3}) {
    if (name == name_of(dtype)) return dtype;
  }
  throw CLI::ValidationError("--dtype", name + " is not f32, f16, bf16 or e4m3");
}

/// A random tensor (batch, rows, heads, dim), heads outside rows in memory unless `by_rows`.
struct Buffer {
  std::vector<std::byte> bytes;
  tandem::Tensor view;
  Buffer(tandem::DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t heads, std::int64_t dim,
         bool by_rows, std::mt19937& random) {
    const std::int64_t n = batch * rows * heads * dim;
    bytes.resize(static_cast<std::size_t>(n) * size_of(dtype) + 64);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < n; ++i) tandem::store_from_f32(bytes.data(), dtype, i, normal(random));
    view = tandem::Tensor(bytes.data(), dtype, {batch, rows, heads, dim});
    if (!by_rows) view.stride = {heads * rows * dim, dim, rows * dim, 1};
  }
};

}  // namespace

int main(int argc, char** argv) {
  using namespace tandem;
  Shape s;
  CLI::App app{"Times the CPU forward pass of one shape on one thread"};
  app.add_option("--dtype", s.dtype, "f32, f16, bf16 or e4m3")->capture_default_str();
  app.add_option("--batch", s.batch)->capture_default_str();
  app.add_option("--heads", s.heads, "query heads")->capture_default_str();
  app.add_option("--heads-kv", s.heads_kv, "KV heads (default: as many as query heads)");
  app.add_option("--seqlen", s.seqlen_q, "queries")->capture_default_str();
  app.add_option("--seqlen-k", s.seqlen_k, "keys (default: as many as queries)");
  app.add_option("--head-dim", s.head_dim)->capture_default_str();
  app.add_option("--head-dim-v", s.head_dim_v, "default: --head-dim");
  app.add_flag("--causal", s.causal);
  app.add_option("--window", s.window, "sliding window to the left");
  app.add_flag("--by-rows", s.by_rows,
               "(batch, seqlen, heads, head_dim) in memory, not (batch, heads, seqlen, head_dim)");
  app.add_option("--block-q", s.block_q, "overrides the tile");
  app.add_option("--block-k", s.block_k, "overrides the tile");
  app.add_option("--seconds", s.seconds, "time to spend")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  if (s.heads_kv == 0) s.heads_kv = s.heads;
  if (s.seqlen_k == 0) s.seqlen_k = s.seqlen_q;
  if (s.head_dim_v == 0) s.head_dim_v = s.head_dim;

  std::mt19937 random(1);
  const DType dtype = parse_dtype(s.dtype);
  const Buffer q(dtype, s.batch, s.seqlen_q, s.heads, s.head_dim, s.by_rows, random);
  const Buffer k(dtype, s.batch, s.seqlen_k, s.heads_kv, s.head_dim, s.by_rows, random);
  const Buffer v(dtype, s.batch, s.seqlen_k, s.heads_kv, s.head_dim_v, s.by_rows, random);
  const Buffer out(dtype == DType::e4m3 ? DType::bf16 : dtype, s.batch, s.seqlen_q, s.heads, s.head_dim_v,
                   s.by_rows, random);
  ForwardArgs args;
  args.q = q.view;
  args.k = k.view;
  args.v = v.view;
  args.out = out.view;
  args.options.causal = s.causal;
  args.options.window_left = s.window;

  const Problem problem = make_problem(args);
  cpu::Config config = cpu::choose(problem, 1);
  if (s.block_q > 0) config.block_q = s.block_q;
  if (s.block_k > 0) config.block_k = s.block_k;
  std::vector<std::byte> workspace(cpu::workspace_bytes(problem, config));

  double best = 1e30;
  const double start = thread_seconds();
  int runs = 0;
  while (runs < 3 || thread_seconds() - start < s.seconds) {
    const double begin = thread_seconds();
    cpu::forward(problem, config, workspace);
    best = std::min(best, thread_seconds() - begin);
    ++runs;
  }

  double pairs = 0.0;  // visible (query, key) pairs
  for (std::int64_t i = 0; i < s.seqlen_q; ++i) {
    const KeyRange r = visible_keys(problem, i, s.seqlen_q, s.seqlen_k);
    pairs += static_cast<double>(std::max<std::int64_t>(0, r.last - r.first));
  }
  const double flops = 2.0 * static_cast<double>(s.batch * s.heads * (s.head_dim + s.head_dim_v)) * pairs;
  const bench::Peak peak = bench::measure_peak(1);
  const bool dots = dtype == DType::bf16 && config.target == cpu::Target::avx512_bf16;
  const double limit = dots ? peak.bf16_gflops : peak.f32_gflops;
  fmt::print(
      "{} {} b {} h {}/{} sq {} sk {} d {}/{}{}: {:.3f} ms, {:.1f} GFLOP/s, {:.1f} % of {:.0f} (block {} x "
      "{}, best of {})\n",
      name_of(config.target), s.dtype, s.batch, s.heads, s.heads_kv, s.seqlen_q, s.seqlen_k, s.head_dim,
      s.head_dim_v, s.causal ? " causal" : "", best * 1e3, flops / best * 1e-9,
      100.0 * flops / best * 1e-9 / limit, limit, config.block_q, config.block_k, runs);
  return 0;
}
