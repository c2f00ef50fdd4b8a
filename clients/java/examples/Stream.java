import io.mlxstream.MlxStreamClient;
import io.mlxstream.Prompt;

/** Streams an answer, then looks at its account: {@code Stream [TARGET]}. */
final class Stream {
  public static void main(String[] arguments) {
    var request = Prompt.chat(Prompt.user("Name three rivers."));
    request.getOptionsBuilder().setMaxTokens(60).setTemperature(0.7).setSeed(1);
    try (var client = MlxStreamClient.connect(arguments.length > 0 ? arguments[0] : "127.0.0.1:50051");
        var stream = client.stream(request)) {
      for (String text : stream) {
        System.out.print(text);
      }
      var stats = stream.stats().orElseThrow();
      System.out.printf(
          "%n%s: %d tokens, %.1f per second%n",
          stream.finishReason().orElseThrow(), stats.getGeneratedTokens(), stats.getDecodeTps());
    }
  }
}
