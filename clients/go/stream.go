package mlxstream

import (
	"context"
	"errors"
	"io"
	"iter"
	"sync"

	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

var errReadTwice = errors.New("mlxstream: a stream is read once")

// Usage counts the tokens of a generation. CachedTokens are part of PromptTokens.
type Usage struct {
	PromptTokens, CachedTokens, GeneratedTokens uint32
}

// Stream is one generation as it happens. Read it once, by one goroutine, with [Stream.Text] or [Stream.Events]; its
// account may be asked from any.
type Stream struct {
	client  *Client
	parent  context.Context
	request *v1.GenerateRequest // nil where an earlier generation is gone on with
	first   uint64              // number of the message after which it began

	mu           sync.Mutex
	cancel       context.CancelFunc
	left         bool
	generationID string
	started      *v1.Started
	finished     *v1.Finished
	generated    uint32
	sequence     uint64
}

// Text gives the text, piece by piece: joined, they are the completion. Leaving the loop ends the generation.
func (s *Stream) Text() iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for event, err := range s.Events() {
			if text := event.GetChunk().GetText(); (text != "" || err != nil) && !yield(text, err) {
				return
			}
		}
	}
}

// Events gives every message of the stream, the last one included. Leaving the loop ends the generation; after
// [Stream.Cancel] the loop ends without an error.
func (s *Stream) Events() iter.Seq2[*v1.GenerateResponse, error] {
	return func(yield func(*v1.GenerateResponse, error) bool) {
		ctx, cancel := s.client.bounded(s.parent)
		defer cancel()
		if !s.begin(cancel) {
			yield(nil, errReadTwice)
			return
		}
		if s.isDurable() {
			context.AfterFunc(ctx, func() { s.client.part(s) }) // at once, also while the loop is busy with an event
			defer s.client.part(s)
		}
		reader := &reader{stream: s, ctx: ctx}
		for {
			event, err := reader.next()
			switch {
			case err == nil:
				if !yield(event, nil) {
					return
				}
			case errors.Is(err, io.EOF) && s.Finished() != nil, s.wasLeft():
				return
			default:
				err = s.client.failure(err)
				if ctx.Err() == nil && !errors.Is(err, DeadlineExceeded) {
					s.client.durable.CompareAndDelete(s, stillRead) // it may be somebody else's by now
				}
				yield(nil, err)
				return
			}
		}
	}
}

// Cancel ends the generation now, from any goroutine; without effect once it has ended.
func (s *Stream) Cancel() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = true
	if s.cancel != nil {
		s.cancel()
	}
}

// Started is the first event; nil before it.
func (s *Stream) Started() *v1.Started {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.started
}

// Finished is the last event, which says why the generation ended; nil before it, and when it was ended from here.
func (s *Stream) Finished() *v1.Finished {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.finished
}

// Usage counts the tokens so far, by what has arrived; it is final once the generation has ended.
func (s *Stream) Usage() Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	if stats := s.finished.GetStats(); stats != nil {
		return Usage{stats.GetPromptTokens(), stats.GetCachedTokens(), stats.GetGeneratedTokens()}
	}
	return Usage{s.started.GetPromptTokens(), s.started.GetCachedTokens(), s.generated}
}

// Sequence is the number of the last message that was read; [Client.Resume] takes it.
func (s *Stream) Sequence() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sequence
}

// begin takes the means to end the call; false if it was taken before.
func (s *Stream) begin(cancel context.CancelFunc) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cancel != nil {
		return false
	}
	s.cancel = cancel
	if s.left { // before it began
		cancel()
	}
	return true
}

func (s *Stream) wasLeft() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.left
}

// remember notes what matters of an event that is about to be shown.
func (s *Stream) remember(event *v1.GenerateResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch tokens := event.GetChunk().GetTokens(); {
	case event.GetStarted() != nil:
		s.started, s.generationID = event.GetStarted(), event.GetStarted().GetGenerationId()
	case len(tokens) > 0:
		s.generated = tokens[len(tokens)-1].GetIndex() + 1
	case event.GetFinished() != nil:
		s.finished = event.GetFinished()
	}
}

// goTo notes after which message the stream is.
func (s *Stream) goTo(sequence uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sequence = sequence
}
