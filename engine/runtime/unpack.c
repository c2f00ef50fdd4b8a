/* Dense float32 values of GGUF blocks: 32 values each, with a 16-bit scale and, in some formats, a 16-bit minimum.

   A value is scale * level + bias, rounded after each step, as the library computes it from affine groups. Each function
   returns 0 if a scale or a bias is beyond float16. Source: the GGUF specification (block layouts). */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { VALUES = 32, LARGEST_HALF = 65504 };

/* Exact: the exponent is moved by a product, so that subnormal numbers come out right as well. */
static float half(const uint8_t *at) {
  uint16_t stored;
  memcpy(&stored, at, 2);
  uint32_t sign = (uint32_t)(stored & 0x8000) << 16, rest = (uint32_t)(stored & 0x7fff) << 13;
  int finite = (stored & 0x7c00) != 0x7c00;
  float value;
  memcpy(&value, &rest, 4);
  value = finite ? value * 0x1p112f : INFINITY;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}

static int usable(float value) { return fabsf(value) <= LARGEST_HALF; }

/* Byte j holds the levels of values j and j + 16. */
static void nibbles(const uint8_t *levels, float scale, float bias, float *restrict values) {
  for (int j = 0; j < VALUES / 2; j++) values[j] = scale * (float)(levels[j] & 15) + bias;
  for (int j = 0; j < VALUES / 2; j++) values[j + VALUES / 2] = scale * (float)(levels[j] >> 4) + bias;
}

int mlx_stream_unpack_q4_0(const uint8_t *blocks, long count, float *restrict values) {
  int fine = 1;
  for (long block = 0; block < count; block++, blocks += 18, values += VALUES) {
    float scale = half(blocks), bias = -8 * scale;
    fine &= usable(bias);
    nibbles(blocks + 2, scale, bias, values);
  }
  return fine;
}

int mlx_stream_unpack_q4_1(const uint8_t *blocks, long count, float *restrict values) {
  int fine = 1;
  for (long block = 0; block < count; block++, blocks += 20, values += VALUES) {
    float scale = half(blocks), bias = half(blocks + 2);
    fine &= usable(scale) & usable(bias);
    nibbles(blocks + 4, scale, bias, values);
  }
  return fine;
}

int mlx_stream_unpack_q8_0(const uint8_t *blocks, long count, float *restrict values) {
  int fine = 1;
  for (long block = 0; block < count; block++, blocks += 34, values += VALUES) {
    float scale = half(blocks), bias = -128 * scale;
    fine &= usable(bias);
    for (int j = 0; j < VALUES; j++) values[j] = scale * (float)(blocks[2 + j] ^ 0x80) + bias;
  }
  return fine;
}
