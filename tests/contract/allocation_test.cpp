// Contract line 14: with a workspace passed in, a call does not allocate. This program counts every
// allocation that the library makes: operator new is replaced, and the linker sends the C functions here
// (--wrap, CMakeLists.txt).
#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "contract/contract.hpp"

namespace {

std::atomic<int> allocations{0};
std::atomic<int> in_regions{0};  // of OpenMP, which a failed allocation would end the process in
std::atomic<bool> counting{false};

void count() {
  if (!counting) return;
  ++allocations;
  if (omp_in_parallel() != 0) ++in_regions;
}

}  // namespace

extern "C" {
void* __real_malloc(std::size_t size);
void* __real_calloc(std::size_t count, std::size_t size);
void* __real_realloc(void* old, std::size_t size);
void* __real_aligned_alloc(std::size_t alignment, std::size_t size);
int __real_posix_memalign(void** memory, std::size_t alignment, std::size_t size);

void* __wrap_malloc(std::size_t size) {
  count();
  return __real_malloc(size);
}
void* __wrap_calloc(std::size_t n, std::size_t size) {
  count();
  return __real_calloc(n, size);
}
void* __wrap_realloc(void* old, std::size_t size) {
  count();
  return __real_realloc(old, size);
}
void* __wrap_aligned_alloc(std::size_t alignment, std::size_t size) {
  count();
  return __real_aligned_alloc(alignment, size);
}
int __wrap_posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  count();
  return __real_posix_memalign(memory, alignment, size);
}
}

// Not inlined: where GCC inlines one of a pair alone, it takes them for mismatched.
[[gnu::noinline]] void* operator new(std::size_t size) {
  void* memory = std::malloc(size > 0 ? size : 1);  // counted there
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  const auto unit = static_cast<std::size_t>(alignment);
  void* memory = std::aligned_alloc(unit, (size + unit - 1) / unit * unit);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace tandem::harness {
namespace {

template <typename F>
int allocations_in(const F& f) {
  allocations = in_regions = 0;
  counting = true;
  f();
  counting = false;
  return allocations;
}

TEST(Contract14_NoAllocation, TheCounterCounts) {
  EXPECT_GE(allocations_in([] { const std::vector<int> some(100); }), 1);
  void* volatile kept = nullptr;  // or the compiler leaves both calls out
  EXPECT_GE(allocations_in([&] { kept = std::malloc(1); }), 1);
  std::free(kept);
}

/// Memory that is exhausted is an error (Status::out_of_memory, or std::bad_alloc), not the process's end.
TEST(Contract14_NoAllocation, InAParallelRegion) {
  const Execution execution{.threads = 3};
  Call call(plain_case(DType::f32));
  call.prepare(Pass::forward);
  forward(call.forward_args(), execution);
  allocations_in([&] { forward(call.forward_args(), execution); });
  EXPECT_EQ(in_regions, 0) << "forward";
  call.prepare(Pass::backward);
  allocations_in([&] { backward(call.backward_args(), execution); });
  EXPECT_EQ(in_regions, 0) << "backward";

  std::vector<float> values(4 * 6 * 8, 1.0F);
  const auto rows = [&](std::int64_t n) { return Tensor(values.data() + n * 48, DType::f32, {1, 6, 1, 8}); };
  const auto lse = [&](std::int64_t n) { return Tensor(values.data() + n * 6, DType::f32, {1, 1, 6}); };
  std::vector<float> out(48);
  const std::vector<ConstTensor> outs{rows(0), rows(1), rows(2)}, lses{lse(24), lse(25), lse(26)};
  MergeArgs args;
  args.outs = outs;
  args.lses = lses;
  args.out = Tensor(out.data(), DType::f32, {1, 6, 1, 8});
  EXPECT_GT(allocations_in([&] { merge(args, execution); }), 0);
  EXPECT_EQ(in_regions, 0) << "merge";
}

/// Runs both passes with a workspace and counts. The first call is not counted: it may set up what lives as
/// long as the process, such as the thread pool.
void expect_no_allocation(const Case& c) {
  SCOPED_TRACE(c.describe());
  Call call(c);
  const auto workspace_for = [&](std::size_t bytes) {
    return Box(DType::s8, {static_cast<std::int64_t>(bytes)}, {}, true);
  };
  Execution execution{.threads = c.threads};
  const ForwardArgs forward_args = call.forward_args();
  execution.workspace_bytes = workspace_bytes(forward_args, execution);
  const Box forward_workspace = workspace_for(execution.workspace_bytes);
  execution.workspace = forward_workspace.view().data;
  tandem::forward(forward_args, execution);
  EXPECT_EQ(allocations_in([&] { tandem::forward(forward_args, execution); }), 0) << "forward";

  if (c.dtype == DType::e4m3) return;
  Execution backward_execution{.threads = c.threads};
  const BackwardArgs backward_args = call.backward_args();
  backward_execution.workspace_bytes = workspace_bytes(backward_args, backward_execution);
  const Box backward_workspace = workspace_for(backward_execution.workspace_bytes);
  backward_execution.workspace = backward_workspace.view().data;
  tandem::backward(backward_args, backward_execution);
  EXPECT_EQ(allocations_in([&] { tandem::backward(backward_args, backward_execution); }), 0) << "backward";
}

TEST(Contract14_NoAllocation, WithAWorkspace) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3}) {
    for (const bool deterministic : {false, true}) {
      Case c = with(plain_case(dtype), {.deterministic = deterministic});
      expect_no_allocation(c);
      change(c, {.softcap = 2.0F, .causal = true, .sink = true, .dlse = true});
      expect_no_allocation(c);
    }
    expect_no_allocation(varlen_case(dtype, {40, 0, 90}));
    expect_no_allocation(with(plain_case(dtype), {.seqlen_q = 1, .seqlen_k = 2000}));
    Case functions = with(plain_case(dtype), {.score_function = "add(s, mul(t0[h], real(sub(k, q))))"});
    functions.mask_function = "ne(t1[q], t1[k])";
    functions.captured = {{.shape = {4}}, {.dtype = DType::i32, .shape = {200}, .high = 3}};
    expect_no_allocation(functions);
    expect_no_allocation(with(plain_case(dtype), {.head_dim = 50}));
  }
}

}  // namespace
}  // namespace tandem::harness
