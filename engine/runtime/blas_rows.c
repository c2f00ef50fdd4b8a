/* Products of a few rows with weights stored by row, C[m, n] = A[m, k] * B[n, k], for processors with AVX2 or AVX-512.
   Part of the shim: compiled together with `blas_shim.c`.

   Weights are streamed as they lie, four of their rows at a time, where sgemm would pack all of them first. Each result
   is summed in one order, whatever rows come with it: by lanes, then across them, then what is left of k. */

#include <stddef.h>

enum { TILE_COLUMNS = 48, BLOCK_COLUMNS = 4 };

typedef struct {
  int m, n, k;
  float alpha, beta;
  const float *a, *b;
  float *c;
  int lda, ldb, ldc;
} rows_t;

typedef void rows_kernel_t(const rows_t *product, int first, int end);

#if defined(__x86_64__)
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define AVX512 __attribute__((target("avx512f")))
#define AVX2 __attribute__((target("avx2,fma")))

AVX2 INLINE void store_sums(__m256 sums, float *out) {
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}

/* The sums of four vectors each, side by side. */
AVX2 INLINE void sum_256(const __m256 *v, float *out) {
  __m256d ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1])));
  __m256d cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3])));
  store_sums(_mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd))),
             out);
}

AVX512 INLINE void sum_512(const __m512 *v, float *out) {
  __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1])));
  __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3])));
  __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
  __m256 sums = _mm256_add_ps(_mm512_castps512_ps256(all), upper);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}

/* NAME computes columns [first, end); ROWS of A and four of B are in flight at once. */
#define ROWS_KERNEL(NAME, TARGET, VECTOR, LANES, LOAD, ZERO, FMA, SUM, ROWS)                                           \
  TARGET INLINE void NAME##_block(const int rows, int k, const float *a, int lda, const float *const *b, float *out) { \
    VECTOR sums[ROWS][BLOCK_COLUMNS];                                                                                  \
    for (int r = 0; r < rows; r++)                                                                                     \
      for (int q = 0; q < BLOCK_COLUMNS; q++) sums[r][q] = ZERO();                                                     \
    int i = 0;                                                                                                         \
    for (; i + LANES <= k; i += LANES) {                                                                               \
      VECTOR weights[BLOCK_COLUMNS];                                                                                   \
      for (int q = 0; q < BLOCK_COLUMNS; q++) weights[q] = LOAD(b[q] + i);                                             \
      for (int r = 0; r < rows; r++) {                                                                                 \
        VECTOR input = LOAD(a + (long)r * lda + i);                                                                    \
        for (int q = 0; q < BLOCK_COLUMNS; q++) sums[r][q] = FMA(input, weights[q], sums[r][q]);                       \
      }                                                                                                                \
    }                                                                                                                  \
    for (int r = 0; r < rows; r++) {                                                                                   \
      SUM(sums[r], out + BLOCK_COLUMNS * r);                                                                           \
      for (int j = i; j < k; j++)                                                                                      \
        for (int q = 0; q < BLOCK_COLUMNS; q++) out[BLOCK_COLUMNS * r + q] += a[(long)r * lda + j] * b[q][j];          \
    }                                                                                                                  \
  }                                                                                                                    \
  /* The same for a number of rows that is known only now; a function, so that it is compiled once. */                 \
  TARGET static __attribute__((noinline)) void NAME##_some(int rows, int k, const float *a, int lda,                   \
                                                           const float *const *b, float *out) {                        \
    switch (rows) {                                                                                                    \
      case 1: NAME##_block(1, k, a, lda, b, out); break;                                                               \
      case 2: NAME##_block(2, k, a, lda, b, out); break;                                                               \
      case 3: NAME##_block(3 < ROWS ? 3 : ROWS, k, a, lda, b, out); break;                                             \
      case 4: NAME##_block(4 < ROWS ? 4 : ROWS, k, a, lda, b, out); break;                                             \
      case 5: NAME##_block(5 < ROWS ? 5 : ROWS, k, a, lda, b, out); break;                                             \
      default: NAME##_block(ROWS, k, a, lda, b, out);                                                                  \
    }                                                                                                                  \
  }                                                                                                                    \
  TARGET static void NAME(const rows_t *p, int first, int end) {                                                       \
    float out[ROWS * BLOCK_COLUMNS];                                                                                   \
    for (int tile = first; tile < end; tile += TILE_COLUMNS)                                                           \
      for (int row = 0; row < p->m; row += ROWS)                                                                       \
        for (int column = tile; column < tile + TILE_COLUMNS && column < end; column += BLOCK_COLUMNS) {               \
          int rows = p->m - row < ROWS ? p->m - row : ROWS;                                                            \
          int columns = end - column < BLOCK_COLUMNS ? end - column : BLOCK_COLUMNS;                                   \
          const float *a = p->a + (long)row * p->lda, *b[BLOCK_COLUMNS];                                               \
          for (int q = 0; q < BLOCK_COLUMNS; q++) b[q] = p->b + (long)(column + (q < columns ? q : 0)) * p->ldb;       \
          NAME##_some(rows, p->k, a, p->lda, b, out);                                                                  \
          for (int r = 0; r < rows; r++) {                                                                             \
            float *c = p->c + (long)(row + r) * p->ldc + column;                                                       \
            for (int q = 0; q < columns; q++) {                                                                        \
              float sum = p->alpha * out[BLOCK_COLUMNS * r + q];                                                       \
              c[q] = p->beta == 0 ? sum : sum + p->beta * c[q];                                                        \
            }                                                                                                          \
          }                                                                                                            \
        }                                                                                                              \
  }

ROWS_KERNEL(rows_512, AVX512, __m512, 16, _mm512_loadu_ps, _mm512_setzero_ps, _mm512_fmadd_ps, sum_512, 6)
ROWS_KERNEL(rows_256, AVX2, __m256, 8, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_fmadd_ps, sum_256, 2)
#endif

/* The kernel for this processor, and the rows up to which it beats sgemm; NULL if there is none. */
static rows_kernel_t *choose_rows_kernel(int *most_rows) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) {
    *most_rows = 16;
    return rows_512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    *most_rows = 8;
    return rows_256;
  }
#endif
  return NULL;
}
