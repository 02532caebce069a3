// tandem demo: real tensors through forward and backward in f32 and bf16, verified, timed, and looked into.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "api/make_problem.hpp"
#include "command.hpp"
#include "entropy.hpp"
#include "ops/plan.hpp"
#include "outputs.hpp"
#include "problem/problem.hpp"
#include "verification.hpp"

namespace tandem::cli {
namespace {

struct DemoOptions {
  std::string path;
  std::string data;
  int threads = 0;
  bool json = false;
};

constexpr std::uint64_t dout_seed = 1;  ///< where the file has no dout

struct Speed {
  double best_ms = 0.0;
  double gflops = 0.0;
  double share = 0.0;  ///< share of the measured peak
};

/// What one dtype came to.
struct Result {
  DType dtype = DType::f32;
  std::vector<Verdict> verdicts;
  Speed forward, backward;
};

/// The best of many short runs: a neighbour on the machine disturbs some of them.
template <typename Pass>
Speed best_of(const Pass& pass, double flops, double peak) {
  constexpr double budget_seconds = 0.5;
  double best = pass();
  for (double spent = best; spent < budget_seconds;) {
    const double seconds = pass();
    spent += seconds;
    best = std::min(best, seconds);
  }
  const double gflops = flops / best / 1e9;
  return {best * 1e3, gflops, gflops / peak};
}

Json speed_json(const Speed& s) {
  return {{"best_ms", s.best_ms}, {"gflops", s.gflops}, {"share_of_peak", s.share}};
}

void print(const Result& r, const bench::Peak& peak) {
  fmt::print("\n{}\n", name_of(r.dtype));
  for (const Verdict& v : r.verdicts) {
    fmt::print("  {:<4} max error {:.2e} of {:<17} {:<36} {:5.1f}% of its bounds  {}\n", v.output,
               v.deviation.largest, describe(v.bound) + ";", describe_whole(v), 100 * v.deviation.share,
               v.right() ? "ok" : "WRONG");
  }
  for (const auto& [name, speed] : {std::pair("forward", r.forward), std::pair("backward", r.backward)}) {
    fmt::print("  {:<9} {:8.3f} ms  {:7.1f} GFLOP/s  {:5.1f}% of the {} peak\n", name, speed.best_ms,
               speed.gflops, 100 * speed.share, peak_name(peak, r.dtype));
  }
}

/// Entropies of one head's queries as quantiles, which a picture can show.
Json quantiles(std::vector<double> values) {
  std::ranges::sort(values);
  const auto at = [&](double q) {
    return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1))];
  };
  return {at(0.05), at(0.25), at(0.5), at(0.75), at(0.95)};
}

/// By layer, by head: [5%, 25%, 50%, 75%, 95%] of the queries' entropies.
Json entropy_by_head(const Problem& p) {
  const std::vector<double> all = attention_entropy(p);
  Json layers = Json::array();
  for (std::int64_t b = 0; b < p.batch; ++b) {
    Json heads = Json::array();
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      const auto first = all.begin() + (b * p.heads_q + h) * p.rows_q;
      heads.push_back(quantiles({first, first + p.rows_q}));
    }
    layers.push_back(heads);
  }
  return layers;
}

TensorSet copy(const TensorSet& tensors) {
  TensorSet result;
  for (const auto& [name, tensor] : tensors) result.emplace(name, tensor.clone());
  return result;
}

/// What the demonstration found.
struct Findings {
  std::vector<Result> results;
  bench::Peak peak;
  Json entropy;

  [[nodiscard]] bool right() const {
    return std::ranges::all_of(results, [](const Result& result) {
      return std::ranges::all_of(result.verdicts, [](const Verdict& verdict) { return verdict.right(); });
    });
  }
};

/// Both dtypes, compared with the oracle and timed.
Findings find(const Inputs& inputs, const CallOptions& options) {
  Findings found;
  Progress progress;
  CallOptions call_options = options;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    progress.show(fmt::format("{}: computing, then comparing with the fp64 oracle ...", name_of(dtype)));
    call_options.dtype = dtype;
    Call call(copy(inputs.tensors), call_options);
    const Problem problem = make_problem(call.forward_args());
    if (found.peak.threads == 0) {
      found.peak =
          bench::measure_peak(make_plan(problem, Execution{.threads = options.threads}).cpu->config.threads);
    }
    Result& result = found.results.emplace_back();
    result.dtype = dtype;
    result.verdicts = verify(call).verdicts;
    if (dtype == DType::f32) found.entropy = entropy_by_head(problem);
    progress.show(fmt::format("{}: timing ...", name_of(dtype)));
    const double gflops = peak_gflops(found.peak, dtype);
    result.forward = best_of([&] { return call.run_forward(); }, call.forward_flops(), gflops);
    result.backward = best_of([&] { return call.run_backward(); }, call.backward_flops(), gflops);
    progress.show("");
  }
  return found;
}

