/* The matrix products that libmlx asks for, forwarded to a BLAS chosen at run time.

   Opened with RTLD_GLOBAL before mlx, so that these names win over the BLAS that mlx bundles.
   A product of a few rows goes to `blas_rows.c`, or to sgemv where that knows no way for this processor: both stream the
   weights at memory speed, where sgemm first packs them. Every row takes the same path, so a row's bits do not depend on
   how many of these few rows came with it. Large products are cut into pieces for the threads of `blas_threads.c`. */

#include <string.h>

enum { ROW_MAJOR = 101, NO_TRANSPOSE = 111, TRANSPOSE = 112, TILE_STEP = 16 };

/* Work that is worth a second thread, and the columns of a piece of it: in weights, and in multiplications. */
enum { FEW_ROWS_PIECE = 1 << 16, SMALLEST_SHARED = 1 << 17, PIECES_PER_THREAD = 2, PIECE_STEP = 48 };
static const double SHARED_MULTIPLICATIONS = 1 << 21;

typedef void sgemm_t(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
typedef void sgemv_t(int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
typedef void dgemm_t(int, int, int, int, int, int, double, const double *, int, const double *, int, double, double *,
                     int);
typedef void cgemm_t(int, int, int, int, int, int, const void *, const void *, int, const void *, int, const void *,
                     void *, int);

static sgemm_t *target_sgemm;
static sgemv_t *target_sgemv;
static dgemm_t *target_dgemm;
static cgemm_t *target_cgemm;
static int few_rows, tile_elements, thread_count;
static rows_kernel_t *rows_kernel;
static int kernel_rows;
static char label[128];
static unsigned long products;

/* Called before mlx is imported. */
void mlx_stream_blas_bind(sgemm_t *sgemm, sgemv_t *sgemv, dgemm_t *dgemm, cgemm_t *cgemm) {
  target_sgemm = sgemm;
  target_sgemv = sgemv;
  target_dgemm = dgemm;
  target_cgemm = cgemm;
  rows_kernel = choose_rows_kernel(&kernel_rows);
}

/* Called after `bind`, with 0 rows to pass every product on as it is. Pieces of a product run on up to `threads` threads;
   `name` is only kept for whoever asks later. */
void mlx_stream_blas_tune(int rows, int elements, int threads, const char *name) {
  few_rows = rows;
  tile_elements = elements;
  thread_count = threads;
  strncpy(label, name, sizeof label - 1);
}

const char *mlx_stream_blas_label(void) { return label; }

int mlx_stream_blas_few_rows(void) { return few_rows > 0 && rows_kernel ? kernel_rows : few_rows; }

int mlx_stream_blas_threads(void) { return thread_count; }

unsigned long mlx_stream_blas_products(void) { return __atomic_load_n(&products, __ATOMIC_RELAXED); }

/* Columns of the result that one pass over the rows computes; depends on the weights alone, never on the rows. */
static int tile_width(int n, int k) {
  int width = tile_elements / k / TILE_STEP * TILE_STEP;
  return width < TILE_STEP ? TILE_STEP : width > n ? n : width;
}

/* C[m, n] = alpha * op(A)[m, k] * op(B)[k, n] + beta * C, row by row. */
static void few_row_product(int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                            const float *b, int ldb, float beta, float *c, int ldc) {
  int stored_by_column = transpose_b == TRANSPOSE;
  int tile = stored_by_column ? tile_width(n, k) : n;
  for (int first = 0; first < n; first += tile) {
    int width = n - first < tile ? n - first : tile;
    for (int row = 0; row < m; row++) {
      const float *x = transpose_a == TRANSPOSE ? a + row : a + (long)row * lda;
      int step = transpose_a == TRANSPOSE ? lda : 1;
      float *y = c + (long)row * ldc + first;
      /* The result is often fresh memory, and some releases turn 0 * NaN into NaN. */
      if (beta == 0) memset(y, 0, sizeof(float) * width);
      if (stored_by_column)
        target_sgemv(ROW_MAJOR, NO_TRANSPOSE, width, k, alpha, b + (long)first * ldb, ldb, x, step, beta, y, 1);
      else
        target_sgemv(ROW_MAJOR, TRANSPOSE, k, width, alpha, b + first, ldb, x, step, beta, y, 1);
    }
  }
}

static int is_plain(int transpose) { return transpose == NO_TRANSPOSE || transpose == TRANSPOSE; }

static int at_most(int value, int limit) { return value < limit ? value : limit; }

static int piece_columns(long wanted) { return (int)((wanted + PIECE_STEP - 1) / PIECE_STEP * PIECE_STEP); }

typedef struct {
  rows_t rows;
  int columns, transpose_a, transpose_b;
} shared_t;

static void few_rows_piece(const void *product, int piece) {
  const shared_t *shared = product;
  int first = piece * shared->columns;
  rows_kernel(&shared->rows, first, at_most(first + shared->columns, shared->rows.n));
}

/* Where the pieces begin depends on the weights alone. */
static void run_few_rows(shared_t *shared) {
  const rows_t *p = &shared->rows;
  int threads = (long)p->n * p->k < SMALLEST_SHARED ? 1 : thread_count;
  shared->columns = threads < 2 ? p->n : piece_columns(FEW_ROWS_PIECE / p->k);
  run_pieces(few_rows_piece, shared, (p->n + shared->columns - 1) / shared->columns, threads);
}

static void sgemm_piece(const void *product, int piece) {
  const shared_t *shared = product;
  const rows_t *p = &shared->rows;
  int first = piece * shared->columns, stored_by_column = shared->transpose_b == TRANSPOSE;
  target_sgemm(ROW_MAJOR, shared->transpose_a, shared->transpose_b, p->m, at_most(shared->columns, p->n - first), p->k,
               p->alpha, p->a, p->lda, p->b + (stored_by_column ? (long)first * p->ldb : first), p->ldb, p->beta,
               p->c + first, p->ldc);
}

static void run_sgemm(shared_t *shared) {
  const rows_t *p = &shared->rows;
  int threads = (double)p->m * p->n * p->k < SHARED_MULTIPLICATIONS ? 1 : thread_count;
  int columns = threads < 2 ? p->n : piece_columns((long)p->n / ((long)PIECES_PER_THREAD * threads));
  shared->columns = columns < PIECE_STEP ? PIECE_STEP : columns;
  run_pieces(sgemm_piece, shared, (p->n + shared->columns - 1) / shared->columns, threads);
}

void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  __atomic_fetch_add(&products, 1, __ATOMIC_RELAXED);
  int plain = order == ROW_MAJOR && is_plain(transpose_a) && is_plain(transpose_b) && m > 0 && n > 0 && k > 0;
  if (!plain || few_rows == 0) {
    target_sgemm(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  shared_t shared = {{m, n, k, alpha, beta, a, b, c, lda, ldb, ldc}, 0, transpose_a, transpose_b};
  if (rows_kernel && m <= kernel_rows && transpose_a == NO_TRANSPOSE && transpose_b == TRANSPOSE)
    run_few_rows(&shared);
  /* Weights stored by row cannot be tiled well, so only a single row is worth sgemv there. */
  else if (m <= (transpose_b == TRANSPOSE ? few_rows : 1))
    few_row_product(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  else
    run_sgemm(&shared);
}

void cblas_dgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, double alpha, const double *a,
                 int lda, const double *b, int ldb, double beta, double *c, int ldc) {
  target_dgemm(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha, const void *a,
                 int lda, const void *b, int ldb, const void *beta, void *c, int ldc) {
  target_cgemm(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
