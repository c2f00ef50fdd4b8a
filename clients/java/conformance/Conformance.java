import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.Duration;
import io.grpc.Context;
import io.mlxstream.MlxStreamClient;
import io.mlxstream.MlxStreamException;
import io.mlxstream.Prompt;
import io.mlxstream.TextStream;
import io.mlxstream.Tls;
import io.mlxstream.Usage;
import io.mlxstream.v1.AbortResponse;
import io.mlxstream.v1.DeadlinePolicy;
import io.mlxstream.v1.DeliveryOptions;
import io.mlxstream.v1.DrainRequest;
import io.mlxstream.v1.GenerateOptions;
import io.mlxstream.v1.GenerateRequest;
import io.mlxstream.v1.GenerateResponse;
import io.mlxstream.v1.GeneratedToken;
import io.mlxstream.v1.GenerateStats;
import io.mlxstream.v1.GetLoadRequest;
import io.mlxstream.v1.Started;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Consumer;
import java.util.function.Function;

/** The conformance program: requests as lines of JSON on standard input, answers on standard output (clients/conformance). */
final class Conformance {
  private static final Gson GSON = new GsonBuilder().serializeNulls().serializeSpecialFloatingPointValues().create();
  private static final int LONGEST_TEXT = 10_000;

  private final Map<String, MlxStreamClient> clients = new ConcurrentHashMap<>();
  private final ExecutorService threads = Executors.newCachedThreadPool();
  private final ScheduledExecutorService clock = Executors.newSingleThreadScheduledExecutor();
  private final PrintStream output = new PrintStream(System.out, false, StandardCharsets.UTF_8);

  public static void main(String[] arguments) throws Exception {
    new Conformance().run();
  }

  private void run() throws IOException, InterruptedException, ExecutionException {
    var input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    List<Future<?>> running = new ArrayList<>();
    for (String line; (line = input.readLine()) != null; ) {
      JsonObject request = JsonParser.parseString(line).getAsJsonObject();
      if (text(request, "do").equals("quit")) {
        break;
      }
      running.add(threads.submit(() -> respond(request)));
    }
    for (Future<?> one : running) {
      one.get();
    }
    clients.values().forEach(MlxStreamClient::close);
    threads.shutdown();
    clock.shutdownNow();
  }

  private void respond(JsonObject request) {
    Map<String, Object> answer = new LinkedHashMap<>();
    answer.put("id", request.get("id"));
    long begun = System.nanoTime();
    try {
      answer.putAll(play(request));
    } catch (RuntimeException error) {
      answer.put("outcome", "failed");
      answer.put("error", report(error));
      answer.put("seconds", (System.nanoTime() - begun) / 1e9);
    }
    print(answer);
  }

  private synchronized void print(Map<String, Object> line) {
    output.println(GSON.toJson(line));
    output.flush();
  }

  private Map<String, Object> play(JsonObject request) {
    return switch (text(request, "do")) {
      case "stream", "resume" -> playStream(request);
      case "generate" -> playGenerate(request);
      case "burst" -> playBurst(request);
      case "watch" -> playWatch(request);
      case "abort" -> {
        MlxStreamClient client = client(request);
        AbortResponse response =
            request.has("request_id")
                ? client.abort(text(request, "request_id"))
                : client.abortGeneration(text(request, "generation_id"));
        yield Map.of("outcome", "ok", "status", response.getStatus().name().replace("ABORT_STATUS_", ""));
      }
      case "health" -> Map.of("outcome", "ok", "status", client(request).health(text(request, "service")));
      case "model" -> Map.of("outcome", "ok", "model", client(request).model().getName());
      case "load" -> {
        var load = client(request).admin(stub -> stub.getLoad(GetLoadRequest.getDefaultInstance()));
        yield Map.of("outcome", "ok", "queue_limit", load.getQueueLimit());
      }
      case "drain" -> {
        var drained = client(request).admin(stub -> stub.drain(DrainRequest.getDefaultInstance()));
        yield Map.of(
            "outcome", "ok", "finished", drained.getFinishedGenerations(), "aborted", drained.getAbortedGenerations());
      }
      case "close" -> {
        MlxStreamClient client = client(request);
        clients.remove(request.get("server").toString());
        client.close();
        yield Map.of("outcome", "ok");
      }
      default -> throw new IllegalArgumentException("unknown request " + request.get("do"));
    };
  }

