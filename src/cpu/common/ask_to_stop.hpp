// How a kernel learns that its call is to end: a plain struct, for sources that are compiled for each
// instruction set.
#pragma once

namespace tandem::cpu {

/// What a kernel asks between blocks of keys (stop.hpp): true ends it, and its tile is left as it is.
struct AskToStop {
  bool (*wanted)(void* context) = nullptr;  ///< may be null
  void* context = nullptr;

  [[gnu::always_inline]] bool operator()() const { return wanted != nullptr && wanted(context); }
};

}  // namespace tandem::cpu
