import io.grpc.Context;
import io.mlxstream.MlxStreamClient;
import io.mlxstream.MlxStreamException;
import io.mlxstream.Prompt;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;

/** Three ways to end a generation early; each frees the server at once: {@code Cancel [TARGET]}. */
final class Cancel {
  public static void main(String[] arguments) {
    var question = Prompt.chat(Prompt.user("Tell a story that never ends.")).build();
    var clock = Executors.newSingleThreadScheduledExecutor();
    try (var client = MlxStreamClient.connect(arguments.length > 0 ? arguments[0] : "127.0.0.1:50051")) {

      // 1. Leave the try block of the stream.
      try (var stream = client.stream(question)) {
        System.out.println("left after " + stream.iterator().next());
      }

      // 2. Cancel the context in which it is read; this one does so by itself after half a second.
      var context = Context.current().withDeadlineAfter(500, TimeUnit.MILLISECONDS, clock);
      try (var stream = client.stream(question)) {
        context.run(() -> stream.forEach(text -> {}));
      } catch (MlxStreamException error) {
        System.out.println("gave up: " + error.kind());
      } finally {
        context.cancel(null);
      }

      // 3. Cancel the stream from another thread: its reader stops without an error.
      try (var stream = client.stream(question)) {
        clock.schedule(stream::cancel, 500, TimeUnit.MILLISECONDS);
        stream.forEach(text -> {});
        System.out.println("cancelled after " + stream.usage().generatedTokens() + " tokens");
      }
    } finally {
      clock.shutdown();
    }
  }
}
