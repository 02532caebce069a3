// A fiber: a stack of its own, entered and left by a few instructions.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace tandem::emulator {

/// Memory for the stacks of one CTA's threads, reused from CTA to CTA and from launch to launch; a page
/// below each faults on overflow.
class Stacks {
 public:
  static constexpr std::size_t bytes =
      256 * 1024;  ///< an unoptimised kernel keeps its register tiles on the stack
  explicit Stacks(std::size_t count);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  [[nodiscard]] char* bottom(std::size_t index) const;

 private:
  char* memory_ = nullptr;
  std::size_t count_ = 0;
};

/// Where a suspended flow of control goes on.
struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  const void* bottom = nullptr;  ///< of its stack, for AddressSanitizer
  std::size_t size = 0;
  void* fake_stack = nullptr;
};

/// Makes `context` begin in `entry`, which never returns, on the stack at `bottom`.
void prepare(Context& context, char* bottom, void (*entry)());

/// Suspends the caller in `from` and resumes `to`. `finished`: the caller will never be resumed.
void switch_context(Context& from, Context& to, bool finished = false);

/// First thing in an entry function: `from` is who switched here.
void finish_switch(Context& self, Context& from);

}  // namespace tandem::emulator
