package mlxstream

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"

	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

const (
	firstBackoff = 100 * time.Millisecond
	mostBackoff  = 2 * time.Second
)

// reader reads one generation through as many calls as it takes. A durable one is resumed where it was cut off, until
// the call's deadline; whoever reads sees each token once.
type reader struct {
	stream *Stream
	ctx    context.Context

	call eventSource
	// Of a resumed call: characters that it has brought, known ones included; and of the whole stream.
	place, characters int
	backoff           time.Duration
	// The end of a durable generation that failed: what follows shows whether it is the end.
	held *v1.GenerateResponse
	// What the stream fails with once the held event was given.
	failure error
}

// next gives the next event that the caller has not had.
func (r *reader) next() (*v1.GenerateResponse, error) {
	if r.failure != nil {
		return nil, r.failure
	}
	for {
		if errors.Is(r.ctx.Err(), context.Canceled) { // gRPC would first give what has come already
			return nil, r.ctx.Err()
		}
		event, err := r.receive()
		switch {
		case err == nil:
			if event = r.news(event); event != nil {
				r.stream.remember(event)
				return event, nil
			}
		case r.mayResume(err):
			if !r.pause(asError(errorOf(err)).RetryAfter) {
				return nil, r.ctx.Err()
			}
			r.call, r.held = nil, nil
		case r.held != nil:
			r.failure = err
			r.stream.remember(r.held)
			return r.held, nil
		default:
			return nil, err
		}
	}
}

// receive reads from the call in hand, or from the next one.
func (r *reader) receive() (*v1.GenerateResponse, error) {
	if r.call == nil {
		call, err := r.open()
		if err != nil {
			return nil, err
		}
		r.call = call
	}
	return r.call.Recv()
}

func (r *reader) open() (eventSource, error) {
	client, started, sequence := r.stream.client, r.stream.Started(), r.stream.Sequence()
	client.settle(r.ctx, r.stream)
	if r.stream.durable && r.ctx.Err() == nil {
		client.durable.LoadOrStore(r.stream, stillRead)
	}
	if sequence == r.stream.first {
		r.place = 0
	}
	if started == nil {
		return r.stream.open(r.ctx)
	}
	request := &v1.ResumeRequest{GenerationId: started.GetGenerationId(), AfterSequence: sequence}
	return client.generations.Resume(r.ctx, request)
}

// news gives what is new of an event; nil if nothing is.
func (r *reader) news(event *v1.GenerateResponse) *v1.GenerateResponse {
	r.backoff = 0
	r.stream.read(event.GetSequence())
	switch {
	case event.GetStarted() != nil && r.stream.Started() != nil:
		return nil
	case event.GetFinished().GetError() != nil && r.stream.durable:
		r.held = event
		return nil
	case event.GetChunk() != nil:
		return r.newPart(event)
	}
	return event
}

// newPart gives a chunk without what an earlier call has brought.
func (r *reader) newPart(event *v1.GenerateResponse) *v1.GenerateResponse {
	chunk := event.GetChunk()
	for generated := r.stream.Usage().GeneratedTokens; len(chunk.Tokens) > 0 && chunk.Tokens[0].GetIndex() < generated; {
		chunk.Tokens = chunk.Tokens[1:]
	}
	text := []rune(chunk.GetText())
	known := min(r.characters-r.place, len(text))
	chunk.Text = string(text[known:])
	r.place += len(text)
	r.characters = max(r.characters, r.place)
	if len(chunk.Tokens) == 0 && chunk.Text == "" {
		return nil
	}
	return event
}

// mayResume tells whether a durable generation was cut off, rather than ended.
func (r *reader) mayResume(err error) bool {
	if !r.stream.durable || r.stream.Started() == nil || r.stream.Finished() != nil || r.ctx.Err() != nil {
		return false
	}
	failure := asError(errorOf(err))
	isLost := failure.Reason == "RESUME_POINT_GONE" || failure.Reason == "CHECKPOINT_DAMAGED"
	if isLost && r.stream.Sequence() != r.stream.first {
		r.stream.read(r.stream.first) // the server has lost the end of its log, and says everything again
		return true
	}
	switch failure.Kind {
	case Unavailable, StreamCut:
		return true
	case Overloaded:
		return failure.RetryAfter > 0
	}
	return failure.Reason == "" && (failure.Code == codes.Internal || failure.Code == codes.Unknown)
}

// pause waits longer from try to try, and never shorter than the server asks for; false if the call has ended meanwhile.
func (r *reader) pause(atLeast time.Duration) bool {
	r.backoff = min(max(2*r.backoff, firstBackoff), mostBackoff)
	select {
	case <-r.ctx.Done():
		return false
	case <-time.After(max(atLeast, time.Duration((0.5+rand.Float64()/2)*float64(r.backoff)))):
		return true
	}
}