  private MlxStreamClient client(JsonObject request) {
    JsonObject server = request.getAsJsonObject("server");
    MlxStreamClient client = clients.computeIfAbsent(server.toString(), key -> connect(server));
    if (request.has("timeout_seconds")) {
      client = client.withTimeout(java.time.Duration.ofNanos((long) (request.get("timeout_seconds").getAsDouble() * 1e9)));
    }
    return request.has("priority") ? client.withPriority(request.get("priority").getAsInt()) : client;
  }

  private static MlxStreamClient connect(JsonObject server) {
    List<String> targets = new ArrayList<>();
    if (server.has("targets")) {
      server.getAsJsonArray("targets").forEach(one -> targets.add(one.getAsString()));
    } else {
      targets.add(text(server, "target"));
    }
    MlxStreamClient.Builder builder = MlxStreamClient.builder(targets.toArray(String[]::new));
    if (server.has("tls")) {
      JsonObject tls = server.getAsJsonObject("tls");
      builder.tls(new Tls(path(tls, "ca_file"), path(tls, "certificate_file"), path(tls, "key_file"), text(tls, "server_name")));
    }
    if (server.has("token")) {
      builder.token(text(server, "token"));
    }
    return builder.connect();
  }

  private static GenerateRequest request(JsonObject request) {
    GenerateRequest.Builder builder = prompt(request.getAsJsonObject("prompt"));
    with(request, "model", value -> builder.setModel(value.getAsString()));
    with(request, "request_id", value -> builder.setRequestId(value.getAsString()));
    with(request, "options", value -> options(value.getAsJsonObject(), builder.getOptionsBuilder()));
    with(request, "delivery", value -> delivery(value.getAsJsonObject(), builder.getDeliveryBuilder()));
    return builder.build();
  }

  private static GenerateRequest.Builder prompt(JsonObject prompt) {
    if (prompt.has("tokens")) {
      return Prompt.tokens(prompt.getAsJsonArray("tokens").asList().stream().mapToInt(JsonElement::getAsInt).toArray());
    }
    if (prompt.has("messages")) {
      return Prompt.chat(
          prompt.getAsJsonArray("messages").asList().stream()
              .map(JsonElement::getAsJsonObject)
              .map(turn -> Prompt.message(text(turn, "role"), text(turn, "content")))
              .toList());
    }
    int filler = prompt.has("filler_bytes") ? prompt.get("filler_bytes").getAsInt() : 0;
    return Prompt.text(text(prompt, "text") + "x".repeat(filler));
  }

  private static void options(JsonObject from, GenerateOptions.Builder into) {
    with(from, "max_tokens", value -> into.setMaxTokens(value.getAsInt()));
    with(from, "temperature", value -> into.setTemperature(value.getAsDouble()));
    with(from, "top_p", value -> into.setTopP(value.getAsDouble()));
    with(from, "top_k", value -> into.setTopK(value.getAsInt()));
    with(from, "seed", value -> into.setSeed(Long.parseUnsignedLong(value.getAsString())));
    with(from, "stop_sequences", value -> value.getAsJsonArray().forEach(one -> into.addStopSequences(one.getAsString())));
    with(from, "logprobs", value -> into.setLogprobs(value.getAsBoolean()));
    with(from, "top_logprobs", value -> into.setTopLogprobs(value.getAsInt()));
  }

  private static void delivery(JsonObject from, DeliveryOptions.Builder into) {
    with(from, "heartbeat_seconds", value -> into.setHeartbeatInterval(duration(value)));
    with(from, "max_delay_seconds", value -> into.setMaxDelay(duration(value)));
    with(from, "max_tokens_per_message", value -> into.setMaxTokensPerMessage(value.getAsInt()));
    with(from, "include_text", value -> into.setIncludeText(value.getAsBoolean()));
    with(from, "include_token_bytes", value -> into.setIncludeTokenBytes(value.getAsBoolean()));
    with(from, "draft_blocks", value -> into.setDraftBlocks(value.getAsBoolean()));
    with(from, "durable", value -> into.setDurable(value.getAsBoolean()));
    with(from, "deadline_policy", value -> {
      if (value.getAsJsonPrimitive().isNumber()) {
        into.setDeadlinePolicyValue(value.getAsInt());
      } else {
        into.setDeadlinePolicy(DeadlinePolicy.valueOf("DEADLINE_POLICY_" + value.getAsString().toUpperCase(Locale.ROOT)));
      }
    });
  }

