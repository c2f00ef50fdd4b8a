package mlxstream

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

// How long telling the server of durable streams that were left may take.
const farewell = 2 * time.Second

// parting is closed once the server was told that a durable stream is read no more; stillRead means that it is not left.
type parting chan struct{}

var stillRead parting

func (p parting) wait(ctx context.Context) {
	if p == stillRead {
		return
	}
	select {
	case <-p:
	case <-ctx.Done():
	}
}

func newStream(ctx context.Context, client *Client, request *v1.GenerateRequest) *Stream {
	if request.GetDelivery().GetDurable() && request.GetRequestId() == "" {
		request = proto.CloneOf(request)
		request.RequestId = rand.Text() // tells the server a repetition from a twin
	}
	return &Stream{client: client, parent: ctx, request: request}
}

func (s *Stream) isDurable() bool { return s.request == nil || s.request.GetDelivery().GetDurable() }

// target is what the server knows the generation by: its own name for it, or before that is known the caller's.
func (s *Stream) target() *v1.AbortRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.generationID != "" {
		return &v1.AbortRequest{Target: &v1.AbortRequest_GenerationId{GenerationId: s.generationID}}
	}
	return &v1.AbortRequest{Target: &v1.AbortRequest_RequestId{RequestId: s.request.GetRequestId()}}
}

// part tells the server, in the background, of a durable generation that nobody reads any more: it would wait for
// somebody to come back. It does so once, and not where the generation has ended by itself.
func (c *Client) part(s *Stream) {
	if s.Finished() != nil {
		c.durable.CompareAndDelete(s, stillRead)
		return
	}
	told := make(parting)
	if !c.durable.CompareAndSwap(s, stillRead, told) {
		return
	}
	go func() {
		defer c.durable.Delete(s)
		defer close(told)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.parent), farewell)
		defer cancel()
		_, _ = c.abort(ctx, s.target())
	}()
}

// settle waits until the same generation, if it was left before, has been: the farewell would end whoever resumes it.
func (c *Client) settle(ctx context.Context, s *Stream) {
	id := s.target().GetGenerationId()
	c.durable.Range(func(stream, left any) bool {
		if id != "" && stream != any(s) && stream.(*Stream).target().GetGenerationId() == id {
			left.(parting).wait(ctx)
		}
		return true
	})
}

// Close ends every generation that still runs on the connection, and closes it: whoever reads one, and whoever calls later,
// gets an [Error] of kind Cancelled with the reason CLIENT_CLOSED. It waits, two seconds at most, until the server has been
// told of the durable ones, and of those that were left before: they do not end with the connection. More than once is
// harmless.
func (c *Client) Close() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	c.closed.Store(true)
	c.durable.Range(func(stream, _ any) bool { c.part(stream.(*Stream)); return true })
	c.durable.Range(func(_, left any) bool { left.(parting).wait(ctx); return true })
	for _, conn := range c.conns {
		if failure := conn.Close(); status.Code(failure) != codes.Canceled { // that is what a closed connection says
			err = errors.Join(err, failure)
		}
	}
	return err
}
