// The error of every 8-bit recipe against fp64, on one kind of input: JSON on stdout.
//
//   accuracy --input paper --seqlen 4096                 queries, keys and values drawn here
//   accuracy --input file --file qkv.raw --heads 12 ...  f16, (3, seqlen, heads, head_dim): q, k, v end to
//   end
//
// bench/accuracy.py runs it for the page docs/results/low-precision-accuracy.md.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <functional>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "cpu/common/convert.hpp"
#include "cpu/cpu.hpp"
#include "cpu/reference/reference.hpp"
#include "problem/recipe_of.hpp"

namespace tandem::bench {
namespace {

constexpr std::int64_t max_heads = 64;

struct Settings {
  std::string input = "paper";
  std::string file;
  std::string dtype = "f16";
  std::int64_t queries = 1024;  ///< spread evenly over the sequence, so that fp64 is affordable
  std::int64_t seqlen = 4096;
  std::int64_t heads = 4;
  std::int64_t head_dim = 128;
  std::uint64_t seed = 1;
  bool causal = false;
  int threads = 0;
};

/// Normal numbers, the same on every machine (std::normal_distribution is not).
class Normal {
 public:
  explicit Normal(std::uint64_t seed) : bits_(seed) {}
  double uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }
  double operator()() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

 private:
  std::mt19937_64 bits_;
};

/// Q, K and V, (rows, heads, head_dim) each.
struct Tensors {
  std::vector<std::uint16_t> q, k, v;
};

/// Element (row, head, channel) of q (0), k (1) or v (2).
using Draw =
    std::function<double(Normal&, int which, std::int64_t row, std::int64_t head, std::int64_t channel)>;

Draw draw_of(const std::string& input) {
  if (input == "paper") {  // N(0, 1) + N(0, 100) * Bernoulli(0.001)
    return [](Normal& n, int, std::int64_t, std::int64_t, std::int64_t) {
      const double x = n();
      return n.uniform() < 0.001 ? x + 10.0 * n() : x;
    };
  }
  if (input == "normal") return [](Normal& n, int, std::int64_t, std::int64_t, std::int64_t) { return n(); };
  if (input == "biased") {  // every channel has a mean of its own, as real K and V do
    std::vector<double> means(2 * max_heads * 256);
    Normal mean(1000);
    for (double& m : means) m = mean();
    return [means](Normal& n, int which, std::int64_t, std::int64_t head, std::int64_t channel) {
      if (which == 0) return n();
      const auto at = static_cast<std::size_t>(((which - 1) * max_heads + head) * 256 + channel);
      return n() + (which == 1 ? 8.0 : 2.0) * means[at];
    };
  }
  if (input == "sink") {  // the first key draws most queries' attention, and its value is small
    return [](Normal& n, int which, std::int64_t row, std::int64_t, std::int64_t channel) {
      if (which == 0) return n() + (channel == 0 ? 10.0 : 0.0);
      if (row > 0) return n();
      return which == 1 ? (channel == 0 ? 10.0 : 0.0) : 0.1 * n();
    };
  }
  if (input == "flat") {  // logits near zero: every key counts alike
    return [](Normal& n, int which, std::int64_t, std::int64_t, std::int64_t) {
      return which == 0 ? 0.1 * n() : n();
    };
  }
  throw Error(Status::invalid_argument, "unknown input " + input);
}

std::uint16_t encode(const std::string& dtype, double x) {
  return dtype == "f16" ? from_f32<f16>(static_cast<float>(x)).bits
                        : from_f32<bf16>(static_cast<float>(x)).bits;
}

Tensors make_tensors(const Settings& s) {
  Tensors t;
  if (s.input == "file") {
    const auto count = static_cast<std::size_t>(s.seqlen * s.heads * s.head_dim);
    std::ifstream in(s.file, std::ios::binary);
    for (std::vector<std::uint16_t>* x : {&t.q, &t.k, &t.v}) {
      x->resize(count);
      in.read(reinterpret_cast<char*>(x->data()), static_cast<std::streamsize>(2 * count));
    }
    if (!in)
      throw Error(Status::invalid_argument,
                  s.file + " does not hold 3 * seqlen * heads * head_dim f16 numbers");
    return t;
  }
  const Draw draw = draw_of(s.input);
  for (int which = 0; which < 3; ++which) {
    Normal normal(s.seed * 10 + static_cast<std::uint64_t>(which));
    std::vector<std::uint16_t>& x = which == 0 ? t.q : (which == 1 ? t.k : t.v);
    const std::int64_t rows = which == 0 ? s.queries : s.seqlen;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < s.heads; ++head) {
        for (std::int64_t c = 0; c < s.head_dim; ++c)
          x.push_back(encode(s.dtype, draw(normal, which, row, head, c)));
      }
    }
  }
  return t;
}

