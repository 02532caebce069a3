// A C++ project outside the tree: attention over three keys, checked by hand, and an error caught by its
// type.
#include <cmath>
#include <cstdio>
#include <tandem/attention.hpp>
#include <vector>

int main() {
  std::vector<float> q(8, 0.0F);
  std::vector<float> k(3 * 8, 1.0F);
  std::vector<float> v(3 * 8);
  std::vector<float> out(8, NAN);
  float lse = NAN;
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);

  tandem::ForwardArgs args;
  args.q = tandem::ConstTensor(q.data(), tandem::DType::f32, {1, 1, 1, 8});
  args.k = tandem::ConstTensor(k.data(), tandem::DType::f32, {1, 3, 1, 8});
  args.v = tandem::ConstTensor(v.data(), tandem::DType::f32, {1, 3, 1, 8});
  args.out = tandem::Tensor(out.data(), tandem::DType::f32, {1, 1, 1, 8});
  args.lse = tandem::Tensor(&lse, tandem::DType::f32, {1, 1, 1});
  tandem::forward(args);

  // A query of zeros weighs all keys alike: the mean of the values, and log 3.
  for (std::size_t d = 0; d < out.size(); ++d) {
    if (std::abs(out[d] - static_cast<float>(8 + d)) > 1e-5F) return 1;
  }
  if (std::abs(lse - std::log(3.0F)) > 1e-5F) return 2;

  args.options.window_left = -7;
  try {
    tandem::forward(args);
    return 3;
  } catch (const tandem::Error& e) {
    if (e.status() != tandem::Status::invalid_argument) return 4;
  }
  std::printf("tandem %s\n", tandem::version());
  return 0;
}
