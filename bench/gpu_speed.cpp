// Times the forward or the backward pass on a GPU, on request: a server for bench/gpu_speed.py, which
// interleaves it with its peers, and a bench by hand.
//
//   gpu_speed            reads commands from standard input, answers each with one line of JSON
//
//   problem key=value ...  pass=forward dtype=bf16 batch=1 heads=16 heads_kv=heads seqlen=8192
//   seqlen_k=seqlen head_dim=128
//                          head_dim_v=head_dim causal=0 window_left=-1 softcap=0 deterministic=0 (backward),
//                          and any field of the pass's Config by its name. lengths=131072,1000x16 packs
//                          sequences of these lengths (1000 of 16) in place of batch and seqlen;
//                          device_lengths=1 gives seqlen_k as lengths that the device reads, too;
//                          page_size=16 (forward) puts the keys into pages in a random order, with such
//                          lengths: layout=0 rows before heads, 1 heads before rows, 2 as 0 with V of a page
//                          behind its K
//                          -> {"flops": of one call, "config": "...", "first_call_ms": compile, load and run,
//                          "memory_bytes": of the device that tensors, workspace and call took,
//                          "share_of_bound": the error of a sample of the results, which is at most 1, or -1
//                          where nothing is compared: windows, softcap, s8 and the quantiser alone}
//                          precision=fp8 strict=0 (forward) times the call with the quantiser in it;
//   problem pass=quantize precision=fp8 ...  the quantiser alone -> {"bytes": read and written, ...}
//                          quantized=1: q, k and v are 8-bit already; the same pass arranges all of them
//                          (in a whole call in_place=0 arranges them, in_place=1 reads e4m3 where it is)
//   problem pass=quantized precision=fp8 ... the 8-bit attention kernel alone
//   problem pass=both ...  the forward call and the backward one; backward_precision=int8 precision=int8 has
//                          gradients in 8 bits, which are not compared
//   round MILLISECONDS     runs for about that long -> {"us": mean time of a call, "calls": n}
//
// An error is answered by {"error": "..."}; the next command starts afresh.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "api/make_problem.hpp"
#include "config/fields.hpp"
#include "gpu/device.hpp"
#include "gpu_check.hpp"
#include "gpu_speed_inputs.hpp"
#include "ops/backward/plan.hpp"
#include "ops/backward/sm80_plan.hpp"
#include "ops/decode/plan.hpp"
#include "ops/eight_bit/launch.hpp"
#include "ops/eight_bit/plan.hpp"
#include "ops/eight_bit_backward/plan.hpp"
#include "ops/forward/plan.hpp"
#include "ops/forward/sm80_plan.hpp"
#include "ops/latent/plan.hpp"
#include "ops/plan_gpu.hpp"
#include "ops/quantize/launch.hpp"
#include "ops/run.hpp"
#include "tandem/error.hpp"

