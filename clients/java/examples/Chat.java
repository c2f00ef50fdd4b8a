import io.mlxstream.MlxStreamClient;
import io.mlxstream.MlxStreamException;
import io.mlxstream.Prompt;
import io.mlxstream.v1.ChatMessage;
import java.util.ArrayList;
import java.util.List;

/** A conversation: the client keeps the turns, the model's template makes the prompt: {@code Chat [TARGET]}. */
final class Chat {
  public static void main(String[] arguments) {
    List<ChatMessage> turns = new ArrayList<>(List.of(Prompt.message("system", "Answer in one sentence.")));
    try (var client = MlxStreamClient.connect(arguments.length > 0 ? arguments[0] : "127.0.0.1:50051")) {
      for (String question : List.of("What is the capital of France?", "And which river runs through it?")) {
        turns.add(Prompt.user(question));
        var request = Prompt.chat(turns);
        request.getOptionsBuilder().setMaxTokens(60);
        String answer = client.generate(request).getText();
        turns.add(Prompt.message("assistant", answer));
        System.out.println("> " + question + "\n" + answer);
      }

      var wrong = Prompt.chat(turns);
      wrong.getOptionsBuilder().setTemperature(-1);
      try {
        client.generate(wrong);
      } catch (MlxStreamException error) {
        error.violations().forEach((field, description) -> System.out.println(field + " " + description));
      }
    }
  }
}
