package io.mlxstream;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status.Code;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.io.Serializable;
import java.net.ConnectException;
import java.net.UnknownHostException;
import java.time.Duration;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Optional;
import java.util.Set;

/** A failed call. {@link #kind} tells what a caller would do about it. */
public final class MlxStreamException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  /** What a caller would do about an error. */
  public enum Kind {
    /** The prompt leaves no room in the context. */
    PROMPT_TOO_LONG,
    /** A field is wrong; {@link MlxStreamException#violations} names each. */
    INVALID_REQUEST(Code.INVALID_ARGUMENT),
    /** The point to resume from is no longer held. */
    OUT_OF_RANGE(Code.OUT_OF_RANGE),
    /** No model, adapter or generation of this name. */
    NOT_FOUND(Code.NOT_FOUND),
    /** The request id is in use by a live generation. */
    ALREADY_EXISTS(Code.ALREADY_EXISTS),
    /** An adapter, a checkpoint or a model file does not fit. */
    FAILED_PRECONDITION(Code.FAILED_PRECONDITION),
    /** A bounded resource is full; see {@link MlxStreamException#retryAfter}. */
    OVERLOADED(Code.RESOURCE_EXHAUSTED),
    /** Not reachable, loading, draining: try again later. */
    UNAVAILABLE(Code.UNAVAILABLE),
    /** A known option or RPC that this server or model cannot honour. */
    UNSUPPORTED(Code.UNIMPLEMENTED),
    /** No credentials, wrong ones, or not enough rights. */
    AUTHENTICATION(Code.UNAUTHENTICATED, Code.PERMISSION_DENIED),
    /** The call's deadline passed; what had arrived stays in the stream. */
    DEADLINE_EXCEEDED(Code.DEADLINE_EXCEEDED),
    /** The generation was ended by somebody else, or this call by its context. */
    CANCELLED(Code.CANCELLED),
    /** Stored data is damaged. */
    DATA_LOSS(Code.DATA_LOSS),
    /** The stream ended without its last event. */
    STREAM_CUT,
    /** The server's fault; the metadata hold a correlation id. */
    SERVER;

    private final Set<Code> codes;

    Kind(Code... codes) {
      this.codes = Set.of(codes);
    }

    private static Kind of(Code code) {
      return Arrays.stream(values()).filter(kind -> kind.codes.contains(code)).findFirst().orElse(SERVER);
    }
  }

  private final Kind kind;
  private final Code code;
  private final Details details;

  private MlxStreamException(Kind kind, Code code, String message, Details details, Throwable cause) {
    super(message, cause);
    this.kind = kind;
    this.code = code;
    this.details = details;
  }

  /** What a caller would do about it. */
  public Kind kind() {
    return kind;
  }

  /** Status code of the call. */
  public Code code() {
    return code;
  }

  /**
   * Name of the schema's {@code ErrorReason}, or where no server spoke one of the client's own: DEADLINE, UNREACHABLE,
   * UNRESOLVABLE_TARGET, CONNECTION_LOST, CLIENT_CLOSED, CANCELLED_HERE, STREAM_CUT.
   */
  public String reason() {
    return details.reason;
  }

  /** The values that the message speaks of, by name. */
  public Map<String, String> metadata() {
    return details.metadata;
  }

  /** The bad fields of the request: what is wrong, by their paths in the schema. */
  public Map<String, String> violations() {
    return details.violations;
  }

  /** How long the server asks to wait before another try. */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(details.retryAfter);
  }

  /** Whether a durable generation may go on: the server is away, restarts, or is full and says for how long. */
  boolean isTransient() {
    return switch (kind) {
      case UNAVAILABLE, STREAM_CUT -> true;
      case OVERLOADED -> details.retryAfter != null;
      default -> false;
    };
  }

  static MlxStreamException streamCut() {
    return here(Kind.STREAM_CUT, Code.DATA_LOSS, "STREAM_CUT", "the stream ended without its last event");
  }

  static MlxStreamException cancelledHere() {
    String message = "the context or the thread of the call was cancelled";
    return here(Kind.CANCELLED, Code.CANCELLED, "CANCELLED_HERE", message);
  }

  static MlxStreamException clientClosed() {
    return here(Kind.CANCELLED, Code.CANCELLED, "CLIENT_CLOSED", "the client was closed");
  }

  private static MlxStreamException here(Kind kind, Code code, String reason, String message) {
    return new MlxStreamException(kind, code, message, new Details(reason, Map.of()), null);
  }

  /**
   * The typed error of a failed call.
   *
   * @param target whom was asked
   * @param timeout for how long at most; null for ever
   * @param generatedTokens how many had arrived; null when not even the first event had
   */
  static MlxStreamException of(StatusRuntimeException error, String target, Duration timeout, Integer generatedTokens) {
    Code code = error.getStatus().getCode();
    if (code == Code.DEADLINE_EXCEEDED && timeout != null) {
      String seconds = String.valueOf(timeout.toMillis() / 1000.0);
      String tokens = String.valueOf(generatedTokens == null ? 0 : generatedTokens);
      Details known = new Details("DEADLINE", Map.of("timeout_seconds", seconds, "generated_tokens", tokens));
      String message = "stopped by its deadline of " + seconds + " s after " + tokens + " tokens";
      return new MlxStreamException(Kind.DEADLINE_EXCEEDED, code, message, known, error);
    }
    Details details = Details.of(error);
    if (details.reason.isEmpty() && isWithoutAnswer(code, generatedTokens != null)) {
      return withoutAnswer(error, target, generatedTokens);
    }
    String text = error.getStatus().getDescription() == null ? code.name() : error.getStatus().getDescription();
    Kind kind = details.reason.equals("PROMPT_TOO_LONG") ? Kind.PROMPT_TOO_LONG : Kind.of(code);
    return new MlxStreamException(kind, code, text, details, error);
  }

  /** What a dying connection or a proxy can make of a call, without a word from the server. */
  private static boolean isWithoutAnswer(Code code, boolean hasStarted) {
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
    Details details = new Details(reason, Map.of("target", target));
    return new MlxStreamException(Kind.UNAVAILABLE, Code.UNAVAILABLE, message, details, error);
  }

  private static boolean isCausedBy(Throwable error, Class<? extends Throwable> kind) {
    return error != null && (kind.isInstance(error) || isCausedBy(error.getCause(), kind));
  }

  /** What a status carries beside its code and message. */
  private record Details(
      String reason, Map<String, String> metadata, Map<String, String> violations, Duration retryAfter)
      implements Serializable {

    Details(String reason, Map<String, String> metadata) {
      this(reason, metadata, Map.of(), null);
    }

    static Details of(StatusRuntimeException error) {
      ErrorInfo info = ErrorInfo.getDefaultInstance();
      Map<String, String> violations = new LinkedHashMap<>();
      Duration retryAfter = null;
      try {
        for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
          if (detail.is(ErrorInfo.class)) {
            info = detail.unpack(ErrorInfo.class);
          } else if (detail.is(BadRequest.class)) {
            detail.unpack(BadRequest.class).getFieldViolationsList()
                .forEach(one -> violations.put(one.getField(), one.getDescription()));
          } else if (detail.is(RetryInfo.class)) {
            var delay = detail.unpack(RetryInfo.class).getRetryDelay();
            retryAfter = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
          }
        }
      } catch (InvalidProtocolBufferException | IllegalArgumentException malformed) {
        error.addSuppressed(malformed); // a proxy's own bytes are no reason to hide the status
      }
      return new Details(info.getReason(), Map.copyOf(info.getMetadataMap()), violations, retryAfter);
    }
  }
}
