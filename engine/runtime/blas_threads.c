/* A few threads that share the pieces of one product. Part of the shim: compiled together with `blas_shim.c`.

   Whoever is free takes the next piece, so a thread that the system keeps waiting delays a product by one piece at most.
   An idle thread looks for work for a tenth of a millisecond, then sleeps: unlike threads that wait for each other in a
   loop, these leave the processor to others on a busy machine. */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

enum { MOST_THREADS = 64, LOOK_NANOSECONDS = 100000, LOOKS_PER_CLOCK = 32 };

typedef void piece_t(const void *product, int piece);

static struct {
  pthread_mutex_t lock, owner;
  pthread_cond_t begun, ended;
  piece_t *run;
  const void *product;
  int pieces, open, helpers;
  atomic_int next, active;
  atomic_uint turn;
} team = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .owner = PTHREAD_MUTEX_INITIALIZER,
          .begun = PTHREAD_COND_INITIALIZER,
          .ended = PTHREAD_COND_INITIALIZER};

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

static long long nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void take_pieces(void) {
  int piece;
  while ((piece = atomic_fetch_add(&team.next, 1)) < team.pieces) team.run(team.product, piece);
}

/* Wait a moment for another turn, without sleeping. */
static void look_for_turn(unsigned seen) {
  long long until = nanoseconds() + LOOK_NANOSECONDS;
  do {
    for (int look = 0; look < LOOKS_PER_CLOCK; look++) {
      if (atomic_load(&team.turn) != seen) return;
      relax();
    }
  } while (nanoseconds() < until);
}

static void *help(void *unused) {
  unsigned seen = 0;
  (void)unused;
  for (;;) {
    look_for_turn(seen);
    pthread_mutex_lock(&team.lock);
    while (atomic_load(&team.turn) == seen) pthread_cond_wait(&team.begun, &team.lock);
    seen = atomic_load(&team.turn);
    int joins = team.open;
    if (joins) atomic_fetch_add(&team.active, 1);
    pthread_mutex_unlock(&team.lock);
    if (!joins) continue;
    take_pieces();
    pthread_mutex_lock(&team.lock);
    if (atomic_fetch_sub(&team.active, 1) == 1) pthread_cond_signal(&team.ended);
    pthread_mutex_unlock(&team.lock);
  }
  return NULL;
}

/* Start what is missing of the team. Signals stay with the threads that asked for them. */
static void hire(int helpers) {
  sigset_t all, before;
  pthread_t thread;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (team.helpers < helpers && team.helpers < MOST_THREADS && !pthread_create(&thread, NULL, help, NULL)) {
    pthread_detach(thread);
    team.helpers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Run all pieces, on up to `threads` threads; alone if the team is at work for another thread. */
static void run_pieces(piece_t *run, const void *product, int pieces, int threads) {
  if (threads < 2 || pieces < 2 || pthread_mutex_trylock(&team.owner)) {
    for (int piece = 0; piece < pieces; piece++) run(product, piece);
    return;
  }
  hire(threads - 1);
  pthread_mutex_lock(&team.lock);
  team.run = run, team.product = product, team.pieces = pieces, team.open = 1;
  atomic_store(&team.next, 0);
  atomic_fetch_add(&team.turn, 1);
  pthread_cond_broadcast(&team.begun);
  pthread_mutex_unlock(&team.lock);
  take_pieces();
  long long until = nanoseconds() + LOOK_NANOSECONDS;
  while (atomic_load(&team.active) && nanoseconds() < until) relax();
  pthread_mutex_lock(&team.lock);
  team.open = 0;
  while (atomic_load(&team.active)) pthread_cond_wait(&team.ended, &team.lock);
  pthread_mutex_unlock(&team.lock);
  pthread_mutex_unlock(&team.owner);
}
