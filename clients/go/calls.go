package mlxstream

import (
	"context"
	"crypto/rand"
	"iter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

const readinessPause = 100 * time.Millisecond

// bearer is a token as gRPC's credentials. It goes over plain text too, where servers behind a proxy may want it.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (b bearer) RequireTransportSecurity() bool { return false }

// unary is the connection as the stubs see it: calls with one answer have a deadline, and fail with our errors.
type unary struct {
	*grpc.ClientConn
	client *Client
}

// Invoke makes such a call.
func (u unary) Invoke(ctx context.Context, method string, request, answer any, options ...grpc.CallOption) error {
	ctx, cancel := u.client.bounded(ctx)
	defer cancel()
	return u.client.failure(u.ClientConn.Invoke(ctx, method, request, answer, options...))
}

// bounded gives ctx a deadline if it has none.
func (c *Client) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has || c.timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, c.timeout)
}

// Generate runs a generation to its end, and gives all of it.
func (c *Client) Generate(ctx context.Context, request Request) (*Generation, error) {
	answer, err := c.generations.Complete(ctx, request.complete())
	if err != nil {
		return nil, err
	}
	return &Generation{CompleteResponse: answer}, nil
}

// Stream describes a generation and gives its stream. The request is sent when the stream is first read.
func (c *Client) Stream(ctx context.Context, request Request) *Stream {
	message := request.generate()
	if request.Delivery.GetDurable() && message.RequestId == "" {
		message.RequestId = rand.Text() // tells the server a repetition from a twin
	}
	open := func(ctx context.Context) (eventSource, error) { return c.generations.Generate(ctx, message) }
	return &Stream{client: c, durable: request.Delivery.GetDurable(), open: open, parent: ctx, requestID: message.RequestId}
}

// Resume continues a durable generation after the message with this sequence number; 0 repeats all of it.
func (c *Client) Resume(ctx context.Context, generationID string, afterSequence uint64) *Stream {
	open := func(ctx context.Context) (eventSource, error) {
		return c.generations.Resume(ctx, &v1.ResumeRequest{GenerationId: generationID, AfterSequence: afterSequence})
	}
	return &Stream{
		client: c, durable: true, open: open, parent: ctx,
		generationID: generationID, first: afterSequence, sequence: afterSequence,
	}
}

// Abort ends a generation by the request id that its caller gave it. One that does not run (any more) is not an error.
func (c *Client) Abort(ctx context.Context, requestID string) (*v1.AbortResponse, error) {
	return c.generations.Abort(ctx, abortRequest("", requestID))
}

// AbortGeneration ends a generation by the server's id of it, which [Stream.Started] tells.
func (c *Client) AbortGeneration(ctx context.Context, generationID string) (*v1.AbortResponse, error) {
	return c.generations.Abort(ctx, abortRequest(generationID, ""))
}

// Model tells what is known about a model; "" means the served one.
func (c *Client) Model(ctx context.Context, name string) (*v1.ModelInfo, error) {
	answer, err := c.models.GetModel(ctx, &v1.GetModelRequest{Model: name})
	return answer.GetModel(), err
}

// Tokenize gives the token ids of a text.
func (c *Client) Tokenize(ctx context.Context, text string) ([]uint32, error) {
	answer, err := c.models.Tokenize(ctx, &v1.TokenizeRequest{Text: text})
	return answer.GetIds(), err
}

// Detokenize gives the text of token ids.
func (c *Client) Detokenize(ctx context.Context, ids []uint32) (string, error) {
	answer, err := c.models.Detokenize(ctx, &v1.DetokenizeRequest{Ids: ids})
	return answer.GetText(), err
}

// Health gives the status of a service by the standard health protocol: "SERVING" or "NOT_SERVING". The name "" asks for
// the process, [ReadinessService] whether generations are taken.
func (c *Client) Health(ctx context.Context, service string) (string, error) {
	answer, err := c.health.Check(ctx, &healthv1.HealthCheckRequest{Service: service})
	return answer.GetStatus().String(), err
}

// WatchHealth gives the status of a service now, and again whenever it changes, until the loop is left.
func (c *Client) WatchHealth(ctx context.Context, service string) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		call, err := c.health.Watch(ctx, &healthv1.HealthCheckRequest{Service: service})
		for err == nil {
			var answer *healthv1.HealthCheckResponse
			if answer, err = call.Recv(); err == nil && !yield(answer.GetStatus().String(), nil) {
				return
			}
		}
		yield("", c.failure(err))
	}
}

// WaitReady waits until the server takes generations, which need not be reachable yet, or until ctx ends.
func (c *Client) WaitReady(ctx context.Context) error {
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	for {
		status, err := c.Health(ctx, ReadinessService)
		if err == nil && status == healthv1.HealthCheckResponse_SERVING.String() {
			return nil
		}
		if e := asError(err); e != nil && e.Code != codes.Unavailable && e.Code != codes.DeadlineExceeded {
			return err
		}
		select {
		case <-ctx.Done():
			return errorOf(ctx.Err())
		case <-time.After(readinessPause):
		}
	}
}
