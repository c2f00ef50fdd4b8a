package io.mlxstream;

import io.mlxstream.v1.FinishReason;
import io.mlxstream.v1.Finished;
import io.mlxstream.v1.GenerateResponse;
import io.mlxstream.v1.GenerateStats;
import io.mlxstream.v1.Started;
import java.lang.ref.Cleaner;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.function.Function;

/**
 * One generation as it happens. Iterate over it, once, for its text, or over {@link #events} for everything; that sends
 * the request. One thread reads; {@link #cancel} may come from any.
 *
 * <p>Use it in a {@code try} block: its end ends the generation on the server, as do {@code cancel}, a cancelled {@code
 * io.grpc.Context} around the reader, and an interrupt of it. (Java does not tell an iterator that its loop was left; a
 * stream that was only dropped ends when it is collected.) A durable generation goes on by itself after a lost
 * connection, and after a restart of its server.
 */
public final class TextStream implements Iterable<String>, AutoCloseable {
  private static final Cleaner CLEANER = Cleaner.create();

  private final EventReader reader;
  private boolean isRead;

  TextStream(EventReader reader) {
    this.reader = reader;
    CLEANER.register(this, reader::cancel);
  }

  /** The text, piece by piece: joined, they are the completion. */
  @Override
  public Iterator<String> iterator() {
    return walk(response -> response.getChunk().getText().isEmpty() ? null : response.getChunk().getText());
  }

  /** Every message of the stream, the last one included. */
  public Iterable<GenerateResponse> events() {
    return () -> walk(response -> response);
  }

  /** Ends the generation now. A reader that is under way stops without an error. */
  public void cancel() {
    reader.cancel();
  }

  /** The same as {@link #cancel}. */
  @Override
  public void close() {
    cancel();
  }

  /** The first event; empty before it. */
  public Optional<Started> started() {
    return Optional.ofNullable(reader.started);
  }

  /** The last event; empty before it, and when the generation was cancelled from here. */
  public Optional<Finished> finished() {
    return Optional.ofNullable(reader.finished);
  }

  /** Why the generation ended; empty before it has. A value that this client does not know counts as unspecified. */
  public Optional<FinishReason> finishReason() {
    return finished().map(Finished::getFinishReason)
        .map(reason -> reason == FinishReason.UNRECOGNIZED ? FinishReason.FINISH_REASON_UNSPECIFIED : reason);
  }

  /** The account of the whole generation; empty before its end. */
  public Optional<GenerateStats> stats() {
    return finished().map(Finished::getStats);
  }

  /** Number of the last event that was received; {@link MlxStreamClient#resume} takes it. */
  public long sequence() {
    return reader.sequence;
  }

  /** The tokens used so far, by what has arrived; final once the generation has ended. */
  public Usage usage() {
    Started first = started().orElse(Started.getDefaultInstance());
    int generated = stats().map(GenerateStats::getGeneratedTokens).orElse(reader.generatedTokens);
    return new Usage(first.getPromptTokens(), first.getCachedTokens(), generated);
  }

  private <T> Iterator<T> walk(Function<GenerateResponse, T> pick) {
    if (isRead) {
      throw new IllegalStateException("a stream is read once");
    }
    isRead = true;
    return new Walk<>(pick);
  }

  /** Walks the events and gives what {@code pick} takes from each; null is passed over. */
  private final class Walk<T> implements Iterator<T> {
    private final Function<GenerateResponse, T> pick;
    private T next;

    Walk(Function<GenerateResponse, T> pick) {
      this.pick = pick;
    }

    @Override
    public boolean hasNext() {
      for (GenerateResponse response; next == null && (response = reader.read()) != null; ) {
        next = pick.apply(response);
      }
      return next != null;
    }

    @Override
    public T next() {
      if (!hasNext()) {
        throw new NoSuchElementException();
      }
      T item = next;
      next = null;
      return item;
    }
  }
}
