// Each rule of the forward kernel's Configs, and what is said of one that breaks it.
#include <gtest/gtest.h>

#include "ops/decode/plan.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"

namespace tandem {
namespace {

TEST(ForwardLegality, NamesTheRuleThatIsBroken) {
  const auto objection = [](auto change) {
    ForwardConfig c;
    change(c);
    return forward_objection(c);
  };
  EXPECT_EQ(objection([](ForwardConfig&) {}), "");
  EXPECT_NE(objection([](ForwardConfig& c) { c.tiling.head_dim_qk = 48; }).find("48"), std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.tiling.head_dim_v = 288; }).find("288"), std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.tiling.block_m = 256; }).find("block_m 256"),
            std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.tiling.block_n = 24; }).find("block_n 24"), std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.tiling.block_n = 272; }).find("block_n 272"),
            std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.stages = 0; }).find("stages 0"), std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.stages = 4; }).find("shared memory"), std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.tiling.block_m = 192; }).find("registers"), std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.tiling.block_m = 64; }).find("pingpong"), std::string::npos);
}

TEST(ForwardLegality, NamesTheRuleOfWarpgroupsOutOfStepThatIsBroken) {
  const auto objection = [](auto change) {
    ForwardConfig c;
    c.tiling.head_dim_qk = c.tiling.head_dim_v = c.tiling.block_n = 64;
    c.teams = 2;
    c.schedule = {.dynamic = true, .pingpong = false, .own_blocks = true};
    change(c);
    return forward_objection(c);
  };
  EXPECT_EQ(objection([](ForwardConfig&) {}), "");
  EXPECT_NE(objection([](ForwardConfig& c) { c.teams = 3; }).find("3 teams of 2"), std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.teams = 0; }).find("0 teams"), std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.tiling.block_m = 192; }).find("2 teams of 3"),
            std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.tiling.block_n = 128; }).find("registers"), std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.schedule.dynamic = false; }).find("dynamic"),
            std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.schedule.pingpong = true; }).find("pingpong"),
            std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.mask.varlen = true; }).find("varlen"), std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.schedule.invariant = true; }).find("whole"),
            std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) { c.stages = 1; }).find("two stages"), std::string::npos);
  EXPECT_NE(objection([](ForwardConfig& c) {
              c.teams = 1;
              c.schedule.pingpong = true;
            }).find("not in step"),
            std::string::npos);
}

TEST(ForwardLegality, NamesTheRuleOfEightBitKeysThatIsBroken) {
  const auto objection = [](auto change) {
    ForwardConfig c;
    c.stages = 1;
    c.key_type = OperandType::e4m3;
    c.transform = ScoreTransform::scaled;
    change(c);
    return forward_objection(c);
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != text.npos; };
  EXPECT_EQ(objection([](ForwardConfig& c) { c.tiling.block_n = 64; }), "");
  EXPECT_TRUE(has(objection([](ForwardConfig& c) { c.schedule.specialised = false; }), "producer warpgroup"));
  EXPECT_TRUE(has(objection([](ForwardConfig& c) { c.tiling.block_m = 192; }), "one or two consumer"));
  EXPECT_TRUE(
      has(objection([](ForwardConfig& c) { c.tiling.head_dim_v = 192; }), "from a head_dim_v of 129"));
  EXPECT_TRUE(has(objection([](ForwardConfig& c) { c.tiling.head_dim_qk = 96; }), "multiples of 64"));
  EXPECT_TRUE(has(objection([](ForwardConfig& c) { c.tiling.block_n = 80; }), "whole 32 rows"));
  EXPECT_TRUE(has(objection([](ForwardConfig& c) { c.transform = ScoreTransform::raw; }), "scaled scores"));
  const auto decoding = [&](auto change) {
    DecodeConfig c{.key_type = OperandType::e4m3};
    c.stages = 1;
    c.transform = ScoreTransform::scaled;
    change(c);
    return forward_objection(c);
  };
  EXPECT_EQ(decoding([](DecodeConfig&) {}), "");
  EXPECT_EQ(decoding([](DecodeConfig& c) { c.tiling.block_n = 128; }), "");
  EXPECT_EQ(decoding([](DecodeConfig& c) { c.row_scales = true; }), "");
  EXPECT_TRUE(has(decoding([](DecodeConfig& c) {
                    c.tiling.block_n = 128;
                    c.row_scales = true;
                  }),
                  "blocks of 64 keys"));
  EXPECT_TRUE(has(decoding([](DecodeConfig& c) { c.tiling.block_m = 64; }), "block_m 64 is not 16"));
  EXPECT_TRUE(has(decoding([](DecodeConfig& c) { c.tiling.head_dim_v = 96; }), "multiples of 64"));
  EXPECT_TRUE(has(decoding([](DecodeConfig& c) { c.transform = ScoreTransform::raw; }), "scaled scores"));
}

TEST(ForwardLegality, SharedMemoryIsWhatTheTilesTake) {
  const ForwardConfig c;  // 128 x 128, head_dim 128: Q 32 KB, two stages of K and V 128 KB
  EXPECT_GE(forward_shared_bytes(c), (32 + 128) * 1024);
  EXPECT_LE(forward_shared_bytes(c), (32 + 128 + 1) * 1024);
}

}  // namespace
}  // namespace tandem
