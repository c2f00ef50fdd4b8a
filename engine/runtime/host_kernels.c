/* What stands between the products of a step, for processors with AVX2 or AVX-512: attention of rows to their own keys
   and values, and the gates of feed-forwards. Part of the shim: compiled together with `blas_shim.c`, whose threads and
   kernel for few rows it uses.

   Every number of a result is computed in one order that its own row alone decides, whatever else is in the step and
   however a prompt was cut: keys are taken from the first one on, by so many at once, and what a query may not see
   weighs exactly nothing. */

#include <math.h>
#include <string.h>

enum { KEYS_AT_ONCE = 256, LARGEST_HEAD = 256, VECTORS_AT_ONCE = 4 };

/* Shares of a step that one thread takes at a time: queries of one head, and numbers behind gates. */
enum { QUERIES_PER_PIECE = 48, NUMBERS_PER_PIECE = 1 << 13 };

/* Some packed tokens of one row, which has `offset` tokens already. `state` is its [2·kv_heads, capacity, size] of one
   layer, keys first; `start` is the place of the first of the `length` tokens in the step. */
typedef struct {
  float *state;
  int capacity, start, length, offset;
} stretch_t;

/* Queries [tokens, heads, size], keys and values [tokens, 2·kv_heads, size], or NULL if they have been kept before, with
   so many numbers from one token to the next; `out` is [tokens, heads, size]. */
typedef struct {
  const stretch_t *stretches;
  const float *queries, *joined;
  float *out;
  long query_stride, joined_stride;
  int count, heads, kv_heads, size;
  float factor;
} attention_t;

typedef struct {
  const float *gate, *up;
  float *out;
  long stride;
  int tokens, size, tokens_per_piece;
} gates_t;

typedef void queries_kernel_t(const attention_t *, const stretch_t *, int head, int first, int end);
typedef void gates_kernel_t(const gates_t *, int first, int end);

#if defined(__x86_64__)

/* 2^x = 2^n · 2^f with n whole and |f| <= 1/2; the powers of the fraction are a polynomial through Chebyshev's points,
   to 1e-7 of the result. */
#define POWER_OF_FRACTION(FMA, SPREAD, f)                                                                              \
  FMA(FMA(FMA(FMA(FMA(FMA(SPREAD(1.5461444724808513e-4f), f, SPREAD(1.3400428177711937e-3f)), f,                       \
                      SPREAD(9.61805667843204e-3f)), f, SPREAD(5.550327226669895e-2f)), f,                             \
              SPREAD(0.24022650922289554f)), f, SPREAD(0.6931472067028329f)), f, SPREAD(1.0f))

AVX512 INLINE __m512 power_512(__m512 x) {
  __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_sub_ps(x, whole);
  /* The infinite have no fraction. */
  f = _mm512_mask_mov_ps(f, _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(INFINITY), _CMP_EQ_OQ),
                         _mm512_setzero_ps());
  return _mm512_scalef_ps(POWER_OF_FRACTION(_mm512_fmadd_ps, _mm512_set1_ps, f), whole);
}

AVX2 INLINE __m256 power_256(__m256 x) {
  /* What is not a number stays that: both instructions return their second operand then. */
  x = _mm256_min_ps(_mm256_set1_ps(128.0f), _mm256_max_ps(_mm256_set1_ps(-127.0f), x));
  __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 f = _mm256_sub_ps(x, whole);
  __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(POWER_OF_FRACTION(_mm256_fmadd_ps, _mm256_set1_ps, f), _mm256_castsi256_ps(exponent));
}

/* NAME attends with queries [first, end) of one head of keys, in the order of tokens, then heads that share the keys.
   SCORES is of the kernel for few rows, and multiplies up to ROWS queries with four keys. */
