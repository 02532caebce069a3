// A call on a GPU that is described alone, and what is planned for it.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "api/make_problem.hpp"
#include "gpu/device.hpp"
#include "harness/error_of.hpp"
#include "ops/plan_gpu.hpp"
#include "tandem/attention.hpp"

namespace tandem {

struct DescribedCall {
  std::int64_t queries = 3000;
  std::int64_t keys = 3000;
  std::int64_t head_dim = 128;
  AttentionOptions options = {};
  bool max_logits = false;
  bool gate = false;

  [[nodiscard]] ForwardArgs args() const {
    const Device cuda{.kind = Device::Kind::cuda, .index = gpu::first_described};
    ForwardArgs a;
    a.q = ConstTensor(nullptr, DType::bf16, {2, queries, 8, head_dim}, cuda);
    a.k = a.v = ConstTensor(nullptr, DType::bf16, {2, keys, 8, head_dim}, cuda);
    a.out = Tensor(nullptr, DType::bf16, {2, queries, 8, head_dim}, cuda);
    a.lse = Tensor(nullptr, DType::f32, {2, 8, queries}, cuda);
    if (max_logits) a.max_logits = a.lse;
    if (gate) a.gate = a.q;
    a.options = options;
    return a;
  }
  [[nodiscard]] Plan plan() const { return plan_gpu(make_problem(args(), Memory::described)); }
  template <typename Config>
  [[nodiscard]] Config config() const {
    return std::get<Config>(plan().gpu->config);
  }
  [[nodiscard]] std::string error() const {
    return error_of(Status::unsupported, [&] { return explain(args()); });
  }
};

}  // namespace tandem