  private static Duration duration(JsonElement seconds) {
    long nanos = Math.round(seconds.getAsDouble() * 1e9);
    return Duration.newBuilder().setSeconds(nanos / 1_000_000_000L).setNanos((int) (nanos % 1_000_000_000L)).build();
  }

  private Map<String, Object> playStream(JsonObject request) {
    Account account = new Account();
    MlxStreamClient client = client(request);
    TextStream stream =
        text(request, "do").equals("resume")
            ? client.resume(text(request, "generation_id"), request.get("after_sequence").getAsLong())
            : client.stream(request(request));
    Map<String, Object> answer = new LinkedHashMap<>();
    Context.CancellableContext owner = Context.current().withCancellation();
    try (stream) {
      owner.run(() -> read(request, stream, owner, account));
      answer.put("outcome", stream.finished().isPresent() ? "finished" : "left");
    } catch (MlxStreamException error) {
      boolean hasLeft = owner.isCancelled();
      answer.put("outcome", hasLeft ? "left" : "failed");
      answer.put("error", hasLeft ? null : report(error));
    } finally {
      owner.cancel(null);
    }
    answer.put("finish_reason", stream.finishReason().map(one -> shortName(one.name())).orElse(null));
    answer.put("matched_stop", stream.finished().map(one -> one.getMatchedStop()).orElse(""));
    answer.put("usage", report(stream.usage()));
    answer.put("started", stream.started().map(Conformance::report).orElse(null));
    answer.putAll(account.report(request));
    return answer;
  }

  /** Reads one stream as the request says. */
  private void read(JsonObject request, TextStream stream, Context.CancellableContext owner, Account account) {
    JsonObject end = request.has("end") ? request.getAsJsonObject("end") : new JsonObject();
    Runnable leave = text(end, "by") != null && text(end, "by").equals("owner") ? () -> owner.cancel(null) : stream::cancel;
    if (end.has("seconds")) {
      clock.schedule(leave, (long) (end.get("seconds").getAsDouble() * 1e3), TimeUnit.MILLISECONDS);
    }
    int markAfter = request.has("mark_after_chunks") ? request.get("mark_after_chunks").getAsInt() : Integer.MAX_VALUE;
    boolean isMarked = false;
    boolean hasLeft = false;
    for (GenerateResponse response : stream.events()) {
      account.read(response);
      if (!isMarked && account.chunks >= markAfter) {
        isMarked = true;
        String generation = stream.started().map(Started::getGenerationId).orElse("");
        print(mark(request, Map.of("generation_id", generation, "sequence", Long.toUnsignedString(stream.sequence()))));
      }
      boolean isDue = end.has("after") && switch (text(end, "after")) {
        case "started" -> true;
        case "chunks" -> account.chunks >= end.get("count").getAsInt();
        default -> false;
      };
      if (isDue && !hasLeft) {
        hasLeft = true;
        if (text(end, "by").equals("leave")) {
          stream.close(); // as the end of a try block does
          break;
        }
        clock.execute(leave);
      }
      with(request, "pause_seconds", value -> sleep(value.getAsDouble()));
    }
  }

  private static Map<String, Object> mark(JsonObject request, Map<String, Object> more) {
    Map<String, Object> line = new LinkedHashMap<>(more);
    line.put("id", request.get("id"));
    line.put("mark", "chunks");
    return line;
  }

  private Map<String, Object> playGenerate(JsonObject request) {
    Account account = new Account();
    var generation = client(request).generate(request(request));
    account.take(generation.getText(), generation.getTokensList());
    GenerateStats stats = generation.getFinished().getStats();
    Map<String, Object> answer = new LinkedHashMap<>();
    answer.put("outcome", "finished");
    answer.put("finish_reason", shortName(generation.getFinished().getFinishReason().name()));
    answer.put("matched_stop", generation.getFinished().getMatchedStop());
    answer.put("usage", report(new Usage(stats.getPromptTokens(), stats.getCachedTokens(), stats.getGeneratedTokens())));
    answer.put("started", report(generation.getStarted()));
    answer.putAll(account.report(request));
    return answer;
  }

