// Contract line 12: cu_seqlens and seqused. Never an access out of bounds, whatever they contain.
#include <limits>

#include "contract/contract.hpp"
#include "harness/error_of.hpp"

namespace tandem::harness {
namespace {

/// Three sequences with everything that metadata can say.
Case metadata_case(DType dtype, DType metadata) {
  Case c = with(varlen_case(dtype, {40, 66, 9}), {.used_q = {40, 30, 9}, .used_k = {20, 66, 9}});
  change(c, {.metadata = metadata, .causal = true, .deterministic = true});
  return c;
}

/// Every element of every output is written, and nothing around it. No input has a NaN.
void expect_written_in_bounds(Call& call, std::initializer_list<Pass> passes, const std::string& what) {
  on_every_runner(call.spec, [&](Runner& runner) {
    for (const Pass pass : passes) {
      call.prepare(pass);
      pass == Pass::forward ? runner.forward(call) : runner.backward(call);
      for (const Box* box : call.outputs(pass)) {
        if (!box->given()) continue;
        EXPECT_EQ(box->changed_outside(), "") << what;
        for (const double value : box->values()) ASSERT_FALSE(std::isnan(value)) << what;
      }
    }
  });
}

TEST(Contract12_Metadata, NoAccessOutOfBoundsWhateverItContains) {
  // The boxes end at inaccessible pages, what surrounds outputs is checked, and stale rows hold no NaN here,
  // so that a NaN in an output is one that was not written.
  const std::vector<std::vector<double>> contents{{0, 115, 40, 106},
                                                  {-5, 40, 106, 115},
                                                  {0, 40, 106, 2147483647},
                                                  {115, 106, 40, 0},
                                                  {0, 0, 0, 0},
                                                  {1000, 2000, 3000, 4000},
                                                  {-2147483648.0, 0, 5, 3},
                                                  {0, 200, 50, 115},
                                                  {50, 60, 70, 80},
                                                  {2147483647, -1, 2147483647, -1}};
  for (const DType metadata : {DType::i32, DType::i64}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Case c = metadata_case(dtype, metadata);
      c.q.ends_at_guard = c.k.ends_at_guard = c.v.ends_at_guard = c.dout.ends_at_guard = true;
      c.out.ends_at_guard = c.dq.ends_at_guard = c.dk.ends_at_guard = c.dv.ends_at_guard = true;
      for (std::size_t n = 0; n < contents.size(); ++n) {
        Call call(c);
        call.rows_overlap = true;
        Random random(n);
        for (Box* box : {&call.q, &call.k, &call.v, &call.dout}) fill(*box, random, 1.0);
        for (std::size_t i = 0; i < 4; ++i) {
          const auto at = static_cast<std::int64_t>(i);
          call.cu_seqlens_q.set(at, contents[n][i]);
          call.cu_seqlens_k.set(at, contents[(n + i % 2) % contents.size()][i]);
          if (i < 3) call.seqused_q.set(at, contents[(n + 3) % contents.size()][i]);
          if (i < 3) call.seqused_k.set(at, contents[(n + 5) % contents.size()][i]);
        }
        expect_written_in_bounds(call, {Pass::forward, Pass::backward}, "contents " + std::to_string(n));
      }
    }
  }
}

TEST(Contract12_Metadata, SequencesThatOverlapHaveNoMoreMemory) {
  // Few queries on many keys, which GPUs share among CTAs; every second sequence is all rows, so that there
  // are more tiles, and more splits of them, than sequences side by side have.
  for (const std::int64_t split_size : {0, 128}) {
    Case c = varlen_case(DType::bf16, std::vector<std::int64_t>(20, 12));
    c.lengths_k.assign(20, 30);
    change(c, {.heads = 1, .split_size = split_size});
    c.q.ends_at_guard = c.k.ends_at_guard = c.v.ends_at_guard = c.out.ends_at_guard = true;
    Call call(c);
    call.rows_overlap = true;
    Random random(1);
    for (Box* box : {&call.q, &call.k, &call.v}) fill(*box, random, 1.0);
    for (std::int64_t n = 0; n < 20; ++n) {
      call.cu_seqlens_q.set(n, n % 2 == 0 ? 5.0 : 240.0);
      call.cu_seqlens_k.set(n, n % 2 == 0 ? 0.0 : 600.0);
    }
    expect_written_in_bounds(call, {Pass::forward}, "split_size " + std::to_string(split_size));
  }
}

/// Rows that belong to two sequences have two orders in which gradients are added to them: calls end
/// nevertheless, and write every element.
TEST(Contract12_Metadata, SequencesThatOverlapEndInAFixedOrder) {
  for (const bool causal : {true, false}) {
    Case c = with(varlen_case(DType::bf16, {330, 20, 50}), {.heads = 1, .causal = causal});
    c.options.deterministic = true;
    Call call(c);
    call.rows_overlap = true;
    for (Box* box : {&call.cu_seqlens_q, &call.cu_seqlens_k}) {
      box->set(1, 330);
      box->set(2, 20);
      box->set(3, 400);
    }
    expect_written_in_bounds(call, {Pass::forward, Pass::backward}, "descending offsets");
  }
}

TEST(Contract12_Metadata, WideOffsetsAreNotTruncated) {
  for (const DType dtype : float_dtypes) {
    Case c = metadata_case(dtype, DType::i64);
    Call call(c);
    Random random(1);
    for (Box* box : {&call.q, &call.k, &call.v}) fill(*box, random, 1.0);
    // 2^32 + 106 would be 106 in 32 bits, and the last sequence empty; clamped to the tensor it is the end.
    call.cu_seqlens_q.set(3, 4294967296.0 + 106.0);
    run_everywhere(call, false);
  }
}

TEST(Contract12_Metadata, Int64GivesTheBitsOfInt32) {
  for (const DType dtype : float_dtypes) {
    Call narrow(metadata_case(dtype, DType::i32));
    Call wide(metadata_case(dtype, DType::i64));
    run_everywhere(wide);
    on_every_runner(narrow.spec,
                    [&](Runner& runner) { EXPECT_TRUE(same_bits(run(runner, narrow), run(runner, wide))); });
  }
}

TEST(Contract12_Metadata, StridedIsReadByItsStride) {
  Call call(metadata_case(DType::f32, DType::i32));
  tandem::forward(call.forward_args());
  const std::vector<std::byte> expected = call.out.raw();
  // Every third element of a longer array whose other elements are nonsense.
  std::vector<std::int32_t> spread(12, -77);
  for (std::int64_t n = 0; n < 4; ++n) {
    spread[static_cast<std::size_t>(3 * n)] = static_cast<std::int32_t>(call.cu_seqlens_k.get(n));
  }
  ForwardArgs args = call.forward_args();
  args.cu_seqlens_k = Tensor(spread.data(), DType::i32, {4});
  args.cu_seqlens_k.stride[0] = 3;
  call.prepare(Pass::forward);
  try {
    tandem::forward(args);
    EXPECT_TRUE(same_bits(call.out.raw(), expected));
  } catch (const Error& e) {  // or refused by name
    EXPECT_NE(std::string(e.what()).find("cu_seqlens_k"), std::string::npos) << e.what();
  }
}

struct WrongContent {
  Box Call::*argument;
  std::int64_t position;
  double value;
  std::vector<std::string> named;  ///< what the message has to contain
};

TEST(Contract12_Metadata, CheckNamesArgumentPositionAndRule) {
  const std::vector<WrongContent> wrong{
      {&Call::cu_seqlens_q, 0, 1, {"cu_seqlens_q[0]", "1"}},
      {&Call::cu_seqlens_q, 2, 39, {"cu_seqlens_q[2]", "39", "40"}},
      {&Call::cu_seqlens_k, 3, 116, {"cu_seqlens_k[3]", "116", "115"}},
      {&Call::cu_seqlens_k, 1, -1, {"cu_seqlens_k[1]", "-1"}},
      {&Call::seqused_q, 1, 67, {"seqused_q[1]", "67", "66"}},
      {&Call::seqused_k, 2, -3, {"seqused_k[2]", "-3"}},
  };
  for (const DType metadata : {DType::i32, DType::i64}) {
    for (const WrongContent& w : wrong) {
      Case c = with(metadata_case(DType::bf16, metadata), {.check = true});
      Call call(c);
      run_everywhere(call);  // right contents pass the check
      (call.*w.argument).set(w.position, w.value);
      on_every_runner(c, [&](Runner& runner) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          call.prepare(pass);
          const std::string error = error_of(Status::invalid_argument, [&] {
            pass == Pass::forward ? runner.forward(call) : runner.backward(call);
          });
          for (const std::string& text : w.named) EXPECT_NE(error.find(text), std::string::npos) << error;
          for (const Box* box : call.outputs(pass)) EXPECT_FALSE(box->given() && box->changed());
        }
      });
    }
  }
}

}  // namespace
}  // namespace tandem::harness