Problem problem_of(const Settings& s, Tensors& t, std::vector<float>& out) {
  const auto operand = [&](void* data, DType dtype) {
    return Operand{.data = data,
                   .dtype = dtype,
                   .batch_stride = 0,
                   .row_stride = s.heads * s.head_dim,
                   .head_stride = s.head_dim};
  };
  const DType dtype = s.dtype == "f16" ? DType::f16 : DType::bf16;
  Problem p;
  p.batch = 1;
  p.heads_q = p.heads_kv = s.heads;
  p.head_dim_qk = p.head_dim_v = s.head_dim;
  p.rows_q = s.input == "file" ? s.seqlen : s.queries;
  p.rows_k = s.seqlen;
  p.scale = 1.0F / std::sqrt(static_cast<float>(s.head_dim));
  p.window_right = s.causal ? 0 : -1;
  p.q = operand(t.q.data(), dtype);
  p.k = operand(t.k.data(), dtype);
  p.v = operand(t.v.data(), dtype);
  out.assign(static_cast<std::size_t>(p.rows_q * s.heads * s.head_dim), std::nanf(""));
  p.out = operand(out.data(), DType::f32);
  return p;
}

/// fp64 results, a head a thread.
std::vector<double> exact(const Problem& p) {
  std::vector<double> all(static_cast<std::size_t>(p.rows_q * p.heads_q * p.head_dim_v));
#pragma omp parallel for schedule(dynamic, 1)
  for (std::int64_t head = 0; head < p.heads_q; ++head) {
    Problem one = p;
    one.heads_q = one.heads_kv = 1;
    for (Operand* x : {&one.q, &one.k, &one.v}) {
      x->data = static_cast<std::byte*>(x->data) + 2 * head * x->head_stride;
    }
    const reference::Forward r = reference::forward(one);
    for (std::int64_t row = 0; row < p.rows_q; ++row) {
      for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
        all[static_cast<std::size_t>((row * p.heads_q + head) * p.head_dim_v + c)] =
            r.out[static_cast<std::size_t>(row * p.head_dim_v + c)];
      }
    }
  }
  return all;
}

struct Entry {
  const char* name;
  Recipe recipe;
};

std::vector<Entry> entries() {
  Recipe plain{.rotate_qk = false, .smooth_k = false};
  const auto with = [](Recipe r, auto change) {
    change(r);
    return r;
  };
  const Recipe tensor = with(plain, [](Recipe& r) { r.qk_scales = r.v_scales = ScaleGroup::tensor; });
  const Recipe head = with(plain, [](Recipe& r) { r.qk_scales = r.v_scales = ScaleGroup::head; });
  const Recipe rotated = with(plain, [](Recipe& r) { r.rotate_qk = true; });
  constexpr int never = 1 << 30;
  return {
      {"fp8 tensor", tensor},
      {"fp8 head", head},
      {"fp8 block", plain},
      {"fp8 tensor + Hadamard", with(tensor, [](Recipe& r) { r.rotate_qk = true; })},
      {"fp8 block + Hadamard", rotated},
      {"fp8 block + smoothing", with(plain, [](Recipe& r) { r.smooth_k = true; })},
      {"fp8", fp8_recipe},
      {"fp8, exact exponentials", with(fp8_recipe, [](Recipe& r) { r.linear_exp2 = false; })},
      {"fp8, promotion every 4", with(fp8_recipe, [](Recipe& r) { r.promote_every = 4; })},
      {"fp8, no promotion", with(fp8_recipe, [](Recipe& r) { r.promote_every = never; })},
      {"fp8, V scales by row", with(fp8_recipe, [](Recipe& r) { r.v_scales = ScaleGroup::row; })},
      {"fp8 strict", strict(fp8_recipe)},
      {"int8, V scales by (block, channel)",
       with(int8_recipe, [](Recipe& r) { r.v_scales = ScaleGroup::channel; })},
      {"int8, scales by row",
       with(int8_recipe, [](Recipe& r) { r.qk_scales = r.v_scales = ScaleGroup::row; })},
      {"int8, V not rotated", with(int8_recipe, [](Recipe& r) { r.rotate_v = false; })},
      {"int8", int8_recipe},
      {"int8 strict", strict(int8_recipe)},
  };
}

