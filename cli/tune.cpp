// tandem tune: Configs of a kernel against the planned one on the GPU, so that the table of tiles can be
// chosen by measurement.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <thread>

#include "command.hpp"
#include "gpu/describe.hpp"
#include "gpu/kernel_spec.hpp"
#include "inputs.hpp"
#include "ops/backward/plan.hpp"
#include "ops/backward/sm80_plan.hpp"
#include "ops/decode/plan.hpp"
#include "ops/forward/plan.hpp"
#include "ops/forward/sm80_plan.hpp"
#include "ops/latent/plan.hpp"
#include "report.hpp"
#include "supervise.hpp"
#include "tandem/attention.hpp"
#include "tune_course.hpp"

namespace tandem::cli {
namespace {

struct TuneOptions {
  std::string pass = "forward";
  std::string dtype = "bf16";
  std::vector<std::int64_t> head_dims{128};
  std::int64_t head_dim_v = 0;
  std::vector<std::int64_t> seqlens{2048, 8192};
  std::int64_t tokens = 16384;
  std::int64_t heads = 0;
  std::int64_t heads_kv = 0;
  std::string causal = "both";
  std::int64_t window_left = -1;
  std::int64_t queries = 0;
  std::int64_t page_size = 0;
  bool v_in_k = false;
  std::vector<FieldValues> fields;
  std::size_t most = 200;
  double patience = 20.0;
  unsigned compilers = 0;
  RaceRules rules;
  bool json = false;
};

std::string dashed(std::string name) {
  std::ranges::replace(name, '_', '-');
  return name;
}

std::vector<TuneShape> shapes_of(const TuneOptions& options) {
  std::vector<TuneShape> shapes;
  for (const std::int64_t head_dim : options.head_dims) {
    for (const bool causal : {false, true}) {
      if (options.causal == (causal ? "no" : "yes")) continue;
      for (const std::int64_t seqlen : options.seqlens) {
        // Hidden size 2048, as in FlashAttention-3's tables.
        const std::int64_t heads =
            options.heads > 0 ? options.heads : std::max<std::int64_t>(1, 2048 / head_dim);
        shapes.push_back({.dtype = parse_dtype(options.dtype, "--dtype"),
                          .batch = std::max<std::int64_t>(1, options.tokens / seqlen),
                          .seqlen = seqlen,
                          .heads = heads,
                          .heads_kv = options.heads_kv > 0 ? options.heads_kv : heads,
                          .head_dim = head_dim,
                          .head_dim_v = options.head_dim_v > 0 ? options.head_dim_v : head_dim,
                          .causal = causal,
                          .window_left = options.window_left,
                          .queries = options.queries > 0 ? options.queries : seqlen,
                          .page_size = options.page_size,
                          .v_in_k = options.v_in_k});
      }
    }
  }
  return shapes;
}

void check(const TuneOptions& options) {
  const auto invalid = [](const std::string& message) { throw Error(Status::invalid_argument, message); };
  if (options.dtype != "f16" && options.dtype != "bf16")
    invalid("--dtype is " + options.dtype + "; it must be f16 or bf16");
  const bool forward = options.pass == "forward";
  const std::int64_t most_qk = forward ? max_gpu_wide_head_dim_qk : 256;
  const std::int64_t most_v = forward ? max_gpu_wide_head_dim_v : 256;
  for (const std::int64_t head_dim : options.head_dims) {
    if (head_dim < 8 || head_dim > most_qk || head_dim % 8 != 0)
      invalid(fmt::format("--head-dim is {}; it must be a multiple of 8 from 8 to {}", head_dim, most_qk));
    if (options.v_in_k && options.head_dim_v > head_dim)
      invalid(fmt::format("--head-dim-v is {}, and --head-dim {}: with --v-in-k v has no more columns than k",
                          options.head_dim_v, head_dim));
  }
  if (options.head_dim_v < 0 || options.head_dim_v > most_v || options.head_dim_v % 8 != 0)
    invalid(fmt::format("--head-dim-v is {}; it must be a multiple of 8 up to {}, or 0", options.head_dim_v,
                        most_v));
  if (options.queries < 0 || options.page_size < 0) invalid("--queries and --page-size must not be negative");
  if (!forward && (options.queries > 0 || options.page_size > 0 || options.v_in_k))
    invalid("--queries, --page-size and --v-in-k are of the forward pass");
  for (const std::int64_t seqlen : options.seqlens) {
    if (seqlen < 1) invalid(fmt::format("--seqlen is {}; it must be at least 1", seqlen));
    if (options.page_size > 0 && seqlen % options.page_size != 0)
      invalid(fmt::format("--seqlen {} is no multiple of --page-size {}", seqlen, options.page_size));
  }
  if (options.heads < 0 || options.heads_kv < 0) invalid("--heads and --heads-kv must not be negative");
  if (options.window_left < -1)
    invalid(fmt::format("--window-left is {}; it must be at least -1", options.window_left));
  if (options.rules.rounds < 1)
    invalid(fmt::format("--rounds is {}; it must be at least 1", options.rules.rounds));
  if (!(options.patience > 0)) invalid(fmt::format("--patience is {}; it must be above 0", options.patience));
}

/// The fields in which a Config differs from the planned one.
template <typename Config>
std::string difference(const Config& config, const Config& planned) {
  std::string text;
  for_each_field(config, planned, [&](std::string_view name, const auto& field, const auto& otherwise) {
    if (field == otherwise) return;
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, static_cast<int>(field));
  });
  return text.empty() ? "planned" : text;
}

/// Indices by time, failures last.
std::vector<std::size_t> by_speed(const std::vector<ItemReport>& reports) {
  std::vector<std::size_t> order(reports.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto us = [&](std::size_t i) {
    return reports[i].failure.empty() ? reports[i].facts.value("us", 1e30) : 2e30;
  };
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return us(a) < us(b); });
  return order;
}