namespace {

using namespace tandem;

using Words = std::map<std::string, std::string>;

[[noreturn]] void invalid(const std::string& message) {
  throw Error(Status::invalid_argument, message);
}

/// Takes `name` out of `words`; `otherwise` if it is not there.
std::int64_t take(Words& words, const std::string& name, std::int64_t otherwise) {
  const auto at = words.find(name);
  if (at == words.end()) return otherwise;
  const std::int64_t value = std::stoll(at->second);
  words.erase(at);
  return value;
}

/// Takes a precision out of `words`; exact if it is not there.
Precision take_precision(Words& words, const std::string& name) {
  const auto word = words.extract(name);
  if (word.empty()) return Precision::exact;
  for (const Precision precision : {Precision::fp8, Precision::int8}) {
    if (word.mapped() == name_of(precision)) return precision;
  }
  invalid(name + ": " + word.mapped() + " is none");
}

std::size_t free_bytes() {
  const gpu::ContextGuard guard(0);
  std::size_t free = 0;
  std::size_t total = 0;
  gpu::check(gpu::driver().memory_get_info(&free, &total), "cuMemGetInfo");
  return free;
}

/// What the pass of that name times of an 8-bit call.
bool is_timed(const gpu::KernelSpec* kernel, const std::string& pass) {
  namespace kernels = gpu::kernels;
  if (pass == "quantize") return kernel != &kernels::eight_bit_forward;
  return pass != "quantized" || (kernel != &kernels::mean_of_keys && kernel != &kernels::quantize &&
                                 kernel != &kernels::arrange_quantized);
}

/// The steps that the pass times. One after a step that is left out does not start under it.
gpu::StepList timed_steps(const gpu::StepList& steps, const std::string& pass) {
  gpu::StepList timed;
  bool follows = true;
  for (gpu::Step step : steps) {
    step.programmatic = step.programmatic && follows;
    follows = is_timed(step.kernel, pass);
    if (follows) timed.add(step);
  }
  return timed;
}

/// A call with its memory, ready to run: planned as a user's is, but for the fields of the Config that are
/// given.
class Bench {
 public:
  explicit Bench(Words words) {
    batch_ = take(words, "batch", 1);
    heads_q_ = take(words, "heads", 16);
    heads_kv_ = take(words, "heads_kv", heads_q_);
    rows_q_ = take(words, "seqlen", 8192);
    rows_k_ = take(words, "seqlen_k", rows_q_);
    head_dim_qk_ = take(words, "head_dim", 128);
    head_dim_v_ = take(words, "head_dim_v", head_dim_qk_);
    if (const auto at = words.find("lengths"); at != words.end()) {
      pack(bench::parse_lengths(at->second));
      words.erase(at);
    }
    const std::int64_t page_size = take(words, "page_size", 0);
    const auto layout = static_cast<bench::PageLayout>(take(words, "layout", 0));
    if (take(words, "device_lengths", 0) != 0 || page_size > 0) use_all_keys();
    AttentionOptions& options = args_.options;
    options.causal = take(words, "causal", 0) != 0;
    options.window_left = take(words, "window_left", -1);
    options.softcap = static_cast<float>(take(words, "softcap", 0));
    options.strict = take(words, "strict", 0) != 0;
    options.deterministic = take(words, "deterministic", 0) != 0;
    options.precision = take_precision(words, "precision");
    options.backward_precision = take_precision(words, "backward_precision");
    const DType sixteen = words["dtype"] == "f16" ? DType::f16 : DType::bf16;
    words.erase("dtype");
    pass_ = words["pass"];
    words.erase("pass");
    DType in = sixteen;
    if (take(words, "quantized", 0) != 0) {
      if (options.precision == Precision::exact) invalid("quantized=1 needs a precision");
      in = options.precision == Precision::fp8 ? DType::e4m3 : DType::s8;
    }
    allocate(in, sixteen);
    if (page_size > 0) put_into_pages(page_size, layout);
    plan(words);
    if (!words.empty()) invalid("no such key: " + words.begin()->first);
  }

  std::string first_call() {
    const auto start = std::chrono::steady_clock::now();
    call();
    stream_.synchronize();
    const std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - start;
    const bool exact = p_.precision == Precision::exact;
    const std::size_t memory = free_before_ - free_bytes();
    const double share =
        pass_ == "quantize"
            ? -1.0
            : bench::check_results(pages_.rows.bytes() > 0 ? contiguous_ : p_,
                                   is_backward() ? Pass::backward : Pass::forward, tensors_, lengths_);
    return fmt::format(
        R"({{"flops": {}, {}"config": "{}", "first_call_ms": {:.1f}, "memory_bytes": {}, "share_of_bound": {}}})",
        flops(), exact ? "" : fmt::format(R"("bytes": {}, )", quantized_bytes()),
        gpu::expression_of(steps_.config), spent.count(), memory, share);
  }

  std::string round(double milliseconds) {
    const double one = time(1);
    const int calls = std::max(1, static_cast<int>(milliseconds / one));
    const double all = one >= milliseconds ? one : time(calls);
    return fmt::format(R"({{"us": {:.3f}, "calls": {}}})", all * 1000.0 / calls, calls);
  }

 private:
  [[nodiscard]] bool with_forward() const { return pass_ == "both"; }
  [[nodiscard]] bool is_backward() const { return pass_ == "backward" || with_forward(); }

  /// Makes it a call of packed sequences.
  void pack(const std::vector<std::int64_t>& lengths) {
    lengths_ = lengths;
    std::vector<std::int64_t> offsets{0};
    for (const std::int64_t length : lengths) offsets.push_back(offsets.back() + length);
    offsets_ = gpu::DeviceBuffer(0, offsets.size() * sizeof(offsets[0]));
    offsets_.copy_from_host(offsets.data(), offsets_.bytes());
    gpu::synchronize(0);
    batch_ = 1;
    rows_q_ = rows_k_ = offsets.back();
    args_.cu_seqlens_q = args_.cu_seqlens_k =
        ConstTensor(offsets_.data(), DType::i64, {static_cast<std::int64_t>(offsets.size())}, cuda);
  }

