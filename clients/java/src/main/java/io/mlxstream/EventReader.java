package io.mlxstream;

import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.mlxstream.v1.AbortRequest;
import io.mlxstream.v1.Finished;
import io.mlxstream.v1.GenerateRequest;
import io.mlxstream.v1.GenerateResponse;
import io.mlxstream.v1.GeneratedToken;
import io.mlxstream.v1.GenerationServiceGrpc;
import io.mlxstream.v1.GenerationServiceGrpc.GenerationServiceBlockingStub;
import io.mlxstream.v1.ResumeRequest;
import io.mlxstream.v1.Started;
import io.mlxstream.v1.TokenChunk;
import java.time.Duration;
import java.util.Iterator;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * Reads one generation through as many calls as it takes, and can end it from any thread.
 *
 * <p>A durable one that was cut off is resumed where it stood, until its deadline; whoever reads sees each token once.
 */
final class EventReader {
  private static final long FIRST_PAUSE_MILLIS = 100;
  private static final long LONGEST_PAUSE_MILLIS = 2_000;
  // What the server says of a point that its log has lost; what lies before it is whole.
  private static final Set<String> LOST_POINT_REASONS = Set.of("RESUME_POINT_GONE", "CHECKPOINT_DAMAGED");

  private final Connection connection;
  private final GenerationServiceBlockingStub generations;
  private final Duration timeout;
  private final boolean isDurable;
  private final GenerateRequest request;
  private final long firstSequence;
  private final CountDownLatch leaving = new CountDownLatch(1);
  // What a reader that was left fails with; null: it stops without an error.
  private volatile MlxStreamException leavingError;

  private volatile Context.CancellableContext context;
  private volatile boolean isOver;
  private volatile String generationId;
  private Iterator<GenerateResponse> responses;
  private Deadline deadline;
  private int failures;
  // Who is asked to go on, whether that one has not answered yet, how many in a row have refused, and why.
  private volatile int server;
  private boolean isAsking;
  private int refusals;
  private MlxStreamException verdict;
  // How much text has come since the first point, and how far into it the calls have got: one may say it again.
  private int textLength;
  private int place;
  // The end of a durable generation that failed: the status that follows shows whether it is the end.
  private GenerateResponse held;
  // What the reader fails with once the held event was given.
  private MlxStreamException failure;

  volatile Started started;
  volatile Finished finished;
  volatile long sequence;
  volatile int generatedTokens;

  /**
   * Begins with {@code request}, or, where {@code first} names a generation, after that point.
   *
   * @param generations has no deadline yet
   * @param timeout of the whole generation; null means none
   */
  EventReader(
      Connection connection,
      GenerationServiceBlockingStub generations,
      Duration timeout,
      GenerateRequest request,
      ResumeRequest first) {
    this.connection = connection;
    this.generations = generations;
    this.timeout = timeout;
    this.request = request;
    generationId = first.getGenerationId();
    firstSequence = first.getAfterSequence();
    sequence = firstSequence;
    isDurable = request.getDelivery().getDurable() || !generationId.isEmpty();
  }

  /** The next event that the caller has not had; null after the last one, and after {@link #cancel}. */
  GenerateResponse read() {
    if (failure != null) {
      MlxStreamException told = failure;
      failure = null;
      throw told;
    }
    while (!isOver && !hasLeft()) {
      GenerateResponse news = receive();
      if (news != null) {
        remember(news);
        return news;
      }
    }
    connection.readers.remove(this);
    if (leavingError != null) {
      throw leavingError;
    }
    return null;
  }

  /** Ends the generation, from any thread; without effect once it has ended. */
  void cancel() {
    leave(null);
  }

  /** Ends the generation because its client is closed: a reader that is under way fails. */
  void close() {
    leave(MlxStreamException.clientClosed());
  }

  private synchronized void leave(MlxStreamException error) {
    connection.readers.remove(this);
    if (isOver || finished != null || hasLeft()) {
      return;
    }
    leavingError = error;
    leaving.countDown();
    Context.CancellableContext running = context;
    if (running == null) {
      return; // nothing was sent yet
    }
    running.cancel(null);
    sayFarewell();
  }

  /** A durable generation would wait for somebody to come back. */
  private void sayFarewell() {
    if (isDurable) {
      connection.sayFarewell(name(), server);
    }
  }

  /** The context around the reader has been cancelled, perhaps while nobody reads. Its deadline is one of the call. */
  private void leaveWith(Context owner) {
    if (owner.isCancelled() && !(owner.cancellationCause() instanceof TimeoutException)) {
      leave(MlxStreamException.cancelledHere());
    }
  }

  private boolean hasLeft() {
    return leaving.getCount() == 0;
  }

  private void end() {
    isOver = true;
    connection.readers.remove(this);
    context.cancel(null); // frees what it holds of its owner
  }

  private AbortRequest name() {
    return generationId.isEmpty()
        ? AbortRequest.newBuilder().setRequestId(request.getRequestId()).build()
        : AbortRequest.newBuilder().setGenerationId(generationId).build();
  }

  /** What is new of the next message, of the call in hand or of the next one; null if nothing is. */
  private GenerateResponse receive() {
    try {
      if (responses == null) {
        open();
      }
      if (responses.hasNext()) {
        return news(responses.next());
      }
    } catch (StatusRuntimeException error) {
      Deadline outer = Context.current().getDeadline();
      Duration passed = outer != null && outer.isExpired() ? null : timeout; // whose deadline it was
      Integer tokens = started == null ? null : generatedTokens;
      return recover(MlxStreamException.of(error, connection.target, passed, tokens), error.getStatus().getCode());
    }
    if (finished == null) {
      return recover(MlxStreamException.streamCut(), Status.Code.DATA_LOSS);
    }
    end();
    return null;
  }

