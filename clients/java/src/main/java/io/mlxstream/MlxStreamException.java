package io.mlxstream;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.net.ConnectException;
import java.net.UnknownHostException;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Optional;

/** A failed call. {@link #kind} tells what a caller would do about it. */
public final class MlxStreamException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  /** What a caller would do about an error. */
  public enum Kind {
    /** The prompt leaves no room in the context. */
    PROMPT_TOO_LONG,
    /** A field is wrong; {@link MlxStreamException#violations} names each. */
    INVALID_REQUEST,
    /** The point to resume from is no longer held. */
    OUT_OF_RANGE,
    /** No model, adapter or generation of this name. */
    NOT_FOUND,
    /** The request id is in use by a live generation. */
    ALREADY_EXISTS,
    /** An adapter, a checkpoint or a model file does not fit. */
    FAILED_PRECONDITION,
    /** A bounded resource is full; see {@link MlxStreamException#retryAfter}. */
    OVERLOADED,
    /** Not reachable, loading, draining: try again later. */
    UNAVAILABLE,
    /** A known option or RPC that this server or model cannot honour. */
    UNSUPPORTED,
    /** No credentials, wrong ones, or not enough rights. */
    AUTHENTICATION,
    /** The call's deadline passed; what had arrived stays in the stream. */
    DEADLINE_EXCEEDED,
    /** The generation was ended by somebody else, or this call by its context. */
    CANCELLED,
    /** Stored data is damaged. */
    DATA_LOSS,
    /** The stream ended without its last event. */
    STREAM_CUT,
    /** The server's fault; the metadata hold a correlation id. */
    SERVER
  }

  private final Kind kind;
  private final Status.Code code;
  private final String reason;
  private final transient Map<String, String> metadata;
  private final transient Map<String, String> violations;
  private final Duration retryAfter;

  private MlxStreamException(
      Kind kind, Status.Code code, String message, Details details, Throwable cause) {
    super(message, cause);
    this.kind = kind;
    this.code = code;
    this.reason = details.reason;
    this.metadata = Map.copyOf(details.metadata);
    this.violations = details.violations;
    this.retryAfter = details.retryAfter;
  }

  /** What a caller would do about it. */
  public Kind kind() {
    return kind;
  }

  /** Status code of the call. */
  public Status.Code code() {
    return code;
  }

  /**
   * Name of the schema's {@code ErrorReason}, or where no server spoke one of the client's own: DEADLINE, UNREACHABLE,
   * UNRESOLVABLE_TARGET, CONNECTION_LOST, CLIENT_CLOSED, CANCELLED_HERE, STREAM_CUT.
   */
  public String reason() {
    return reason;
  }

  /** The values that the message speaks of, by name. */
  public Map<String, String> metadata() {
    return metadata;
  }

  /** The bad fields of the request: what is wrong, by their paths in the schema. */
  public Map<String, String> violations() {
    return violations;
  }

  /** How long the server asks to wait before another try. */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(retryAfter);
  }

  /** Whether a durable generation may go on: the server is away, restarts, or is full and says for how long. */
  boolean isTransient() {
    return switch (kind) {
      case UNAVAILABLE, STREAM_CUT -> true;
      case OVERLOADED -> retryAfter != null;
      default -> false;
    };
  }

  static MlxStreamException streamCut() {
    Details details = new Details("STREAM_CUT");
    return new MlxStreamException(
        Kind.STREAM_CUT, Status.Code.DATA_LOSS, "the stream ended without its last event", details, null);
  }

  static MlxStreamException cancelledHere() {
    return cancelled("CANCELLED_HERE", "the context or the thread of the call was cancelled");
  }

  static MlxStreamException clientClosed() {
    return cancelled("CLIENT_CLOSED", "the client was closed");
  }

  private static MlxStreamException cancelled(String reason, String message) {
    return new MlxStreamException(Kind.CANCELLED, Status.Code.CANCELLED, message, new Details(reason), null);
  }

  /**
   * The typed error of a failed call.
   *
   * @param target whom was asked
   * @param timeout for how long at most; null for ever
   * @param generatedTokens how many had arrived; null when not even the first event had
   */
  static MlxStreamException of(StatusRuntimeException error, String target, Duration timeout, Integer generatedTokens) {
    Status status = error.getStatus();
    Details details = Details.of(error);
    int tokens = generatedTokens == null ? 0 : generatedTokens;
    if (status.getCode() == Status.Code.DEADLINE_EXCEEDED && timeout != null) {
      Details known = new Details("DEADLINE");
      known.metadata.put("timeout_seconds", String.valueOf(timeout.toMillis() / 1000.0));
      known.metadata.put("generated_tokens", String.valueOf(tokens));
      String message = "stopped by its deadline of " + timeout.toMillis() / 1000.0 + " s after " + tokens + " tokens";
      return new MlxStreamException(Kind.DEADLINE_EXCEEDED, status.getCode(), message, known, error);
    }
    if (details.reason.isEmpty() && isWithoutAnswer(status.getCode(), generatedTokens != null)) {
      return withoutAnswer(error, target, generatedTokens);
    }
    String text = status.getDescription() == null ? status.getCode().name() : status.getDescription();
    return new MlxStreamException(kindOf(status.getCode(), details.reason), status.getCode(), text, details, error);
  }

  /** What a dying connection or a proxy can make of a call, without a word from the server. */
  private static boolean isWithoutAnswer(Status.Code code, boolean hasStarted) {
    return switch (code) {
      case UNAVAILABLE -> true;
      case INTERNAL, UNKNOWN, CANCELLED -> hasStarted;
      default -> false;
    };
  }

  private static MlxStreamException withoutAnswer(StatusRuntimeException error, String target, Integer tokens) {
    String reason = "CONNECTION_LOST";
    String message = target + " went away before it answered (" + error.getStatus().getDescription() + ")";
    if (tokens != null) {
      message = target + " went away after " + tokens + " tokens";
    } else if (isCausedBy(error, ConnectException.class)) {
      reason = "UNREACHABLE";
      message = "no server answers at " + target;
    } else if (isCausedBy(error, UnknownHostException.class)) {
      reason = "UNRESOLVABLE_TARGET";
      message = "the target " + target + " leads to no address";
    }
    Details details = new Details(reason);
    details.metadata.put("target", target);
    return new MlxStreamException(Kind.UNAVAILABLE, Status.Code.UNAVAILABLE, message, details, error);
  }

  private static boolean isCausedBy(Throwable error, Class<? extends Throwable> kind) {
    return error != null && (kind.isInstance(error) || isCausedBy(error.getCause(), kind));
  }

  private static Kind kindOf(Status.Code code, String reason) {
    return switch (code) {
      case INVALID_ARGUMENT -> reason.equals("PROMPT_TOO_LONG") ? Kind.PROMPT_TOO_LONG : Kind.INVALID_REQUEST;
      case OUT_OF_RANGE -> Kind.OUT_OF_RANGE;
      case NOT_FOUND -> Kind.NOT_FOUND;
      case ALREADY_EXISTS -> Kind.ALREADY_EXISTS;
      case FAILED_PRECONDITION -> Kind.FAILED_PRECONDITION;
      case RESOURCE_EXHAUSTED -> Kind.OVERLOADED;
      case UNAVAILABLE -> Kind.UNAVAILABLE;
      case UNIMPLEMENTED -> Kind.UNSUPPORTED;
      case UNAUTHENTICATED, PERMISSION_DENIED -> Kind.AUTHENTICATION;
      case DEADLINE_EXCEEDED -> Kind.DEADLINE_EXCEEDED;
      case CANCELLED -> Kind.CANCELLED;
      case DATA_LOSS -> Kind.DATA_LOSS;
      default -> Kind.SERVER;
    };
  }

  /** What a status carries beside its code and message. */
  private static final class Details {
    private String reason;
    private final Map<String, String> metadata = new LinkedHashMap<>();
    private final Map<String, String> violations = new LinkedHashMap<>();
    private Duration retryAfter;

    Details(String reason) {
      this.reason = reason;
    }

    static Details of(StatusRuntimeException error) {
      Details details = new Details("");
      try {
        for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
          details.add(detail);
        }
      } catch (InvalidProtocolBufferException | IllegalArgumentException malformed) {
        error.addSuppressed(malformed); // a proxy's own bytes are no reason to hide the status
      }
      return details;
    }

    private void add(Any detail) throws InvalidProtocolBufferException {
      if (detail.is(ErrorInfo.class)) {
        ErrorInfo info = detail.unpack(ErrorInfo.class);
        reason = info.getReason();
        metadata.putAll(info.getMetadataMap());
      } else if (detail.is(BadRequest.class)) {
        detail.unpack(BadRequest.class).getFieldViolationsList()
            .forEach(one -> violations.put(one.getField(), one.getDescription()));
      } else if (detail.is(RetryInfo.class)) {
        var delay = detail.unpack(RetryInfo.class).getRetryDelay();
        retryAfter = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
      }
    }
  }
}
