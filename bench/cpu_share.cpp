// What share of one core's arithmetic peak the CPU kernels reach.
//
//   cpu_share                                                        the shapes of docs/kernels/cpu.md
//   cpu_share --pass forward --dtype bf16 --seqlen 2048 --head-dim 128 --mask causal
//
// One thread, CPU time. On a shared machine rates can halve for seconds although no time is reported stolen,
// so a cell is the best of many runs over the best of the peaks that were measured in between: what the
// kernel can reach, not what it gets on average.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <ctime>
#include <map>
#include <random>
#include <vector>

#include "api/make_problem.hpp"
#include "cpu/common/convert.hpp"
#include "cpu/cpu.hpp"
#include "peak.hpp"
#include "problem/problem.hpp"

namespace {

using tandem::DType;

struct Shape {
  bool backward = false;
  DType dtype = DType::f32;
  tandem::Precision precision = tandem::Precision::exact;
  bool causal = false;
  std::int64_t batch = 1, heads = 1, heads_kv = 1, seqlen_q = 1024, seqlen_k = 1024;
  std::int64_t head_dim = 128, head_dim_v = 128;
  std::int64_t window = -1;
  bool by_rows = false;
  bool v_in_k = false;  ///< v is the first columns of k
};

/// Blocks that replace the plan's, 0 to keep them.
struct Tile {
  int block_q = 0, block_k = 0;
};

double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// A random tensor (batch, rows, heads, dim), heads outside rows in memory unless `by_rows`.
struct Buffer {
  std::vector<std::byte> bytes;
  tandem::Tensor view;
  Buffer(const Shape& s, DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim,
         std::mt19937& random) {
    const std::int64_t n = s.batch * rows * heads * dim;
    bytes.resize(static_cast<std::size_t>(n) * size_of(dtype) + 64);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < n; ++i) tandem::store_from_f32(bytes.data(), dtype, i, normal(random));
    view = tandem::Tensor(bytes.data(), dtype, {s.batch, rows, heads, dim});
    if (!s.by_rows) view.stride = {heads * rows * dim, dim, rows * dim, 1};
  }
};

struct Measured {
  double seconds = 1e30;  ///< the best run
  double gflops = 0.0;    ///< of the best run
  double peak = 0.0;      ///< GFLOP/s, measured in between
  tandem::cpu::Config config;
  int runs = 0;
};

Measured better(const Measured& a, const Measured& b) {
  Measured m = a.seconds < b.seconds ? a : b;
  m.peak = std::max(a.peak, b.peak);
  m.runs = a.runs + b.runs;
  return m;
}

double peak_now(bool dots) {
  const tandem::bench::Peak peak = tandem::bench::measure_peak(1, 0.002);
  return dots ? peak.bf16_gflops : peak.f32_gflops;
}

/// 2 (d_qk + d_v) for each visible pair of query and key, 2.5 times that backward.
double flops_of(const Shape& s, const tandem::Problem& problem) {
  double pairs = 0.0;
  for (std::int64_t i = 0; i < s.seqlen_q; ++i) {
    const tandem::KeyRange r = visible_keys(window_of(problem, 0), i, s.seqlen_q, s.seqlen_k);
    pairs += static_cast<double>(std::max<std::int64_t>(0, r.last - r.first));
  }
  return 2.0 * static_cast<double>(s.batch * s.heads * (s.head_dim + s.head_dim_v)) * pairs *
         (s.backward ? 2.5 : 1.0);
}

