package main

import (
	"context"
	"encoding/hex"
	"errors"
	"sort"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	mlxstream "github.com/mlx-stream/mlx-stream/clients/go"
	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

// seen is what one generation has shown so far.
type seen struct {
	request   request
	stream    *mlxstream.Stream
	began     time.Time
	firstText *float64
	text      []byte
	tokens    []*v1.GeneratedToken
	blocks    []answer
	counts    map[string]int
}

func newSeen(r request, stream *mlxstream.Stream) *seen {
	return &seen{request: r, stream: stream, began: time.Now(), counts: map[string]int{}}
}

func (s *seen) take(event *v1.GenerateResponse) {
	switch told := event.GetEvent().(type) {
	case *v1.GenerateResponse_Started:
		s.counts["started"]++
	case *v1.GenerateResponse_Chunk:
		s.counts["chunk"]++
		if s.firstText == nil && told.Chunk.GetText() != "" {
			elapsed := time.Since(s.began).Seconds()
			s.firstText = &elapsed
		}
		s.text = append(s.text, told.Chunk.GetText()...)
		s.tokens = append(s.tokens, told.Chunk.GetTokens()...)
	case *v1.GenerateResponse_Block:
		s.counts["block"]++
		s.blocks = append(s.blocks, answer{
			"block_index": told.Block.GetBlockIndex(), "revision": told.Block.GetRevision(),
			"committed": told.Block.GetCommitted(), "tokens": told.Block.GetTokens(),
		})
	case *v1.GenerateResponse_Heartbeat:
		s.counts["heartbeat"]++
	case *v1.GenerateResponse_Finished:
		s.counts["finished"]++
	default:
		s.counts["unknown"]++
	}
}

// hasCome tells whether the moment of `end` is there.
func (s *seen) hasCome() bool {
	end := s.request.End
	if end == nil {
		return false
	}
	return end.After == "started" && s.counts["started"] > 0 || end.After == "chunks" && s.counts["chunk"] >= end.Count
}

func (s *seen) answer(outcome string, err error) answer {
	told := answer{
		"outcome":            outcome,
		"finish_reason":      tellReason(s.stream.Finished()),
		"matched_stop":       s.stream.Finished().GetMatchedStop(),
		"usage":              tellUsage(s.stream.Usage()),
		"started":            tellStarted(s.stream.Started()),
		"heartbeats":         s.counts["heartbeat"],
		"unknown_events":     s.counts["unknown"],
		"blocks":             s.blocks,
		"error":              tell(err),
		"seconds":            time.Since(s.began).Seconds(),
		"first_text_seconds": s.firstText,
	}
	tellOutput(told, s.request, string(s.text), s.tokens)
	return told
}

// stream reads to the end, or to where the request says that the stream is to be ended.
func (p *program) stream(ctx context.Context, cancel context.CancelFunc, r request, stream *mlxstream.Stream) answer {
	s := newSeen(r, stream)
	endIt := func() {
		if r.End.By == "owner" {
			cancel()
		} else {
			stream.Cancel()
		}
	}
	if r.End != nil && r.End.After == "seconds" {
		defer time.AfterFunc(seconds(r.End.Seconds), endIt).Stop()
	}
	marked, left := r.MarkAfterChunks == nil, false
	for event, err := range stream.Events() {
		if err != nil {
			if r.End != nil && r.End.By == "owner" && errors.Is(err, context.Canceled) && ctx.Err() != nil {
				return s.answer("left", nil)
			}
			return s.answer("failed", err)
		}
		s.take(event)
		if !marked && s.counts["started"] > 0 && s.counts["chunk"] >= *r.MarkAfterChunks {
			marked = true
			p.say(r.ID, answer{"mark": "chunks", "generation_id": stream.Started().GetGenerationId(),
				"sequence": decimal(stream.Sequence())})
		}
		if !left && s.hasCome() {
			left = true
			if r.End.By == "leave" {
				break
			}
			endIt()
		}
		time.Sleep(seconds(r.PauseSeconds))
	}
	if left || stream.Finished() == nil {
		return s.answer("left", nil)
	}
	return s.answer("finished", nil)
}

func generate(ctx context.Context, client *mlxstream.Client, r request) (answer, error) {
	began := time.Now()
	result, err := client.Generate(ctx, r.built())
	if err != nil {
		return answer{"outcome": "failed", "error": tell(err), "seconds": time.Since(began).Seconds()}, nil
	}
	stats := result.GetFinished().GetStats()
	told := answer{
		"outcome":       "finished",
		"finish_reason": tellReason(result.GetFinished()),
		"matched_stop":  result.GetFinished().GetMatchedStop(),
		"usage": tellUsage(mlxstream.Usage{
			PromptTokens: stats.GetPromptTokens(), CachedTokens: stats.GetCachedTokens(),
			GeneratedTokens: stats.GetGeneratedTokens(),
		}),
		"started": tellStarted(result.GetStarted()),
		"seconds": time.Since(began).Seconds(),
		"error":   nil,
	}
	tellOutput(told, r, result.GetText(), result.GetTokens())
	return told, nil
}

// burst plays many streams of one request; the answer tells of all of them together.
func burst(ctx context.Context, client *mlxstream.Client, r request) answer {
	var (
		mu                            sync.Mutex
		running                       sync.WaitGroup
		next                          atomic.Int64
		finished, messages, generated int
		added                         []float64
	)
	texts, failed := map[string]bool{}, map[string]int{}
	began := time.Now()
	work := func() {
		defer running.Done()
		for next.Add(1) <= int64(r.Count) {
			s := newSeen(r, client.Stream(ctx, r.built()))
			var failure error
			for event, err := range s.stream.Events() {
				if failure = err; err == nil {
					s.take(event)
				}
			}
			mu.Lock()
			if failure != nil {
				failed[string(kindOf(failure))]++
			} else {
				finished++
				for _, count := range s.counts {
					messages += count
				}
				generated += int(s.stream.Usage().GeneratedTokens)
				texts[string(s.text)] = true
				if s.firstText != nil {
					added = append(added, 1000**s.firstText-s.stream.Finished().GetStats().GetTimeToFirstTokenMs())
				}
			}
			mu.Unlock()
		}
	}
	for range r.Streams {
		running.Add(1)
		go work()
	}
	running.Wait()
	sort.Float64s(added)
	distinct := []string{}
	for text := range texts {
		distinct = append(distinct, text[:min(len(text), shown)])
	}
	sort.Strings(distinct)
	return answer{
		"outcome": "ok", "finished": finished, "failed": failed, "texts": distinct, "messages": messages,
		"generated_tokens": generated, "seconds": time.Since(began).Seconds(),
		"added_ms": answer{"p50": at(added, 0.5), "p99": at(added, 0.99)},
	}
}

func at(values []float64, share float64) any {
	if len(values) == 0 {
		return nil
	}
	return values[min(len(values)-1, int(share*float64(len(values))))]
}

// tellOutput adds what a stream and a result tell alike of text and tokens.
func tellOutput(told answer, r request, text string, tokens []*v1.GeneratedToken) {
	told["text"], told["text_characters"] = beginning(text), utf8.RuneCountInString(text)
	ids, ordered := []uint32{}, true
	for place, token := range tokens {
		if place < shown {
			ids = append(ids, token.GetToken())
		}
		first := uint32(0)
		if r.Do == "resume" {
			first = tokens[0].GetIndex()
		}
		ordered = ordered && token.GetIndex() == first+uint32(place)
	}
	told["tokens"], told["in_order"] = ids, ordered
	if r.Delivery.IncludeTokenBytes {
		written := []string{}
		for _, token := range tokens {
			written = append(written, hex.EncodeToString(token.GetTextBytes()))
		}
		told["token_bytes"] = written
	}
	if r.Options.Logprobs != nil && *r.Options.Logprobs {
		logprobs := []float64{}
		for _, token := range tokens {
			logprobs = append(logprobs, token.GetLogprobs().GetLogprob())
		}
		told["logprobs"] = logprobs
	}
}

func beginning(text string) string {
	characters := 0
	for place := range text {
		if characters == shown {
			return text[:place]
		}
		characters++
	}
	return text
}
