package io.mlxstream;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.ForwardingClientCall.SimpleForwardingClientCall;
import io.grpc.ForwardingClientCallListener.SimpleForwardingClientCallListener;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.util.concurrent.TimeoutException;

/**
 * Makes calls outside of their caller's context, and yet ends them with it.
 *
 * <p>It may be a call that makes gRPC begin to watch the health of a server, which it does in the context of that call:
 * once that is cancelled, as every context of a call is at last, the watch ends too, and the server passes for a sick one.
 */
final class OutOfContext implements ClientInterceptor {
  @Override
  public <Q, A> ClientCall<Q, A> interceptCall(MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
    Context owner = Context.current();
    Deadline theirs = owner.getDeadline();
    Deadline ours = options.getDeadline();
    boolean isSooner = theirs != null && (ours == null || theirs.isBefore(ours));
    CallOptions bounded = isSooner ? options.withDeadline(theirs) : options;

    Context.ROOT.attach();
    ClientCall<Q, A> call;
    try {
      call = next.newCall(method, bounded);
    } finally {
      Context.ROOT.detach(owner);
    }
    Context.CancellationListener end = cancelled -> {
      if (!(cancelled.cancellationCause() instanceof TimeoutException)) { // the deadline is one of the call
        call.cancel("the context of the call was cancelled", cancelled.cancellationCause());
      }
    };
    return new SimpleForwardingClientCall<>(call) {
      @Override
      public void start(Listener<A> listener, Metadata headers) {
        var closing = new SimpleForwardingClientCallListener<>(listener) {
          @Override
          public void onClose(Status status, Metadata trailers) {
            owner.removeListener(end);
            super.onClose(status, trailers);
          }
        };
        Context.ROOT.run(() -> super.start(closing, headers));
        owner.addListener(end, Runnable::run);
      }
    };
  }
}
