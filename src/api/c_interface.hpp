// What the functions of the C interface share: structs -> arguments, exceptions -> statuses.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "api/check.hpp"
#include "tandem/attention.hpp"
#include "tandem/tandem.h"

namespace tandem::c {

/// Keeps the message of this thread's last failure.
int fail(Status status, const char* message) noexcept;

Execution execution_of(const tandem_execution* given);

/// Runs `work`; no exception leaves.
template <typename Work>
int guarded(Work&& work) noexcept {
  try {
    work();
    return tandem_ok;
  } catch (const Error& e) {
    return fail(e.status(), e.what());
  } catch (const std::bad_alloc&) {
    return fail(Status::out_of_memory, "host memory is exhausted; free some, or use a smaller problem");
  } catch (const std::exception& e) {
    return fail(Status::internal, e.what());
  } catch (...) {
    return fail(Status::internal, "an unknown exception; this is a bug in tandem");
  }
}

/// The caller's struct in this library's layout: fields that an older caller did not know keep `defaults`; a
/// newer caller's fields that this library does not know must be zero.
template <typename Struct>
Struct adopt(const char* name, const Struct& callers, const Struct& defaults, std::size_t least) {
  const std::size_t size = callers.struct_size;
  if (size < least) {
    check::invalid(
        "{}.struct_size is {}; set it to sizeof the struct, at least {} (the _default function does)", name,
        size, least);
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(&callers);
  if (size > sizeof(Struct) &&
      std::any_of(bytes + sizeof(Struct), bytes + size, [](unsigned char byte) { return byte != 0; })) {
    check::invalid(
        "{} uses fields that tandem {} does not know (struct_size {}, known {}); update the library", name,
        version(), size, sizeof(Struct));
  }
  Struct adopted = defaults;
  std::memcpy(&adopted, &callers, std::min(size, sizeof(Struct)));
  return adopted;
}

template <typename View>
View tensor(const tandem_tensor& t) {
  View r;
  r.data = t.data;
  r.dtype = static_cast<DType>(t.dtype);
  r.rank = t.rank;
  std::copy(std::begin(t.shape), std::end(t.shape), r.shape.begin());
  std::copy(std::begin(t.stride), std::end(t.stride), r.stride.begin());
  r.device = {static_cast<Device::Kind>(t.device), t.device_index};
  return r;
}
inline ConstTensor input(const tandem_tensor& t) {
  return tensor<ConstTensor>(t);
}
inline Tensor output(const tandem_tensor& t) {
  return tensor<Tensor>(t);
}

}  // namespace tandem::c
