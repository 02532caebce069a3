/* A C project outside the tree: attention over three keys, checked by hand, and an error with its message. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <tandem/tandem.h>

int main(void) {
  float q[8] = {0};
  float k[24];
  float v[24];
  float out[8];
  float lse = NAN;
  for (int i = 0; i < 24; ++i) {
    k[i] = 1.0F;
    v[i] = (float)i;
  }
  const int64_t query[4] = {1, 1, 1, 8};
  const int64_t keys[4] = {1, 3, 1, 8};
  tandem_forward_args args = tandem_forward_args_default();
  args.q = tandem_contiguous(q, tandem_f32, 4, query);
  args.k = tandem_contiguous(k, tandem_f32, 4, keys);
  args.v = tandem_contiguous(v, tandem_f32, 4, keys);
  args.out = tandem_contiguous(out, tandem_f32, 4, query);
  args.lse = tandem_contiguous(&lse, tandem_f32, 3, query);
  if (tandem_forward(&args, NULL) != tandem_ok) {
    puts(tandem_last_error());
    return 1;
  }
  /* A query of zeros weighs all keys alike: the mean of the values, and log 3. */
  for (int d = 0; d < 8; ++d) {
    if (fabsf(out[d] - (float)(8 + d)) > 1e-5F) return 2;
  }
  if (fabsf(lse - logf(3.0F)) > 1e-5F) return 3;

  args.q.data = NULL;
  if (tandem_forward(&args, NULL) != tandem_invalid_argument) return 4;
  if (strcmp(tandem_last_error(), "q has shape (1, 1, 1, 8) but no data; its address is NULL") != 0) return 5;
  printf("tandem %s\n", tandem_version());
  return 0;
}