  /// Gives the lengths of all keys of each sequence.
  void use_all_keys() {
    const std::vector<std::int64_t> used(static_cast<std::size_t>(batch_), rows_k_);
    used_ = gpu::DeviceBuffer(0, used.size() * sizeof(used[0]));
    used_.copy_from_host(used.data(), used_.bytes());
    gpu::synchronize(0);
    args_.seqused_k = ConstTensor(used_.data(), DType::i64, {batch_}, cuda);
  }

  /// `in`: of q, k and v.
  void allocate(DType in, DType sixteen) {
    const auto tensor = [&](DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
      const auto seed = static_cast<unsigned>(tensors_.size() + 1);
      tensors_.push_back(
          bench::random_tensor(static_cast<std::size_t>(batch_ * rows * heads * dim), dtype, seed));
      void* const data = tensors_.back().data();
      return lengths_.empty() ? Tensor(data, dtype, {batch_, rows, heads, dim}, cuda)
                              : Tensor(data, dtype, {rows, heads, dim}, cuda);
    };
    args_.q = tensor(in, rows_q_, heads_q_, head_dim_qk_);
    args_.k = tensor(in, rows_k_, heads_kv_, head_dim_qk_);
    args_.v = tensor(in, rows_k_, heads_kv_, head_dim_v_);
    args_.out = tensor(sixteen, rows_q_, heads_q_, head_dim_v_);
    if (is_backward()) {
      gradients_.dout = tensor(sixteen, rows_q_, heads_q_, head_dim_v_);
      gradients_.dq = tensor(sixteen, rows_q_, heads_q_, head_dim_qk_);
      gradients_.dk = tensor(sixteen, rows_k_, heads_kv_, head_dim_qk_);
      gradients_.dv = tensor(sixteen, rows_k_, heads_kv_, head_dim_v_);
    }
    const auto of_row = [&] {
      tensors_.emplace_back(0, static_cast<std::size_t>(batch_ * heads_q_ * rows_q_) * sizeof(float));
      void* const data = tensors_.back().data();
      return lengths_.empty() ? Tensor(data, DType::f32, {batch_, heads_q_, rows_q_}, cuda)
                              : Tensor(data, DType::f32, {heads_q_, rows_q_}, cuda);
    };
    args_.lse = of_row();
    if (args_.options.backward_precision != Precision::exact) args_.max_logits = of_row();
  }

  /// The call is of the keys in pages then; `contiguous_` is what it was.
  void put_into_pages(std::int64_t page_size, bench::PageLayout layout) {
    if (!lengths_.empty()) invalid("page_size: sequences of one length, not lengths");
    contiguous_ = make_problem(args_, Memory::present);
    pages_ = bench::put_into_pages(args_, tensors_[1], tensors_[2], page_size, layout);
  }

  /// Plans the call with the fields of the Config that `words` has, which it takes out.
  void plan(Words& words) {
    if (is_backward()) {
      forward(args_, {.stream = stream_.get()});  // out, LSE and max_logits
      stream_.synchronize();
      static_cast<AttentionInputs&>(gradients_) = args_;
      gradients_.options = args_.options;
      gradients_.out = args_.out;
      gradients_.lse = args_.lse;
      gradients_.max_logits = args_.max_logits;
    }
    if (with_forward()) {
      forward_steps_ = *plan_gpu(make_problem(args_, Memory::present)).gpu;
      forward_workspace_ = gpu::DeviceBuffer(0, forward_steps_.workspace.bytes());
    }
    p_ = is_backward() ? make_problem(gradients_, Memory::present) : make_problem(args_, Memory::present);
    gpu::KernelConfig config = plan_gpu(p_).gpu->config;
    if (auto* c = std::get_if<EightBitConfig>(&config); c != nullptr && pass_ == "quantize") {
      c->in_place = false;
    }
    std::visit([&](auto& c) { override_config(c, words); }, config);
    if (const std::string why = objection(config); !why.empty()) invalid(why);
    steps_ = *plan_gpu(p_, &config).gpu;
    workspace_ = gpu::DeviceBuffer(0, steps_.workspace.bytes());
    if (pass_ == "quantized") gpu::run(steps_, stream_.get(), workspace_.data());
    steps_.list = timed_steps(steps_.list, pass_);
  }

