import io.mlxstream.MlxStreamClient;
import io.mlxstream.Prompt;
import io.mlxstream.v1.GenerateResponse;
import io.mlxstream.v1.Started;

/** Streams that survive: by themselves, and from where another process stopped: {@code Resume [TARGET]}. */
final class Resume {
  public static void main(String[] arguments) {
    var request = Prompt.chat(Prompt.user("Tell a story that never ends."));
    request.getOptionsBuilder().setMaxTokens(100);
    request.getDeliveryBuilder().setDurable(true);
    try (var client = MlxStreamClient.connect(arguments.length > 0 ? arguments[0] : "127.0.0.1:50051")) {

      // A durable stream goes on by itself when its connection is lost or its server restarts; no token is lost or
      // doubled. Leaving it frees the row; what was computed is kept for a while.
      var first = client.stream(request);
      try (first) {
        int received = 0;
        for (GenerateResponse event : first.events()) {
          System.out.print(event.getChunk().getText());
          if (++received == 20) {
            break;
          }
        }
      }

      // Whoever knows these two can go on, in another process too.
      String generationId = first.started().map(Started::getGenerationId).orElseThrow();
      System.out.printf("%nresume %s after %d%n", generationId, first.sequence());
      try (var rest = client.resume(generationId, first.sequence())) {
        rest.forEach(System.out::print);
      }
      System.out.println();
    }
  }
}
