// Times the forward or the backward pass on a GPU, on request: a server for bench/gpu_speed.py, which
// interleaves it with its peers, and a bench by hand.
//
//   gpu_speed            reads commands from standard input, answers each with one line of JSON
//
//   problem key=value ...  pass=forward dtype=bf16 batch=1 heads=16 heads_kv=heads seqlen=8192
//   seqlen_k=seqlen head_dim=128
//                          head_dim_v=head_dim causal=0 window_left=-1 softcap=0 deterministic=0 (backward),
//                          and any field of the pass's Config by its name. lengths=131072,1000x16 packs
//                          sequences of these lengths (1000 of 16) in place of batch and seqlen
//                          -> {"flops": of one call, "config": "...", "first_call_ms": compile, load and run,
//                          "memory_bytes": of the device that tensors, workspace and call took}
//                          precision=fp8 strict=0 (forward) times the call with the quantiser in it;
//   problem pass=quantize precision=fp8 ...  the quantiser alone -> {"bytes": read and written, ...}
//                          codes=1: q, k and v are codes already, which the same pass arranges
//                          (transpose_v=0), or the attention kernel reads where they are
//   problem pass=quantized precision=fp8 ... the 8-bit attention kernel alone
//   round MILLISECONDS     runs for about that long -> {"us": mean time of a call, "calls": n}
//
// An error is answered by {"error": "..."}; the next command starts afresh.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/convert.hpp"
#include "gpu/backward.hpp"
#include "gpu/device.hpp"
#include "gpu/eight_bit_forward.hpp"
#include "gpu/forward.hpp"
#include "gpu/kernel_name.hpp"
#include "kernels/config/fields.hpp"
#include "plan/backward_plan.hpp"
#include "plan/eight_bit_plan.hpp"
#include "plan/forward_plan.hpp"
#include "plan/quantize_plan.hpp"
#include "problem/recipe_of.hpp"
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

Precision precision_of(const std::string& name) {
  for (const Precision precision : {Precision::fp8, Precision::int8, Precision::int8_accurate}) {
    if (name == name_of(precision)) return precision;
  }
  invalid("precision: " + name + " is none");
}

/// Device memory of normal numbers, or their codes of scale 1 (e4m3) or 1 / 32 (s8): four million drawn, then
/// repeated.
gpu::DeviceBuffer random_tensor(std::size_t elements, DType dtype, unsigned seed) {
  constexpr std::size_t period = std::size_t{1} << 22;
  const std::size_t size = size_of(dtype);
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  const std::size_t drawn = std::min(elements, period);
  std::vector<std::byte> values(drawn * size);
  for (std::size_t i = 0; i < drawn; ++i) {
    const float x = normal(generator);
    if (dtype == DType::s8) {
      values[i] = static_cast<std::byte>(std::lround(std::clamp(32.0F * x, -127.0F, 127.0F)));
    } else {
      store_from_f32(values.data(), dtype, static_cast<std::int64_t>(i), x);
    }
  }
  gpu::DeviceBuffer buffer(0, elements * size);
  for (std::size_t at = 0; at < elements; at += period) {
    buffer.copy_from_host(values.data(), std::min(period, elements - at) * size, nullptr, at * size);
  }
  gpu::synchronize(0);
  return buffer;
}

std::size_t free_bytes() {
  const gpu::ContextGuard guard(0);
  std::size_t free = 0;
  std::size_t total = 0;
  gpu::check(gpu::driver().memory_get_info(&free, &total), "cuMemGetInfo");
  return free;
}

/// "131072,1000x16": one of 131072 and a thousand of 16.
std::vector<std::int64_t> parse_lengths(const std::string& text) {
  std::vector<std::int64_t> lengths;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    const std::size_t times = part.find('x');
    const std::int64_t count = times == std::string::npos ? 1 : std::stoll(part.substr(0, times));
    const std::int64_t length = std::stoll(times == std::string::npos ? part : part.substr(times + 1));
    if (count < 1 || length < 0) invalid("lengths: " + part + " is not LENGTH or COUNTxLENGTH");
    lengths.insert(lengths.end(), static_cast<std::size_t>(count), length);
  }
  return lengths;
}