  /** Begins the generation, or goes on where the last call got to. */
  private void open() {
    if (context == null) {
      begin();
    }
    if (sequence == firstSequence) {
      place = 0;
    }
    connection.awaitFarewell(generationId); // it would end what is resumed
    Context before = context.attach();
    try {
      isAsking = !generationId.isEmpty();
      responses =
          isAsking
              ? GenerationServiceGrpc.newBlockingStub(connection.apart(server)).withDeadline(deadline).resume(point())
              : generations.withDeadline(deadline).generate(request);
    } finally {
      context.detach(before);
    }
  }

  private void begin() {
    connection.begin(this);
    deadline = timeout == null ? null : Deadline.after(timeout.toMillis(), TimeUnit.MILLISECONDS);
    Context owner = Context.current();
    context = owner.withCancellation();
    context.addListener(cancelled -> leaveWith(owner), Runnable::run);
    if (hasLeft()) { // by another thread, which saw no context yet
      context.cancel(null);
    }
  }

  private ResumeRequest point() {
    return ResumeRequest.newBuilder().setGenerationId(generationId).setAfterSequence(sequence).build();
  }

  /** What the caller has not had of {@code response}; null if that is nothing. */
  private GenerateResponse news(GenerateResponse response) {
    failures = 0;
    isAsking = false;
    refusals = 0;
    verdict = null;
    sequence = response.getSequence();
    return switch (response.getEventCase()) {
      case STARTED -> started == null ? response : null;
      case CHUNK -> newPart(response);
      case FINISHED -> {
        boolean isHeld = isDurable && response.getFinished().hasError();
        held = isHeld ? response : null;
        yield isHeld ? null : response;
      }
      default -> response; // heartbeats, canvases, and whatever a newer server sends
    };
  }

  /** A chunk without what an earlier call has brought already; null if nothing is left of it. */
  private GenerateResponse newPart(GenerateResponse response) {
    TokenChunk chunk = response.getChunk();
    String text = chunk.getText();
    List<GeneratedToken> tokens =
        chunk.getTokensList().stream().filter(token -> token.getIndex() >= generatedTokens).toList();
    int known = Math.min(textLength - place, text.length());
    place += text.length();
    textLength = Math.max(textLength, place);
    if (tokens.isEmpty() && known == text.length()) {
      return null;
    }
    if (tokens.size() == chunk.getTokensCount() && known == 0) {
      return response;
    }
    var part = chunk.toBuilder().clearTokens().addAllTokens(tokens).setText(text.substring(known));
    return response.toBuilder().setChunk(part).build();
  }

  private void remember(GenerateResponse response) {
    switch (response.getEventCase()) {
      case STARTED -> {
        started = response.getStarted();
        generationId = started.getGenerationId();
      }
      case FINISHED -> finished = response.getFinished();
      case CHUNK -> {
        int count = response.getChunk().getTokensCount();
        generatedTokens = count == 0 ? generatedTokens : response.getChunk().getTokens(count - 1).getIndex() + 1;
      }
      default -> { }
    }
  }

  /** Waits until the next call is due, and gives null; where none is, the last event that there is, or it throws. */
  private GenerateResponse recover(MlxStreamException told, Status.Code code) {
    if (code == Status.Code.CANCELLED && (Context.current().isCancelled() || Thread.currentThread().isInterrupted())) {
      leave(MlxStreamException.cancelledHere());
    }
    if (hasLeft()) {
      return null;
    }
    MlxStreamException error = verdictOn(told);
    if (error == null) {
      responses = null;
      return null;
    }
    long pauseMillis = Math.max(error.retryAfter().map(Duration::toMillis).orElse(0L), backoffMillis(failures++));
    boolean isTooLate = deadline != null && deadline.timeRemaining(TimeUnit.MILLISECONDS) <= pauseMillis;
    if (isTooLate || !mayGoOn(error)) {
      if (error.kind() == MlxStreamException.Kind.DEADLINE_EXCEEDED) {
        sayFarewell();
      }
      end();
      if (held == null) {
        throw error;
      }
      failure = error;
      return held;
    }
    responses = null;
    held = null;
    pause(pauseMillis);
    return null;
  }

  /**
   * What an error comes to. Where a server does not know the generation, or cannot be asked, the next one is: then null.
   * Whoever could not be asked may know it yet, so that it is not found only where all have said so.
   */
  private MlxStreamException verdictOn(MlxStreamException error) {
    boolean isNotFound = error.kind() == MlxStreamException.Kind.NOT_FOUND;
    if (!isAsking || !(isNotFound || error.isTransient())) {
      return error;
    }
    if (verdict == null || !isNotFound) {
      verdict = error;
    }
    server = (server + 1) % connection.servers();
    if (++refusals < connection.servers()) {
      return null;
    }
    MlxStreamException said = verdict;
    refusals = 0;
    verdict = null;
    return said;
  }

  private boolean mayGoOn(MlxStreamException error) {
    if (!isDurable || started == null || finished != null) {
      return false;
    }
    if (LOST_POINT_REASONS.contains(error.reason()) && sequence != firstSequence) {
      sequence = firstSequence; // everything is said again, and skipped
      return true;
    }
    return error.isTransient();
  }

  private void pause(long millis) {
    try {
      leaving.await(millis, TimeUnit.MILLISECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      leave(MlxStreamException.cancelledHere());
    }
  }

  private static long backoffMillis(int failures) {
    long longest = Math.min(LONGEST_PAUSE_MILLIS, FIRST_PAUSE_MILLIS << Math.min(failures, 10));
    return (long) (longest * ThreadLocalRandom.current().nextDouble(0.8, 1.2));
  }
}
