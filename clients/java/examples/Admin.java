import io.mlxstream.MlxStreamClient;
import io.mlxstream.v1.GetLoadRequest;
import io.mlxstream.v1.ListAdaptersRequest;
import io.mlxstream.v1.ListGenerationsRequest;

/** What an operator asks: load, live generations, adapters: {@code Admin [TARGET [TOKEN]]}. */
final class Admin {
  public static void main(String[] arguments) {
    var settings = MlxStreamClient.builder(arguments.length > 0 ? arguments[0] : "127.0.0.1:50051");
    if (arguments.length > 1) {
      settings.token(arguments[1]);
    }
    try (var client = settings.connect()) {
      var load = client.admin(stub -> stub.getLoad(GetLoadRequest.getDefaultInstance()));
      System.out.printf(
          "%d running, %d of %d queued, %.1f tokens per second%n",
          load.getRunning(), load.getQueued(), load.getQueueLimit(), load.getDecodeTps());

      var generations = client.admin(stub -> stub.listGenerations(ListGenerationsRequest.getDefaultInstance()));
      generations.getGenerationsList()
          .forEach(one -> System.out.println(one.getGenerationId() + ": " + one.getGeneratedTokens() + " tokens"));

      var adapters = client.admin(stub -> stub.listAdapters(ListAdaptersRequest.getDefaultInstance()));
      adapters.getAdaptersList().forEach(one -> System.out.println("adapter " + one.getId() + " of rank " + one.getRank()));
    }
  }
}