#define HOST_KERNELS(NAME, TARGET, VECTOR, LANES, LOAD, STORE, SPREAD, FMA, ADD, MUL, DIV, MAX, POWER, ROWS, SCORES)   \
  /* Scores of one query become weights; those that were summed before shrink to the new largest score. */             \
  TARGET static __attribute__((noinline)) void NAME##_weigh(float *scores, int count, float *top, float *total, float *shrink) { \
    float lanes[LANES], most, sum = 0;                                                                                 \
    VECTOR largest = LOAD(scores), sums = SPREAD(0);                                                                   \
    for (int i = LANES; i < count; i += LANES) largest = MAX(largest, LOAD(scores + i));                               \
    STORE(lanes, largest);                                                                                             \
    most = *top;                                                                                                       \
    for (int i = 0; i < LANES; i++) most = most > lanes[i] ? most : lanes[i];                                          \
    for (int i = 0; i < count; i += LANES) {                                                                           \
      VECTOR weights = POWER(ADD(LOAD(scores + i), SPREAD(-most)));                                                    \
      STORE(scores + i, weights);                                                                                      \
      sums = ADD(sums, weights);                                                                                       \
    }                                                                                                                  \
    STORE(lanes, sums);                                                                                                \
    for (int i = 0; i < LANES; i++) sum += lanes[i];                                                                   \
    STORE(lanes, POWER(SPREAD(*top - most)));                                                                          \
    *shrink = lanes[0];                                                                                                \
    *total = *total * *shrink + sum;                                                                                   \
    *top = most;                                                                                                       \
  }                                                                                                                    \
  TARGET INLINE void NAME##_mix(const int rows, const int vectors, const float *weights, int count,                    \
                                const float *values, int size, const float *shrinks, float *out) {                     \
    VECTOR sums[ROWS][VECTORS_AT_ONCE];                                                                                \
    for (int r = 0; r < rows; r++)                                                                                     \
      for (int q = 0; q < vectors; q++) sums[r][q] = MUL(LOAD(out + r * size + q * LANES), SPREAD(shrinks[r]));        \
    for (int i = 0; i < count; i++) {                                                                                  \
      VECTOR value[VECTORS_AT_ONCE];                                                                                   \
      for (int q = 0; q < vectors; q++) value[q] = LOAD(values + (long)i * size + q * LANES);                          \
      for (int r = 0; r < rows; r++) {                                                                                 \
        VECTOR weight = SPREAD(weights[r * KEYS_AT_ONCE + i]);                                                         \
        for (int q = 0; q < vectors; q++) sums[r][q] = FMA(weight, value[q], sums[r][q]);                              \
      }                                                                                                                \
    }                                                                                                                  \
    for (int r = 0; r < rows; r++)                                                                                     \
      for (int q = 0; q < vectors; q++) STORE(out + r * size + q * LANES, sums[r][q]);                                 \
  }                                                                                                                    \
  TARGET static __attribute__((noinline)) void NAME##_mix_some(int rows, const float *weights, int count,              \
                                                               const float *values, int size, const float *shrinks,    \
                                                               float *out) {                                           \
    int d = 0, wide = VECTORS_AT_ONCE * LANES;                                                                         \
    for (; d + wide <= size; d += wide)                                                                                \
      if (rows == ROWS) NAME##_mix(ROWS, VECTORS_AT_ONCE, weights, count, values + d, size, shrinks, out + d);         \
      else if (rows == 3) NAME##_mix(3 < ROWS ? 3 : 1, VECTORS_AT_ONCE, weights, count, values + d, size, shrinks, out + d); \
      else                                                                                                             \
        for (int r = 0; r < rows; r++)                                                                                 \
          NAME##_mix(1, VECTORS_AT_ONCE, weights + r * KEYS_AT_ONCE, count, values + d, size, shrinks + r, out + r * size + d); \
    for (; d < size; d += LANES)                                                                                       \
      for (int r = 0; r < rows; r++)                                                                                   \
        NAME##_mix(1, 1, weights + r * KEYS_AT_ONCE, count, values + d, size, shrinks + r, out + r * size + d);        \
  }                                                                                                                    \
  TARGET static void NAME##_score(int rows, const float *queries, const float *keys, int count, int size,              \
                                  float *scores) {                                                                     \
    float four[ROWS * BLOCK_COLUMNS];                                                                                  \
    for (int i = 0; i < count; i += BLOCK_COLUMNS) {                                                                   \
      const float *some[BLOCK_COLUMNS];                                                                                \
      for (int q = 0; q < BLOCK_COLUMNS; q++) some[q] = keys + (long)(i + q < count ? i + q : i) * size;               \
      SCORES(rows, size, queries, size, some, four);                                                                   \
      for (int r = 0; r < rows; r++) memcpy(scores + r * KEYS_AT_ONCE + i, four + BLOCK_COLUMNS * r, 4 * BLOCK_COLUMNS); \
    }                                                                                                                  \
  }                                                                                                                    \
  TARGET static void NAME##_block(int rows, const float *queries, const float *keys, const float *values,              \
                                  int size, const int *limits, float *out) {                                           \
    float scores[ROWS * KEYS_AT_ONCE], tops[ROWS], totals[ROWS], shrinks[ROWS];                                        \
    for (int r = 0; r < rows; r++) tops[r] = -INFINITY, totals[r] = 0;                                                 \
    memset(out, 0, sizeof(float) * rows * size);                                                                       \
    for (int base = 0; base < limits[rows - 1]; base += KEYS_AT_ONCE) {                                                \
      int count = limits[rows - 1] - base < KEYS_AT_ONCE ? limits[rows - 1] - base : KEYS_AT_ONCE;                     \
      int filled = (count + LANES - 1) / LANES * LANES;                                                                \
      NAME##_score(rows, queries, keys + (long)base * size, count, size, scores);                                      \
      for (int r = 0; r < rows; r++) {                                                                                 \
        for (int i = limits[r] > base ? limits[r] - base : 0; i < filled; i++)                                         \
          scores[r * KEYS_AT_ONCE + i] = -INFINITY;                                                                    \
        NAME##_weigh(scores + r * KEYS_AT_ONCE, filled, tops + r, totals + r, shrinks + r);                            \
      }                                                                                                                \
      NAME##_mix_some(rows, scores, count, values + (long)base * size, size, shrinks, out);                            \
    }                                                                                                                  \
    for (int r = 0; r < rows; r++)                                                                                     \
      for (int d = 0; d < size; d += LANES) STORE(out + r * size + d, DIV(LOAD(out + r * size + d), SPREAD(totals[r]))); \
  }                                                                                                                    \
  TARGET static void NAME##_queries(const attention_t *p, const stretch_t *s, int head, int first, int end) {          \
    float queries[ROWS * LARGEST_HEAD], out[ROWS * LARGEST_HEAD];                                                      \
    int limits[ROWS], group = p->heads / p->kv_heads, size = p->size;                                                  \
    const float *keys = s->state + (long)head * s->capacity * size;                                                    \
    const float *values = keys + (long)p->kv_heads * s->capacity * size;                                               \
    for (int line = first, rows; line < end; line += rows) {                                                           \
      rows = end - line < ROWS ? end - line : ROWS;                                                                    \
      for (int r = 0; r < rows; r++) {                                                                                 \
        int token = (line + r) / group, own = head * group + (line + r) % group;                                       \
        const float *query = p->queries + (s->start + token) * p->query_stride + (long)own * size;                     \
        for (int d = 0; d < size; d++) queries[r * size + d] = query[d] * p->factor;                                   \
        limits[r] = s->offset + token + 1;                                                                             \
      }                                                                                                                \
      NAME##_block(rows, queries, keys, values, size, limits, out);                                                    \
      for (int r = 0; r < rows; r++) {                                                                                 \
        int token = (line + r) / group, own = head * group + (line + r) % group;                                       \
        memcpy(p->out + ((long)(s->start + token) * p->heads + own) * size, out + r * size, sizeof(float) * size);     \
      }                                                                                                                \
    }                                                                                                                  \
  }                                                                                                                    \
  /* gate · up / (1 + 2^(-gate · log2 e)) */                                                                           \
  TARGET INLINE VECTOR NAME##_gated(VECTOR gate, VECTOR up) {                                                          \
    return DIV(MUL(gate, up), ADD(SPREAD(1), POWER(MUL(gate, SPREAD(-1.44269504088896341f)))));                        \
  }                                                                                                                    \
  TARGET static void NAME##_gates(const gates_t *p, int first, int end) {                                              \
    for (int token = first; token < end; token++) {                                                                    \
      const float *gate = p->gate + token * p->stride, *up = p->up + token * p->stride;                                \
      float *out = p->out + (long)token * p->size;                                                                     \
      int i = 0;                                                                                                       \
      for (; i + LANES <= p->size; i += LANES) STORE(out + i, NAME##_gated(LOAD(gate + i), LOAD(up + i)));             \
      if (i < p->size) {                                                                                               \
        float last[3][LANES] = {{0}};                                                                                  \
        memcpy(last[0], gate + i, sizeof(float) * (p->size - i));                                                      \
        memcpy(last[1], up + i, sizeof(float) * (p->size - i));                                                        \
        STORE(last[2], NAME##_gated(LOAD(last[0]), LOAD(last[1])));                                                    \
        memcpy(out + i, last[2], sizeof(float) * (p->size - i));                                                       \
      }                                                                                                                \
    }                                                                                                                  \
  }

HOST_KERNELS(host_512, AVX512, __m512, 16, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps,
             _mm512_add_ps, _mm512_mul_ps, _mm512_div_ps, _mm512_max_ps, power_512, 6, rows_512_some)
HOST_KERNELS(host_256, AVX2, __m256, 8, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps,
             _mm256_add_ps, _mm256_mul_ps, _mm256_div_ps, _mm256_max_ps, power_256, 2, rows_256_some)
#endif

static queries_kernel_t *queries_kernel;
static gates_kernel_t *gates_kernel;

/* Numbers that the kernels take at once, by which the size of heads must be divisible; 0 if there are none. Called
   before the others; at most so many numbers are taken, whatever the processor has. */
int mlx_stream_host_lanes(int most_lanes) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (most_lanes >= 16 && __builtin_cpu_supports("avx512f")) {
    queries_kernel = host_512_queries, gates_kernel = host_512_gates;
    return 16;
  }
  if (most_lanes >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    queries_kernel = host_256_queries, gates_kernel = host_256_gates;
    return 8;
  }
#endif
  (void)most_lanes;
  return 0;
}

