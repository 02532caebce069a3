// tandem bench: whether attention is right on this machine, and how fast, as time, GFLOP/s and a share of the
// measured peak.
#include <omp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "api/make_problem.hpp"
#include "call.hpp"
#include "command.hpp"
#include "cpu/common/convert.hpp"
#include "energy.hpp"
#include "harness/sample.hpp"
#include "problem/problem.hpp"
#include "report.hpp"
#include "values.hpp"

namespace tandem::cli {
namespace {

struct BenchOptions {
  std::vector<std::string> dtypes{"f32", "bf16"};
  std::vector<std::int64_t> head_dims{64, 128};
  std::vector<std::int64_t> seqlens{512, 1024, 2048};
  std::vector<std::int64_t> batches{1};
  std::int64_t heads = 8;
  std::int64_t heads_kv = 0;
  std::string causal = "both";
  std::string pass = "both";
  AttentionOptions attention;
  int threads = 0;
  std::string device = "auto";
  double seconds = 0.5;
  std::uint64_t seed = 1;
  bool joules = false;
  bool json = false;
};

/// One line of the table.
struct Cell {
  Pass pass = Pass::forward;
  DType dtype = DType::f32;
  std::int64_t head_dim = 0;
  std::int64_t seqlen = 0;
  std::int64_t batch = 0;
  bool causal = false;
  double share_of_bound = 0.0;  ///< the most that a sampled error takes of its bound in the contract
  std::string wrong;            ///< what is wrong; empty if the results are right
  int runs = 0;                 ///< 0 where they are wrong: then they are not timed
  double median = 0.0;          ///< seconds
  double best = 0.0;
  double gflops = 0.0;  ///< in the best run
  bool on_gpu = false;
  const char* peak = "";  ///< which peak the share is of
  double share = 0.0;
  double flops = 0.0;
  std::string energy_by;  ///< what counts joules, or why nothing does; empty if nobody asks
  double joules = 0.0;    ///< a run takes; 0 if nothing counts them