template <typename Config>
void print_table(const char* pass, const TuneShape& s, const Candidates<Config>& candidates,
                 const std::vector<ItemReport>& reports) {
  fmt::print("\n{} {} d={}{} seqlen={} batch={} heads={}/{} {}: {} Configs ({} combinations cannot exist)\n",
             pass, name_of(s.dtype), s.head_dim,
             s.head_dim_v != s.head_dim ? fmt::format("/{}", s.head_dim_v) : "", s.seqlen, s.batch, s.heads,
             s.heads_kv, s.causal ? "causal" : "full", reports.size(), candidates.illegal);
  fmt::print("planned: {}\n", gpu::expression_of(candidates.configs[0]));
  fmt::print("{:>10} {:>9} {:>8} {:>8} {:>5} {:>7}  {}\n", "us", "TFLOP/s", "ratio", "spread", "regs",
             "spilled", "Config");
  const double planned = reports[0].facts.value("us", 0.0);
  for (const std::size_t i : by_speed(reports)) {
    const Json& f = reports[i].facts;
    const std::string label = difference(candidates.configs[i], candidates.configs[0]);
    if (!reports[i].failure.empty()) {
      fmt::print("{:>10} {:>43} {}: {}\n", "failed", "", label, reports[i].failure);
      continue;
    }
    const double us = f.value("us", 0.0);
    fmt::print("{:>10.1f} {:>9.1f} {:>8.3f} {:>7.1f}% {:>5} {:>7}  {}{}\n", us, f.value("tflops", 0.0),
               planned / us, 100 * f.value("spread", 0.0), f.value("registers", 0), f.value("spill_bytes", 0),
               label, f.value("serialised", false) ? " (products serialised)" : "");
  }
  std::fflush(stdout);
}

template <typename Config>
Json shape_json(const char* pass, const TuneShape& s, const Candidates<Config>& candidates,
                const std::vector<ItemReport>& reports) {
  Json shape{{"pass", pass},           {"dtype", name_of(s.dtype)},
             {"head_dim", s.head_dim}, {"head_dim_v", s.head_dim_v},
             {"seqlen", s.seqlen},     {"batch", s.batch},
             {"heads", s.heads},       {"heads_kv", s.heads_kv},
             {"causal", s.causal},     {"window_left", s.window_left},
             {"queries", s.queries},   {"page_size", s.page_size},
             {"v_in_k", s.v_in_k},     {"illegal", candidates.illegal}};
  shape["configs"] = Json::array();
  const double planned = reports[0].facts.value("us", 0.0);
  for (const std::size_t i : by_speed(reports)) {
    Json line{{"config", gpu::expression_of(candidates.configs[i])},
              {"changes", difference(candidates.configs[i], candidates.configs[0])}};
    line.update(reports[i].facts);
    if (!reports[i].failure.empty()) {
      line["failure"] = reports[i].failure;
    } else {
      line["ratio"] = planned / reports[i].facts.value("us", 1.0);
    }
    shape["configs"].push_back(line);
  }
  return shape;
}

template <typename Config>
void tune_shape(const TuneShape& shape, const Config& planned, const TuneOptions& options, Json& document) {
  constexpr bool backward = requires {
    planned.dout_stages;
  };
  const auto objection = [](const Config& c) {
    if constexpr (backward) {
      return backward_objection(c);
    } else {
      return forward_objection(c);
    }
  };
  const char* const pass = options.pass.c_str();
  RaceRules rules = options.rules;
  rules.compilers =
      options.compilers > 0 ? options.compilers : std::max(1U, std::thread::hardware_concurrency());
  const std::chrono::milliseconds patience(static_cast<std::int64_t>(options.patience * 1e3));
  const auto candidates = legal_candidates(planned, objection, options.fields, options.most);
  Progress progress;
  progress.show(fmt::format("compiling {} Configs ...", candidates.configs.size()));
  const auto worker = [&](const std::vector<ItemReport>& reports, const Reporter& reporter) {
    RaceCourse course = [&] {
      if constexpr (backward) {
        return backward_course(shape, candidates.configs);
      } else {
        return forward_course(shape, candidates.configs);
      }
    }();
    reporter.facts(0, {{"device", gpu::properties(0).name}});
    return race(course, rules, reports, reporter);
  };
  const std::vector<ItemReport> reports =
      supervise(candidates.configs.size(), patience, worker, [&](std::size_t i) {
        progress.show(fmt::format("[{}/{}] {}", i + 1, candidates.configs.size(),
                                  difference(candidates.configs[i], candidates.configs[0])));
      });
  progress.show("");
  document["device"] = reports[0].facts.value("device", "");
  document["shapes"].push_back(shape_json(pass, shape, candidates, reports));
  if (!options.json) print_table(pass, shape, candidates, reports);
}