static int pieces_of(const attention_t *p, const stretch_t *s) {
  return (s->length * (p->heads / p->kv_heads) + QUERIES_PER_PIECE - 1) / QUERIES_PER_PIECE * p->kv_heads;
}

static void attention_piece(const void *shared, int piece) {
  const attention_t *p = shared;
  const stretch_t *s = p->stretches;
  for (; piece >= pieces_of(p, s); s++) piece -= pieces_of(p, s);
  int first = piece / p->kv_heads * QUERIES_PER_PIECE, queries = s->length * (p->heads / p->kv_heads);
  int end = first + QUERIES_PER_PIECE < queries ? first + QUERIES_PER_PIECE : queries;
  queries_kernel(p, s, piece % p->kv_heads, first, end);
}

/* Writes the step's keys and values behind those that each row has. */
static void keep(const attention_t *p) {
  for (const stretch_t *s = p->stretches; s < p->stretches + p->count; s++)
    for (int head = 0; head < 2 * p->kv_heads; head++)
      for (int token = 0; token < s->length; token++)
        memcpy(s->state + ((long)head * s->capacity + s->offset + token) * p->size,
               p->joined + (s->start + token) * p->joined_stride + (long)head * p->size, sizeof(float) * p->size);
}

/* Keeps the step's keys and values, if there are any, then attends causally. `factor` makes powers of two of scores. */
void mlx_stream_attend(const stretch_t *stretches, int count, const float *queries, long query_stride,
                       const float *joined, long joined_stride, float *out, int heads, int kv_heads, int size,
                       float factor, int threads) {
  attention_t shared = {stretches, queries, joined, out, query_stride, joined_stride, count, heads, kv_heads, size, factor};
  int pieces = 0;
  if (joined) keep(&shared);
  for (int i = 0; i < count; i++) pieces += pieces_of(&shared, stretches + i);
  run_pieces(attention_piece, &shared, pieces, threads);
}

static void gates_piece(const void *shared, int piece) {
  const gates_t *p = shared;
  int first = piece * p->tokens_per_piece, end = first + p->tokens_per_piece;
  gates_kernel(p, first, end < p->tokens ? end : p->tokens);
}

/* out[tokens, size] = silu(gate) · up, whose tokens are `stride` numbers apart. */
void mlx_stream_swiglu(const float *gate, const float *up, long stride, float *out, int tokens, int size, int threads) {
  gates_t shared = {gate, up, out, stride, tokens, size, size < NUMBERS_PER_PIECE ? NUMBERS_PER_PIECE / size : 1};
  run_pieces(gates_piece, &shared, (tokens + shared.tokens_per_piece - 1) / shared.tokens_per_piece, threads);
}
