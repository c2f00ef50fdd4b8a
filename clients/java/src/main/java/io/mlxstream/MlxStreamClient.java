package io.mlxstream;

import com.google.protobuf.InvalidProtocolBufferException;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthGrpc;
import io.grpc.stub.AbstractStub;
import io.grpc.stub.MetadataUtils;
import io.mlxstream.v1.AbortRequest;
import io.mlxstream.v1.AbortResponse;
import io.mlxstream.v1.AdminServiceGrpc;
import io.mlxstream.v1.CompleteRequest;
import io.mlxstream.v1.CompleteResponse;
import io.mlxstream.v1.GenerateRequest;
import io.mlxstream.v1.GenerateRequestOrBuilder;
import io.mlxstream.v1.GenerationServiceGrpc;
import io.mlxstream.v1.GetModelRequest;
import io.mlxstream.v1.ModelInfo;
import io.mlxstream.v1.ModelServiceGrpc;
import io.mlxstream.v1.ResumeRequest;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import java.util.function.Predicate;
import java.util.function.Supplier;

/**
 * Talks to one server, or to several in turn; from any thread. Close it at the end.
 *
 * <pre>{@code
 * try (var client = MlxStreamClient.connect("127.0.0.1:50051");
 *     var stream = client.stream(Prompt.text("Once upon a time"))) {
 *   for (String text : stream) {
 *     System.out.print(text);
 *   }
 * }
 * }</pre>
 */
public final class MlxStreamClient implements AutoCloseable {
  private static final Duration DEFAULT_TIMEOUT = Duration.ofSeconds(600);
  private static final Metadata.Key<String> PRIORITY =
      Metadata.Key.of("mlx-stream-priority", Metadata.ASCII_STRING_MARSHALLER);

  private final Connection connection;
  private final Duration timeout;
  private final Metadata metadata;

  private MlxStreamClient(Connection connection, Duration timeout, Metadata metadata) {
    this.connection = connection;
    this.timeout = timeout;
    this.metadata = metadata;
  }

  /** Describes a connection in plain text to "HOST:PORT" or "unix:PATH"; the network is touched by the first call. */
  public static MlxStreamClient connect(String target) {
    return builder(target).connect();
  }

  /** As {@link #connect}, with settings. Several targets take turns, each while its health says that it serves. */
  public static Builder builder(String... targets) {
    return new Builder(Arrays.asList(targets));
  }

  /** Settings of a connection. */
  public static final class Builder {
    private final List<String> targets;
    private final Metadata metadata = new Metadata();
    private Duration timeout = DEFAULT_TIMEOUT;
    private Tls tls;

    private Builder(List<String> targets) {
      this.targets = List.copyOf(targets);
    }

    /** TLS in place of plain text. */
    public Builder tls(Tls tls) {
      this.tls = tls;
      return this;
    }

    /** A bearer token, sent with every call. */
    public Builder token(String token) {
      return metadata("authorization", "Bearer " + token);
    }

    /** A value that is sent with every call. */
    public Builder metadata(String name, String value) {
      metadata.put(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER), value);
      return this;
    }

    /** Deadline of every call, 600 seconds by default; null means none. */
    public Builder timeout(Duration timeout) {
      this.timeout = checkedTimeout(timeout);
      return this;
    }

