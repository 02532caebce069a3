// tandem trace: what one CTA of a kernel does, and when.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "command.hpp"
#include "files/atomic_write.hpp"
#include "files/source.hpp"
#include "report.hpp"
#include "tandem/error.hpp"
#include "trace/chrome.hpp"
#include "trace/device_timeline.hpp"
#include "trace/picture.hpp"
#include "trace/recorded.hpp"
#include "tune_course.hpp"

namespace tandem::cli {
namespace {

using namespace trace;

struct TraceOptions {
  int head_dim = 128;
  bool causal = false;
  bool pingpong = true;
  bool overlap = true;
  TracedShape shape;
  std::vector<std::string> costs;
  std::string device = "emulator";
  std::string out;
  std::string picture;
  PictureOptions view;
  bool json = false;
};

[[noreturn]] void invalid(const std::string& message) {
  throw Error(Status::invalid_argument, message);
}

std::vector<EmulatedKernel> kernels() {
  std::vector<EmulatedKernel> all;
  for (const auto& some : {narrow_kernels(), wide_kernels(), widest_kernels()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

std::string describe(const ForwardConfig& config) {
  const Tiling& t = config.tiling;
  return fmt::format("forward, head dimension {}, {} x {}, {} stages, {}{}, {}", t.head_dim_qk, t.block_m,
                     t.block_n, config.stages, config.mask.causal ? "causal, " : "",
                     config.schedule.pingpong ? "ping-pong" : "no ping-pong",
                     config.schedule.overlap ? "overlap" : "no overlap");
}

EmulatedKernel kernel_of(const TraceOptions& options) {
  std::string those;
  for (const EmulatedKernel& kernel : kernels()) {
    const ForwardConfig& c = kernel.config;
    if (c.tiling.head_dim_qk == options.head_dim && c.mask.causal == options.causal &&
        c.schedule.pingpong == options.pingpong && c.schedule.overlap == options.overlap) {
      return kernel;
    }
    those += fmt::format("{}{}{}{}{}", those.empty() ? "" : "; ", c.tiling.head_dim_qk,
                         c.mask.causal ? " --causal" : "", c.schedule.pingpong ? "" : " --pingpong 0",
                         c.schedule.overlap ? "" : " --overlap 0");
  }
  throw Error(
      Status::unsupported,
      fmt::format("the program has no emulated kernel of --head-dim {}{}{}{}; it has {}", options.head_dim,
                  options.causal ? " --causal" : "", options.pingpong ? "" : " --pingpong 0",
                  options.overlap ? "" : " --overlap 0", those));
}

/// The model's costs, with those changed that NAME=VALUE names.
Costs costs_of(const std::vector<std::string>& changes) {
  Costs costs;
  for (const std::string& change : changes) {
    const std::size_t equals = change.find('=');
    const std::string name = change.substr(0, equals);
    const auto found = std::ranges::find_if(cost_names(), [&](const CostName& c) { return c.name == name; });
    if (found == cost_names().end()) {
      std::string names;
      for (const CostName& c : cost_names()) names += fmt::format("{}{}", names.empty() ? "" : ", ", c.name);
      invalid(fmt::format("--cost names {}; the model's costs are {}", files::in_quotes(name), names));
    }
    std::uint64_t value = 0;
    const char* last = change.data() + change.size();
    const char* first = equals == std::string::npos ? last : change.data() + equals + 1;
    const auto [end, error] = std::from_chars(first, last, value);
    if (error != std::errc() || end != last || value < 1 || value > 1'000'000) {
      invalid(fmt::format("--cost is {}; it must be NAME=CYCLES with a whole number from 1 to 1000000",
                          files::in_quotes(change)));
    }
    costs.*found->cost = value;
  }
  return costs;
}

void check(const TraceOptions& options) {
  if (options.shape.keys < 1 || options.shape.keys > 16384)
    invalid(fmt::format("--seqlen is {}; it must be from 1 to 16384", options.shape.keys));
  if (options.shape.tiles < 1 || options.shape.tiles > 64)
    invalid(fmt::format("--tiles is {}; it must be from 1 to 64", options.shape.tiles));
  if (!options.picture.empty() && !options.picture.ends_with(".svg"))
    invalid(fmt::format("--picture is {}; it must end in .svg", files::in_quotes(options.picture)));
  if (!options.out.empty() && !options.out.ends_with(".json"))
    invalid(fmt::format("--out is {}; it must end in .json", files::in_quotes(options.out)));
  if (options.device != "emulator" && options.device != "gpu")
    invalid(fmt::format("--device is {}; it must be emulator or gpu", files::in_quotes(options.device)));
  if (options.device == "gpu" && !options.costs.empty())
    invalid("--cost changes the model, which --device gpu does not use; leave one of them out");
  if (options.view.to != 0 && options.view.from >= options.view.to)
    invalid(fmt::format("--from is {} and --to {}; --from must be less", options.view.from, options.view.to));
}

double percent(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

const char* clock_of(const TraceOptions& options) {
  return options.device == "gpu" ? "cycles of an SM's clock; every timestamp takes some of them itself"
                                 : "cycles of a model of one SM, not a measurement";
}

void print(const std::string& title, const TraceOptions& options, const Timeline& timeline,
           const Summary& summary) {
  fmt::print("kernel        {}\nclock         {}\n", title, clock_of(options));
  fmt::print("cycles        {}\ntensor cores  {:.1f} % busy\n\n", timeline.cycles,
             percent(summary.tensor_cores_busy, timeline.cycles));
  fmt::print("{:<14}{:>9}{:>9}{:>9}{:>10}   softmax under products of others\n", "", "softmax", "issue",
             "wait", "epilogue");
  for (const WarpgroupTotal& w : summary.warpgroups) {
    fmt::print("{:<14}{:>9}{:>9}{:>9}{:>10}   {:.1f} %\n", w.track, w.softmax, w.issue, w.wait, w.epilogue,
               percent(w.softmax_under_others, w.softmax));
  }
  fmt::print("\n{:<14}{:<16}{:>9}{:>9}{:>9}\n", "waits", "for", "cycles", "times", "longest");
  for (const WaitTotal& w : summary.waits)
    fmt::print("{:<14}{:<16}{:>9}{:>9}{:>9}\n", w.track, w.name, w.cycles, w.count, w.longest);
  const Span& longest = summary.longest_wait;
  if (summary.longest_wait_of.empty()) return;
  fmt::print("\nlongest wait  {}, {} cycles from {} on: {} ({})\n", summary.longest_wait_of, longest.cycles(),
             longest.begin, longest.name, longest.detail.empty() ? "wgmma.wait_group" : longest.detail);
}

Json to_json(const std::string& title, const TraceOptions& options, const Timeline& timeline,
             const Summary& summary) {
  Json document{{"kernel", title},
                {"clock", options.device == "gpu" ? "gpu" : "model"},
                {"cycles", timeline.cycles},
                {"tensor_cores_busy", summary.tensor_cores_busy},
                {"warpgroups", Json::array()},
                {"waits", Json::array()},
                {"longest_wait", nullptr}};
  for (const WarpgroupTotal& w : summary.warpgroups) {
    document["warpgroups"].push_back({{"track", w.track},
                                      {"softmax", w.softmax},
                                      {"softmax_under_others", w.softmax_under_others},
                                      {"issue", w.issue},
                                      {"wait", w.wait},
                                      {"epilogue", w.epilogue}});
  }
  for (const WaitTotal& w : summary.waits) {
    document["waits"].push_back({{"track", w.track},
                                 {"for", w.name},
                                 {"cycles", w.cycles},
                                 {"times", w.count},
                                 {"longest", w.longest}});
  }
  if (!summary.longest_wait_of.empty()) {
    document["longest_wait"] = {{"track", summary.longest_wait_of},
                                {"for", summary.longest_wait.name},
                                {"detail", summary.longest_wait.detail},
                                {"cycles", summary.longest_wait.cycles()},
                                {"from", summary.longest_wait.begin}};
  }
  return document;
}

int run_trace(const TraceOptions& options) {
  check(options);
  const EmulatedKernel kernel = kernel_of(options);
  const Costs costs = costs_of(options.costs);
  // Before the work, so that it is not done in vain.
  std::optional<files::AtomicFile> out;
  std::optional<files::AtomicFile> picture;
  if (!options.out.empty()) out.emplace(options.out);
  if (!options.picture.empty()) picture.emplace(options.picture);

  const Roles roles{.warps = kernel.config.threads() / 32, .producer = kernel.config.schedule.specialised};
  const bool on_gpu = options.device == "gpu";
  if (on_gpu) require_hopper();
  const Timeline timeline =
      on_gpu ? timeline_of(record_on_gpu(kernel.config, options.shape), kernel.names(), roles)
             : model(record(kernel, options.shape), kernel.names(), roles, costs);
  const Summary summary = summarize(timeline);
  const std::string title = fmt::format("{}, {} keys", describe(kernel.config), options.shape.keys);
  const auto write = [](std::optional<files::AtomicFile>& file, const std::string& text) {
    if (file) file->write(std::as_bytes(std::span(text)));
  };
  if (out) write(out, to_chrome_trace(timeline, title));
  PictureOptions view = options.view;
  view.title = title;
  view.clock = clock_of(options);
  if (picture) write(picture, to_svg(timeline, summary, view));
  for (auto* file : {&out, &picture}) {
    if (*file) (*file)->flush();
  }
  for (auto* file : {&out, &picture}) {
    if (*file) (*file)->commit();
  }
  if (options.json) {
    print_json(to_json(title, options, timeline, summary));
  } else {
    print(title, options, timeline, summary);
  }
  return success;
}

}  // namespace

void add_trace(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<TraceOptions>();
  CLI::App* command = app.add_subcommand(
      "trace", "Show what one CTA of the forward kernel does when, by emulator and model or on a GPU");
  command->add_option("--head-dim", options->head_dim, "64, 128 or 256")->capture_default_str();
  command->add_option("--seqlen", options->shape.keys, "Keys that the queries see")->capture_default_str();
  command->add_option("--tiles", options->shape.tiles, "Tiles of queries, one after the other")
      ->capture_default_str();
  command->add_flag("--causal", options->causal, "With a causal mask, aligned to the last query and key");
  command->add_option("--pingpong", options->pingpong, "Warpgroups take the tensor cores in turns: 0 or 1")
      ->capture_default_str();
  command->add_option("--overlap", options->overlap, "Q K^T of a block runs beside P V of the last: 0 or 1")
      ->capture_default_str();
  command->add_option("--device", options->device, "emulator: by a model of time; gpu: by timestamps")
      ->capture_default_str();
  command->add_option("--cost", options->costs, "A cost of the model, NAME=CYCLES; may be given again")
      ->type_name("NAME=CYCLES");
  command->add_option("--out", options->out, "Write a trace for ui.perfetto.dev (.json)");
  command->add_option("--picture", options->picture, "Write a drawing (.svg)");
  command->add_option("--from", options->view.from, "First cycle of the drawing")->capture_default_str();
  command->add_option("--to", options->view.to, "Its last cycle; 0: that of the trace")
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print as JSON");
  command->footer(R"(Examples:
  tandem trace --picture trace.svg
  tandem trace --head-dim 64 --seqlen 2048 --out trace.json
  tandem trace --pingpong 0 --overlap 0 --picture serial.svg --from 2000 --to 9000
  tandem trace --cost copy_latency=3000
  tandem trace --device gpu --out measured.json)");
  command->callback([options, &chosen] { chosen = [options] { return run_trace(*options); }; });
}

}  // namespace tandem::cli