/// A problem with its memory, ready to run.
class Bench {
 public:
  explicit Bench(Words words) {
    p_.device = {.kind = Device::Kind::cuda, .index = 0};
    p_.batch = take(words, "batch", 1);
    p_.heads_q = take(words, "heads", 16);
    p_.heads_kv = take(words, "heads_kv", p_.heads_q);
    p_.rows_q = take(words, "seqlen", 8192);
    p_.rows_k = take(words, "seqlen_k", p_.rows_q);
    if (const auto at = words.find("lengths"); at != words.end()) {
      pack(parse_lengths(at->second));
      words.erase(at);
    }
    p_.head_dim_qk = take(words, "head_dim", 128);
    p_.head_dim_v = take(words, "head_dim_v", p_.head_dim_qk);
    p_.window_right = take(words, "causal", 0) != 0 ? 0 : -1;
    p_.window_left = take(words, "window_left", -1);
    p_.softcap = static_cast<float>(take(words, "softcap", 0));
    p_.scale = 1.0F / std::sqrt(static_cast<float>(p_.head_dim_qk));
    const bool f16 = words["dtype"] == "f16";
    words.erase("dtype");
    const std::string pass = words["pass"];
    words.erase("pass");
    backward_ = pass == "backward";
    if (const auto at = words.find("precision"); at != words.end()) {
      p_.precision = precision_of(at->second);
      words.erase(at);
      stages_ = {.quantize = pass != "quantized", .attend = pass != "quantize"};
    }
    p_.strict = take(words, "strict", 0) != 0;
    p_.deterministic = take(words, "deterministic", 0) != 0;
    const DType sixteen = f16 ? DType::f16 : DType::bf16;
    DType in = sixteen;
    if (take(words, "codes", 0) != 0) {
      if (p_.precision == Precision::exact) invalid("codes=1 needs a precision");
      in = p_.precision == Precision::fp8 ? DType::e4m3 : DType::s8;
    }
    allocate(in, sixteen);
    if (p_.precision != Precision::exact) {
      recipe_ = recipe_of(p_);
      eight_bit_config_ = choose_eight_bit_config(p_, recipe_);
      if (!stages_.attend) eight_bit_config_.transpose_v = false;  // else nothing is launched before
      override_config(eight_bit_config_, words);
      if (!words.empty()) invalid("no such key: " + words.begin()->first);
      if (const std::string why = eight_bit_objection(eight_bit_config_); !why.empty()) invalid(why);
      workspace_ =
          gpu::DeviceBuffer(0, gpu::eight_bit_forward_workspace_bytes(p_, recipe_, eight_bit_config_));
      if (!stages_.quantize)
        gpu::eight_bit_forward(p_, recipe_, choose_quantize_config(p_, recipe_), eight_bit_config_,
                               stream_.get(), workspace_.data());
      return;
    }
    forward_config_ = choose_forward_config(p_);
    if (backward_) {
      backward_config_ = choose_backward_config(p_);
      override_config(backward_config_, words);
    } else {
      override_config(forward_config_, words);
    }
    if (!words.empty()) invalid("no such key: " + words.begin()->first);
    const std::string objection =
        backward_ ? backward_objection(backward_config_) : forward_objection(forward_config_);
    if (!objection.empty()) invalid(objection);
    workspace_ = gpu::DeviceBuffer(0, gpu::forward_workspace_bytes(p_, forward_config_));
    if (backward_) make_gradients_due();
  }

  std::string first_call() {
    const auto start = std::chrono::steady_clock::now();
    call();
    stream_.synchronize();
    const std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - start;
    const bool exact = p_.precision == Precision::exact;
    return fmt::format(R"({{"flops": {}, {}"config": "{}", "first_call_ms": {:.1f}, "memory_bytes": {}}})",
                       flops(), exact ? "" : fmt::format(R"("bytes": {}, )", quantized_bytes()),
                       !exact      ? gpu::expression_of(eight_bit_config_)
                       : backward_ ? gpu::expression_of(backward_config_)
                                   : gpu::expression_of(forward_config_),
                       spent.count(), free_before_ - free_bytes());
  }

  std::string round(double milliseconds) {
    const double one = time(1);
    const int calls = std::max(1, static_cast<int>(milliseconds / one));
    const double all = one >= milliseconds ? one : time(calls);
    return fmt::format(R"({{"us": {:.3f}, "calls": {}}})", all * 1000.0 / calls, calls);
  }

 private:
  /// Makes it a call of packed sequences.
  void pack(const std::vector<std::int64_t>& lengths) {
    lengths_ = lengths;
    std::vector<std::int64_t> offsets{0};
    for (const std::int64_t length : lengths) offsets.push_back(offsets.back() + length);
    offsets_ = gpu::DeviceBuffer(0, offsets.size() * sizeof(offsets[0]));
    offsets_.copy_from_host(offsets.data(), offsets_.bytes());
    gpu::synchronize(0);
    p_.packed_q = p_.packed_k = true;
    p_.batch = static_cast<std::int64_t>(lengths.size());
    p_.rows_q = p_.rows_k = offsets.back();
    p_.cu_seqlens_q = p_.cu_seqlens_k = {.data = offsets_.data(), .wide = true, .stride = 1};
  }

  /// Batch entries that the tensors have.
  [[nodiscard]] std::int64_t entries() const { return p_.packed_q ? 1 : p_.batch; }

