// The emulator: runs device kernels as ordinary C++ and reports what hardware hides.
//
// Usage. Include launch.hpp, then the kernel (src/ and tests/kernels/emulator on the include path), link
// tandem_emulator:
//
//   emulator::Options options;
//   options.seed = 7;                                     // 0: round robin; others: a random interleaving
//   each options.buffers = {emulator::readable(q), emulator::writable(out)};   // std::vectors; every access
//   is checked params.q = emulator::encode(TensorMapSpec{...}); emulator::launch(forward<config>, params,
//   {.blocks = 2, .threads = 384, .shared_bytes = bytes}, options);
//
// A fault is an emulator::Fault whose text says what, where and who. Shared addresses are printed as +offset
// from the start of dynamic shared memory.
//
// How it works. The threads of a CTA are fibers (fiber.hpp) that switch where a thread can block. TMA and the
// tensor cores act later than they are asked to, by a random number of scheduling steps (block.hpp). Vector
// clocks (clock.hpp) know what happens before what, and a shadow of shared memory (shadow.hpp) who wrote and
// read each word: an access that only lucky timing makes right is a fault in every interleaving.
//
// This header declares what src/ptx calls. What a function does is written there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "config/types.hpp"

namespace tandem::emulator {

std::uint32_t thread_index();
std::uint32_t block_index();
std::uint32_t grid_size();
char* dynamic_shared();
std::uint32_t shared_address(const void* p);

void sync_block();
void sync_cluster();
void arrive_cluster();
void wait_cluster();
void named_barrier_sync(int id, int threads);
void named_barrier_arrive(int id, int threads);
void fence_async_shared();
void fence_async_global();
void wait_for_previous_grid();

void mbarrier_init(void* bar, std::uint32_t arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(void* bar);
void mbarrier_arrive_other(void* bar);
void mbarrier_arrive_expect(void* bar, std::uint32_t bytes);
void mbarrier_wait(void* bar, std::uint32_t parity);

void tma_load(void* shared, const TensorMap& map, void* bar, int c0, int c1, int c2, int c3);
void tma_load_both(void* shared, const TensorMap& map, void* bar, int c0, int c1, int c2, int c3);
void tma_store(const TensorMap& map, const void* shared, int c0, int c1, int c2, int c3);
void tma_reduce_add(const TensorMap& map, const void* shared, int c0, int c1, int c2, int c3);
void bulk_load(void* shared, const void* global, std::uint32_t bytes, void* bar);
void copy_async(void* shared, const void* global, std::size_t bytes);
void wait_for_copies();
void commit_copies();
void wait_for_copy_groups(int pending);
void store_async(std::uint32_t to, void* target, const void* data, std::uint32_t bytes, void* bar);
void bulk_send(void* target, const void* source, std::uint32_t bytes, void* bar);
void bulk_store(void* global, const void* shared, std::uint32_t bytes);
void bulk_reduce_add(float* global, const void* shared, std::uint32_t bytes);
void tma_store_commit();
void tma_store_wait(int pending);
void tma_store_wait_written(int pending);

void check_descriptor(const void* shared, std::uint32_t leading, std::uint32_t stride, Swizzle swizzle);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);
void wgmma_shared(float* d, int n, Element element, std::uint64_t a, std::uint64_t b, bool a_mn_major,
                  bool b_mn_major, bool accumulate);
void wgmma_registers(float* d, int n, Element element, const std::uint32_t* a, std::uint64_t b,
                     bool b_mn_major, bool accumulate);
void wgmma_bytes_shared(void* d, int n, Bytes bytes, std::uint64_t a, std::uint64_t b, bool accumulate);
void wgmma_bytes_registers(void* d, int n, Bytes bytes, const std::uint32_t* a, std::uint64_t b,
                           bool accumulate);

void mma(Element element, float* d, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

std::uint32_t shuffle_xor(std::uint32_t value, int mask);
float shuffle_xor(float value, int mask);
std::uint32_t shuffle(std::uint32_t value, int lane);
std::uint32_t shuffle_up(std::uint32_t value, int delta);
std::uint32_t ballot(bool predicate);
std::uint32_t reduce_or(std::uint32_t value);
std::uint32_t reduce_max(std::uint32_t value);
void sync_warp();
bool elect_one();
void ldmatrix_x4(const void* row, std::uint32_t (&d)[4]);
void ldmatrix_x4_transposed(const void* row, std::uint32_t (&d)[4]);
void stmatrix_x4(void* row, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d);
void stmatrix_x4_transposed(void* row, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d);

void release_registers(int count);
void claim_registers(int count);

float exp2(float x);
float log2(float x);
float reciprocal(float x);
float square_root(float x);
int add_min_relu(int a, int b, int most);
float fmax(float a, float b);
float fmax_nan(float a, float b);
float fma(float a, float b, float c);
float multiply(float a, float b);
float divide(float a, float b);
float max_magnitude(float largest, float x);
std::uint32_t pack_bf16(float low, float high);
std::uint32_t pack_f16(float low, float high);
std::uint32_t add_zero_times(std::uint32_t sum, std::uint32_t x, Element element);
std::uint32_t pack_e4m3(float a, float b, float c, float d);
float unpack_e4m3(std::uint32_t code);
std::uint32_t pack_u8(float a, float b, float c, float d);
float to_float(int x);
std::uint32_t low_bytes(float a, float b, float c, float d);
float unpack(std::uint32_t bits, Element element);

/// Throws unless `bytes` at `p` lie in a registered buffer (a writable one, to write) and are aligned to
/// `bytes`.
void check_global(const void* p, std::size_t bytes, bool write);
/// The same for ordinary loads and stores, which throw where no barrier is between them and another thread's
/// store.
void check_global_load(const void* p, std::size_t bytes);
/// And for loads through the read-only cache, which throw where this grid has stored, or one that has not
/// ended may store.
void check_read_only_load(const void* p, std::size_t bytes);
void check_global_store(const void* p, std::size_t bytes);
/// Throws if `x` came from accumulator registers that wgmma_wait had not handed back.
void check_register(float x);
void check_registers(const void* d, std::size_t count);
void check_shared_read(const void* p, std::size_t bytes);
void check_shared_write(const void* p, std::size_t bytes);

template <typename T>
T load_written(const T* p) {
  check_global_load(p, sizeof(T));
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}
template <typename T>
T load_global(const T* p) {
  const T value = load_written(p);
  check_read_only_load(p, sizeof(T));
  return value;
}

template <typename T>
void store_global(T* p, T value) {
  if constexpr (std::is_same_v<T, float>) check_register(value);
  check_global_store(p, sizeof(T));
  std::memcpy(p, &value, sizeof(T));
}

std::uint32_t atomic_add(std::uint32_t* p, std::uint32_t value);

inline void atomic_add(float* p, float value) {
  check_register(value);
  check_global(p, sizeof(*p), true);
  std::atomic_ref(*p).fetch_add(value, std::memory_order_relaxed);
}

inline void atomic_max(std::uint32_t* p, std::uint32_t value) {
  check_global(p, sizeof(*p), true);
  const std::atomic_ref number(*p);
  std::uint32_t now = number.load(std::memory_order_relaxed);
  while (now < value && !number.compare_exchange_weak(now, value, std::memory_order_relaxed)) {
  }
}

/// Throws where the number stays another for long: blocks that run one after the other cannot wait for later
/// ones.
std::uint32_t semaphore_read(const std::uint32_t* p);
std::uint32_t semaphore_claim(std::uint32_t* p);
void semaphore_wait(const std::uint32_t* p, std::uint32_t value);
/// For kernels that another launch, on another thread of the host, goes on beside: throws after ten minutes.
void semaphore_wait_long(const std::uint32_t* p, std::uint32_t value);
void semaphore_increment(std::uint32_t* p);
void flag_raise(unsigned long long* p, unsigned long long raised);
void flag_take(unsigned long long* p, unsigned long long raised);

template <typename T>
T load_shared(const T* p) {
  check_shared_read(p, sizeof(T));
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

template <typename T>
void store_shared(T* p, T value) {
  if constexpr (std::is_same_v<T, float>) check_register(value);
  check_shared_write(p, sizeof(T));
  std::memcpy(p, &value, sizeof(T));
}

}  // namespace tandem::emulator

#include "intrinsics.hpp"
