/* tandem_quantize, used as a C program would. */
#include <math.h>

#include "c_check.h"

void test_quantize(void) {
  float x[2][8] = {{1.0F, -2.0F, 127.0F, 0.4F, 0.0F, 3.5F, -127.0F, 64.0F}, {0.0F}};
  int8_t codes[2][8];
  float scales[2];
  tandem_quantize_args args = tandem_quantize_args_default();
  args.granularity = tandem_granularity_row;
  args.x = tandem_contiguous(x, tandem_f32, 3, (int64_t[]){2, 1, 8});
  args.codes = tandem_contiguous(codes, tandem_s8, 3, (int64_t[]){2, 1, 8});
  args.scales = tandem_contiguous(scales, tandem_f32, 2, (int64_t[]){1, 2});
  CHECK(tandem_quantize(&args, NULL) == tandem_ok);
  CHECK(scales[0] == 1.0F && scales[1] == 0.0F);
  CHECK(codes[0][1] == -2 && codes[0][2] == 127 && codes[0][3] == 0 && codes[0][5] == 4 && codes[1][0] == 0);
  CHECK_FAILS(tandem_quantize(NULL, NULL), tandem_invalid_argument,
              "args is NULL; pass the address of a tandem_quantize_args");
}

/* A rotary embedding by 90 degrees on the way: (a, b) becomes (-b, a), of halves or of neighbours. */
void test_quantize_rotary(void) {
  float x[16], cosines[8] = {0.0F}, sines[8];
  int8_t codes[16];
  float scale = NAN;
  for (int i = 0; i < 16; ++i) x[i] = (float)(i + 112);
  for (int i = 0; i < 8; ++i) sines[i] = 1.0F;
  tandem_quantize_args args = tandem_quantize_args_default();
  CHECK(args.cos.rank == 0 && args.sin.rank == 0 && args.interleaved == 0);
  args.granularity = tandem_granularity_tensor;
  args.x = tandem_contiguous(x, tandem_f32, 3, (int64_t[]){1, 1, 16});
  args.codes = tandem_contiguous(codes, tandem_s8, 3, (int64_t[]){1, 1, 16});
  args.scales = tandem_contiguous(&scale, tandem_f32, 1, (int64_t[]){1});
  args.cos = tandem_contiguous(cosines, tandem_f32, 2, (int64_t[]){1, 8});
  args.sin = tandem_contiguous(sines, tandem_f32, 2, (int64_t[]){1, 8});
  CHECK(tandem_quantize(&args, NULL) == tandem_ok && scale == 1.0F);
  for (int i = 0; i < 8; ++i) CHECK(codes[i] == -(i + 120) && codes[i + 8] == i + 112);
  args.interleaved = 1;
  CHECK(tandem_quantize(&args, NULL) == tandem_ok && scale == 1.0F);
  for (int i = 0; i < 16; i += 2) CHECK(codes[i] == -(i + 113) && codes[i + 1] == i + 112);
  args.sin.rank = 0;
  args.sin.data = NULL;
  CHECK_FAILS(tandem_quantize(&args, NULL), tandem_invalid_argument,
              "cos is given without sin; pass both, or neither");

  /* A caller of the first version, whose struct ends before `cos`: it is not read. */
  args.struct_size = 368;
  CHECK(tandem_quantize(&args, NULL) == tandem_ok);
  CHECK(codes[0] == 112 && codes[15] == 127);
}