/// Runs `problem` for `seconds` of CPU time, at least three times.
Measured measure(const Shape& s, const tandem::Problem& problem, Tile tile, double seconds) {
  using namespace tandem;
  Measured m;
  m.config = cpu::choose(problem, 1);
  if (tile.block_q > 0) m.config.block_q = tile.block_q;
  if (tile.block_k > 0) m.config.block_k = tile.block_k;
  const cpu::Plan plan(problem, m.config);
  std::vector<std::byte> workspace(plan.workspace_bytes);
  const bool dots = s.dtype == DType::bf16 && m.config.target == cpu::Target::avx512_bf16;
  const double flops = flops_of(s, problem);
  const double start = thread_seconds();
  while (m.runs < 3 || thread_seconds() - start < seconds) {
    m.peak = std::max(m.peak, peak_now(dots));
    const double begin = thread_seconds();
    cpu::run(plan, workspace);
    m.seconds = std::min(m.seconds, thread_seconds() - begin);
    ++m.runs;
  }
  m.gflops = 1e-9 * flops / m.seconds;
  return m;
}

Measured measure(const Shape& s, Tile tile, double seconds) {
  using namespace tandem;
  std::mt19937 random(1);
  const auto tensor = [&](DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
    return Buffer(s, dtype, rows, heads, dim, random);
  };
  const DType result = s.dtype == DType::e4m3 ? DType::bf16 : s.dtype;
  const Buffer q = tensor(s.dtype, s.seqlen_q, s.heads, s.head_dim);
  const Buffer k = tensor(s.dtype, s.seqlen_k, s.heads_kv, s.head_dim);
  const Buffer v = tensor(s.dtype, s.seqlen_k, s.heads_kv, s.head_dim_v);
  const Buffer out = tensor(result, s.seqlen_q, s.heads, s.head_dim_v);
  std::vector<float> lse(static_cast<std::size_t>(s.batch * s.heads * s.seqlen_q));
  ForwardArgs args;
  args.q = q.view;
  args.k = k.view;
  args.v = v.view;
  if (s.v_in_k) {
    args.v = k.view;
    args.v.shape[3] = s.head_dim_v;
  }
  args.out = out.view;
  args.lse = {lse.data(), DType::f32, {s.batch, s.heads, s.seqlen_q}};
  args.options.causal = s.causal;
  args.options.window_left = s.window;
  args.options.precision = s.precision;
  if (!s.backward) return measure(s, make_problem(args), tile, seconds);

  forward(args, {.threads = 1});
  const Buffer dout = tensor(s.dtype, s.seqlen_q, s.heads, s.head_dim_v);
  const Buffer dq = tensor(s.dtype, s.seqlen_q, s.heads, s.head_dim);
  const Buffer dk = tensor(s.dtype, s.seqlen_k, s.heads_kv, s.head_dim);
  const Buffer dv = tensor(s.dtype, s.seqlen_k, s.heads_kv, s.head_dim_v);
  BackwardArgs gradients;
  static_cast<AttentionInputs&>(gradients) = args;
  gradients.out = args.out;
  gradients.lse = args.lse;
  gradients.dout = dout.view;
  gradients.dq = dq.view;
  gradients.dk = dk.view;
  gradients.dv = dv.view;
  gradients.options = args.options;
  return measure(s, make_problem(gradients), tile, seconds);
}