  [[nodiscard]] double picojoules_per_flop() const { return joules / flops * 1e12; }
  [[nodiscard]] double microjoules_per_token() const {
    return joules / static_cast<double>(batch * seqlen) * 1e6;
  }
};

const char* name_of(Pass pass) {
  return pass == Pass::forward ? "forward" : "backward";
}

std::vector<Cell> grid(const BenchOptions& options) {
  std::vector<Pass> passes;
  if (options.pass != "backward") passes.push_back(Pass::forward);
  if (options.pass != "forward") passes.push_back(Pass::backward);
  std::vector<bool> masks;
  if (options.causal != "yes") masks.push_back(false);
  if (options.causal != "no") masks.push_back(true);
  std::vector<Cell> cells;
  for (const std::string& dtype : options.dtypes) {
    const DType type = parse_dtype(dtype, "--dtype");
    for (const std::int64_t head_dim : options.head_dims) {
      for (const bool causal : masks) {
        for (const std::int64_t batch : options.batches) {
          for (const std::int64_t seqlen : options.seqlens) {
            for (const Pass pass : passes) {
              // There is no backward of 8-bit inputs.
              if (type == DType::e4m3 && pass == Pass::backward && options.pass == "both") continue;
              Cell& cell = cells.emplace_back();
              cell.pass = pass;
              cell.dtype = type;
              cell.head_dim = head_dim;
              cell.seqlen = seqlen;
              cell.batch = batch;
              cell.causal = causal;
            }
          }
        }
      }
    }
  }
  return cells;
}

TensorSet random_inputs(const Cell& cell, const BenchOptions& options) {
  TensorSet tensors;
  std::uint64_t seed = options.seed;
  const std::int64_t heads_kv = options.heads_kv > 0 ? options.heads_kv : options.heads;
  for (const char* name : {"q", "k", "v"}) {
    const std::int64_t heads = *name == 'q' ? options.heads : heads_kv;
    files::TensorData tensor(cell.dtype, {cell.batch, cell.seqlen, heads, cell.head_dim});
    fill_normal(tensor, seed++);
    tensors.emplace(name, std::move(tensor));
  }
  return tensors;
}

/// "out holds NaN or infinity" if it does. Every query sees a key, so that no result may.
std::string not_finite(const std::string& name, const files::TensorData& tensor) {
  for (std::int64_t n = 0; n < tensor.numel(); ++n) {
    if (!std::isfinite(load_as_f32(tensor.bytes().data(), tensor.dtype(), n)))
      return fmt::format("{} is not finite at its element {} of {}", name, n, tensor.numel());
  }
  return {};
}

/// Runs the cell once on outputs full of NaN and compares a sample of them with fp64. 8-bit inputs have no
/// bound of their own: their errors are reported beside the 16-bit one.
void check_results(Cell& cell, Call& call, std::uint64_t seed) {
  call.poison_outputs();
  const DType dtype = call.forward_args().out.dtype;
  const auto compare = [&](Pass pass) {
    const TensorSet& outputs = call.fetch_outputs();
    const Problem problem =
        pass == Pass::forward ? make_problem(call.forward_args()) : make_problem(call.backward_args());
    for (const char* name : {"out", "lse", "dq", "dk", "dv"}) {
      const auto found = outputs.find(name);
      if (found == outputs.end() || (*name == 'd') != (pass == Pass::backward)) continue;
      if (cell.wrong.empty()) cell.wrong = not_finite(name, found->second);
    }
    for (const harness::SampleError& error :
         harness::compare_sample(problem, dtype, pass, harness::sample_parts(problem, seed))) {
      if (cell.wrong.empty() && !error.deviation.right() && !is_eight_bit(cell.dtype)) {
        cell.wrong = fmt::format("{} is off by {:.3g} times its bound of {:.2e} at {}", error.output,
                                 error.deviation.worst_share, error.bound.at(0.0), error.worst);
        if (error.deviation.wrong == 0) {
          cell.wrong = fmt::format("{} is off as a whole: {}", error.output, error.deviation.complaint());
        }
      }
      if (pass == cell.pass) cell.share_of_bound = std::max(cell.share_of_bound, error.deviation.share);
    }
  };
  call.run_forward();
  compare(Pass::forward);
  if (!call.has_backward()) return;
  call.run_backward();
  compare(Pass::backward);
}

void measure(Cell& cell, const BenchOptions& options, const bench::Peak& peak) {
  CallOptions call_options;
  call_options.attention = options.attention;
  call_options.attention.causal = cell.causal;
  call_options.threads = options.threads;
  call_options.device = options.device;
  call_options.backward = cell.pass == Pass::backward;
  call_options.dout_seed = options.seed + 3;
  Call call(random_inputs(cell, options), call_options);
  cell.on_gpu = call.on_gpu();
  check_results(cell, call, options.seed);  // the warm-up, too, and what backward starts from
  if (!cell.wrong.empty()) return;

  bench::EnergyMeter meter;
  if (options.joules) meter = cell.on_gpu ? bench::gpu_energy(0) : bench::cpu_energy();
  cell.energy_by = meter.what;
  constexpr std::size_t fewest = 3;
  const std::size_t most = meter.joules ? std::numeric_limits<std::size_t>::max() : 1000;
  // A board's counter changes some ten times a second.
  const double seconds = meter.joules ? std::max(options.seconds, 2.0) : options.seconds;
  std::vector<double> times;
  double spent = 0.0;
  const double before = meter.joules ? meter.joules() : 0.0;
  while (times.size() < fewest || (spent < seconds && times.size() < most)) {
    times.push_back(call.has_backward() ? call.run_backward() : call.run_forward());
    spent += times.back();
  }
  if (meter.joules) cell.joules = (meter.joules() - before) / static_cast<double>(times.size());
  std::ranges::sort(times);
  const double flops = call.has_backward() ? call.backward_flops() : call.forward_flops();
  cell.flops = flops;
  cell.runs = static_cast<int>(times.size());
  cell.median = times[times.size() / 2];
  cell.best = times.front();
  cell.gflops = flops / cell.best / 1e9;
  cell.peak = cell.on_gpu ? "nominal" : peak_name(peak, cell.dtype);
  cell.share = cell.gflops / (cell.on_gpu ? gpu_nominal_gflops() : peak_gflops(peak, cell.dtype));
}

Json cell_json(const Cell& c, const BenchOptions& options) {
  Json json{{"device", c.on_gpu ? "gpu" : "cpu"},
            {"pass", name_of(c.pass)},
            {"dtype", tandem::name_of(c.dtype)},
            {"head_dim", c.head_dim},
            {"seqlen", c.seqlen},
            {"batch", c.batch},
            {"heads", options.heads},
            {"heads_kv", options.heads_kv > 0 ? options.heads_kv : options.heads},
            {"causal", c.causal},
            {"right", c.wrong.empty()},
            {"share_of_bound", c.share_of_bound},
            {"runs", c.runs}};
  if (!c.wrong.empty()) {
    json["wrong"] = c.wrong;
    return json;
  }
  json.update(Json{{"median_ms", c.median * 1e3},
                   {"best_ms", c.best * 1e3},
                   {"gflops", c.gflops},
                   {"peak", c.peak},
                   {"share_of_peak", c.share}});
  if (!c.energy_by.empty()) json["energy_by"] = c.energy_by;
  if (c.joules > 0.0) {
    json.update(Json{{"joules", c.joules},
                     {"picojoules_per_flop", c.picojoules_per_flop()},
                     {"microjoules_per_token", c.microjoules_per_token()}});
  }
  return json;
}

std::string title(const Cell& c) {
  return fmt::format("{:<8} {:<5} {:>4} {:>6} {:>5} {:<6}", name_of(c.pass), tandem::name_of(c.dtype),
                     c.head_dim, c.seqlen, c.batch, c.causal ? "causal" : "full");
}

void print_row(const Cell& c) {
  if (c.wrong.empty()) {
    fmt::print("{} {:>11.3f} {:>11.3f} {:>9.1f} {:>7.1f}% {:>11.3f}", title(c), c.median * 1e3, c.best * 1e3,
               c.gflops, 100 * c.share, c.share_of_bound);
    if (c.joules > 0.0) {
      fmt::print(" {:>11.4g} {:>11.4g} {:>11.4g}", c.joules, c.picojoules_per_flop(),
                 c.microjoules_per_token());
    }
    fmt::print("\n");
  } else {
    fmt::print("{} {:>11} {:>11} {:>9} {:>8} {:>11.3g} WRONG\n", title(c), "-", "-", "-", "-",
               c.share_of_bound);
  }
  std::fflush(stdout);
}

/// A line for each wrong cell; the exit code.
int verdict(const std::vector<Cell>& cells) {
  int code = success;
  for (const Cell& c : cells) {
    if (c.wrong.empty()) continue;
    say(fmt::format("WRONG: {} {} head_dim {} seqlen {} batch {} {}: {}", name_of(c.pass),
                    tandem::name_of(c.dtype), c.head_dim, c.seqlen, c.batch, c.causal ? "causal" : "full",
                    c.wrong));
    code = verify_failed;
  }
  return code;
}

void check(const BenchOptions& options) {
  const auto positive = [](const char* name, std::int64_t value) {
    if (value < 1)
      throw Error(Status::invalid_argument, fmt::format("{} is {}; it must be at least 1", name, value));
  };
  for (const auto n : options.head_dims) positive("--head-dim", n);
  for (const auto n : options.seqlens) positive("--seqlen", n);
  for (const auto n : options.batches) positive("--batch", n);
  positive("--heads", options.heads);
  if (options.heads_kv < 0 || (options.heads_kv > 0 && options.heads % options.heads_kv != 0)) {
    throw Error(Status::invalid_argument,
                fmt::format("--heads-kv is {}; it must divide --heads {}, or be 0 for as many",
                            options.heads_kv, options.heads));
  }
  if (options.threads < 0) {
    throw Error(Status::invalid_argument,
                fmt::format("--threads is {}; it must be at least 1, or 0 for every core", options.threads));
  }
  // Also what NaN fails.
  if (!(options.seconds >= 0)) {
    throw Error(Status::invalid_argument,
                fmt::format("--seconds is {}; it must not be negative", options.seconds));
  }
}

int run_bench(const BenchOptions& options) {
  check(options);
  std::vector<Cell> cells = grid(options);
  Progress progress;
  progress.show("measuring the machine's peak ...");
  const bench::Peak peak = bench::measure_peak(options.threads > 0 ? options.threads : omp_get_max_threads());
  progress.show("");
  if (!options.json) {
    const Machine m = machine();
    fmt::print("{}, {} threads, {}; measured peak: f32 {:.0f} GFLOP/s", m.processor, peak.threads, m.target,
               peak.f32_gflops);
    if (peak.bf16_gflops > 0) fmt::print(", bf16 {:.0f} GFLOP/s", peak.bf16_gflops);
    fmt::print("\n\n{:<8} {:<5} {:>4} {:>6} {:>5} {:<6} {:>11} {:>11} {:>9} {:>8} {:>11}{}\n", "pass",
               "dtype", "d", "seqlen", "batch", "mask", "median ms", "best ms", "GFLOP/s", "of peak",
               "error/bound",
               options.joules ? fmt::format(" {:>11} {:>11} {:>11}", "J", "pJ/FLOP", "uJ/token") : "");
  }
  for (std::size_t i = 0; i < cells.size(); ++i) {
    Cell& cell = cells[i];
    progress.show(fmt::format("[{}/{}] {} {} d={} seqlen={} batch={}", i + 1, cells.size(),
                              name_of(cell.pass), tandem::name_of(cell.dtype), cell.head_dim, cell.seqlen,
                              cell.batch));
    measure(cell, options, peak);
    progress.show("");
    if (!options.json) print_row(cell);
  }
  if (options.joules && !options.json) fmt::print("\nenergy: {}\n", cells.front().energy_by);
  if (options.json) {
    Json document{{"machine", to_json(machine())}, {"peak", to_json(peak)}, {"version", version()}};
    document["cells"] = Json::array();
    for (const Cell& cell : cells) document["cells"].push_back(cell_json(cell, options));
    print_json(document);
  }
  return verdict(cells);
}

}  // namespace

void add_bench(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      app.add_subcommand("bench", "Check and time forward and backward over a grid of shapes");
  command->add_option("--dtype", options->dtypes, "f32, f16, bf16, e4m3 (forward only)")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--head-dim", options->head_dims, "Head dimensions")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--seqlen", options->seqlens, "Sequence lengths")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--batch", options->batches, "Batch sizes")->delimiter(',')->capture_default_str();
  command->add_option("--heads", options->heads, "Query heads")->capture_default_str();
  command->add_option("--heads-kv", options->heads_kv, "Key and value heads; 0: as many as query heads")
      ->capture_default_str();
  command->add_option("--causal", options->causal, "yes, no or both")
      ->check(CLI::IsMember({"yes", "no", "both"}))
      ->capture_default_str();
  command->add_option("--pass", options->pass, "forward, backward or both")
      ->check(CLI::IsMember({"forward", "backward", "both"}))
      ->capture_default_str();
  command->add_flag("--deterministic", options->attention.deterministic, "Bitwise reproducible gradients");
  command->add_option("--seconds", options->seconds, "Time spent on a cell, at least three runs")
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of the normal random inputs")->capture_default_str();
  add_execution_options(*command, options->threads, options->device);
  command->add_flag("--joules", options->joules,
                    "Energy of a run, by NVML's counter of the GPU's board or RAPL's of the CPU");
  command->add_flag("--json", options->json, "Print everything as JSON");
  command->footer(
      R"(GFLOP/s and the share are of the best run. The peak is measured at the start with as many threads:
multiply-adds from registers in f32, for bf16 dot products where they are faster; on a GPU it is the tensor
cores' nominal rate at the highest clock. Operations: forward 2 * batch * heads * seqlen^2 * (d_qk + d_v),
backward 2.5 times that, causal counts half.

Before a cell is timed, it runs once on outputs full of NaN. Every result must then be finite, and the
error of a sample (rows of two heads, against fp64), of an element, in the root mean square or of the gain,
is given as a share of the bound that `tandem verify --help` states: at most 1 is right. A wrong cell is not
timed; the exit code is 1. For e4m3 the share is a report: the bound is that of the output's dtype, which
8-bit arithmetic may miss.

--joules runs a cell for 2 seconds or more; what the machine draws between runs counts, too. Tokens are
batch * seqlen. TANDEM_POWERCAP is the folder of RAPL's counters if it is not /sys/class/powercap.

Examples:
  tandem bench
  tandem bench --dtype bf16 --head-dim 128 --seqlen 4096 --causal yes --pass forward
  tandem bench --seqlen 512,1024,2048,4096,8192 --batch 1,4 --json > bench.json)");
  command->callback([options, &chosen] { chosen = [options] { return run_bench(*options); }; });
}

}  // namespace tandem::cli
