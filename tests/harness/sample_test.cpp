// The sample of a call's results: it agrees with the oracle, and a wrong result in it does not pass.
#include "harness/sample.hpp"
#include "changes.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "api/make_problem.hpp"
#include "harness/expect.hpp"

namespace tandem::harness {
namespace {

Case long_case(DType dtype, bool causal) {
  Case c = with({}, {.dtype = dtype, .batch = 2, .heads_q = 4, .heads_kv = 2, .head_dim_qk = 32});
  change(c, {.head_dim_v = 24, .seqlen_q = 150, .seqlen_k = 170, .causal = causal});
  return c;
}

/// Runs both passes on the CPU.
void run(Call& call) {
  call.prepare(Pass::forward);
  forward(call.forward_args());
  call.prepare(Pass::backward);
  backward(call.backward_args());
}

/// With its outputs, unlike the Problem that the oracle reads.
Problem problem_of(const Call& call, Pass pass) {
  return pass == Pass::forward ? make_problem(call.forward_args()) : make_problem(call.backward_args());
}

Box& box_of(Call& call, const std::string& output) {
  if (output == "out") return call.out;
  if (output == "lse") return call.lse;
  if (output == "dq") return call.dq;
  return output == "dk" ? call.dk : call.dv;
}

/// Index of the element that a SampleError names, in a box.
std::int64_t index_of(const Box& box, const std::string& worst) {
  long long batch = 0;
  long long row = 0;
  long long head = 0;
  long long element = 0;
  EXPECT_EQ(std::sscanf(worst.c_str(), "batch %lld, row %lld, head %lld, element %lld", &batch, &row, &head,
                        &element),
            4)
      << worst;
  const auto& shape = box.view().shape;
  if (box.view().rank == 3) return (batch * shape[1] + head) * shape[2] + row;
  return ((batch * shape[1] + row) * shape[2] + head) * shape[3] + element;
}

class Sample : public testing::TestWithParam<std::tuple<DType, bool>> {};

const Target& target_of(const Expected& e, const std::string& output) {
  if (output == "out") return e.out;
  if (output == "lse") return e.lse;
  if (output == "dq") return e.dq;
  return output == "dk" ? e.dk : e.dv;
}

TEST_P(Sample, RightResultsPassByTheOraclesValuesAndBounds) {
  const auto& [dtype, causal] = GetParam();
  std::map<std::string, double> bounds;  // logarithms of the sample's over the oracle's
  constexpr int calls = 6;
  for (int seed = 1; seed <= calls; ++seed) {
    Case c = with(long_case(dtype, causal), {.seed = static_cast<std::uint64_t>(seed)});
    Call call(c);
    run(call);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Expected whole = expect(call, pass);
      const Problem problem = problem_of(call, pass);
      const std::vector<SampleError> errors =
          compare_sample(problem, dtype, pass, sample_parts(problem, c.seed));
      ASSERT_EQ(errors.size(), pass == Pass::forward ? 2 : 3);
      for (const SampleError& error : errors) {
        SCOPED_TRACE(error.output);
        EXPECT_TRUE(error.deviation.right()) << error.deviation.complaint() << " at " << error.worst;
        ASSERT_GT(error.deviation.share, 0.0);  // something was compared
        const Target& target = target_of(whole, error.output);
        bounds[error.output] += std::log(error.bound.at(0.0) / target.bound.at(0.0));
        // The oracle says the same of the element that is furthest off.
        const Box& box = box_of(call, error.output);
        const std::int64_t index = index_of(box, error.worst);
        const double expected = target.values[static_cast<std::size_t>(index)];
        EXPECT_NEAR(std::abs(box.get(index) - expected),
                    error.deviation.worst_share * error.bound.at(expected), 0.1 * target.bound.at(expected));
      }
    }
  }
  // Bounds follow from the largest of many roundings, and a sample has fewer. Those of keys' gradients come
  // from a model of their own, whose single roundings differ from the oracle's.
  for (const auto& [output, sum] : bounds) {
    const bool of_keys = output == "dk" || output == "dv";
    EXPECT_LE(std::exp(sum / calls), of_keys ? 1.1 : 1.001) << output;
    EXPECT_GE(std::exp(sum / calls), 0.4) << output;
  }
}

TEST_P(Sample, AWrongElementIsFoundAndNamed) {
  const auto& [dtype, causal] = GetParam();
  Call call(long_case(dtype, causal));
  run(call);
  const std::vector<Part> parts = sample_parts(call.problem(), 3);
  const Part& part = parts[1];
  for (const auto& [output, pass] :
       {std::pair{"out", Pass::forward}, std::pair{"lse", Pass::forward}, std::pair{"dq", Pass::backward},
        std::pair{"dk", Pass::backward}, std::pair{"dv", Pass::backward}}) {
    Box& box = box_of(call, output);
    const bool of_keys = box.view().shape[2] == call.spec.heads_kv;
    const std::string place = fmt::format("batch {}, row {}, head {}, element {}", part.batch, part.first + 2,
                                          of_keys ? part.head / 2 : part.head, box.view().rank == 3 ? 0 : 5);
    const std::int64_t index = index_of(box, place);
    const double right = box.get(index);
    for (const double wrong : {right + 0.5, std::nan("")}) {
      box.set(index, wrong);
      for (const SampleError& error : compare_sample(problem_of(call, pass), dtype, pass, parts)) {
        if (error.output != std::string(output)) continue;
        EXPECT_EQ(error.deviation.wrong, 1) << output << " " << wrong;
        EXPECT_EQ(error.worst, place);
      }
    }
    box.set(index, right);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Sample,
                         testing::Combine(testing::Values(DType::f32, DType::f16, DType::bf16),
                                          testing::Bool()),
                         [](const auto& instance) {
                           return std::string(name_of(std::get<0>(instance.param))) +
                                  (std::get<1>(instance.param) ? "_causal" : "_full");
                         });

TEST(SampleParts, FewRowsAreAllCompared) {
  const Call call(with({}, {.seqlen = 40}));
  for (const Part& part : sample_parts(call.problem(), 1)) {
    EXPECT_EQ(part.first, 0);
    EXPECT_EQ(part.count, 40);
  }
}

TEST(SampleParts, OtherProblemsAreRefused) {
  const Call call(with({}, {.window_left = 3}));
  const Problem problem = call.problem();
  EXPECT_THROW(compare_sample(problem, DType::f32, Pass::forward, sample_parts(problem, 1)), Error);
}

}  // namespace
}  // namespace tandem::harness
