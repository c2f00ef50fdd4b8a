import io.mlxstream.MlxStreamClient;
import io.mlxstream.MlxStreamException;
import io.mlxstream.Prompt;
import io.mlxstream.v1.DeadlinePolicy;
import java.time.Duration;

/** Every call has a deadline; fails at it, or takes what there is by then: {@code Deadline [TARGET]}. */
final class Deadline {
  public static void main(String[] arguments) {
    var question = Prompt.chat(Prompt.user("Tell a story that never ends."));
    try (var client = MlxStreamClient.connect(arguments.length > 0 ? arguments[0] : "127.0.0.1:50051")) {
      var hasty = client.withTimeout(Duration.ofSeconds(2));
      try {
        hasty.generate(question);
      } catch (MlxStreamException error) {
        System.out.println(error.kind() + ": " + error.getMessage());
      }

      question.getDeliveryBuilder().setDeadlinePolicy(DeadlinePolicy.DEADLINE_POLICY_PARTIAL_RESULT);
      var result = hasty.generate(question);
      var reason = result.getFinished().getFinishReason();
      System.out.println(reason + ": " + result.getText().length() + " characters in two seconds");
    }
  }
}
