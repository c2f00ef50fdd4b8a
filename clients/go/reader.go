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

	call interface { // the call in hand
		Recv() (*v1.GenerateResponse, error)
	}
	// Of a resumed call: characters that it has brought, known ones included; and of the whole stream.
	place, characters int
	backoff           time.Duration
	// Who is asked to go on, whether that one has not answered yet, how many in a row have refused, and what that comes to.
	server, refusals int
	isAsking         bool
	verdict          *Error
	// The end of a durable generation that failed: what follows shows whether it is the end.
	held *v1.GenerateResponse
	// What the stream fails with once the held event was given.
	failure error
}

// next gives the next event that the caller has not had.
func (r *reader) next() (*v1.GenerateResponse, error) {
	for r.failure == nil {
		if errors.Is(r.ctx.Err(), context.Canceled) { // gRPC would first give what has come already
			return nil, r.ctx.Err()
		}
		event, err := r.receive()
		if err == nil {
			if event = r.news(event); event != nil {
				r.stream.remember(event)
				return event, nil
			}
			continue
		}
		failure := errorOf(err)
		if r.isAsking && (failure.Kind == NotFound || failure.isTransient()) {
			if r.turnToNext(failure) {
				continue
			}
			failure = r.verdict
		}
		if !r.mayResume(failure) {
			r.failure = failure
		} else if r.pause(failure.RetryAfter) {
			r.call, r.held, r.refusals, r.verdict = nil, nil, 0, nil
		} else {
			return nil, r.ctx.Err()
		}
	}
	if held := r.held; held != nil {
		r.held = nil
		r.stream.remember(held)
		return held, nil
	}
	return nil, r.failure
}

// receive reads from the call in hand, or from the next one.
func (r *reader) receive() (*v1.GenerateResponse, error) {
	if r.call == nil {
		if err := r.open(); err != nil {
			return nil, err
		}
	}
	return r.call.Recv()
}

func (r *reader) open() (err error) {
	s := r.stream
	s.client.settle(r.ctx, s)
	if s.isDurable() && r.ctx.Err() == nil {
		s.client.durable.LoadOrStore(s, stillRead)
	}
	sequence := s.Sequence()
	if sequence == s.first {
		r.place = 0
	}
	generationID := s.target().GetGenerationId()
	if generationID == "" {
		r.call, err = s.client.Generations().Generate(r.ctx, s.request)
		return err
	}
	request := &v1.ResumeRequest{GenerationId: generationID, AfterSequence: sequence}
	r.isAsking = true
	r.call, err = s.client.apart(r.server).Resume(r.ctx, request)
	return err
}

// news gives what is new of an event; nil if nothing is.
func (r *reader) news(event *v1.GenerateResponse) *v1.GenerateResponse {
	r.backoff, r.isAsking, r.refusals, r.verdict = 0, false, 0, nil
	r.stream.goTo(event.GetSequence())
	switch {
	case event.GetStarted() != nil && r.stream.Started() != nil:
		return nil
	case event.GetFinished().GetError() != nil && r.stream.isDurable():
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

// turnToNext has another server asked where one does not know the generation, or cannot be asked; false if each has been.
// Whoever could not be asked may know it yet, so that NotFound is the verdict only where all have said it.
func (r *reader) turnToNext(failure *Error) bool {
	if r.verdict == nil || failure.Kind != NotFound {
		r.verdict = failure
	}
	servers := r.stream.client.servers
	r.call, r.server, r.refusals = nil, (r.server+1)%servers, r.refusals+1
	return r.refusals < servers
}

// mayResume tells whether a durable generation was cut off, rather than ended.
func (r *reader) mayResume(failure *Error) bool {
	s := r.stream
	if !s.isDurable() || s.Started() == nil || s.Finished() != nil || r.ctx.Err() != nil {
		return false
	}
	isLost := failure.Reason == "RESUME_POINT_GONE" || failure.Reason == "CHECKPOINT_DAMAGED"
	if isLost && s.Sequence() != s.first {
		s.goTo(s.first) // the server has lost the end of its log, and says everything again
		return true
	}
	return failure.isTransient()
}

// isTransient tells whether the same may succeed soon: the connection was lost, or the server is full and says for how long.
func (e *Error) isTransient() bool {
	switch e.Kind {
	case Unavailable, StreamCut:
		return true
	case Overloaded:
		return e.RetryAfter > 0
	}
	return e.Reason == "" && (e.Code == codes.Internal || e.Code == codes.Unknown)
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