double rmse(const std::vector<float>& got, const std::vector<double>& expected) {
  double sum = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i)
    sum += std::pow(static_cast<double>(got[i]) - expected[i], 2.0);
  return std::sqrt(sum / static_cast<double>(got.size()));
}

void measure(const Settings& s) {
  Tensors tensors = make_tensors(s);
  std::vector<float> out;
  Problem p = problem_of(s, tensors, out);
  const std::vector<double> expected = exact(p);
  cpu::Config config = cpu::choose(p, s.threads);
  std::string cells;
  const auto run = [&](const char* name, Precision precision, const Recipe& recipe) {
    p.precision = precision;
    config.recipe = recipe;
    if (precision != Precision::exact) config.block_q = config.block_k = quant_block;
    const cpu::Plan plan(p, config);
    std::vector<std::byte> workspace(plan.workspace_bytes);
    std::fill(out.begin(), out.end(), std::nanf(""));
    const auto start = std::chrono::steady_clock::now();
    cpu::run(plan, workspace);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    cells += fmt::format("{}{{\"recipe\": \"{}\", \"rmse\": {:.6e}, \"seconds\": {:.4f}}}",
                         cells.empty() ? "" : ",\n  ", name, rmse(out, expected), seconds.count());
  };
  run("exact", Precision::exact, {});
  for (const Entry& entry : entries()) run(entry.name, Precision::fp8, entry.recipe);
  const double size = rmse(std::vector<float>(out.size(), 0.0F), expected);
  fmt::print(
      "{{\"input\": \"{}\", \"dtype\": \"{}\", \"seqlen\": {}, \"queries\": {}, \"heads\": {}, \"head_dim\": "
      "{}, "
      "\"causal\": {}, \"seed\": {}, \"rms\": {:.6e}, \"cells\": [\n  {}]}}\n",
      s.input, s.dtype, s.seqlen, p.rows_q, s.heads, s.head_dim, s.causal, s.seed, size, cells);
}

int run(int argc, char** argv) {
  Settings s;
  CLI::App app{"Errors of the 8-bit recipes against fp64"};
  app.add_option("--input", s.input, "paper, normal, biased, sink, flat or file")->capture_default_str();
  app.add_option("--file", s.file, "q, k, v of the input 'file', f16");
  app.add_option("--dtype", s.dtype)->check(CLI::IsMember({"f16", "bf16"}))->capture_default_str();
  app.add_option("--queries", s.queries)->capture_default_str();
  app.add_option("--seqlen", s.seqlen)->capture_default_str();
  app.add_option("--heads", s.heads)->check(CLI::Range(std::int64_t{1}, max_heads))->capture_default_str();
  app.add_option("--head-dim", s.head_dim)->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--seed", s.seed)->capture_default_str();
  app.add_flag("--causal", s.causal);
  app.add_option("--threads", s.threads)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  measure(s);
  return 0;
}

}  // namespace
}  // namespace tandem::bench

int main(int argc, char** argv) {
  try {
    return tandem::bench::run(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "accuracy: {}\n", e.what());
    return 1;
  }
}