void print(const std::vector<Shape>& shapes, const std::vector<Measured>& best) {
  fmt::print(
      "| pass | dtype | precision | d | mask | seqlen | ms | GFLOP/s | peak | share | tile | target | runs "
      "|\n");
  fmt::print("|---|---|---|--:|---|--:|--:|--:|--:|--:|---|---|--:|\n");
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const Shape& cell = shapes[i];
    const Measured& m = best[i];
    fmt::print("| {} | {} | {} | {} | {} | {} | {:.3f} | {:.1f} | {:.1f} | {:.1f} % | {} x {} | {} | {} |\n",
               cell.backward ? "backward" : "forward", name_of(cell.dtype), name_of(cell.precision),
               cell.head_dim, cell.causal ? "causal" : "full", cell.seqlen_q, m.seconds * 1e3, m.gflops,
               m.peak, 100.0 * m.gflops / m.peak, m.config.block_q, m.config.block_k,
               name_of(m.config.target), m.runs);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> passes{"forward", "backward"}, masks{"full", "causal"};
  std::vector<DType> dtypes{DType::f32, DType::bf16};
  const std::map<std::string, DType> dtype_names{
      {"f32", DType::f32}, {"f16", DType::f16}, {"bf16", DType::bf16}, {"e4m3", DType::e4m3}};
  std::vector<tandem::Precision> precisions{tandem::Precision::exact};
  const std::map<std::string, tandem::Precision> precision_names{{"exact", tandem::Precision::exact},
                                                                 {"fp8", tandem::Precision::fp8},
                                                                 {"int8", tandem::Precision::int8}};
  std::vector<std::int64_t> seqlens{1024, 2048, 4096}, head_dims{128};
  Shape s;
  Tile tile;
  std::int64_t heads_kv = 0, seqlen_k = 0, head_dim_v = 0;
  double seconds = 0.6;
  int rounds = 3;
  CLI::App app{"One core's share of its arithmetic peak"};
  app.add_option("--pass", passes)->check(CLI::IsMember({"forward", "backward"}))->capture_default_str();
  app.add_option("--dtype", dtypes, "default: f32 bf16")->transform(CLI::CheckedTransformer(dtype_names));
  app.add_option("--precision", precisions, "of forward, with f16 and bf16 (default: exact)")
      ->transform(CLI::CheckedTransformer(precision_names));
  app.add_option("--mask", masks)->check(CLI::IsMember({"full", "causal"}))->capture_default_str();
  app.add_option("--seqlen", seqlens, "queries")->capture_default_str();
  app.add_option("--head-dim", head_dims)->capture_default_str();
  app.add_option("--head-dim-v", head_dim_v, "default: the head dimension");
  app.add_option("--batch", s.batch)->capture_default_str();
  app.add_option("--heads", s.heads, "query heads")->capture_default_str();
  app.add_option("--heads-kv", heads_kv, "KV heads (default: as many as query heads)");
  app.add_option("--seqlen-k", seqlen_k, "keys (default: as many as queries)");
  app.add_option("--window", s.window, "sliding window to the left");
  app.add_flag("--by-rows", s.by_rows,
               "(batch, seqlen, heads, head_dim) in memory, not (batch, heads, seqlen, head_dim)");
  app.add_flag("--v-in-k", s.v_in_k, "v is the first columns of k, as in a cache of latent vectors");
  app.add_option("--block-q", tile.block_q, "overrides the tile");
  app.add_option("--block-k", tile.block_k, "overrides the tile");
  app.add_option("--seconds", seconds, "CPU time of a cell")->capture_default_str();
  app.add_option("--rounds", rounds, "rounds that share it, so that no disturbance takes all of them")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  s.heads_kv = heads_kv == 0 ? s.heads : heads_kv;

  std::vector<Shape> shapes;
  const auto add_cells = [&](const std::string& pass, DType dtype, tandem::Precision precision) {
    for (const std::int64_t head_dim : head_dims) {
      for (const std::string& mask : masks) {
        for (const std::int64_t seqlen : seqlens) {
          Shape& cell = shapes.emplace_back(s);
          cell.backward = pass == "backward";
          cell.dtype = dtype;
          cell.precision = precision;
          cell.causal = mask == "causal";
          cell.seqlen_q = seqlen;
          cell.seqlen_k = seqlen_k == 0 ? seqlen : seqlen_k;
          cell.head_dim = head_dim;
          cell.head_dim_v = head_dim_v == 0 ? head_dim : head_dim_v;
        }
      }
    }
  };
  for (const std::string& pass : passes) {
    for (const DType dtype : dtypes) {
      for (const tandem::Precision precision : precisions) add_cells(pass, dtype, precision);
    }
  }
  std::vector<Measured> best(shapes.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      best[i] = better(best[i], measure(shapes[i], tile, seconds / rounds));
    }
  }
  print(shapes, best);
  return 0;
}
