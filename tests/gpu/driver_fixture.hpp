// Calls on a driver of our own (fake/), for tests of the GPU backend's host side.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "fake/fake_driver.hpp"
#include "gpu/compiler.hpp"
#include "gpu/device.hpp"
#include "gpu/kernel_spec.hpp"
#include "gpu/kernels.hpp"
#include "ops/backward/launch.hpp"
#include "ops/backward/plan.hpp"
#include "ops/backward/sm80_plan.hpp"
#include "ops/cache/launch.hpp"
#include "ops/eight_bit/launch.hpp"
#include "ops/eight_bit/plan.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"
#include "ops/forward/sm80_plan.hpp"
#include "ops/forward/trace.hpp"
#include "ops/pack/launch.hpp"
#include "ops/quantize/launch.hpp"
#include "ops/quantize/plan.hpp"
#include "tandem/attention.hpp"
#include "tandem/stats.hpp"

namespace tandem::gpu {

constexpr Device cuda{.kind = Device::Kind::cuda, .index = 1};
inline const auto other_context = reinterpret_cast<abi::Context>(0x77);

/// A call of (batch 2, rows 300, heads 4, head_dim 128) in bf16 on memory that the fake driver may read.
struct Memory {
  static constexpr std::int64_t elements = 2 * 300 * 4 * 128;
  DeviceBuffer q{1, elements * 2 + 256}, k{1, elements * 2}, v{1, elements * 2}, out{1, elements * 2};
  ForwardArgs args;

  Memory() {
    const auto tensor = [](const DeviceBuffer& b) {
      return Tensor(b.data(), DType::bf16, {2, 300, 4, 128}, cuda);
    };
    args.q = tensor(q);
    args.k = tensor(k);
    args.v = tensor(v);
    args.out = tensor(out);
  }
};

/// The Config of every call of these tests.
inline ForwardConfig config_of_calls(bool causal = false) {
  Problem p;
  p.q.dtype = p.out.dtype = DType::bf16;
  if (causal) p.window_right = 0;
  p.head_dim_qk = p.head_dim_v = 128;
  p.rows_q = p.rows_k = 300;
  return choose_forward_config(CallFacts(p));
}

/// Of the same call with a result in f32.
inline ForwardConfig config_of_parts() {
  Problem p;
  p.q.dtype = DType::bf16;
  p.out.dtype = DType::f32;
  p.head_dim_qk = p.head_dim_v = 128;
  p.rows_q = p.rows_k = 300;
  return choose_forward_config(CallFacts(p));
}

/// The same of the kernels sm80.
inline Sm80ForwardConfig sm80_config_of_calls() {
  Problem p;
  p.q.dtype = p.out.dtype = DType::bf16;
  p.head_dim_qk = p.head_dim_v = 128;
  p.rows_q = p.rows_k = 300;
  return choose_sm80_forward_config(
      CallFacts(p, {.family = Family::sm80, .shared_bytes_per_sm = 228 * 1024}));
}

inline BackwardConfig backward_config_of_calls() {
  Problem p;
  p.pass = Pass::backward;
  p.q.dtype = p.out.dtype = DType::bf16;
  p.head_dim_qk = p.head_dim_v = 128;
  p.rows_q = p.rows_k = 300;
  return choose_backward_config(CallFacts(p));
}

inline Sm80BackwardConfig sm80_backward_config_of_calls(int head_dim = 128) {
  Problem p;
  p.pass = Pass::backward;
  p.q.dtype = p.out.dtype = DType::bf16;
  p.head_dim_qk = p.head_dim_v = head_dim;
  p.rows_q = p.rows_k = 300;
  return choose_sm80_backward_config(
      CallFacts(p, {.family = Family::sm80, .shared_bytes_per_sm = 228 * 1024}));
}

/// The backward of that call, with a sink.
struct BackwardMemory : Memory {
  DeviceBuffer dout{1, elements * 2 + 256}, dq{1, elements * 2}, dk{1, elements * 2}, dv{1, elements * 2};
  DeviceBuffer lse{1, 2 * 300 * 4 * 4}, sink{1, 16}, dsink{1, 16};
  BackwardArgs backward;

