#include "gpu_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "harness/sample.hpp"
#include "tandem/error.hpp"

namespace tandem::bench {
namespace {

// In 8 bits out has the gain of the recipes' tests, and twice the RMS that normal numbers cost (fp8).
constexpr double eight_bit_gain = 0.02;
constexpr double eight_bit_rms = 0.10;

/// The problem on copies of its tensors in host memory. Lengths that the device reads are of all keys.
Problem on_host(Problem p, const std::vector<gpu::DeviceBuffer>& tensors,
                std::vector<std::vector<std::byte>>& memory) {
  for (Operand* x : {&p.q, &p.k, &p.v, &p.out, &p.lse, &p.dout, &p.dq, &p.dk, &p.dv}) {
    const auto found = std::ranges::find(tensors, static_cast<const void*>(x->data),
                                         [](const gpu::DeviceBuffer& t) -> const void* { return t.data(); });
    if (!x->given() || found == tensors.end()) continue;
    std::vector<std::byte>& copy = memory.emplace_back(found->bytes());
    found->copy_to_host(copy.data(), copy.size());
    x->data = copy.data();
  }
  gpu::synchronize(0);
  p.seqused_k = {};
  return p;
}

/// The longest of packed sequences, as a dense problem.
Problem longest_of(Problem p, const std::vector<std::int64_t>& lengths) {
  std::int64_t begin = 0;
  std::int64_t at = 0;
  std::int64_t longest = 0;
  for (const std::int64_t length : lengths) {
    if (length > longest) {
      longest = length;
      begin = at;
    }
    at += length;
  }
  for (Operand* x : {&p.q, &p.k, &p.v, &p.out, &p.lse, &p.dout, &p.dq, &p.dk, &p.dv}) {
    if (!x->given()) continue;
    x->data = static_cast<std::byte*>(x->data) +
              x->offset(0, begin, 0) * static_cast<std::int64_t>(size_of(x->dtype));
  }
  p.cu_seqlens_q = p.cu_seqlens_k = {};
  p.packed_q = p.packed_k = false;
  p.batch = 1;
  p.rows_q = p.rows_k = longest;
  return p;
}

double share_of_eight_bits(const harness::SampleError& error) {
  const harness::Sums& sums = error.deviation.sums;
  const double rms = sums.rms() / std::sqrt(sums.squares / sums.count);
  const double share = std::max(error.deviation.gain_error() / eight_bit_gain, rms / eight_bit_rms);
  if (!(share <= 1.0)) {
    throw Error(Status::internal,
                fmt::format("out is wrong: its gain is {:.4f}, the RMS of its error {:.3f} of out's",
                            sums.gain(), rms));
  }
  return share;
}

}  // namespace

double check_results(const Problem& problem, Pass pass, const std::vector<gpu::DeviceBuffer>& tensors,
                     const std::vector<std::int64_t>& lengths) {
  const bool windows = problem.window_left >= 0 || problem.window_right > 0;
  const bool in_8_bits = pass == Pass::backward && problem.backward_precision != Precision::exact;
  if (windows || problem.softcap > 0.0F || problem.q.dtype == DType::s8 || in_8_bits) return -1.0;
  std::vector<std::vector<std::byte>> memory;
  Problem p = on_host(problem, tensors, memory);
  if (!lengths.empty()) p = longest_of(p, lengths);
  const bool eight_bits = p.precision != Precision::exact;
  std::vector<harness::Part> parts = harness::sample_parts(p, 1);
  constexpr std::int64_t very_long = 1 << 18;  // keys of which a part takes gigabytes
  if (p.rows_k >= very_long) parts.erase(parts.begin() + 1, parts.end());
  double largest = 0.0;
  for (const harness::SampleError& error : harness::compare_sample(p, p.out.dtype, pass, parts)) {
    const bool is_out = error.output == std::string("out");
    if (eight_bits) {
      if (is_out) largest = share_of_eight_bits(error);
      continue;
    }
    if (!error.deviation.right()) {
      throw Error(Status::internal, fmt::format("{} is wrong: {}; the worst is at {}", error.output,
                                                error.deviation.complaint(), error.worst));
    }
    largest = std::max(largest, error.deviation.share);
  }
  return largest;
}

}  // namespace tandem::bench
