#include "runner.hpp"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <optional>

#include "cpu/cpu.hpp"
#include "environment.hpp"
#include "expect.hpp"

namespace tandem::harness {
namespace {

/// The public API on the CPU, restricted to one instruction set.
class CpuRunner : public Runner {
 public:
  explicit CpuRunner(cpu::Target target) : target_(target) {}
  [[nodiscard]] std::string name() const override { return std::string("cpu ") + cpu::name_of(target_); }
  void forward(Call& call) override {
    run(call, call.forward_args(), [](const auto& args, const Execution& e) { tandem::forward(args, e); });
  }
  void backward(Call& call) override {
    run(call, call.backward_args(), [](const auto& args, const Execution& e) { tandem::backward(args, e); });
  }
  [[nodiscard]] std::string refuses(const Case& spec) const override {
    return spec.dtype == DType::bf16 ? std::string() : without_products();
  }
  /// Once more where the memory is larger than the machine would take long.
  [[nodiscard]] std::string refuses_max_logits(const Case& spec) const override {
    return spec.q.sparse || spec.k.sparse ? "too large to run twice" : "";
  }
  [[nodiscard]] std::string refuses_append(const AppendCase&) const override { return without_products(); }
  [[nodiscard]] std::string refuses_merge(const MergeCase&) const override { return without_products(); }
  void append(AppendCall& call) override {
    const Environment environment("TANDEM_CPU_TARGET", cpu::name_of(target_));
    append_kv(call.args(), {.threads = call.spec.threads});
  }
  void merge(MergeCall& call) override {
    const Environment environment("TANDEM_CPU_TARGET", cpu::name_of(target_));
    tandem::merge(call.args(), {.threads = call.spec.threads});
  }

 private:
  template <typename Args, typename Run>
  void run(const Call& call, const Args& args, const Run& run_pass) {
    const Environment environment("TANDEM_CPU_TARGET", cpu::name_of(target_));
    Execution execution{.threads = call.spec.threads};
    std::optional<Box> workspace;
    if (call.spec.workspace) {
      execution.workspace_bytes = workspace_bytes(args, execution);
      // A poisoned output box: NaN inside, an inaccessible page before, and a pattern behind.
      workspace.emplace(DType::s8,
                        std::vector<std::int64_t>{static_cast<std::int64_t>(execution.workspace_bytes)},
                        Layout{}, true);
      execution.workspace = workspace->view().data;
    }
    run_pass(args, execution);
    if (workspace) {
      EXPECT_EQ(workspace->changed_outside(), "") << "the workspace is larger than workspace_bytes says";
    }
  }

  /// The emulated matrix unit is slow, and multiplies bf16 alone.
  [[nodiscard]] std::string without_products() const {
    return target_ == cpu::Target::amx_emulated ? "what avx512_bf16 runs" : "";
  }

  cpu::Target target_;
};

/// Whether the other instruction sets stand for the portable one.
bool skips_portable() {
#ifdef TANDEM_TEST_SKIPS_PORTABLE
  return cpu::available(cpu::Target::avx2) || cpu::available(cpu::Target::neon);
#else
  return false;
#endif
}

std::vector<Runner*>& registry() {
  static std::vector<std::unique_ptr<CpuRunner>> owned;
  static std::vector<Runner*> all = [] {
    std::vector<Runner*> result;
    for (const cpu::Target target : cpu::available_targets()) {
      if (skips_portable() && target == cpu::Target::portable) continue;
      owned.push_back(std::make_unique<CpuRunner>(target));
      result.push_back(owned.back().get());
    }
    return result;
  }();
  return all;
}

}  // namespace

std::vector<Runner*> runners() {
  return registry();
}
void add_runner(Runner& runner) {
  registry().push_back(&runner);
}

void use_only(Runner& runner) {
  registry() = {&runner};
}

void on_every_runner(const Case& spec, const std::function<void(Runner&)>& f) {
  for (Runner* runner : runners()) {
    if (!runner->refuses(spec).empty()) continue;
    SCOPED_TRACE(runner->name() + ": " + spec.describe());
    f(*runner);
  }
}

namespace {

/// Forward once more, with max_logits.
void expect_max_logits(Runner& runner, const Call& prepared, const Expected& expected) {
  if (!runner.refuses_max_logits(prepared.spec).empty()) return;
  Call call(prepared);
  call.ask_for_max_logits();
  call.prepare(Pass::forward);
  runner.forward(call);
  EXPECT_TRUE(correct(call, Pass::forward, expected)) << "with max_logits";
}

}  // namespace

void run_everywhere(Call& call, bool backward) {
  const bool both = backward && call.spec.has_gradients() && call.lse.given();
  // The oracle is slow, so that it waits for a runner that takes the case.
  std::optional<Expected> forward_expected, backward_expected;
  on_every_runner(call.spec, [&](Runner& runner) {
    if (!forward_expected) forward_expected = expect(call, Pass::forward);
    call.prepare(Pass::forward);
    runner.forward(call);
    EXPECT_TRUE(correct(call, Pass::forward, *forward_expected));
    expect_max_logits(runner, call, *forward_expected);
    if (!both) return;
    if (!backward_expected) backward_expected = expect(call, Pass::backward);
    call.prepare(Pass::backward);
    runner.backward(call);
    EXPECT_TRUE(correct(call, Pass::backward, *backward_expected));
  });
}

void run_everywhere(const Case& spec) {
  Call call(spec);
  run_everywhere(call);
}

void on_every_runner(const AppendCase& spec, const std::function<void(Runner&)>& f) {
  for (Runner* runner : runners()) {
    if (!runner->refuses_append(spec).empty()) continue;
    SCOPED_TRACE(runner->name() + ": " + spec.describe());
    f(*runner);
  }
}

void on_every_runner(const MergeCase& spec, const std::function<void(Runner&)>& f) {
  for (Runner* runner : runners()) {
    if (!runner->refuses_merge(spec).empty()) continue;
    SCOPED_TRACE(runner->name() + ": " + spec.describe());
    f(*runner);
  }
}

void run_everywhere(AppendCall& call) {
  on_every_runner(call.spec, [&](Runner& runner) {
    call.prepare();
    runner.append(call);
    EXPECT_TRUE(call.correct());
  });
}

void run_everywhere(const AppendCase& spec) {
  AppendCall call(spec);
  run_everywhere(call);
}

void run_everywhere(MergeCall& call) {
  on_every_runner(call.spec, [&](Runner& runner) {
    call.prepare();
    runner.merge(call);
    EXPECT_TRUE(call.correct());
  });
}

void run_everywhere(const MergeCase& spec) {
  MergeCall call(spec);
  run_everywhere(call);
}

}  // namespace tandem::harness