Json document_of(const DemoOptions& options, const Inputs& inputs, const Findings& found) {
  Json document{{"file", options.path},        {"tensors", to_json(inputs.tensors.at("q").view())},
                {"metadata", inputs.metadata}, {"machine", to_json(machine())},
                {"peak", to_json(found.peak)}, {"version", version()}};
  for (const Result& result : found.results) {
    Json& entry = document["results"].emplace_back();
    entry = {{"dtype", name_of(result.dtype)},
             {"forward", speed_json(result.forward)},
             {"backward", speed_json(result.backward)}};
    for (const Verdict& verdict : result.verdicts) entry["outputs"].push_back(to_json(verdict));
  }
  document["entropy_nats"] = found.entropy;
  return document;
}

void print(const DemoOptions& options, const Inputs& inputs, const Findings& found) {
  const Machine m = machine();
  fmt::print("{}: {} q, k{}\n", files::printable(options.path), describe(inputs.tensors.at("q").view()),
             inputs.tensors.contains("dout")
                 ? ", v and dout"
                 : fmt::format(" and v; dout: normal numbers, seed {}", dout_seed));
  for (const auto& [key, value] : inputs.metadata) {
    fmt::print("  {:<10} {}\n", files::printable(key), files::printable(value));
  }
  fmt::print("\n{}, {} threads, {}; measured peak: f32 {:.0f} GFLOP/s", m.processor, found.peak.threads,
             m.target, found.peak.f32_gflops);
  if (found.peak.bf16_gflops > 0) fmt::print(", bf16 {:.0f} GFLOP/s", found.peak.bf16_gflops);
  fmt::print("\n");
  for (const Result& result : found.results) print(result, found.peak);
}

int run_demo(const DemoOptions& options) {
  if (!options.data.empty()) files::AtomicFile probe(options.data);
  InputOptions input;
  input.paths = {options.path};
  const Inputs inputs = load_inputs(input);
  if (!options.data.empty()) check_inputs_stay({options.data}, inputs.files);
  const files::TensorData& q = inputs.tensors.at("q");
  if (q.shape().size() != 4 || q.numel() == 0 || is_eight_bit(q.dtype()) || inputs.tensors.size() > 4) {
    files::refuse(options.path,
                  "q is {}; the demo takes q, k, v and dout of (layers, tokens, heads, head_dim) alone",
                  describe(q.view()));
  }

  CallOptions call_options;
  call_options.threads = options.threads;
  call_options.backward = true;
  call_options.dout_seed = dout_seed;
  const Findings found = find(inputs, call_options);
  const Json document = document_of(options, inputs, found);
  if (!options.data.empty()) {
    files::AtomicFile file(options.data);
    const std::string text = to_text(document);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
  }
  if (options.json) {
    print_json(document);
  } else {
    print(options, inputs, found);
  }
  if (found.right()) return success;
  say("a result is off by more than its bound");
  return verify_failed;
}

}  // namespace

void add_demo(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<DemoOptions>();
  CLI::App* command = app.add_subcommand(
      "demo", "Run real tensors forward and backward in f32 and bf16: errors, speed, attention entropy");
  command
      ->add_option("FILE", options->path,
                   "A .safetensors file with q, k, v and dout, such as data/minilm.safetensors")
      ->required();
  command->add_option("--data", options->data,
                      "Write all figures to this JSON file, for scripts/demo_plot.py");
  command->add_option("--threads", options->threads, "CPU threads; 0: OMP_NUM_THREADS or every core")
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print all figures as JSON");
  command->footer(
      R"(Without dout in the file, seeded normal numbers stand in for it. Exit code 1 if a result is off by
more than its bound (see `tandem verify --help`).

Example:
  tandem demo data/minilm.safetensors)");
  command->callback([options, &chosen] { chosen = [options] { return run_demo(*options); }; });
}

}  // namespace tandem::cli