    /** The client. */
    public MlxStreamClient connect() {
      if (targets.isEmpty()) {
        throw new IllegalArgumentException("there must be at least one target");
      }
      return new MlxStreamClient(new Connection(targets, tls, metadata), timeout, new Metadata());
    }
  }

  /** The same client with another deadline for its calls; null means none. It shares the connection. */
  public MlxStreamClient withTimeout(Duration timeout) {
    return new MlxStreamClient(connection, checkedTimeout(timeout), metadata);
  }

  /** The same client with another priority for its generations, from -100 to 100. It shares the connection. */
  public MlxStreamClient withPriority(int priority) {
    Metadata other = new Metadata();
    other.put(PRIORITY, String.valueOf(priority));
    return new MlxStreamClient(connection, timeout, other);
  }

  /** Generates, and gives the text as it comes. {@link Prompt} begins a request. */
  public TextStream stream(GenerateRequestOrBuilder request) {
    return reading(built(request), ResumeRequest.getDefaultInstance());
  }

  /** Goes on with a durable generation after the event with this number; 0 begins at its first. */
  public TextStream resume(String generationId, long afterSequence) {
    var first = ResumeRequest.newBuilder().setGenerationId(generationId).setAfterSequence(afterSequence).build();
    return reading(GenerateRequest.getDefaultInstance(), first);
  }

  /** Generates, and gives all of it at the end: text, tokens, and the first and the last event of the stream. */
  public CompleteResponse generate(GenerateRequestOrBuilder request) {
    CompleteRequest same;
    try {
      same = CompleteRequest.parseFrom(built(request).toByteString()); // their fields and numbers are the same
    } catch (InvalidProtocolBufferException impossible) {
      throw new IllegalStateException(impossible);
    }
    return call(() -> generations().withDeadline(deadline()).complete(same));
  }

  /** Ends a generation by the caller's name for it. One that does not run (any more) is not an error. */
  public AbortResponse abort(String requestId) {
    return abort(AbortRequest.newBuilder().setRequestId(requestId));
  }

  /** Ends a generation by the server's id of it. One that does not run (any more) is not an error. */
  public AbortResponse abortGeneration(String generationId) {
    return abort(AbortRequest.newBuilder().setGenerationId(generationId));
  }

  /** What is known about the served model. */
  public ModelInfo model() {
    return models(stub -> stub.getModel(GetModelRequest.getDefaultInstance())).getModel();
  }

  /** Makes a call of the ModelService, such as {@code tokenize}, with this client's deadline and errors. */
  public <T> T models(Function<ModelServiceGrpc.ModelServiceBlockingStub, T> use) {
    var stub = prepared(ModelServiceGrpc.newBlockingStub(connection.channel));
    return call(() -> use.apply(stub.withDeadline(deadline())));
  }

  /** Makes a call of the AdminService, such as {@code drain}, with this client's deadline and errors. */
  public <T> T admin(Function<AdminServiceGrpc.AdminServiceBlockingStub, T> use) {
    var stub = prepared(AdminServiceGrpc.newBlockingStub(connection.channel));
    return call(() -> use.apply(stub.withDeadline(deadline())));
  }

  /** Status by the standard health protocol: "SERVING" or "NOT_SERVING". Service "" asks for liveness. */
  public String health(String service) {
    HealthCheckRequest request = HealthCheckRequest.newBuilder().setService(service).build();
    var stub = prepared(HealthGrpc.newBlockingStub(connection.channel));
    return call(() -> stub.withDeadline(deadline()).check(request)).getStatus().name();
  }

  /**
   * Follows the health of a service, its status now first, for as long as {@code more} says so. It has no deadline but
   * that of the {@code io.grpc.Context} around it.
   */
  public void watchHealth(String service, Predicate<String> more) {
    HealthCheckRequest request = HealthCheckRequest.newBuilder().setService(service).build();
    Context.CancellableContext context = Context.current().withCancellation();
    Context before = context.attach();
    try {
      var statuses = prepared(HealthGrpc.newBlockingStub(connection.channel)).watch(request);
      while (call(statuses::hasNext) && more.test(statuses.next().getStatus().name())) {}
    } finally {
      context.detach(before);
      context.cancel(null);
    }
  }

  /**
   * Ends everything that still runs, on views with other settings too, and closes the connection once the servers know,
   * within two seconds.
   */
  @Override
  public void close() {
    connection.close();
  }

  /** Asks one server after the other, until one knows the generation: that one tells its account. */
  private AbortResponse abort(AbortRequest.Builder request) {
    Deadline deadline = deadline();
    AbortResponse answer = null;
    MlxStreamException failure = null;
    for (int server = 0; server < connection.servers(); server++) {
      var stub = GenerationServiceGrpc.newBlockingStub(connection.apart(server)).withDeadline(deadline);
      try {
        AbortResponse told = call(() -> stub.abort(request.build()));
        if (told.hasStats()) {
          return told;
        }
        answer = told;
      } catch (MlxStreamException error) {
        failure = error;
      }
    }
    if (answer == null) {
      throw failure;
    }
    return answer;
  }

  private TextStream reading(GenerateRequest request, ResumeRequest first) {
    return new TextStream(new EventReader(connection, generations(), timeout, request, first));
  }

  private GenerationServiceGrpc.GenerationServiceBlockingStub generations() {
    return prepared(GenerationServiceGrpc.newBlockingStub(connection.channel));
  }

  private <S extends AbstractStub<S>> S prepared(S stub) {
    return stub.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(metadata));
  }

  private <T> T call(Supplier<T> use) {
    try {
      return use.get();
    } catch (StatusRuntimeException error) {
      if (connection.isClosed()) {
        throw MlxStreamException.clientClosed();
      }
      throw MlxStreamException.of(error, connection.target, timeout, null);
    }
  }

  private Deadline deadline() {
    return timeout == null ? null : Deadline.after(timeout.toMillis(), TimeUnit.MILLISECONDS);
  }

  private static Duration checkedTimeout(Duration timeout) {
    if (timeout != null && (timeout.isNegative() || timeout.isZero())) {
      throw new IllegalArgumentException("the timeout must be above 0 (null: no deadline), not " + timeout);
    }
    return timeout;
  }

  /** The request; one that is to be durable has a name, which tells the server a repetition from a twin. */
  private static GenerateRequest built(GenerateRequestOrBuilder request) {
    var whole = request instanceof GenerateRequest.Builder builder ? builder.build() : (GenerateRequest) request;
    if (!whole.getDelivery().getDurable() || !whole.getRequestId().isEmpty()) {
      return whole;
    }
    return whole.toBuilder().setRequestId(UUID.randomUUID().toString()).build();
  }
}
