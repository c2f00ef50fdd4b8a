package io.mlxstream;

import io.grpc.Attributes;
import io.grpc.ChannelCredentials;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.EquivalentAddressGroup;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.NameResolver;
import io.grpc.NameResolverProvider;
import io.grpc.NameResolverRegistry;
import io.grpc.StatusOr;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.netty.shaded.io.netty.channel.EventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.MultiThreadIoEventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.nio.NioIoHandler;
import io.grpc.netty.shaded.io.netty.channel.socket.nio.NioDomainSocketChannel;
import io.grpc.netty.shaded.io.netty.util.concurrent.DefaultThreadFactory;
import io.grpc.stub.MetadataUtils;
import io.mlxstream.v1.AbortRequest;
import io.mlxstream.v1.AbortResponse;
import io.mlxstream.v1.GenerationServiceGrpc;
import io.mlxstream.v1.ModelServiceGrpc;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.UnixDomainSocketAddress;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** How servers are reached: the channel with its settings, and whatever must be closed with it. */
final class Connection implements AutoCloseable {
  private static final int MESSAGE_LIMIT_BYTES = 64 << 20;
  private static final Pattern HOST_AND_PORT =
      Pattern.compile("(?:\\[([0-9A-Fa-f:.]+)]|([^\\s/:\\[\\]]+)):(\\d{1,5})");

  // How long telling the server of a durable stream that was left may take.
  private static final long FAREWELL_SECONDS = 2;

  // A call is tried again only while the server has not accepted it, which the answer's headers say. gRPC waits as long
  // as the server's pushback says, and gives up where it says never. An operator's calls change things, and are not.
  private static final List<Map<String, ?>> RETRIED_SERVICES =
      List.of(Map.of("service", GenerationServiceGrpc.SERVICE_NAME), Map.of("service", ModelServiceGrpc.SERVICE_NAME));
  private static final Map<String, ?> RETRY_POLICY =
      Map.of(
          "maxAttempts", 4.0,
          "initialBackoff", "0.1s",
          "maxBackoff", "2s",
          "backoffMultiplier", 2.0,
          "retryableStatusCodes", List.of("UNAVAILABLE", "RESOURCE_EXHAUSTED"));
  private static final Map<String, ?> ONE_SERVER =
      Map.of("methodConfig", List.of(Map.of("name", RETRIED_SERVICES, "retryPolicy", RETRY_POLICY)));
  private static final Map<String, ?> SEVERAL_SERVERS =
      Map.of(
          "methodConfig", ONE_SERVER.get("methodConfig"),
          "loadBalancingConfig", List.of(Map.of("round_robin", Map.of())),
          "healthCheckConfig", Map.of("serviceName", GenerationServiceGrpc.SERVICE_NAME));

  /** To the server, or to several by turns. */
  final ManagedChannel channel;
  final String target;
  /** Streams that are being read. */
  final Set<EventReader> readers = ConcurrentHashMap.newKeySet();

  // To each server by itself, for what only one of them may know: a generation.
  private final List<ManagedChannel> apart;
  private final Map<AbortRequest, Future<?>> farewells = new ConcurrentHashMap<>();
  private final EventLoopGroup group;
  private volatile boolean isClosed;

  Connection(List<String> targets, Tls tls, Metadata metadata) {
    target = String.join(", ", targets);
    ChannelCredentials credentials = tls == null ? InsecureChannelCredentials.create() : tls.credentials();
    boolean isSocket = targets.size() == 1 && targets.get(0).startsWith("unix:");
    // Like gRPC's own threads, that of a socket keeps no program from ending.
    var thread = new DefaultThreadFactory("mlx-stream-socket", true);
    group = isSocket ? new MultiThreadIoEventLoopGroup(1, thread, NioIoHandler.newFactory()) : null;
    ManagedChannelBuilder<?> builder = isSocket ? socket(targets.get(0), credentials) : network(targets, credentials);
    channel = built(builder, targets.size() == 1 ? ONE_SERVER : SEVERAL_SERVERS, tls, metadata);
    apart =
        targets.size() == 1
            ? List.of(channel)
            : targets.stream()
                .map(one -> built(Grpc.newChannelBuilder(one, credentials), ONE_SERVER, tls, metadata))
                .toList();
  }

  private static ManagedChannel built(
      ManagedChannelBuilder<?> builder, Map<String, ?> serviceConfig, Tls tls, Metadata metadata) {
    if (tls != null && tls.serverName() != null) {
      builder.overrideAuthority(tls.serverName());
    }
    return configured(builder)
        .defaultServiceConfig(serviceConfig)
        .intercept(MetadataUtils.newAttachHeadersInterceptor(metadata))
        .build();
  }

  /** How many servers can be told apart. */
  int servers() {
    return apart.size();
  }

  /** The channel to one of the servers by itself. */
  ManagedChannel apart(int server) {
    return apart.get(server % apart.size());
  }

  /** Ends everything that still runs, and closes the channel once the servers know, within two seconds. */
  @Override
  public void close() {
    isClosed = true;
    readers.forEach(EventReader::close);
    farewells.values().forEach(Connection::await);
    channel.shutdownNow();
    apart.forEach(ManagedChannel::shutdownNow);
    if (group != null) {
      group.shutdownGracefully(0, 1, TimeUnit.SECONDS);
    }
  }

  boolean isClosed() {
    return isClosed;
  }

