// tandem bench: how fast attention is on this machine, as time, GFLOP/s and a share of the measured peak.
#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "call.hpp"
#include "command.hpp"
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
  int runs = 0;
  double median = 0.0;  ///< seconds
  double best = 0.0;
  double gflops = 0.0;  ///< of the best run
  bool on_gpu = false;
  const char* peak = "";  ///< which peak the share is of
  double share = 0.0;
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

void measure(Cell& cell, const BenchOptions& options, const bench::Peak& peak) {
  CallOptions call_options;
  call_options.attention = options.attention;
  call_options.attention.causal = cell.causal;
  call_options.threads = options.threads;
  call_options.device = options.device;
  call_options.backward = cell.pass == Pass::backward;
  call_options.dout_seed = options.seed + 3;
  Call call(random_inputs(cell, options), call_options);
  call.run_forward();  // warm-up, and what backward starts from
  if (call.has_backward()) call.run_backward();

  constexpr std::size_t fewest = 3;
  constexpr std::size_t most = 1000;
  std::vector<double> times;
  double spent = 0.0;
  while (times.size() < fewest || (spent < options.seconds && times.size() < most)) {
    times.push_back(call.has_backward() ? call.run_backward() : call.run_forward());
    spent += times.back();
  }
  std::ranges::sort(times);
  const double flops = call.has_backward() ? call.backward_flops() : call.forward_flops();
  cell.runs = static_cast<int>(times.size());
  cell.median = times[times.size() / 2];
  cell.best = times.front();
  cell.gflops = flops / cell.best / 1e9;
  cell.on_gpu = call.on_gpu();
  cell.peak = cell.on_gpu ? "nominal" : peak_name(peak, cell.dtype);
  cell.share = cell.gflops / (cell.on_gpu ? gpu_nominal_gflops() : peak_gflops(peak, cell.dtype));
}

Json cell_json(const Cell& c, const BenchOptions& options) {
  return {{"device", c.on_gpu ? "gpu" : "cpu"},
          {"pass", name_of(c.pass)},
          {"dtype", tandem::name_of(c.dtype)},
          {"head_dim", c.head_dim},
          {"seqlen", c.seqlen},
          {"batch", c.batch},
          {"heads", options.heads},
          {"heads_kv", options.heads_kv > 0 ? options.heads_kv : options.heads},
          {"causal", c.causal},
          {"runs", c.runs},
          {"median_ms", c.median * 1e3},
          {"best_ms", c.best * 1e3},
          {"gflops", c.gflops},
          {"peak", c.peak},
          {"share_of_peak", c.share}};
}

void print_row(const Cell& c) {
  fmt::print("{:<8} {:<5} {:>4} {:>6} {:>5} {:<6} {:>11.3f} {:>11.3f} {:>9.1f} {:>7.1f}%\n", name_of(c.pass),
             tandem::name_of(c.dtype), c.head_dim, c.seqlen, c.batch, c.causal ? "causal" : "full",
             c.median * 1e3, c.best * 1e3, c.gflops, 100 * c.share);
  std::fflush(stdout);
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
    fmt::print("\n\n{:<8} {:<5} {:>4} {:>6} {:>5} {:<6} {:>11} {:>11} {:>9} {:>8}\n", "pass", "dtype", "d",
               "seqlen", "batch", "mask", "median ms", "best ms", "GFLOP/s", "of peak");
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
  if (options.json) {
    Json document{{"machine", to_json(machine())}, {"peak", to_json(peak)}, {"version", version()}};
    document["cells"] = Json::array();
    for (const Cell& cell : cells) document["cells"].push_back(cell_json(cell, options));
    print_json(document);
  }
  return success;
}

}  // namespace

void add_bench(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", "Time forward and backward over a grid of shapes");
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
  command->add_flag("--json", options->json, "Print everything as JSON");
  command->footer(
      R"(GFLOP/s and the share are of the best run. The peak is measured at the start with as many threads:
multiply-adds from registers in f32, for bf16 dot products where they are faster; on a GPU it is the tensor
cores' nominal rate at the highest clock. Operations: forward 2 * batch * heads * seqlen^2 * (d_qk + d_v),
backward 2.5 times that, causal counts half.

Examples:
  tandem bench
  tandem bench --dtype bf16 --head-dim 128 --seqlen 4096 --causal yes --pass forward
  tandem bench --seqlen 512,1024,2048,4096,8192 --batch 1,4 --json > bench.json)");
  command->callback([options, &chosen] { chosen = [options] { return run_bench(*options); }; });
}

}  // namespace tandem::cli
