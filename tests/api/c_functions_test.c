/* Functions on scores, their gradients and dropout through the C interface. */
#include <math.h>
#include <stddef.h>

#include "c_buffers.h"
#include "c_check.h"

/* The sum of out * dout with these functions. */
static double weighted_sum(Buffers* b, tandem_functions functions) {
  tandem_forward_args forward = forward_args(b);
  forward.functions = functions;
  CHECK(tandem_forward(&forward, NULL) == tandem_ok);
  double sum = 0.0;
  for (int i = 0; i < elements; ++i) sum += (double)b->out[i] * (double)b->dout[i];
  return sum;
}

static void test_values(void) {
  Buffers b;
  fill(&b);
  tandem_forward_args forward = forward_args(&b);
  forward.functions.mask = "le(k, q)"; /* causal, of as many keys as queries */
  CHECK(tandem_forward(&forward, NULL) == tandem_ok);
  check_forward_values(&b);
  forward.functions.mask = "le(k, ";
  CHECK(tandem_forward(&forward, NULL) == tandem_invalid_argument);
}

/* Against differences of the forward pass. */
static void test_captured_gradients(void) {
  Buffers b;
  fill(&b);
  float bias[heads * seqlen] = {0.5F, -0.25F, 0.0F, 1.0F, 0.75F, -1.0F};
  float gradient[heads * seqlen];
  const int64_t shape[2] = {heads, seqlen};
  const tandem_tensor captured = tandem_contiguous(bias, tandem_f32, 2, shape);
  const tandem_tensor wanted = tandem_contiguous(gradient, tandem_f32, 2, shape);
  const tandem_functions functions = {"add(s, t0[h, k])", "le(k, q)", &captured, 1};
  tandem_backward_args backward = backward_args(&b);
  backward.functions = functions;
  backward.captured_gradients = &wanted;
  weighted_sum(&b, functions);
  CHECK(tandem_backward(&backward, NULL) == tandem_ok);
  for (int i = 0; i < heads * seqlen; ++i) {
    const float kept = bias[i];
    const float step = 0.01F;
    bias[i] = kept + step;
    const double more = weighted_sum(&b, functions);
    bias[i] = kept - step;
    const double less = weighted_sum(&b, functions);
    bias[i] = kept;
    CHECK(fabs((more - less) / (2.0 * (double)step) - (double)gradient[i]) < 1e-2);
  }
  backward.functions.score = NULL;
  CHECK_FAILS(tandem_backward(&backward, NULL), tandem_invalid_argument,
              "captured_gradients are given without functions.score; pass both, or neither");
  backward.functions = functions;
  backward.functions.captured_count = -1;
  CHECK_FAILS(
      tandem_backward(&backward, NULL), tandem_invalid_argument,
      "functions.captured_count is -1, but functions.captured is given; pass an array of so many tensors");
}

/* The same seed gives the same, another something else, and nothing is kept or scaled otherwise than by 2. */
static void test_dropout(void) {
  Buffers b;
  fill(&b);
  tandem_options options = tandem_options_default();
  options.dropout_p = 0.5F;
  options.dropout_seed = 3;
  tandem_forward_args forward = forward_args(&b);
  forward.options = &options;
  float first[elements];
  CHECK(tandem_forward(&forward, NULL) == tandem_ok);
  for (int i = 0; i < elements; ++i) first[i] = b.out[i];
  CHECK(tandem_forward(&forward, NULL) == tandem_ok);
  int changed = 0;
  for (int i = 0; i < elements; ++i) changed += first[i] != b.out[i] ? 1 : 0;
  CHECK(changed == 0);
  int32_t places[4] = {0, 0, 0, 1}; /* where the rows lie without them */
  const int64_t shape[2] = {1, 4};
  forward.dropout_places = tandem_contiguous(places, tandem_i32, 2, shape);
  CHECK(tandem_forward(&forward, NULL) == tandem_ok);
  for (int i = 0; i < elements; ++i) changed += first[i] != b.out[i] ? 1 : 0;
  CHECK(changed == 0);
  places[1] = 1000;
  CHECK(tandem_forward(&forward, NULL) == tandem_ok);
  for (int i = 0; i < elements; ++i) changed += first[i] != b.out[i] ? 1 : 0;
  CHECK(changed > 0);
  changed = 0;
  forward.dropout_places = tandem_forward_args_default().dropout_places;
  options.dropout_seed = 4;
  CHECK(tandem_forward(&forward, NULL) == tandem_ok);
  for (int i = 0; i < elements; ++i) changed += first[i] != b.out[i] ? 1 : 0;
  CHECK(changed > 0);
  options.dropout_p = 1.0F;
  CHECK_FAILS(tandem_forward(&forward, NULL), tandem_invalid_argument,
              "dropout_p is 1; it must be at least 0 (off) and below 1");
}

/* Gradients are added to what there is. */
static void test_accumulate(void) {
  Buffers b;
  fill(&b);
  tandem_forward_args forward = forward_args(&b);
  CHECK(tandem_forward(&forward, NULL) == tandem_ok);
  tandem_backward_args backward = backward_args(&b);
  CHECK(tandem_backward(&backward, NULL) == tandem_ok);
  float once[3][elements];
  float* const gradients[3] = {backward.dq.data, backward.dk.data, backward.dv.data};
  for (int g = 0; g < 3; ++g) {
    for (int i = 0; i < elements; ++i) once[g][i] = gradients[g][i];
  }
  backward.accumulate_dq = 1;
  backward.accumulate_dk_dv = 1;
  CHECK(tandem_backward(&backward, NULL) == tandem_ok);
  for (int g = 0; g < 3; ++g) {
    for (int i = 0; i < elements; ++i) CHECK(gradients[g][i] == once[g][i] + once[g][i]);
  }
}

void test_functions(void) {
  test_values();
  test_captured_gradients();
  test_dropout();
  test_accumulate();
}
