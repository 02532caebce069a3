// Combinations of field values.
#include "candidates.hpp"

#include <gtest/gtest.h>

#include "ops/forward/plan.hpp"

namespace tandem {
namespace {

TEST(Candidates, AreEveryCombinationOnTopOfTheBase) {
  ForwardConfig base;
  base.tiling.head_dim_qk = 64;
  const auto configs = combinations(
      base, {{"block_n", {"112", "128", "176"}}, {"pingpong", {"0", "1"}}, {"transform", {"softcap"}}});
  ASSERT_EQ(configs.size(), 6U);
  EXPECT_EQ(configs[0].tiling.block_n, 112);
  EXPECT_FALSE(configs[0].schedule.pingpong);
  EXPECT_TRUE(configs[1].schedule.pingpong);
  EXPECT_EQ(configs[5].tiling.block_n, 176);
  for (const ForwardConfig& config : configs) {
    EXPECT_EQ(config.tiling.head_dim_qk, 64);
    EXPECT_EQ(config.transform, ScoreTransform::softcap);
  }
  EXPECT_EQ(combinations(base, {}), std::vector{base});
}

TEST(Candidates, NameWhatIsNoFieldOrNoValue) {
  const auto message = [](const FieldValues& wanted) -> std::string {
    try {
      combinations(ForwardConfig{}, {wanted});
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::invalid_argument);
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(message({"block_x", {"1"}}), "the Config has no field block_x");
  EXPECT_EQ(message({"block_n", {"12z"}}), "12z is no value of the Config's field block_n");
  EXPECT_EQ(message({"block_n", {""}}), " is no value of the Config's field block_n");
  EXPECT_EQ(message({"dynamic", {"yes"}}), "yes is no value of the Config's field dynamic");
  EXPECT_EQ(message({"element", {"f32"}}), "f32 is no value of the Config's field element");
}

}  // namespace
}  // namespace tandem