  BackwardMemory() {
    static_cast<AttentionInputs&>(backward) = args;
    backward.out = args.out;
    const auto tensor = [](const DeviceBuffer& b) {
      return Tensor(b.data(), DType::bf16, {2, 300, 4, 128}, cuda);
    };
    backward.dout = tensor(dout);
    backward.dq = tensor(dq);
    backward.dk = tensor(dk);
    backward.dv = tensor(dv);
    backward.lse = Tensor(lse.data(), DType::f32, {2, 4, 300}, cuda);
    backward.sink = Tensor(sink.data(), DType::f32, {4}, cuda);
    backward.dsink = Tensor(dsink.data(), DType::f32, {4}, cuda);
  }
};

/// That call in 8 bits.
inline Problem eight_bit_problem_of_calls() {
  Problem p;
  p.q.dtype = p.out.dtype = DType::bf16;
  p.q.row_stride = p.k.row_stride = p.v.row_stride = 512;
  p.q.head_stride = p.k.head_stride = p.v.head_stride = 128;
  p.head_dim_qk = p.head_dim_v = 128;
  p.rows_q = p.rows_k = 300;
  return p;
}

/// Whether the machine has a driver, which would be found in place of the fake one.
inline bool has_real_driver() {
  static const bool found = dlopen("libcuda.so.1", RTLD_NOW) != nullptr;
  return found;
}

/// The fake driver, opened once the kernels are in memory: NVRTC looks for a driver itself, and would take
/// this one.
inline fake::Driver& open_fake_driver() {
  static fake::Driver& opened = []() -> fake::Driver& {
    const auto find_forward = [](const auto& config) { find_kernel(kernel_of(config).name(config)); };
    for (const bool causal : {false, true}) find_forward(config_of_calls(causal));
    find_forward(config_of_parts());
    find_kernel(kernels::merge.name(MergeConfig{.from = Stored::f32, .to = Stored::f32}));
    find_forward(sm80_config_of_calls());
    find_kernel(kernels::pack.name(PackConfig{.paired = false}));
    find_kernel(traced_kernel_name(config_of_calls()));
    const auto find_backward = [](const auto& config) {
      find_kernel(kernel_of(config).name(config));
      for (const KernelSpec* kernel :
           {&kernels::backward_preprocess, &kernels::backward_convert, &kernels::backward_sink}) {
        find_kernel(kernel->name(backward_rows_config(config)));
      }
    };
    find_backward(backward_config_of_calls());
    for (const int head_dim : {128, 192}) find_backward(sm80_backward_config_of_calls(head_dim));
    const Problem quantized = eight_bit_problem_of_calls();
    const QuantizeConfig quantizer = choose_quantize_config(CallFacts(quantized), int8_recipe);
    find_kernel(kernels::mean_of_keys.name(mean_config(quantizer)));
    find_kernel(kernels::quantize.name(quantizer));
    find_kernel(kernels::eight_bit_forward.name(choose_eight_bit_config(CallFacts(quantized), int8_recipe)));
    void* library = dlopen(TANDEM_FAKE_DRIVER, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return *reinterpret_cast<fake::Driver* (*)()>(dlsym(library, "fake_driver_state"))();
  }();
  return opened;
}

class FakeDriver : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
    if (has_real_driver()) GTEST_SKIP() << "this machine has a driver of its own";
    driver = &open_fake_driver();
    *driver = {};
    driver->current = {other_context};
  }
  [[nodiscard]] std::ptrdiff_t count(const char* call) const {
    return std::ranges::count(driver->calls, call);
  }

  fake::Driver* driver = nullptr;
};

}  // namespace tandem::gpu
