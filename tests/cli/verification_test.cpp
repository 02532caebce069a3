// That the program calls nothing right which is not: what `tandem verify` and `tandem demo` say of real
// tensors and of the same results a little off.
#include "verification.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "api/make_problem.hpp"
#include "cpu/common/convert.hpp"
#include "files/safetensors.hpp"
#include "files/source.hpp"

namespace tandem::cli {
namespace {

/// The first layer of the demonstration's tensors.
TensorSet first_layer() {
  const files::Safetensors file(files::open_file(TANDEM_DEMO_TENSORS));
  TensorSet tensors;
  for (const char* name : {"q", "k", "v", "dout"}) {
    const files::TensorData all = file.load(name);
    std::vector<std::int64_t> shape = all.shape();
    shape[0] = 1;
    files::TensorData layer(all.dtype(), shape);
    std::memcpy(layer.bytes().data(), all.bytes().data(), layer.bytes().size());
    tensors.emplace(name, std::move(layer));
  }
  return tensors;
}

files::TensorData scaled(const files::TensorData& tensor, float factor) {
  files::TensorData result = tensor.clone();
  for (std::int64_t n = 0; n < result.numel(); ++n) {
    store_from_f32(result.bytes().data(), result.dtype(), n,
                   factor * load_as_f32(tensor.bytes().data(), tensor.dtype(), n));
  }
  return result;
}

class VerificationOfTheDemo : public testing::TestWithParam<DType> {};

TEST_P(VerificationOfTheDemo, HasNoResultRightThatIsOffByOnePercent) {
  CallOptions options;
  options.dtype = GetParam();
  options.backward = true;
  options.device = "cpu";
  Call call(first_layer(), options);
  EXPECT_TRUE(verify(call).right());
  for (const auto& [pass, expected] :
       {std::pair{Pass::forward,
                  harness::expect(make_problem(call.forward_args()), GetParam(), Pass::forward)},
        std::pair{Pass::backward,
                  harness::expect(make_problem(call.backward_args()), GetParam(), Pass::backward)}}) {
    for (const float gain : {0.98F, 0.99F, 1.01F, 1.02F}) {
      TensorSet outputs;
      for (const auto& [name, tensor] : call.fetch_outputs()) outputs.emplace(name, scaled(tensor, gain));
      for (const Verdict& verdict : compare_outputs(outputs, expected, pass)) {
        EXPECT_FALSE(verdict.right()) << verdict.output << " times " << gain;
        EXPECT_GT(verdict.deviation.share, 1.0);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, VerificationOfTheDemo, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& at) { return std::string(name_of(at.param)); });

}  // namespace
}  // namespace tandem::cli
