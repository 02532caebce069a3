// Types that depend on a constant. Device code includes no standard library.
#pragma once

namespace tandem {

template <bool condition, typename Then, typename Else>
struct Select {
  using type = Then;
};
template <typename Then, typename Else>
struct Select<false, Then, Else> {
  using type = Else;
};

}  // namespace tandem
