/* Dense float32 values from a file, in plain numbers or in GGUF blocks: 32 values each, with a 16-bit scale and, in some
   formats, a 16-bit minimum.

   A value of a block is scale * level + bias, rounded after each step, as the library computes it from affine groups.
   Source: the GGUF specification (block layouts). */

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { VALUES = 32, LARGEST_HALF = 65504, STRETCH_BYTES = 1 << 16 };
enum { CUT_SHORT = -1, BEYOND_HALF = 0, FINE = 1 };

/* Exact: the exponent is moved by a product, so that subnormal numbers come out right as well. */
static float half(const uint8_t *at) {
  uint16_t stored;
  memcpy(&stored, at, 2);
  uint32_t sign = (uint32_t)(stored & 0x8000) << 16, rest = (uint32_t)(stored & 0x7fff) << 13;
  int finite = (stored & 0x7c00) != 0x7c00;
  float value;
  uint32_t bits;
  memcpy(&value, &rest, 4);
  value *= 0x1p112f;
  memcpy(&bits, &value, 4);
  bits = (finite ? bits : rest | 0x7f800000) | sign;
  memcpy(&value, &bits, 4);
  return value;
}

/* False for what is no number as well. */
static int usable(float value) { return fabsf(value) <= LARGEST_HALF; }

/* Byte j holds the levels of values j and j + 16. */
static void nibbles(const uint8_t *levels, float scale, float bias, float *restrict values) {
  for (int j = 0; j < VALUES / 2; j++) values[j] = scale * (float)(levels[j] & 15) + bias;
  for (int j = 0; j < VALUES / 2; j++) values[j + VALUES / 2] = scale * (float)(levels[j] >> 4) + bias;
}

/* Each unpacks `count` blocks, and tells whether their scales and biases are all within float16. */

static int q4_0(const uint8_t *blocks, long count, float *restrict values) {
  int fine = FINE;
  for (long block = 0; block < count; block++, blocks += 18, values += VALUES) {
    float scale = half(blocks), bias = -8 * scale;
    fine &= usable(bias);
    nibbles(blocks + 2, scale, bias, values);
  }
  return fine;
}

static int q4_1(const uint8_t *blocks, long count, float *restrict values) {
  int fine = FINE;
  for (long block = 0; block < count; block++, blocks += 20, values += VALUES) {
    float scale = half(blocks), bias = half(blocks + 2);
    fine &= usable(scale) & usable(bias);
    nibbles(blocks + 4, scale, bias, values);
  }
  return fine;
}

static int q8_0(const uint8_t *blocks, long count, float *restrict values) {
  int fine = FINE;
  for (long block = 0; block < count; block++, blocks += 34, values += VALUES) {
    float scale = half(blocks), bias = -128 * scale;
    fine &= usable(bias);
    for (int j = 0; j < VALUES; j++) values[j] = scale * (float)(blocks[2 + j] ^ 0x80) + bias;
  }
  return fine;
}

static int f32(const uint8_t *numbers, long count, float *restrict values) {
  memcpy(values, numbers, 4 * count);
  return FINE;
}

static int f16(const uint8_t *numbers, long count, float *restrict values) {
  for (long i = 0; i < count; i++) values[i] = half(numbers + 2 * i);
  return FINE;
}

static int bf16(const uint8_t *numbers, long count, float *restrict values) {
  for (long i = 0; i < count; i++) {
    uint32_t bits = (uint32_t)numbers[2 * i] << 16 | (uint32_t)numbers[2 * i + 1] << 24;
    memcpy(values + i, &bits, 4);
  }
  return FINE;
}

static const struct {
  const char *name;
  int bytes, values;
  int (*unpack)(const uint8_t *, long, float *restrict);
} FORMATS[] = {
    {"Q4_0", 18, VALUES, q4_0}, {"Q4_1", 20, VALUES, q4_1}, {"Q8_0", 34, VALUES, q8_0},
    {"F32", 4, 1, f32},         {"F16", 2, 1, f16},         {"BF16", 2, 1, bf16},
};

/* The number of a format, for `mlx_stream_fill`; -1 for one that is not known. */
int mlx_stream_format(const char *name) {
  for (int i = 0; i < (int)(sizeof FORMATS / sizeof *FORMATS); i++)
    if (!strcmp(FORMATS[i].name, name)) return i;
  return -1;
}

static int take(int file, long long at, uint8_t *bytes, long count) {
  while (count > 0) {
    ssize_t taken = pread(file, bytes, count, at);
    if (taken < 0 && errno == EINTR) continue;
    if (taken <= 0) return CUT_SHORT;
    at += taken, bytes += taken, count -= taken;
  }
  return FINE;
}

/* Fill `count` values from the bytes at `at` of `file`, by stretches that stay in a processor's cache. A count that is no
   whole number of blocks is cut to one. */
int mlx_stream_fill(int format, int file, long long at, long count, float *values) {
  uint8_t stretch[STRETCH_BYTES];
  int bytes = FORMATS[format].bytes, fine = FINE;
  for (long left = count / FORMATS[format].values, now; left > 0; left -= now) {
    now = left < STRETCH_BYTES / bytes ? left : STRETCH_BYTES / bytes;
    if (take(file, at, stretch, now * bytes) == CUT_SHORT) return CUT_SHORT;
    fine &= FORMATS[format].unpack(stretch, now, values);
    at += (long long)now * bytes, values += now * FORMATS[format].values;
  }
  return fine;
}