  private Map<String, Object> playBurst(JsonObject request) {
    Burst burst = new Burst();
    MlxStreamClient client = client(request);
    GenerateRequest message = request(request);
    AtomicInteger left = new AtomicInteger(request.get("count").getAsInt());
    long begun = System.nanoTime();
    List<Future<?>> lanes = new ArrayList<>();
    for (int lane = 0; lane < request.get("streams").getAsInt(); lane++) {
      lanes.add(threads.submit(() -> {
        while (left.getAndDecrement() > 0) {
          burst.play(client.stream(message));
        }
      }));
    }
    for (Future<?> lane : lanes) {
      join(lane);
    }
    return burst.report((System.nanoTime() - begun) / 1e9);
  }

  private Map<String, Object> playWatch(JsonObject request) {
    List<String> statuses = new ArrayList<>();
    client(request).watchHealth(text(request, "service"), status -> {
      statuses.add(status);
      if (statuses.size() == 1) {
        print(mark(request, Map.of()));
      }
      return statuses.size() < request.get("count").getAsInt();
    });
    return Map.of("outcome", "ok", "statuses", statuses);
  }

  /** What one stream showed. */
  private static final class Account {
    private final long begun = System.nanoTime();
    private final StringBuilder text = new StringBuilder();
    private final List<Integer> tokens = new ArrayList<>();
    private final List<Integer> indices = new ArrayList<>();
    private final List<String> tokenBytes = new ArrayList<>();
    private final List<Double> logprobs = new ArrayList<>();
    private final List<Object> blocks = new ArrayList<>();
    private int messages;
    private int chunks;
    private int heartbeats;
    private int unknownEvents;
    private Double firstTextSeconds;

    void read(GenerateResponse response) {
      messages++;
      switch (response.getEventCase()) {
        case HEARTBEAT -> heartbeats++;
        case EVENT_NOT_SET -> unknownEvents++;
        case BLOCK -> {
          var block = response.getBlock();
          blocks.add(Map.of("block_index", block.getBlockIndex(), "revision", block.getRevision(),
              "committed", block.getCommitted(), "tokens", block.getTokensList()));
        }
        case CHUNK -> {
          chunks++;
          take(response.getChunk().getText(), response.getChunk().getTokensList());
        }
        default -> { }
      }
    }

    void take(String piece, List<GeneratedToken> more) {
      text.append(piece);
      if (!piece.isEmpty() && firstTextSeconds == null) {
        firstTextSeconds = seconds();
      }
      for (GeneratedToken token : more) {
        tokens.add(token.getToken());
        indices.add(token.getIndex());
        tokenBytes.add(HexFormat.of().formatHex(token.getTextBytes().toByteArray()));
        if (token.getLogprobs().hasLogprob()) {
          logprobs.add(token.getLogprobs().getLogprob());
        }
      }
    }

    double seconds() {
      return (System.nanoTime() - begun) / 1e9;
    }

    boolean isInOrder(boolean isResumed) {
      int first = isResumed && !indices.isEmpty() ? indices.get(0) : 0;
      for (int place = 0; place < indices.size(); place++) {
        if (indices.get(place) != first + place) {
          return false;
        }
      }
      return true;
    }

    Map<String, Object> report(JsonObject request) {
      Map<String, Object> report = new LinkedHashMap<>();
      report.put("text", text.substring(0, text.offsetByCodePoints(0, Math.min(LONGEST_TEXT, characters()))));
      report.put("text_characters", characters());
      report.put("tokens", tokens.subList(0, Math.min(LONGEST_TEXT, tokens.size())));
      with(request, "delivery", delivery -> with(delivery.getAsJsonObject(), "include_token_bytes", value -> report.put("token_bytes", tokenBytes)));
      with(request, "options", options -> with(options.getAsJsonObject(), "logprobs", value -> report.put("logprobs", logprobs)));
      report.put("in_order", isInOrder(Conformance.text(request, "do").equals("resume")));
      report.put("heartbeats", heartbeats);
      report.put("unknown_events", unknownEvents);
      report.put("blocks", blocks);
      report.put("seconds", seconds());
      report.put("first_text_seconds", firstTextSeconds);
      return report;
    }

    private int characters() {
      return text.codePointCount(0, text.length());
    }
  }

