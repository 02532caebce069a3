// Every message that append_kv can give, whole; nothing is written before one.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "arguments.hpp"
#include "error_case.hpp"
#include "tandem/cache.hpp"

namespace tandem::test {
namespace {

/// Two sequences of 3 new tokens, 2 heads, 16 and 8 channels, into entries of 10 rows; bf16.
AppendArgs dense() {
  static const std::array<std::int32_t, 2> before{4, 0};
  AppendArgs a;
  a.k_new = tensor(0, DType::bf16, {2, 3, 2, 16});
  a.v_new = tensor(1, DType::bf16, {2, 3, 2, 8});
  a.k_cache = tensor(2, DType::bf16, {2, 10, 2, 16});
  a.v_cache = tensor(3, DType::bf16, {2, 10, 2, 8});
  a.cache_seqlens = ConstTensor(before.data(), DType::i32, {2});
  return a;
}

/// The same in 6 pages of 4 rows, 3 a sequence.
AppendArgs paged() {
  static const std::array<std::int32_t, 6> table{5, 1, 0, 2, 4, 3};
  AppendArgs a = dense();
  a.k_cache = tensor(2, DType::bf16, {6, 4, 2, 16});
  a.v_cache = tensor(3, DType::bf16, {6, 4, 2, 8});
  a.page_table = ConstTensor(table.data(), DType::i32, {2, 3});
  return a;
}

/// Four tokens to rows of the pages.
AppendArgs slots() {
  static const std::array<std::int64_t, 4> where{3, -1, 23, 0};
  AppendArgs a = paged();
  a.k_new = tensor(0, DType::bf16, {4, 2, 16});
  a.v_new = tensor(1, DType::bf16, {4, 2, 8});
  a.page_table = {};
  a.cache_seqlens = {};
  a.slot_mapping = ConstTensor(where.data(), DType::i64, {4});
  return a;
}

/// An s8 cache with scales.
AppendArgs codes() {
  AppendArgs a = dense();
  a.k_cache = tensor(2, DType::s8, {2, 10, 2, 16});
  a.v_cache = tensor(3, DType::s8, {2, 10, 2, 8});
  a.k_scale = tensor(4, DType::f32, {1});
  a.v_scale = tensor(5, DType::f32, {2, 2});
  return a;
}

/// Codes of e4m3 with scales by row, to a bf16 cache.
AppendArgs values() {
  AppendArgs a = dense();
  a.k_new.dtype = a.v_new.dtype = DType::e4m3;
  a.k_scale = tensor(4, DType::f32, {2, 2, 3});
  return a;
}

/// An s8 cache whose scales are found by row.
AppendArgs found() {
  AppendArgs a = codes();
  a.k_scale = a.v_scale = {};
  a.k_scale_cache = tensor(4, DType::f32, {2, 2, 10});
  a.v_scale_cache = tensor(5, DType::f32, {2, 2, 10});
  return a;
}

/// With an embedding of 16 channels at 20 positions, and queries of 4 heads.
AppendArgs rotary() {
  AppendArgs a = dense();
  a.rotary_cos = tensor(6, DType::f32, {20, 8});
  a.rotary_sin = tensor(7, DType::f32, {20, 8});
  a.q = tensor(8, DType::bf16, {2, 3, 4, 16});
  a.q_out = tensor(9, DType::bf16, {2, 3, 4, 16});
  return a;
}

AppendArgs checked(AppendArgs a) {
  a.check = true;
  return a;
}

class AppendError : public testing::TestWithParam<Case<AppendArgs>> {};

TEST_P(AppendError, NamesRuleValueAndRemedy) {
  std::vector<std::byte> before(std::size_t{32} << 16);
  const void* const memory = tensor(0, DType::f32, {1}).data;
  expect_message(GetParam(), [&](const AppendArgs& args) {
    std::memcpy(before.data(), memory, before.size());
    append_kv(args);
  });
  EXPECT_EQ(std::memcmp(before.data(), memory, before.size()), 0) << "written before the error";
}

using A = AppendArgs;
const Case<A> append_cases[] = {
    {"NoKeys", dense, [](A& a) { a.k_new = {}; },
     "k_new is missing; pass a tensor of shape (batch, seqlen_new, heads_kv, head_dim)"},
    {"NoLengths", dense, [](A& a) { a.cache_seqlens = {}; },
     "cache_seqlens is missing; pass a tensor of shape (batch), or pass slot_mapping"},
    {"TwoWaysToSayWhere", slots, set(&A::cache_seqlens, integers<1, 2>()),
     "cache_seqlens and slot_mapping are both given; slot_mapping alone says where tokens go: leave "
     "cache_seqlens out"},
    {"PagesAndEntries", paged, set(&A::cache_batch_idx, integers<0, 1>()),
     "page_table and cache_batch_idx are both given; reorder the rows of page_table, and leave "
     "cache_batch_idx out"},
    {"ValuesWithoutCache", dense, [](A& a) { a.v_cache = {}; },
     "v_new is given without v_cache; pass both, or neither to append keys alone"},
    {"CacheWithoutValues", dense, [](A& a) { a.v_new = {}; },
     "v_cache is given without v_new; pass both, or neither to append keys alone"},
    {"Rank", dense,
     set(&A::k_new, tensor(0, DType::bf16, {6, 2, 16})),
     "k_new has 3 dimensions; it must be (batch, seqlen_new, heads_kv, head_dim), as neither cu_seqlens_new "
     "nor slot_mapping is given"},
    {"RankOfSlots", slots,
     set(&A::k_new, tensor(0, DType::bf16, {1, 4, 2, 16})),
     "k_new has 4 dimensions; it must be (total_new, heads_kv, head_dim), as cu_seqlens_new or slot_mapping "
     "is given"},
    {"NoOffsets", dense,
     [](A& a) {
       a.k_new = tensor(0, DType::bf16, {6, 2, 16});
       a.cu_seqlens_new = tensor(10, DType::i32, {0});
     },
     "cu_seqlens_new has no elements; it has batch + 1 offsets, the first of them 0"},
    {"HeadDim", dense,
     set(&A::k_new, tensor(0, DType::bf16, {2, 3, 2, 1025})),
     "head_dim of k_new is 1025; it must be from 1 to 1024"},
    {"HeadDimOfValues", dense,
     set(&A::v_new, tensor(1, DType::bf16, {2, 3, 2, 0})),
     "head_dim of v_new is 0; it must be from 1 to 1024"},
    {"CacheOfAnotherBatch", dense,
     set(&A::k_cache, tensor(2, DType::bf16, {3, 10, 2, 16})),
     "k_cache has shape (3, 10, 2, 16); it must be (batch of k_new, seqlen, heads_kv of k_new, head_dim of "
     "k_new) = (2, 10, 2, 16)"},
    {"CacheOfOtherHeads", paged,
     set(&A::k_cache, tensor(2, DType::bf16, {6, 4, 4, 16})),
     "k_cache has shape (6, 4, 4, 16); it must be (pages, page_size, heads_kv of k_new, head_dim of k_new) = "
     "(6, 4, 2, 16)"},
    {"CacheOfAnotherHeadDim", slots,
     set(&A::k_cache, tensor(2, DType::bf16, {6, 4, 2, 8})),
     "k_cache has shape (6, 4, 2, 8); it must be (entries, seqlen, heads_kv of k_new, head_dim of k_new) = "
     "(6, 4, 2, 16)"},
    {"ValuesOfAnotherShape", dense,
     set(&A::v_new, tensor(1, DType::bf16, {2, 4, 2, 8})),
     "v_new has shape (2, 4, 2, 8); it must be (batch of k_new, seqlen_new of k_new, heads_kv of k_new, "
     "head_dim_v) = (2, 3, 2, 8)"},
    {"ValueCacheOfAnotherShape", dense,
     set(&A::v_cache, tensor(3, DType::bf16, {2, 9, 2, 8})),
     "v_cache has shape (2, 9, 2, 8); it must be (entries of k_cache, seqlen of k_cache, heads_kv of k_new, "
     "head_dim_v of v_new) = (2, 10, 2, 8)"},
    {"NoRowsInAPage", paged,
     set(&A::k_cache, tensor(2, DType::bf16, {6, 0, 2, 16})),
     "k_cache has pages of 0 rows; a page has one at least"},
    {"TooManyPages", paged,
     [](A& a) {
       a.k_cache = tensor(2, DType::bf16, {6, 64, 2, 16});
       a.page_table.shape[1] = std::int64_t{1} << 59;
       a.page_table.stride = {};
     },
     "page_table has 576460752303423488 pages a sequence, of 64 rows each; their product must fit 63 bits"},
    {"Dtype", dense, [](A& a) { a.k_new.dtype = DType::i32; },
     "k_new is i32; convert it to f32, f16, bf16, e4m3 or s8"},
    {"DtypeOfTheCache", dense, [](A& a) { a.k_cache.dtype = DType::i32; },
     "k_cache is i32; convert it to f32, f16, bf16, e4m3 or s8"},
    {"CodesOfAnotherKind", codes, [](A& a) { a.k_new.dtype = a.v_new.dtype = DType::e4m3; },
     "k_cache is s8 but k_new is e4m3; convert it to e4m3"},
    {"DtypeOfValues", dense, [](A& a) { a.v_new.dtype = DType::f16; },
     "v_new is f16 but k_new is bf16; convert it to bf16"},
    {"DtypeOfTheValueCache", dense, [](A& a) { a.v_cache.dtype = DType::e4m3; },
     "v_cache is e4m3 but k_cache is bf16; convert it to bf16"},
    {"Device", dense, [](A& a) { a.cache_seqlens = on_gpu(a.cache_seqlens, 0); },
     "cache_seqlens is on cuda:0 but k_new is on cpu; move it there"},
    {"DtypeOfLengths", dense, [](A& a) { a.cache_seqlens.dtype = DType::f32; },
     "cache_seqlens is f32; convert it to i32 or i64"},
    {"ShapeOfLengths", dense, set(&A::cache_seqlens, integers<1, 2, 3>()),
     "cache_seqlens has shape (3); it must be (batch) = (2)"},
    {"ShapeOfSlots", slots, set(&A::slot_mapping, integers<1, 2, 3>()),
     "slot_mapping has shape (3); it must be (total_new of k_new) = (4)"},
    {"Contiguous", dense, [](A& a) { a.k_cache.stride[3] = 2; },
     "k_cache has stride 2 in its last dimension; the last dimension must be contiguous (stride 1): copy "
     "k_cache first"},
    {"ScalesGivenAndFound", found, set(&A::k_scale, tensor(10, DType::f32, {1})),
     "k_scale and k_scale_cache are both given; scales are the caller's, or found and written: leave one of "
     "them out"},
    {"FoundScalesOfAnotherShape", found,
     set(&A::v_scale_cache, tensor(5, DType::f32, {2, 10, 2})),
     "v_scale_cache has shape (2, 10, 2); it must be (entries of k_cache, heads_kv of k_new, seqlen of "
     "k_cache) = (2, 2, 10)"},
    {"FoundScalesOfAnotherType", found,
     set(&A::k_scale_cache, tensor(4, DType::f16, {2, 2, 10})),
     "k_scale_cache is f16; convert it to f32"},
    {"FoundScalesOfWhatIsNotRounded", dense,
     set(&A::k_scale_cache, tensor(4, DType::f32, {2, 2, 10})),
     "k_scale_cache is given but k_new is bf16 and k_cache bf16; scales are for rows that become e4m3 or s8: "
     "leave it out"},
    {"FoundScalesOfCodes", values,
     set(&A::k_scale_cache, tensor(6, DType::f32, {2, 2, 10})),
     "k_scale_cache is given but k_new is e4m3 and k_cache bf16; scales are for rows that become e4m3 or s8: "
     "leave it out"},
    {"FoundScalesOfNoCache", found, [](A& a) { a.v_new = {}, a.v_cache = {}; },
     "v_scale_cache is given without v_cache; leave it out"},
    {"FoundScalesInOnePlace", found, [](A& a) { a.v_scale_cache = a.k_scale_cache; },
     "v_scale_cache shares memory with k_scale_cache; an output needs memory of its own"},
    {"ScaleOfWhatIsNotRounded", dense, set(&A::k_scale, tensor(4, DType::f32, {1})),
     "k_scale is given but k_new is bf16 and k_cache bf16; scales are for rows that become e4m3 or s8, or "
     "that were: leave it out"},
    {"ShapeOfScalesByRow", values, [](A& a) { a.k_scale.shape[2] = 10; },
     "k_scale has shape (2, 2, 10); it must be (1), (batch, heads_kv) or (batch, heads_kv, seqlen_new) = (2, "
     "2, 3)"},
    {"ShapeOfScales", codes,
     set(&A::v_scale, tensor(5, DType::f32, {2, 3})),
     "v_scale has shape (2, 3); it must be (1) or (batch, heads_kv) = (2, 2)"},
    {"ScaleWithoutValues", codes, [](A& a) { a.v_new = {}, a.v_cache = {}; },
     "v_scale is given without v_cache; leave it out"},
    {"CosWithoutSin", rotary, [](A& a) { a.rotary_sin = {}; },
     "rotary_cos is given without rotary_sin; pass both, or neither"},
    {"QueriesWithoutEmbedding", rotary, [](A& a) { a.rotary_cos = {}, a.rotary_sin = {}; },
     "q is given without rotary_cos and rotary_sin; leave it out"},
    {"EmbeddingOfCodes", rotary,
     [](A& a) { a.k_new.dtype = a.v_new.dtype = a.k_cache.dtype = a.v_cache.dtype = DType::e4m3; },
     "rotary_cos is given but k_new is e4m3; append rows in f16, bf16 or f32, or embed them before they are "
     "quantized"},
    {"NoPositions", rotary, [](A& a) { a.rotary_cos.shape[0] = 0; },
     "rotary_cos has no positions; it must have one at least"},
    {"RotaryDim", rotary, [](A& a) { a.rotary_cos.shape[1] = 9; },
     "rotary_cos has shape (20, 9): rotary_dim is 18; it must be a multiple of 16 and at most head_dim 16"},
    {"TableOfAnotherShape", rotary, [](A& a) { a.rotary_sin.shape[0] = 19; },
     "rotary_sin has shape (19, 8); it must be (positions, rotary_dim / 2) = (20, 8)"},
    {"TableOfAnotherDtype", rotary, [](A& a) { a.rotary_sin.dtype = DType::f16; },
     "rotary_sin is f16 but k_new is bf16; convert it to bf16"},
    {"TablesOfTwoDtypes", rotary, [](A& a) { a.rotary_sin.dtype = DType::bf16; },
     "rotary_sin is bf16 but rotary_cos is f32; convert it to f32"},
    {"QueriesWithoutResult", rotary, [](A& a) { a.q_out = {}; },
     "q is given without q_out; pass both, or neither"},
    {"QueriesOfAnotherShape", rotary, [](A& a) { a.q.shape[1] = 2; },
     "q has shape (2, 2, 4, 16); it must be (batch of k_new, seqlen_new of k_new, heads_q, head_dim of "
     "k_new) "
     "= (2, 3, 4, 16)"},
    {"QueriesOfAnotherDtype", rotary, [](A& a) { a.q.dtype = DType::f16; },
     "q is f16 but k_new is bf16; convert it to bf16"},
    {"SlotsWithoutPositions", slots,
     [](A& a) {
       a.rotary_cos = tensor(6, DType::f32, {20, 8});
       a.rotary_sin = tensor(7, DType::f32, {20, 8});
     },
     "rotary_offsets is missing; with slot_mapping it has the position of each token: pass a tensor of shape "
     "(total_new)"},
    {"CachesShareMemory", dense, [](A& a) { a.v_cache.data = a.k_cache.data; },
     "v_cache shares memory with k_cache; an output needs memory of its own"},
    {"CacheSharesMemoryWithItsRows", dense, [](A& a) { a.k_new.data = a.k_cache.data; },
     "k_cache shares memory with k_new; an output needs memory of its own"},
    {"QueriesInPlace", rotary,
     [](A& a) {
       a.q_out = Tensor(const_cast<void*>(a.q.data), DType::bf16, {2, 3, 4, 16});
     },
     "q_out shares memory with q; an output needs memory of its own"},
    {"CacheOverlapsItself", dense, [](A& a) { a.k_cache.stride[0] = 0; },
     "k_cache of shape (2, 10, 2, 16) and strides (0, 32, 16, 1) overlaps itself in dimension 0; every "
     "element "
     "of an output needs memory of its own"},
    {"CheckedLengths", [] { return checked(dense()); }, set(&A::cache_seqlens, integers<8, 0>()),
     "cache_seqlens[0] is 8 and 3 tokens are appended; a sequence has rows 0 to 9 of the cache"},
    {"CheckedNegativeLengths", [] { return checked(dense()); },
     set(&A::cache_seqlens, integers<3, -1>()),
     "cache_seqlens[1] is -1 and 3 tokens are appended; a sequence has rows 0 to 9 of the cache"},
    {"CheckedPadding", [] { return checked(dense()); }, set(&A::leftpad_k, integers<4, 1>()),
     "leftpad_k[1] is 1; it must be from 0 to cache_seqlens[1], 0"},
    {"CheckedIndex", [] { return checked(dense()); }, set(&A::cache_batch_idx, integers<1, 2>()),
     "cache_batch_idx[1] is 2; it must be from 0 to 1, the last entry of k_cache"},
    {"CheckedPages", [] { return checked(paged()); },
     [](A& a) {
       a.page_table = integers<5, 1, 6, 2, 4, 3>();
       a.page_table.rank = 2;
       a.page_table.shape = {2, 3};
       a.page_table.stride = {3, 1};
       a.cache_seqlens = integers<6, 0>();
     },
     "page_table[0, 2] is 6; rows 6 to 8 of sequence 0 need a page from 0 to 5 there"},
    {"CheckedUsed", [] { return checked(dense()); }, set(&A::seqused_new, integers<1, 4>()),
     "seqused_new[1] is 4; it must be from 0 to the length of sequence 1, 3"},
    {"CheckedSlots", [] { return checked(slots()); }, set(&A::slot_mapping, integers<24, 1, 2, 3>()),
     "slot_mapping[0] is 24; the cache has rows 0 to 23, and below 0 nothing is appended"},
    {"CheckedPositions", [] { return checked(rotary()); }, set(&A::rotary_offsets, integers<0, 18>()),
     "the position of k_new[1, 2] is 20; rotary_cos and rotary_sin have positions 0 to 19"},
    {"CheckedRowsTwice", [] { return checked(paged()); },
     [](A& a) {
       a.page_table = integers<5, 1, 0, 1, 4, 3>();
       a.page_table.rank = 2;
       a.page_table.shape = {2, 3};
       a.page_table.stride = {3, 1};
     },
     "k_new[0, 0] and k_new[1, 0] both go to row 0 of page 1 of the cache; each token needs a row of its "
     "own"},
};

INSTANTIATE_TEST_SUITE_P(Api, AppendError, testing::ValuesIn(append_cases), case_name<AppendArgs>);

TEST(Append, OffsetsAreChecked) {
  AppendArgs a = checked(dense());
  a.k_new = tensor(0, DType::bf16, {6, 2, 16});
  a.v_new = tensor(1, DType::bf16, {6, 2, 8});
  a.cu_seqlens_new = integers<0, 4, 7>();
  EXPECT_EQ(error_of(Status::invalid_argument, [&] { append_kv(a); }),
            "cu_seqlens_new[2] is 7; offsets are at most total_new = 6");
}

}  // namespace
}  // namespace tandem::test
