package io.mlxstream;

import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.mlxstream.v1.Finished;
import io.mlxstream.v1.GenerateResponse;
import io.mlxstream.v1.Started;
import java.time.Duration;
import java.util.Iterator;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/**
 * Owns the calls of one generation: opens the first at the first read, goes on with another where a durable generation
 * has lost its connection, remembers what matters, and can end it from any thread.
 */
final class EventReader {
  private static final long FIRST_PAUSE_MILLIS = 100;
  private static final long LONGEST_PAUSE_MILLIS = 2_000;

  /** What a reader needs of its client. */
  interface Source {
    /** Begins the generation, or goes on after an event of it ({@code started} is null before the first). */
    Iterator<GenerateResponse> open(Deadline deadline, Started started, long afterSequence);

    /** Ends a generation that does not end with its call. */
    void abort(String generationId);

    boolean isClosed();
  }

  private final Source source;
  private final String target;
  private final Duration timeout;
  private final boolean isDurable;
  private final CountDownLatch leaving = new CountDownLatch(1);
  private volatile Context.CancellableContext context;
  private Iterator<GenerateResponse> responses;
  private Deadline deadline;
  private volatile boolean isOver;
  private int failures;
  volatile Started started;
  volatile Finished finished;
  volatile long sequence;
  volatile int generatedTokens;

  EventReader(Source source, String target, Duration timeout, boolean isDurable) {
    this.source = source;
    this.target = target;
    this.timeout = timeout;
    this.isDurable = isDurable;
  }

  /** The next event; null after the last one, and after {@link #cancel}. */
  GenerateResponse read() {
    while (!isOver && !hasLeft()) {
      try {
        if (responses == null) {
          open();
        }
        if (responses.hasNext()) {
          GenerateResponse response = responses.next();
          if (remember(response)) {
            return response;
          }
          continue;
        }
        isOver = finished != null;
        if (!isOver) {
          settle(MlxStreamException.streamCut(), Status.Code.DATA_LOSS);
        }
      } catch (StatusRuntimeException error) {
        Integer tokens = started == null ? null : generatedTokens;
        Deadline outer = Context.current().getDeadline();
        Duration passed = outer != null && outer.isExpired() ? null : timeout; // whose deadline it was
        settle(MlxStreamException.of(error, target, passed, tokens), error.getStatus().getCode());
      }
    }
    return null;
  }

  /** Ends the generation, from any thread; without effect once it has ended. */
  void cancel() {
    if (isOver || finished != null || hasLeft()) {
      return;
    }
    leaving.countDown();
    Context.CancellableContext running = context;
    if (running != null) {
      running.cancel(null);
    }
    Started begun = started;
    if (isDurable && begun != null) {
      source.abort(begun.getGenerationId());
    }
  }

  private boolean hasLeft() {
    return leaving.getCount() == 0;
  }

  private void open() {
    if (deadline == null && timeout != null) {
      deadline = Deadline.after(timeout.toMillis(), TimeUnit.MILLISECONDS);
    }
    Context.CancellableContext mine = Context.current().withCancellation();
    context = mine;
    if (hasLeft()) { // by another thread, which saw no context yet
      mine.cancel(null);
    }
    Context before = mine.attach();
    try {
      responses = source.open(deadline, started, sequence);
    } finally {
      mine.detach(before);
    }
  }

  /** Notes what matters of an event; false for the Started with which a resumed stream begins again. */
  private boolean remember(GenerateResponse response) {
    failures = 0;
    sequence = response.getSequence();
    if (response.hasStarted() && started != null) {
      return false;
    }
    switch (response.getEventCase()) {
      case STARTED -> started = response.getStarted();
      case FINISHED -> finished = response.getFinished();
      case CHUNK -> {
        int count = response.getChunk().getTokensCount();
        if (count > 0) {
          generatedTokens = response.getChunk().getTokens(count - 1).getIndex() + 1;
        }
      }
      default -> { } // heartbeats, canvases, and whatever a newer server sends
    }
    return true;
  }

  /** Returns where the reader may go on, after a pause; throws where it may not. */
  private void settle(MlxStreamException error, Status.Code code) {
    if (hasLeft()) {
      return;
    }
    context.cancel(null); // frees what it holds of its parent
    if (code == Status.Code.CANCELLED && (Context.current().isCancelled() || Thread.currentThread().isInterrupted())) {
      cancel();
      throw MlxStreamException.cancelledHere("CANCELLED_HERE", "the context or the thread of the call was cancelled");
    }
    long pauseMillis = backoffMillis(failures++);
    boolean isTooLate = deadline != null && deadline.timeRemaining(TimeUnit.MILLISECONDS) <= pauseMillis;
    boolean mayGoOn = isDurable && started != null && finished == null && error.isConnectionLost();
    if (source.isClosed()) {
      isOver = true;
      throw MlxStreamException.cancelledHere("CLIENT_CLOSED", "the client was closed");
    }
    if (!mayGoOn || isTooLate) {
      isOver = true;
      throw error;
    }
    responses = null;
    pause(pauseMillis);
  }

  private void pause(long millis) {
    try {
      boolean hasLeft = leaving.await(millis, TimeUnit.MILLISECONDS);
      isOver = isOver || hasLeft;
    } catch (InterruptedException interrupted) {
      cancel();
      Thread.currentThread().interrupt();
      throw MlxStreamException.cancelledHere("CANCELLED_HERE", "the thread of the call was interrupted");
    }
  }

  private static long backoffMillis(int failures) {
    long longest = Math.min(LONGEST_PAUSE_MILLIS, FIRST_PAUSE_MILLIS << Math.min(failures, 10));
    return (long) (longest * ThreadLocalRandom.current().nextDouble(0.8, 1.2));
  }
}
