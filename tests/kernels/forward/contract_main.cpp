// The contract's tests with the emulated GPU as the only backend. A case runs if it is small and a kernel was
// compiled for it; what comes back is checked as everywhere. Gradients are the CPU's, from the emulated
// forward pass.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "forward/emulated_forward.hpp"

namespace tandem::kernel_tests {
namespace {

/// Picks a kernel for each case.
class EmulatedGpu : public harness::Runner {
 public:
  EmulatedGpu() {
    for (const EmulatedForward& kernel : general_forwards())
      runners_.push_back(std::make_unique<EmulatorRunner>(kernel));
  }
  [[nodiscard]] std::string name() const override { return "emulated gpu"; }
  [[nodiscard]] std::string refuses(const harness::Case& spec) const override {
    // The lines are many: a case of nine tiles takes 20 to 50 ms.
    constexpr double too_many_scores = 1.5e5;
    constexpr double too_many_heads = 64;
    const double heads =
        static_cast<double>(spec.heads_q) * (spec.packed_q ? 1.0 : static_cast<double>(spec.batch));
    const double scores = heads * static_cast<double>(spec.rows_q()) * static_cast<double>(spec.rows_k());
    if (heads > too_many_heads || spec.batch > 64 || scores > too_many_scores) return "too large to emulate";
    for (const auto& runner : runners_) {
      if (runner->refuses(spec).empty()) return {};
    }
    return "no kernel was compiled for it";
  }
  void forward(harness::Call& call) override { pick(call).forward(call); }
  void backward(harness::Call& call) override { pick(call).backward(call); }

 private:
  harness::Runner& pick(const harness::Call& call) {
    for (const auto& runner : runners_) {
      if (runner->refuses(call.spec).empty()) return *runner;
    }
    throw std::logic_error("no kernel was compiled for it");
  }

  std::vector<std::unique_ptr<EmulatorRunner>> runners_;
};

}  // namespace
}  // namespace tandem::kernel_tests

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  tandem::kernel_tests::EmulatedGpu gpu;
  tandem::harness::use_only(gpu);
  return RUN_ALL_TESTS();
}