  [[nodiscard]] std::string objection(const gpu::KernelConfig& config) const {
    if (const auto* c = std::get_if<EightBitConfig>(&config)) return eight_bit_objection(*c);
    if (const auto* c = std::get_if<EightBitBackwardConfig>(&config)) return eight_bit_backward_objection(*c);
    if (is_backward())
      return gpu::visit_backward(config, [](const auto& c) { return backward_objection(c); });
    return gpu::visit_forward(config, [](const auto& c) { return forward_objection(c); });
  }

  template <typename Config>
  static void override_config(Config& config, Words& words) {
    for_each_field(config, [&](std::string_view name, auto& field) {
      using Field = std::remove_reference_t<decltype(field)>;
      field = static_cast<Field>(take(words, std::string(name), static_cast<std::int64_t>(field)));
    });
  }

  void call() {
    if (with_forward()) gpu::run(forward_steps_, stream_.get(), forward_workspace_.data());
    gpu::run(steps_, stream_.get(), workspace_.data());
  }

  /// Milliseconds of `calls` calls in a row.
  double time(int calls) {
    start_.record(stream_.get());
    for (int i = 0; i < calls; ++i) call();
    end_.record(stream_.get());
    return end_.milliseconds_since(start_);
  }

  /// What the quantiser has to read and write once: 16 bits or quantized values in, 8 bits out.
  [[nodiscard]] double quantized_bytes() const {
    const std::int64_t q = heads_q_ * rows_q_ * head_dim_qk_;
    const std::int64_t k = heads_kv_ * rows_k_ * head_dim_qk_;
    const std::int64_t v = heads_kv_ * rows_k_ * head_dim_v_;
    return (p_.quantized_inputs() ? 2.0 : 3.0) * static_cast<double>(batch_ * (q + k + v));
  }
  [[nodiscard]] double flops() const {
    double of_a_head = 0;
    const Window window = window_of(p_, 0);
    for (const std::int64_t length : lengths_) of_a_head += counted_pairs(window, length, length);
    if (!p_.packed_q) of_a_head = counted_pairs(window, p_.rows_q, p_.rows_k) * static_cast<double>(p_.batch);
    return (with_forward()  ? 7.0
            : is_backward() ? 5.0
                            : 2.0) *
           of_a_head * static_cast<double>(p_.heads_q * (p_.head_dim_qk + p_.head_dim_v));
  }

  static constexpr Device cuda{.kind = Device::Kind::cuda, .index = 0};
  std::size_t free_before_ = free_bytes();
  std::string pass_;
  std::int64_t batch_ = 0;  ///< entries that the tensors have
  std::int64_t heads_q_ = 0;
  std::int64_t heads_kv_ = 0;
  std::int64_t rows_q_ = 0;
  std::int64_t rows_k_ = 0;
  std::int64_t head_dim_qk_ = 0;
  std::int64_t head_dim_v_ = 0;
  std::vector<std::int64_t> lengths_;  ///< of packed sequences
  ForwardArgs args_;
  BackwardArgs gradients_;
  Problem p_;
  Problem contiguous_;  ///< the same call on the keys before they were put into pages
  gpu::Steps steps_, forward_steps_;
  std::vector<gpu::DeviceBuffer> tensors_;
  gpu::DeviceBuffer offsets_, used_, workspace_, forward_workspace_;
  bench::KeyPages pages_;
  gpu::Stream stream_{0};
  gpu::Event start_{0};
  gpu::Event end_{0};
};

std::string answer(const std::string& line, std::unique_ptr<Bench>& bench) {
  std::istringstream in(line);
  std::string command;
  in >> command;
  if (command == "device") return fmt::format(R"({{"device": "{}"}})", gpu::properties(0).name);
  if (command == "round") {
    double milliseconds = 0;
    if (!(in >> milliseconds) || bench == nullptr) invalid("round MILLISECONDS, after a problem");
    return bench->round(milliseconds);
  }
  if (command != "problem") invalid("no such command: " + command);
  Words words;
  for (std::string word; in >> word;) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) invalid(word + " is not key=value");
    words[word.substr(0, equals)] = word.substr(equals + 1);
  }
  bench.reset();  // its memory first
  bench = std::make_unique<Bench>(std::move(words));
  return bench->first_call();
}

/// As a JSON string.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + "\"";
}

}  // namespace

int main() {
  std::unique_ptr<Bench> bench;
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << answer(line, bench) << '\n' << std::flush;
    } catch (const std::exception& e) {
      bench.reset();
      std::cout << "{\"error\": " << quoted(e.what()) << "}\n" << std::flush;
    }
  }
}