int run_tune(const TuneOptions& options) {
  check(options);
  Json document{{"version", version()}, {"shapes", Json::array()}};
  // This process opens no driver: a context would not survive the fork.
  for (const TuneShape& shape : shapes_of(options)) {
    const auto tune = [&](const auto& planned) { tune_shape(shape, planned, options, document); };
    if (options.pass == "forward") {
      gpu::visit_forward(planned_forward(shape), tune);
    } else {
      gpu::visit_backward(planned_backward(shape), tune);
    }
  }
  if (options.json) print_json(document);
  return success;
}

}  // namespace

void add_tune(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<TuneOptions>();
  CLI::App* command = app.add_subcommand("tune", "Time Configs of the GPU kernels against the planned one");
  command->add_option("--pass", options->pass, "forward or backward")
      ->check(CLI::IsMember({"forward", "backward"}))
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "f16 or bf16")->capture_default_str();
  command->add_option("--head-dim", options->head_dims, "Head dimensions")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--head-dim-v", options->head_dim_v, "Head dimension of v; 0: the same")
      ->capture_default_str();
  command->add_option("--seqlen", options->seqlens, "Sequence lengths")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--queries", options->queries, "Queries a sequence; 0: as many as it has keys")
      ->capture_default_str();
  command->add_option("--page-size", options->page_size, "k and v in pages of so many rows; 0: they are not")
      ->capture_default_str();
  command->add_flag("--v-in-k", options->v_in_k, "v is the first columns of k (latent attention)");
  command->add_option("--tokens", options->tokens, "The batch is tokens / seqlen")->capture_default_str();
  command->add_option("--heads", options->heads, "Query heads; 0: 2048 / head_dim")->capture_default_str();
  command->add_option("--heads-kv", options->heads_kv, "Key and value heads; 0: as many as query heads")
      ->capture_default_str();
  command->add_option("--causal", options->causal, "yes, no or both")
      ->check(CLI::IsMember({"yes", "no", "both"}))
      ->capture_default_str();
  command->add_option("--window-left", options->window_left, "Keys seen to the left of the diagonal; -1: all")
      ->capture_default_str();
  const auto add_field = [&](std::string_view name, const auto&) {
    const std::string field(name);
    if (command->get_option_no_throw("--" + dashed(field)) != nullptr) return;
    command
        ->add_option_function<std::vector<std::string>>(
            "--" + dashed(field),
            [options, field](const std::vector<std::string>& values) {
              options->fields.push_back({field, values});
            },
            "Values of the Config's field " + field + "; default: the planned one")
        ->delimiter(',');
  };
  const auto add_fields = [&](const auto& any) { for_each_field(any, add_field); };
  add_fields(ForwardConfig{});
  add_fields(LatentConfig{});
  add_fields(BackwardConfig{});
  add_fields(Sm80BackwardConfig{});
  command
      ->add_option("--rounds", options->rules.rounds,
                   "Rounds in which each Config is timed once; the median counts")
      ->capture_default_str();
  command->add_option("--burst", options->rules.burst_ms, "Milliseconds of a Config in a round")
      ->capture_default_str();
  command->add_option("--most", options->most, "An error if more Configs are legal")->capture_default_str();
  command->add_option("--patience", options->patience, "Seconds after which a Config counts as hung")
      ->capture_default_str();
  command->add_option("--compilers", options->compilers, "Threads that compile; 0: every core")
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print everything as JSON");
  command->footer(
      R"(Every combination of the values that can exist is compiled first, side by side, and kept in the cache;
each is then checked against the planned Config's result on poisoned outputs, and all are timed in rounds.
They run in a process of their own: a Config that hangs or faults is named, left out, and the others go on.
ratio is the planned Config's time over this one's: above 1 is faster. Fields are documented in
src/ops/forward/config.hpp; 0 and 1 are off and on.

Examples:
  tandem tune --seqlen 8192 --causal no --block-n 64,80,96 --stages 2,3,4
  tandem tune --head-dim 64 --seqlen 512,2048 --teams 1,2 --block-m 64,128 --q-stages 1,2 --json > tune.json
  tandem tune --head-dim 256 --dtype f16 --output-late 0,1
  tandem tune --pass backward --pingpong 0,1 --q-stages 2,3
  tandem tune --pass backward --deterministic 0,1)");
  command->callback([options, &chosen] { chosen = [options] { return run_tune(*options); }; });
}

}  // namespace tandem::cli