  /** Notes that a stream is being read. */
  void begin(EventReader reader) {
    readers.add(reader); // before the look, so that whoever closes sees it, or it sees them
    if (isClosed) {
      readers.remove(reader);
      throw MlxStreamException.clientClosed();
    }
  }

  /** Tells the servers, without waiting and this one first, that a durable generation was left. */
  void sayFarewell(AbortRequest generation, int first) {
    var told = new CompletableFuture<Void>();
    farewells.put(generation, told);
    told.thenRun(() -> farewells.remove(generation, told));
    Deadline deadline = Deadline.after(FAREWELL_SECONDS, TimeUnit.SECONDS);
    Context.ROOT.run(() -> tell(generation, first, servers(), deadline, told)); // that of the call has been cancelled
  }

  /** Asks one server after the other, until one knows the generation or so many have been asked. */
  private void tell(
      AbortRequest generation, int server, int count, Deadline deadline, CompletableFuture<Void> told) {
    var asked = GenerationServiceGrpc.newFutureStub(apart(server)).withDeadline(deadline).abort(generation);
    Runnable onward =
        () -> {
          if (count == 1 || knows(asked)) {
            told.complete(null);
          } else {
            tell(generation, server + 1, count - 1, deadline, told);
          }
        };
    asked.addListener(onward, Runnable::run);
  }

  private static boolean knows(Future<AbortResponse> asked) {
    try {
      return asked.get().hasStats();
    } catch (ExecutionException | InterruptedException failed) {
      return false; // it ends the generation by itself, later
    }
  }

  /** Waits for the farewell to a generation, if one is being said. */
  void awaitFarewell(String generationId) {
    Future<?> farewell = farewells.get(AbortRequest.newBuilder().setGenerationId(generationId).build());
    if (farewell != null) {
      await(farewell);
    }
  }

  private static void await(Future<?> farewell) {
    try {
      farewell.get();
    } catch (ExecutionException failed) {
      // The server ends the generation by itself, later.
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }

  private ManagedChannelBuilder<?> socket(String target, ChannelCredentials credentials) {
    var address = UnixDomainSocketAddress.of(target.substring("unix:".length()));
    return NettyChannelBuilder.forAddress(address, credentials)
        .channelType(NioDomainSocketChannel.class, UnixDomainSocketAddress.class)
        .eventLoopGroup(group)
        .overrideAuthority("localhost");
  }

  private static ManagedChannelBuilder<?> network(List<String> targets, ChannelCredentials credentials) {
    List<InetSocketAddress> addresses = targets.stream().map(Connection::address).toList();
    if (targets.size() == 1) {
      return Grpc.newChannelBuilder(targets.get(0), credentials);
    }
    NameResolverRegistry registry = new NameResolverRegistry();
    registry.register(new ListedServers(addresses));
    return Grpc.newChannelBuilder("listed:///servers", credentials, registry).intercept(new OutOfContext());
  }

  private static ManagedChannelBuilder<?> configured(ManagedChannelBuilder<?> builder) {
    return builder
        .maxInboundMessageSize(MESSAGE_LIMIT_BYTES)
        // Pings every 30 s are what the server expects; 20 s for the answer survive a busy machine.
        .keepAliveTime(30, TimeUnit.SECONDS)
        .keepAliveTimeout(20, TimeUnit.SECONDS)
        // What may be sent again is kept: the largest prompt too.
        .perRpcBufferLimit(MESSAGE_LIMIT_BYTES)
        .retryBufferSize(4L * MESSAGE_LIMIT_BYTES);
  }

  private static InetSocketAddress address(String target) {
    Matcher matcher = HOST_AND_PORT.matcher(target);
    int port = matcher.matches() ? Integer.parseInt(matcher.group(3)) : 0;
    if (port < 1 || port > 65535) {
      throw new IllegalArgumentException("the target must be HOST:PORT or unix:PATH, not \"" + target + "\"");
    }
    String host = matcher.group(1) == null ? matcher.group(2) : matcher.group(1);
    return InetSocketAddress.createUnresolved(host, port);
  }

  /** Gives a fixed list of servers to the load balancer. */
  private static final class ListedServers extends NameResolverProvider {
    private final List<InetSocketAddress> addresses;

    ListedServers(List<InetSocketAddress> addresses) {
      this.addresses = addresses;
    }

    @Override
    public String getDefaultScheme() {
      return "listed";
    }

    @Override
    public NameResolver newNameResolver(URI uri, NameResolver.Args args) {
      return new NameResolver() {
        @Override
        public String getServiceAuthority() {
          return "listed";
        }

        @Override
        public void start(Listener2 listener) {
          var servers = StatusOr.fromValue(addresses.stream().map(ListedServers::server).toList());
          listener.onResult(ResolutionResult.newBuilder().setAddressesOrError(servers).build());
        }

        @Override
        public void shutdown() {}
      };
    }

    private static EquivalentAddressGroup server(InetSocketAddress address) {
      String name = address.getHostString() + ":" + address.getPort(); // what its certificate must be for
      Attributes attributes =
          Attributes.newBuilder().set(EquivalentAddressGroup.ATTR_AUTHORITY_OVERRIDE, name).build();
      return new EquivalentAddressGroup(new InetSocketAddress(address.getHostString(), address.getPort()), attributes);
    }

    @Override
    protected boolean isAvailable() {
      return true;
    }

    @Override
    protected int priority() {
      return 5;
    }
  }
}