  /** What many streams showed together. */
  private static final class Burst {
    private final Map<String, Integer> failed = new TreeMap<>();
    private final TreeSet<String> texts = new TreeSet<>();
    private final List<Double> addedMillis = new ArrayList<>();
    private int finished;
    private long messages;
    private long generatedTokens;

    void play(TextStream stream) {
      Account account = new Account();
      String failure = null;
      try (stream) {
        stream.events().forEach(account::read);
      } catch (MlxStreamException error) {
        failure = error.kind().name().toLowerCase(Locale.ROOT);
      }
      add(stream, account, failure);
    }

    private synchronized void add(TextStream stream, Account account, String failure) {
      messages += account.messages;
      generatedTokens += stream.usage().generatedTokens();
      if (failure != null) {
        failed.merge(failure, 1, Integer::sum);
        return;
      }
      finished++;
      texts.add(account.text.toString());
      if (account.firstTextSeconds != null) {
        double own = stream.stats().map(GenerateStats::getTimeToFirstTokenMs).orElse(0.0);
        addedMillis.add(account.firstTextSeconds * 1000 - own);
      }
    }

    synchronized Map<String, Object> report(double seconds) {
      addedMillis.sort(null);
      Function<Double, Double> quantile =
          share -> addedMillis.isEmpty() ? 0.0 : addedMillis.get(Math.min(addedMillis.size() - 1, (int) (addedMillis.size() * share)));
      Map<String, Object> report = new LinkedHashMap<>();
      report.put("outcome", "ok");
      report.put("finished", finished);
      report.put("failed", failed);
      report.put("texts", texts);
      report.put("messages", messages);
      report.put("generated_tokens", generatedTokens);
      report.put("seconds", seconds);
      report.put("added_ms", Map.of("p50", quantile.apply(0.5), "p99", quantile.apply(0.99)));
      return report;
    }
  }

  private static Map<String, Object> report(Usage usage) {
    return Map.of("prompt_tokens", usage.promptTokens(), "cached_tokens", usage.cachedTokens(), "generated_tokens", usage.generatedTokens());
  }

  private static Map<String, Object> report(Started started) {
    GenerateOptions options = started.getOptions();
    Map<String, Object> report = new LinkedHashMap<>();
    report.put("model", started.getModel());
    report.put("seed_was_explicit", started.getSeedWasExplicit());
    report.put("seed", Long.toUnsignedString(options.getSeed()));
    report.put("temperature", options.hasTemperature() ? options.getTemperature() : null);
    report.put("top_p", options.hasTopP() ? options.getTopP() : null);
    report.put("top_k", options.hasTopK() ? options.getTopK() : null);
    report.put("max_tokens", options.hasMaxTokens() ? options.getMaxTokens() : null);
    report.put("resumed_tokens", started.getResumedTokens());
    return report;
  }

  private static Map<String, Object> report(RuntimeException error) {
    Map<String, Object> report = new LinkedHashMap<>();
    report.put("message", error.toString());
    if (error instanceof MlxStreamException known) {
      report.put("kind", known.kind().name().toLowerCase(Locale.ROOT));
      report.put("code", known.code().name());
      report.put("reason", known.reason());
      report.put("message", known.getMessage());
      report.put("metadata", known.metadata());
      report.put("violations", known.violations().keySet());
      report.put("retry_after_seconds", known.retryAfter().map(wait -> wait.toNanos() / 1e9).orElse(null));
    }
    return report;
  }

  private static String shortName(String reason) {
    return reason.replace("FINISH_REASON_", "").toLowerCase(Locale.ROOT);
  }

  private static String text(JsonObject object, String name) {
    return object.has(name) ? object.get(name).getAsString() : null;
  }

  private static Path path(JsonObject object, String name) {
    return object.has(name) ? Path.of(text(object, name)) : null;
  }

  private static void with(JsonObject object, String name, Consumer<JsonElement> use) {
    if (object.has(name)) {
      use.accept(object.get(name));
    }
  }

  private static void sleep(double seconds) {
    try {
      Thread.sleep((long) (seconds * 1000));
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }

  private static void join(Future<?> lane) {
    try {
      lane.get();
    } catch (InterruptedException | ExecutionException error) {
      throw new IllegalStateException(error);
    }
  }
}
