#include "fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace tandem::emulator {
namespace {

std::size_t page() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

std::mutex pool_mutex;

/// Stacks that no CTA has, by how many they are. They are kept until the program ends: to map them again, and
/// their pages, was a seventh of the time of short launches.
std::vector<char*>& pool(std::size_t count) {
  static auto* const all = new std::map<std::size_t, std::vector<char*>>;
  return (*all)[count];
}

char* pooled(std::size_t count) {
  const std::lock_guard lock(pool_mutex);
  std::vector<char*>& free = pool(count);
  if (free.empty()) return nullptr;
  char* const memory = free.back();
  free.pop_back();
  return memory;
}

}  // namespace

Stacks::Stacks(std::size_t count) : memory_(pooled(count)), count_(count) {
  if (memory_ != nullptr) return;
  void* p = mmap(nullptr, count * (bytes + page()), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(p);
  for (std::size_t i = 0; i < count; ++i) mprotect(bottom(i) - page(), page(), PROT_NONE);
}

Stacks::~Stacks() {
#if defined(__SANITIZE_ADDRESS__)
  // Fibers that a fault has left behind have poisoned theirs.
  for (std::size_t i = 0; i < count_; ++i) __asan_unpoison_memory_region(bottom(i), bytes);
#endif
  const std::lock_guard lock(pool_mutex);
  pool(count_).push_back(memory_);
}

char* Stacks::bottom(std::size_t index) const {
  return memory_ + index * (bytes + page()) + page();
}

#if defined(__x86_64__)

// Saves the callee-saved registers on the stack, exchanges stacks, restores.
extern "C" void tandem_emulator_switch(void** save, void* load);
asm(R"(
.text
.hidden tandem_emulator_switch
.globl tandem_emulator_switch
.type tandem_emulator_switch, @function
tandem_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tandem_emulator_switch, . - tandem_emulator_switch
)");

void prepare(Context& context, char* bottom, void (*entry)()) {
  constexpr int saved_registers = 6;
  auto* top = reinterpret_cast<std::uintptr_t*>(bottom + Stacks::bytes);
  *--top = 0;  // entry's return address; the stack is then aligned as at a call
  *--top = reinterpret_cast<std::uintptr_t>(entry);
  for (int i = 0; i < saved_registers; ++i) *--top = 0;
  context = {.stack_pointer = top, .bottom = bottom, .size = Stacks::bytes};
}

static void exchange(Context& from, Context& to) {
  tandem_emulator_switch(&from.stack_pointer, to.stack_pointer);
}

#else

void prepare(Context& context, char* bottom, void (*entry)()) {
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = bottom;
  context.context.uc_stack.ss_size = Stacks::bytes;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
  context.bottom = bottom;
  context.size = Stacks::bytes;
  context.fake_stack = nullptr;
}

static void exchange(Context& from, Context& to) {
  swapcontext(&from.context, &to.context);
}

#endif

#if defined(__SANITIZE_ADDRESS__)

void switch_context(Context& from, Context& to, bool finished) {
  __sanitizer_start_switch_fiber(finished ? nullptr : &from.fake_stack, to.bottom, to.size);
  exchange(from, to);
  finish_switch(from, to);
}

void finish_switch(Context& self, Context& from) {
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(self.fake_stack, &bottom, &size);
  if (from.bottom == nullptr) {  // the host thread's own stack, seen for the first time
    from.bottom = bottom;
    from.size = size;
  }
}

#else

void switch_context(Context& from, Context& to, bool /*finished*/) {
  exchange(from, to);
}
void finish_switch(Context& /*self*/, Context& /*from*/) {}

#endif

}  // namespace tandem::emulator