  /// `in`: of q, k and v.
  void allocate(DType in, DType sixteen) {
    const auto operand = [&](gpu::DeviceBuffer& buffer, std::int64_t rows, std::int64_t heads,
                             std::int64_t dim, unsigned seed) {
      const auto elements = static_cast<std::size_t>(entries() * rows * heads * dim);
      const DType dtype = seed <= 3 ? in : sixteen;
      buffer = random_tensor(elements, dtype, seed);
      return Operand{.data = buffer.data(),
                     .dtype = dtype,
                     .batch_stride = rows * heads * dim,
                     .row_stride = heads * dim,
                     .head_stride = dim};
    };
    p_.q = operand(q_, p_.rows_q, p_.heads_q, p_.head_dim_qk, 1);
    p_.k = operand(k_, p_.rows_k, p_.heads_kv, p_.head_dim_qk, 2);
    p_.v = operand(v_, p_.rows_k, p_.heads_kv, p_.head_dim_v, 3);
    p_.out = operand(out_, p_.rows_q, p_.heads_q, p_.head_dim_v, 4);
    if (backward_) {
      p_.dout = operand(dout_, p_.rows_q, p_.heads_q, p_.head_dim_v, 5);
      p_.dq = operand(dq_, p_.rows_q, p_.heads_q, p_.head_dim_qk, 6);
      p_.dk = operand(dk_, p_.rows_k, p_.heads_kv, p_.head_dim_qk, 7);
      p_.dv = operand(dv_, p_.rows_k, p_.heads_kv, p_.head_dim_v, 8);
    }
    lse_ = gpu::DeviceBuffer(0, static_cast<std::size_t>(entries() * p_.heads_q * p_.rows_q) * 4);
    p_.lse = {.data = lse_.data(),
              .dtype = DType::f32,
              .batch_stride = p_.heads_q * p_.rows_q,
              .row_stride = 1,
              .head_stride = p_.rows_q};
  }

  /// Runs forward once, for the out and LSE that backward reads.
  void make_gradients_due() {
    gpu::forward(p_, forward_config_, stream_.get(), workspace_.data());
    stream_.synchronize();
    p_.pass = Pass::backward;
    workspace_ = gpu::DeviceBuffer(0, gpu::backward_workspace_bytes(p_, backward_config_));
  }

  template <typename Config>
  void override_config(Config& config, Words& words) {
    for_each_field(config, [&](const char* name, auto& field) {
      using Field = std::remove_reference_t<decltype(field)>;
      field = static_cast<Field>(take(words, name, static_cast<std::int64_t>(field)));
    });
  }

  void call() {
    if (p_.precision != Precision::exact) {
      gpu::eight_bit_forward(p_, recipe_, choose_quantize_config(p_, recipe_), eight_bit_config_,
                             stream_.get(), workspace_.data(), stages_);
    } else if (backward_) {
      gpu::backward(p_, backward_config_, stream_.get(), workspace_.data());
    } else {
      gpu::forward(p_, forward_config_, stream_.get(), workspace_.data());
    }
  }

  /// Milliseconds of `calls` calls in a row.
  double time(int calls) {
    start_.record(stream_.get());
    for (int i = 0; i < calls; ++i) call();
    end_.record(stream_.get());
    return end_.milliseconds_since(start_);
  }

  /// What the quantiser has to read and write once: 16 bits or codes in, 8 bits out.
  [[nodiscard]] double quantized_bytes() const {
    const std::int64_t q = p_.heads_q * p_.rows_q * p_.head_dim_qk;
    const std::int64_t k = p_.heads_kv * p_.rows_k * p_.head_dim_qk;
    const std::int64_t v = p_.heads_kv * p_.rows_k * p_.head_dim_v;
    return (p_.of_codes() ? 2.0 : 3.0) *
           static_cast<double>(entries() * (q + k + (recipe_.pv == Codes::input ? 0 : v)));
  }
  [[nodiscard]] double flops() const {
    double of_a_head = 0;
    for (const std::int64_t length : lengths_) of_a_head += counted_pairs(p_, length, length);
    if (!p_.packed_q) of_a_head = counted_pairs(p_, p_.rows_q, p_.rows_k) * static_cast<double>(p_.batch);
    return (backward_ ? 5.0 : 2.0) * of_a_head *
           static_cast<double>(p_.heads_q * (p_.head_dim_qk + p_.head_dim_v));
  }

  std::size_t free_before_ = free_bytes();
  Problem p_;
  bool backward_ = false;
  gpu::EightBitStages stages_;
  Recipe recipe_;
  EightBitConfig eight_bit_config_;
  ForwardConfig forward_config_;
  BackwardConfig backward_config_;
  std::vector<std::int64_t> lengths_;  ///< of packed sequences
  gpu::DeviceBuffer q_, k_, v_, out_, lse_, dout_, dq_, dk_, dv_, offsets_, workspace_;
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
      std::cout << answer(line, bench) << std::endl;
    } catch (const std::exception& e) {
      bench.reset();
      std::cout << "{\"error\": " << quoted(e.what()) << "}" << std::endl;
    }
  }
}
